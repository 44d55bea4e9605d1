"""Recorded routing: choices that follow given loads instead of a router.

It serves benchmarks of skewed loads. `loads` makes a table [samples, layers, experts]
on the host. `sample_index` says which sample a micro-batch follows. `choose` draws k
distinct experts per token, such that the expected counts are exactly one row of the
table.
"""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moejax.config import Points, Recorded
from moejax.moe.array_file import names_in_npz, read_npz

MAX_COUNT = 1e15
"""Largest count of a file, so that sums of counts are exact."""
MAX_CONCENTRATION = 700
"""Largest concentration of a hill of load; exp() of more is infinite."""
MAX_ROWS = 2**17
MAX_NUMBERS = 2**25
"""Largest size of a table of loads, in rows and in numbers: that of 'rotating' with 128
layers of 512 experts. It is 128 MiB on each device, and made in some seconds."""


def loads(cfg: Recorded, num_layers: int, num_experts: int, top_k: int) -> np.ndarray:
    """Return the probability that a token chooses each expert.

    The table is float32 [samples, layers, e].
    Rows sum to k. No entry exceeds 1, because a token chooses an expert at most once;
    any excess is given to the other experts in proportion to their loads.
    """
    makers = {
        "uniform": lambda: np.ones((1, num_experts)),
        "zipf": lambda: np.arange(1, num_experts + 1)[None] ** -cfg.zipf,
        "one_hot": lambda: np.eye(num_experts)[:1] + 1e-9,
        "rotating": lambda: _hot_loads(cfg, np.arange(num_experts), num_experts),
        "burst": lambda: _hot_loads(cfg, np.array([0, -1]), num_experts),
        "wandering": lambda: _wandering_loads(cfg, num_experts),
    }
    if cfg.source in makers:
        samples = {"rotating": num_experts, "burst": 2}
        samples["wandering"] = num_experts * cfg.period_steps
        num_samples = samples.get(cfg.source, 1)
        _check_size(cfg, num_samples, num_layers, num_experts)
        table_te = makers[cfg.source]()
        table_tle = np.repeat(table_te[:, None], num_layers, axis=1)
    else:
        table_tle = _read_loads(cfg, num_layers, num_experts)
    return np.stack(
        [[_choice_probabilities(row_e, top_k) for row_e in t] for t in table_tle]
    )


def sample_index(
    cfg: Recorded,
    num_samples: int,
    step: Int[Array, ""],
    micro_batch: Int[Array, ""] | int = 0,
    accumulate_steps: int = 1,
) -> Int[Array, ""]:
    """Return the index of the table's sample that a micro-batch of this step uses.

    `micro_batch` is its number within the step, of `accumulate_steps`. It counts with
    sample_per='micro_batch' and loads of a file alone.
    """
    if cfg.source == "wandering":
        return step % num_samples
    if cfg.source in ("rotating", "burst"):
        return (step // cfg.period_steps) % num_samples
    if cfg.sample_per == "micro_batch":
        step = step * accumulate_steps + micro_batch
    return (step // cfg.steps_per_sample) % num_samples


def draw_points(
    points: Points, key: Array, shape: tuple[int, int]
) -> Float[Array, "b t"]:
    """Return the point of each token in [0, 1), from which `choose` draws its experts.

    With points='spread' token i has the i-th number of van der Corput's sequence (1935;
    the bits of i in reverse order), all moved by one random offset. So the tokens of a
    device, which are consecutive, have evenly spaced points where they are a power of
    two, and nearly so otherwise.
    """
    if points == "random":
        return jax.random.uniform(key, shape)
    bits = jnp.arange(shape[0] * shape[1], dtype=jnp.uint32).reshape(shape)
    for width, mask in (
        (1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF),
        (16, 0x0000FFFF),
    ):  # fmt: skip
        bits = ((bits >> width) & mask) | ((bits & mask) << width)
    offset = jax.random.bits(key, dtype=jnp.uint32)
    return (bits + offset >> 8).astype(jnp.float32) * 2.0**-24


def choose(
    chance_e: Float[Array, " e"], start_bt: Float[Array, "b t"], top_k: int
) -> Int[Array, "b t k"]:
    """Draw k distinct experts per token by systematic sampling (Madow 1949).

    The experts' probabilities are laid end to end on [0, k). A token's points are u,
    u + 1, .., u + k - 1, where u in [0, 1) is its entry of `start_bt`. No probability
    exceeds 1, so no expert is hit twice, and each is hit with exactly its probability.
    (Edges are rounded: if a point falls on an edge, the next expert is taken.)
    """
    end_e = jnp.cumsum(chance_e)
    end_e = end_e * (top_k / end_e[-1])
    order_k = jnp.arange(top_k)
    point_btk = start_bt[..., None] + order_k
    is_past_btke = point_btk[..., None] >= end_e
    gap_btk = jnp.sum(is_past_btke, axis=-1, dtype=jnp.int32) - order_k
    gap_btk = jax.lax.cummax(gap_btk, axis=gap_btk.ndim - 1)
    return jnp.minimum(gap_btk, chance_e.shape[0] - top_k) + order_k


def _check_size(
    cfg: Recorded, num_samples: int, num_layers: int, num_experts: int
) -> None:
    """Raise ValueError for a table of loads that is too large to be made."""
    rows = num_samples * num_layers
    if rows > MAX_ROWS or rows * num_experts > MAX_NUMBERS:
        raise ValueError(
            f"Recorded.source='{cfg.source}' has {num_samples} samples of {num_layers} "
            f"layers with {num_experts} experts, and a table of loads has {MAX_ROWS} "
            f"rows and {MAX_NUMBERS} numbers at most: use fewer samples (of "
            "'wandering', a shorter Recorded.period_steps)"
        )


def _hot_loads(cfg: Recorded, hot_t: np.ndarray, num_experts: int) -> np.ndarray:
    """Return one row of loads per phase, with `hot_share` on the phase's hot expert.

    The other experts share the rest evenly. A hot expert of -1 makes all even.
    """
    table_te = np.full((len(hot_t), num_experts), 1.0 / num_experts)
    for phase, expert in enumerate(hot_t):
        if expert >= 0:
            table_te[phase] = (1 - cfg.hot_share) / max(num_experts - 1, 1)
            table_te[phase, expert] = cfg.hot_share
    return table_te


def _wandering_loads(cfg: Recorded, num_experts: int) -> np.ndarray:
    """Return one row of loads per step: a peak (von Mises) that moves over the experts.

    In the first period it rises from an even load until its top has `hot_share`. Then
    it moves on by one expert per period.
    """
    step_t = np.arange(num_experts * cfg.period_steps)
    top_t = np.maximum(step_t / cfg.period_steps - 1, 0)
    angle_te = 2 * np.pi * (np.arange(num_experts) - top_t[:, None]) / num_experts
    concentration, shape_e = 0.0, np.cos(angle_te[0])
    while np.exp(concentration) / np.exp(concentration * shape_e).sum() < cfg.hot_share:
        concentration += 0.01
        if concentration > MAX_CONCENTRATION:
            raise ValueError(
                f"Recorded.hot_share={cfg.hot_share} cannot be reached by a hill of "
                f"load over Moe.num_experts={num_experts}: lower it"
            )
    rise_t = np.minimum(step_t / cfg.period_steps, 1.0)
    table_te = np.exp(concentration * rise_t[:, None] * np.cos(angle_te))
    return table_te / table_te.sum(axis=1, keepdims=True)


def _read_loads(cfg: Recorded, num_layers: int, num_experts: int) -> np.ndarray:
    """Read loads [samples, layers, e] from an .npz file.

    Dims between layers and experts are summed. If the file has fewer layers, they are
    repeated.
    """
    path = pathlib.Path(cfg.source)
    if not os.path.isfile(path):
        raise ValueError(
            f"Recorded.source='{cfg.source}' is neither a synthetic load (uniform, "
            "zipf, one_hot, rotating, burst, wandering) nor a file"
        )
    arrays = read_npz(path, [cfg.array])
    if cfg.array not in arrays:
        raise ValueError(
            f"{path} holds {names_in_npz(path)}, not Recorded.array='{cfg.array}'"
        )
    counts = arrays[cfg.array]
    if counts.ndim < 3 or counts.shape[-1] != num_experts or not counts.size:
        raise ValueError(
            f"{path}: '{cfg.array}' has shape {list(counts.shape)}, but "
            f"Moe.num_experts={num_experts} needs [samples, layers, ..., {num_experts}]"
        )
    if not (counts.min() >= 0 and counts.max() <= MAX_COUNT):  # NaN fails too
        raise ValueError(
            f"{path}: '{cfg.array}' has numbers from {counts.min()} to "
            f"{counts.max()}, and must hold counts, from 0 to {MAX_COUNT:.0e}"
        )
    _check_size(cfg, len(counts), num_layers, num_experts)
    counts_tle = counts.sum(axis=tuple(range(2, counts.ndim - 1)), dtype=np.float64)
    layer_l = np.arange(num_layers) % counts_tle.shape[1]
    return counts_tle[:, layer_l]


def _choice_probabilities(load_e: np.ndarray, top_k: int) -> np.ndarray:
    """Scale loads to probabilities that sum to k, none above 1."""
    load_e = np.maximum(load_e.astype(np.float64), 0) + 1e-12
    fixed_e = np.zeros(load_e.shape, bool)
    for _ in range(len(load_e)):
        rest = load_e * ~fixed_e
        chance_e = np.where(fixed_e, 1.0, rest * (top_k - fixed_e.sum()) / rest.sum())
        if (chance_e <= 1 + 1e-12).all():
            break
        fixed_e |= chance_e >= 1
    return np.minimum(chance_e, 1).astype(np.float32)
