"""Layers whose weights are fetched a layer ahead compute the same, bit for bit, and the
backward pass fetches again what it would have to keep."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Balance, Config, Data, Dispatch, Model, Moe, Train
from moejax.model import ahead
from moejax.moe.weights import dependency
from moejax.plan.layout import Topology
from tests.support.close import assert_close
from tests.support.plain_model import network
from tests.support.primitives import equations
from tests.support.steps import QUICK

D = 5


def toy(num_layers: int, is_ahead: bool, remat: bool):
    """Return loss(params, x) of layers x -> tanh(x w) * scale, whose w is fetched as
    twice a parameter."""

    def run(x_d, w_dd, layer):
        scale_d, dependency = layer
        assert dependency is None
        x_d = jnp.tanh(x_d @ w_dd) * scale_d
        return x_d, x_d.sum()

    def fetch(source):
        w_dd, which = source
        return 2 * w_dd.astype(jnp.float32) * (which + 1), None

    run = jax.checkpoint(run) if remat else run

    def loss(params, x_d):
        w_ldd, scale_ld = params
        sources = w_ldd, jnp.arange(num_layers)
        if is_ahead:
            scanned = ahead.scan(run, x_d, scale_ld, fetch, sources, is_kept=not remat)
        else:
            scanned = jax.lax.scan(
                lambda x_d, layer: run(x_d, fetch(layer[0])[0], (layer[1], None)),
                x_d,
                (sources, scale_ld),
            )
        x_d, sums_l = scanned
        return (x_d * jnp.arange(D)).sum() + (sums_l**2).sum()

    return loss


def toy_operands(num_layers: int):
    rng = np.random.default_rng(num_layers)
    shapes = (num_layers, D, D), (num_layers, D), (D,)
    w_ldd, scale_ld, x_d = (rng.normal(size=s).astype(np.float32) for s in shapes)
    return (jnp.asarray(w_ldd), jnp.asarray(scale_ld)), jnp.asarray(x_d)


@pytest.mark.parametrize(("num_layers", "remat"), [(1, True), (2, False), (3, True)])
def test_a_scan_ahead_is_the_scan(num_layers, remat):
    """Value and gradients, also where gradients are added to sums in place."""
    params, x_d = toy_operands(num_layers)
    plain, here = (toy(num_layers, is_ahead, remat) for is_ahead in (False, True))
    expected = jax.jit(jax.value_and_grad(plain, (0, 1)))(params, x_d)
    actual = jax.jit(jax.value_and_grad(here, (0, 1)))(params, x_d)
    assert_close(actual, expected)

    @jax.jit
    def summed(params, x_d):
        _, pull_back = jax.vjp(lambda params: here(params, x_d), params)
        refs = jax.tree.map(lambda leaf: jax.new_ref(jnp.ones_like(leaf)), params)
        pull_back.with_refs(refs)(jnp.float32(1))
        return jax.tree.map(jax.ref.freeze, refs)

    added = jax.tree.map(lambda leaf: leaf - 1, summed(params, x_d))
    assert_close(added, expected[1][0], factor=10, reason="1 was added to them")


def kept_weights(num_layers: int, remat: bool) -> int:
    """Return how many arrays of the weights of all layers loops of the gradient make,
    the gradient itself not counted."""
    operands = toy_operands(num_layers)
    jaxpr = jax.make_jaxpr(jax.grad(toy(num_layers, True, remat)))(*operands)
    made = [
        variable
        for eqn, _ in equations(jaxpr)
        if eqn.primitive.name == "scan"
        for variable in eqn.outvars
        if variable.aval.shape == (num_layers, D, D)
    ]
    return len(made) - 1


def test_only_without_remat_are_fetched_weights_kept():
    assert kept_weights(3, remat=False) == 1
    assert kept_weights(3, remat=True) == 0


@pytest.mark.parametrize("num_layers", [1, 3])
def test_each_pass_fetches_each_layer_and_one_more(num_layers):
    loss = toy(num_layers, True, remat=True)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(*toy_operands(num_layers))
    casts = [
        times
        for eqn, times in equations(jaxpr)
        if eqn.primitive.name == "dynamic_slice" and eqn.outvars[0].aval.size == D * D
    ]
    assert sum(casts) == 2 * (num_layers + 1)


E, T = 8, 8
SMALL = Config(
    model=Model(
        vocab_size=16, d_model=16, num_layers=2, num_heads=2, num_kv_heads=2,
        head_dim=8, d_ff=16, compute_dtype="float32",
    ),
    moe=Moe(num_experts=E, top_k=2, d_expert=16),
    data=Data(seq_len=T),
    train=Train(batch_size=8, loss_chunk=T),
)  # fmt: skip
COPIES = {"slots_per_device": 3}
DATA, TENSOR = Topology(data=2, expert=4), Topology(data=2, expert=2, tensor=2)
TWO_DCS = Topology(dc=2, data=2, expert=2)
CASES = {
    "owned": (DATA, {"store": "owned"}, {"remat": "full"}),
    "no experts' axis": (Topology(data=8), {"store": "owned"}, {"remat": "full"}),
    "kept": (DATA, {"store": "owned"}, {"remat": "none"}),
    "one layer": (DATA, {}, {"remat": "full", "num_layers": 1}),
    "three layers": (DATA, {}, {"remat": "dispatch", "num_layers": 3}),
    "dense first": (
        DATA, {}, {"remat": "full", "num_layers": 3, "first_k_dense": 1}
    ),
    "every second": (
        DATA, {}, {"remat": "full", "num_layers": 4, "moe_every": 2}
    ),
    "transient": (
        DATA, {"store": "transient", "split": "local_first", **COPIES},
        {"remat": "full"},
    ),
    "resident": (
        DATA, {"store": "resident", "split": "water_filling", **COPIES},
        {"remat": "full"},
    ),
    "sharded": (DATA, {"store": "sharded", "slots_per_device": 3}, {"remat": "full"}),
    "merged": (
        DATA, {"group": "data_expert", "store": "transient", "slots_per_device": 2},
        {"remat": "full"},
    ),
    "awaited": (
        Topology(expert=4),
        {"store": "transient", "split": "local_first", **COPIES},
        {"remat": "full"},
    ),
    "two dcs": (TWO_DCS, {"store": "owned"}, {"remat": "full"}),
    "domain": (
        TWO_DCS, {"group": "dc_expert", "domain": (2, 1)}, {"remat": "full"}
    ),
    **{
        schedule: (TENSOR, {"schedule": schedule}, {"remat": "full"})
        for schedule in ("base", "s1", "s2", "s1h", "local")
    },
    "one shard": (TENSOR, {"schedule": "s1h", "expert_shards": 1}, {"remat": "full"}),
}  # fmt: skip


@functools.cache
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 16, (8, T))


def gradient(name: str, prefetch: bool):
    """Return the loss of a case and the gradients of its parameters."""
    mesh, dispatch, model = CASES[name]
    policy = "micromoe" if dispatch.get("split") == "water_filling" else "home"
    cfg = dataclasses.replace(
        SMALL,
        mesh=mesh,
        model=dataclasses.replace(SMALL.model, **model),
        dispatch=Dispatch(rows_per_peer=64, prefetch=prefetch, **dispatch),
        balance=Balance(policy=policy),
    )
    ours = network(cfg)

    def loss(params):
        hidden_btd, sums, _ = ours.apply(params, tokens())
        return (hidden_btd**2).mean() + 0.1 * sums.z.mean() + sums.sequence.mean()

    return jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)(ours.params)


@pytest.mark.long
@pytest.mark.parametrize("flop_per_byte", [0, dependency.FLOP_PER_BYTE])
def test_rows_that_wait_for_copies_are_the_same_bits(flop_per_byte, monkeypatch):
    """Without a price per byte copies fit under attention, and rows wait for them; in
    so small a model they do not, and rows wait for the offers."""
    monkeypatch.setattr(dependency, "FLOP_PER_BYTE", flop_per_byte)
    actual, expected = (gradient("awaited", prefetch) for prefetch in (True, False))
    pairs = zip(*map(jax.tree.leaves, (actual, expected)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_the_model_is_the_same_bits(name):
    actual, expected = (gradient(name, prefetch) for prefetch in (True, False))
    pairs = zip(*map(jax.tree.leaves, (actual, expected)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
