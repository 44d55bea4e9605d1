"""Forms of compressed experts on a toy: one MoE layer that predicts bytes of pysrc.

    python tools/study_compression.py
    python tools/study_compression.py --steps 400 --ratios 50 --json

A domain of four devices with two experts each, in one program: device j reads its own
rows, and holds the others' experts as `moejax.moe.weights.compression` encodes and
decodes them. `everywhere` puts the decoded experts in the place of own ones too. Bytes
are counted against experts that move in bfloat16. docs/compression.md has the table.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from moejax.config import Data  # noqa: E402
from moejax.moe.weights import compression  # noqa: E402
from moejax.moe.weights import gradient_compression as gradients  # noqa: E402
from train import data  # noqa: E402
from train.launch.ending import DONE, emit, guarded  # noqa: E402

MEMBERS, OWN, CONTEXT = 4, 2, 16
EXPERTS = MEMBERS * OWN
BYTES, WIDTH, HIDDEN, TOP_K = 256, 64, 64, 2
SIZE = 3 * WIDTH * HIDDEN
ROWS, HELD_OUT = 256, 8192
LEARNING_RATE, BALANCE = 3e-3, 1e-2
WEIGHT_BYTES = 2
ENTRY = {"value_bytes": 2, "index_bytes": 2}


@dataclasses.dataclass(frozen=True)
class Arm:
    """One run of the study."""

    form: compression.Form
    ratio: float = 1.0
    everywhere: bool = False
    base: str = "float32"
    """In what receivers keep what they track."""
    longest_block: int = 8192
    gradients: str = "whole"
    """Or 'kept', 'lost': top-k at the same ratio, and what becomes of the rest."""
    seed: int = 0

    @property
    def blocks(self) -> int:
        return compression.blocks_of(SIZE, self.longest_block)

    @property
    def k(self) -> int:
        sizes = (*ENTRY.values(), WEIGHT_BYTES, self.blocks)
        return compression.entries_of(SIZE, self.ratio, *sizes)

    @property
    def bytes(self) -> int:
        """Of one expert on the wire."""
        if self.form == "none":
            return SIZE * WEIGHT_BYTES
        return compression.wire_bytes(1, self.k, **ENTRY)


def main() -> int:
    args = parsed()
    return guarded(lambda: study(args), as_json=args.json)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--ratios", default="10,50,100")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def study(args: argparse.Namespace) -> int:
    ratios = [float(ratio) for ratio in args.ratios.split(",")]
    (source,) = data.load_corpus(Data(), BYTES).sources
    text = [tokens_of(line) for line in (source.train, source.held_out)]
    exact = [run(Arm("none", seed=seed), text, args.steps) for seed in range(3)]
    print(
        "exact, three seeds: " + ", ".join(f"{one['loss']:.4f}" for one in exact),
        f"nats per byte, {exact[0]['sec']:.0f} s each",
    )
    records = [run(arm, text, args.steps) for arm in arms(ratios)]
    show(records, exact[0]["loss"])
    emit({"steps": args.steps, "exact": exact, "arms": records}, args.json)
    return DONE


def arms(ratios: list[float]) -> list[Arm]:
    forms = ("top_k", "residual", "delta")
    plain = [
        Arm(form, ratio, everywhere)
        for everywhere in (False, True)
        for form in forms
        for ratio in ratios
    ]
    middle = ratios[len(ratios) // 2]
    return [
        *plain,
        Arm("delta", middle, base="bfloat16"),
        Arm("delta", middle, longest_block=SIZE),
        Arm("delta", middle, longest_block=1024),
        Arm("delta", middle, gradients="kept"),
        Arm("delta", middle, gradients="lost"),
    ]


def show(records: list[dict], exact: float) -> None:
    print(
        "form  ratio  bytes  where  also | loss  to exact | masters  to exact | apart"
    )
    for one in records:
        others = (f"W~ {one['base']}", f"blocks of {one['longest_block']}")
        usual = (f"W~ {Arm.base}", f"blocks of {Arm.longest_block}")
        also = [x for x, y in zip(others, usual) if x != y]
        also += [f"gradients {one['gradients']}"] if one["gradients"] != "whole" else []
        where = "everywhere" if one["everywhere"] else "moved"
        print(
            f"{one['form']:8} {one['ratio']:4g} {one['bytes']:6} {where:10} "
            f"{', '.join(also):24} | {one['loss']:.4f} {one['loss'] / exact - 1:+7.2%} "
            f"| {one['masters']:.4f} {one['masters'] / exact - 1:+7.2%} "
            f"| {one['apart']:.4f}"
        )


def tokens_of(line) -> np.ndarray:
    """At most four million bytes of one side of the corpus."""
    from train.data.lines import read_tokens

    return read_tokens(line, [0], min(line.num_tokens, 4_000_000))[0].astype(np.uint8)


def run(arm: Arm, text: list[np.ndarray], steps: int) -> dict:
    """Train, and the held-out loss: as trained, and with the masters themselves."""
    started = time.perf_counter()
    train, held_out = text
    starts_tn = np.random.default_rng(arm.seed).integers(
        0, len(train) - CONTEXT - 1, (steps, ROWS)
    )
    windows_tnc = train[starts_tn[..., None] + np.arange(CONTEXT + 1)]
    starts_n = np.random.default_rng(1).integers(
        0, len(held_out) - CONTEXT - 1, HELD_OUT
    )
    windows_nc = held_out[starts_n[:, None] + np.arange(CONTEXT + 1)]
    params = initial(jax.random.key(arm.seed))
    compiled_for = dataclasses.replace(arm, everywhere=False, seed=0)
    is_own_je = own_of(arm)
    params, tracked_ex = trained(compiled_for, params, windows_tnc, is_own_je)
    held_ex = params["experts_ex"]
    trained_jex = held(is_own_je, held_ex, tracked_ex)
    whole_jex = jnp.broadcast_to(held_ex, (MEMBERS, EXPERTS, SIZE))
    apart = jnp.linalg.norm(held_ex - tracked_ex) / jnp.linalg.norm(held_ex)
    return {
        **dataclasses.asdict(arm),
        "bytes": arm.bytes,
        "loss": float(jit_loss(params, trained_jex, windows_nc)[0]),
        "masters": float(jit_loss(params, whole_jex, windows_nc)[0]),
        "apart": float(apart),
        "sec": time.perf_counter() - started,
    }


@functools.partial(jax.jit, static_argnums=0)
def trained(arm: Arm, params: dict, windows_tnc, is_own_je) -> tuple[dict, jax.Array]:
    """Parameters and W~ after all steps of Adam."""
    optimizer = optax.adam(LEARNING_RATE)
    tracked_ex = params["experts_ex"].astype(arm.base)  # sent whole, once
    error_jex = jnp.zeros((MEMBERS, EXPERTS, SIZE))

    def step(carry, windows_nc):
        params, moments, tracked_ex, error_jex = carry
        held_jex = held(is_own_je, params["experts_ex"], tracked_ex)
        total = lambda *args: sum(loss_of(*args, windows_nc))  # noqa: E731
        grads, grad_jex = jax.grad(total, (0, 1))(params, held_jex)
        grads["experts_ex"], error_jex = summed(arm, grad_jex, error_jex)
        updates, moments = optimizer.update(grads, moments)
        params = optax.apply_updates(params, updates)
        tracked_ex = track(arm, params["experts_ex"], tracked_ex)
        return (params, moments, tracked_ex, error_jex), None

    start = (params, optimizer.init(params), tracked_ex, error_jex)
    return jax.lax.scan(step, start, windows_tnc)[0][::2]


def track(arm: Arm, experts_ex, tracked_ex) -> jax.Array:
    """What the others hold after this step."""
    if arm.form == "none":
        return experts_ex
    base_ex = {
        "top_k": jnp.zeros_like(tracked_ex[:1]),
        "residual": jnp.mean(experts_ex, axis=0, keepdims=True),
        "delta": tracked_ex,
    }[arm.form]
    packed = compression.encode(experts_ex, base_ex, arm.k, "bfloat16", arm.blocks)
    return compression.decode(base_ex, packed)


def own_of(arm: Arm) -> np.ndarray:
    """Which experts each member has exactly."""
    owner_e = np.arange(EXPERTS) // OWN
    return (owner_e == np.arange(MEMBERS)[:, None]) & (not arm.everywhere)


def held(is_own_je, experts_ex, tracked_ex) -> jax.Array:
    """All experts as each member has them."""
    wide_ex = tracked_ex.astype(experts_ex.dtype)
    return jnp.where(is_own_je[..., None], experts_ex, wide_ex)


def summed(arm: Arm, grad_jex, error_jex) -> tuple[jax.Array, jax.Array]:
    """Gradients at their owners, and what the members keep for later."""
    if arm.gradients == "whole":
        return jnp.sum(grad_jex, axis=0), error_jex
    scatter = functools.partial(
        gradients.scattered, k=arm.k, axes=("member",), blocks=arm.blocks
    )
    own_jex, new_jex = jax.vmap(scatter, axis_name="member")(grad_jex, error_jex)
    kept_jex = new_jex if arm.gradients == "kept" else error_jex
    return own_jex.reshape(EXPERTS, SIZE), kept_jex


def initial(key) -> dict:
    shapes = {
        "embed_cvd": (CONTEXT, BYTES, WIDTH),
        "router_de": (WIDTH, EXPERTS),
        "head_dv": (WIDTH, BYTES),
        "experts_ex": (EXPERTS, SIZE),
    }
    scale = dict.fromkeys(shapes, WIDTH**-0.5) | {"embed_cvd": 0.25}
    keys = jax.random.split(key, len(shapes))
    return {
        name: scale[name] * jax.random.normal(one, shape)
        for one, (name, shape) in zip(keys, shapes.items())
    }


def loss_of(params: dict, held_jex, windows_nc):
    """Cross-entropy of the next byte, and the weighted balance loss."""
    windows_nc = windows_nc.astype(jnp.int32)
    context_nc, target_n = windows_nc[:, :-1], windows_nc[:, -1]
    x_nd = params["embed_cvd"][jnp.arange(CONTEXT), context_nc].sum(axis=1)
    x_nd = normal(x_nd)
    score_ne = jax.nn.softmax(x_nd @ params["router_de"])
    gate_nk, expert_nk = jax.lax.top_k(score_ne, TOP_K)
    is_chosen_nke = jax.nn.one_hot(expert_nk, EXPERTS)
    gate_ne = jnp.einsum("nk,nke->ne", gate_nk, is_chosen_nke)
    load_e = jnp.mean(jnp.sum(is_chosen_nke, axis=1), axis=0)
    balance = EXPERTS / TOP_K * jnp.sum(load_e * jnp.mean(score_ne, axis=0))

    x_jnd = x_nd.reshape(MEMBERS, -1, WIDTH)
    weights = jax.vmap(lambda held_ex: compression.unflat(held_ex, WIDTH))(held_jex)
    into = jnp.einsum("jnd,jedgf->jnegf", x_jnd, weights["into"])
    hidden = jax.nn.silu(into[..., 0, :]) * into[..., 1, :]
    gate_jne = gate_ne.reshape(MEMBERS, -1, EXPERTS)
    y_jnd = jnp.einsum("jnef,jefd,jne->jnd", hidden, weights["down"], gate_jne)
    y_nd = normal(x_nd + y_jnd.reshape(x_nd.shape))
    log_nv = jax.nn.log_softmax(y_nd @ params["head_dv"])
    nats = -jnp.mean(jnp.take_along_axis(log_nv, target_n[:, None], axis=1))
    return nats, BALANCE * balance


def normal(x_nd):
    return x_nd * jax.lax.rsqrt(jnp.mean(x_nd**2, axis=-1, keepdims=True) + 1e-6)


jit_loss = jax.jit(loss_of)


if __name__ == "__main__":
    sys.exit(main())
