"""Water-filling in whole rows reaches the ceiling of the linear program's optimum."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import linprog

from moejax.kernels.water_fill.portable import water_fill
from moejax.plan import water_filling
from moejax.plan.edge_coloring import edge_coloring, max_colors
from tests.support.close import assert_close
from tests.support.replica_loads import replicated, ring, scattered, zipf


def optimum(load_e, row_p, w) -> int:
    """Return the ceiling of the linear program's value, computed by HiGHS.

    The value is a number of rows over at most w devices. So 1/(2 w) is far from both
    rounding errors and the next integer.
    """
    slot_x = np.flatnonzero(row_p >= 0)
    num_x = len(slot_x)
    of_expert = np.zeros((len(load_e), num_x + 1))
    of_expert[row_p[slot_x], np.arange(num_x)] = 1
    on_device = np.zeros((w, num_x + 1))
    on_device[slot_x // (len(row_p) // w), np.arange(num_x)] = 1
    on_device[:, -1] = -1
    result = linprog(
        np.append(np.zeros(num_x), 1.0), A_ub=on_device, b_ub=np.zeros(w),
        A_eq=of_expert, b_eq=load_e, method="highs",
    )  # fmt: skip
    assert result.status == 0, result.message
    return int(np.ceil(result.fun - 1 / (2 * w)))


def random_instances():
    for seed in range(60):
        rng = np.random.default_rng(seed)
        w = int(rng.choice([2, 3, 4, 8, 16]))
        num_experts = int(rng.choice([max(1, w // 2), w, 2 * w, 4 * w]))
        slots = -(-num_experts // w) + int(rng.integers(0, 4))
        total = int(rng.choice([7, 300, 20_000, 1_000_000]))
        load_e = zipf(rng, num_experts, total, rng.uniform(0.4, 2.0))
        yield load_e, scattered(rng, num_experts, w, slots), w


def adversarial_instances():
    for seed, (w, num_experts) in enumerate([(4, 8), (8, 16)]):
        rng = np.random.default_rng(seed)
        load_e = zipf(rng, num_experts, 5000, 1.0)
        row_p = replicated(rng, num_experts, w, 2)
        yield np.where(np.arange(num_experts) == seed, 9999, 0), row_p, w
        yield np.where(rng.random(num_experts) < 0.6, 0, load_e), row_p, w
        yield np.full(num_experts, 1001), row_p, w
        yield np.zeros(num_experts, int), row_p, w
        yield load_e[: w // 2], scattered(rng, w // 2, w, 3), w  # fewer than devices
        yield load_e, np.tile(np.arange(num_experts), w), w  # all on every device
        yield load_e, rng.permutation(num_experts), w  # without replicas
        twins_ws = np.arange(num_experts).reshape(w // 2, -1).repeat(2, axis=0)
        yield load_e, twins_ws.reshape(-1), w  # devices in equal pairs


def large_instances():
    for num_experts, w, replicas in ((64, 16, 2), (128, 32, 2), (256, 64, 4)):
        rng = np.random.default_rng(num_experts + w)
        load_e = zipf(rng, num_experts, 4096 * w, 0.8)
        yield load_e, replicated(rng, num_experts, w, replicas), w


@functools.cache
def instances() -> list:
    kinds = (random_instances(), adversarial_instances(), large_instances(), [ring()])
    return [
        (load_e, row_p.astype(np.int32), w)
        for load_e, row_p, w in itertools.chain(*kinds)
    ]


def even(load_e, row_p, w) -> np.ndarray:
    """Return loads for equal shares of each expert; first devices get the rest, [w]."""
    level_w = np.zeros(w, int)
    for expert, load in enumerate(load_e):
        devices = np.unique(np.flatnonzero(row_p == expert) // (len(row_p) // w))
        level_w[devices] += load // len(devices)
        level_w[devices[: load % len(devices)]] += 1
    return level_w


def check_rows(filling, load_e, row_p, w) -> None:
    """Check that rows are whole and sum to the load of their expert. Empty slots get no
    rows, nor does a second slot on the same device."""
    rows_p = filling.rows_p
    assert np.issubdtype(rows_p.dtype, np.integer)
    assert rows_p.min() >= 0
    assert not rows_p[row_p < 0].any()
    summed_e = np.zeros(len(load_e), int)
    np.add.at(summed_e, row_p[row_p >= 0], rows_p[row_p >= 0])
    assert np.array_equal(summed_e, load_e)
    used = np.flatnonzero(rows_p)
    on_device = row_p[used] * w + used // (len(row_p) // w)
    assert len(np.unique(on_device)) == len(on_device)


def test_fullest_device_has_the_ceiling_of_the_optimum_and_the_bound_says_so():
    """Whoever has the loads and the plan can check the proof of a bound without solving
    anything: it names devices that the rows of its experts cannot leave."""
    for load_e, row_p, w in instances():
        best = optimum(load_e, row_p, w)
        swept = water_filling.sweep(load_e, row_p, w)
        filling = water_filling.fill(load_e, row_p, w)
        for each in (swept, filling):
            check_rows(each, load_e, row_p, w)
        assert filling.level_w(w).max() == filling.bound == best
        assert swept.bound <= best <= swept.level_w(w).max()
        assert swept.level_w(w).max() <= even(load_e, row_p, w).max()
        proof = water_filling.prove(load_e, row_p, w)
        is_inside_p = np.isin(row_p, proof.experts)
        device_p = np.arange(len(row_p)) // (len(row_p) // w)
        assert np.isin(device_p[is_inside_p], proof.devices).all()
        assert proof.rows == load_e[proof.experts].sum()
        assert proof.bound == best


def test_tolerance_is_kept_and_the_bound_stays_below_the_optimum():
    """A step tolerates a 512th of the mean, which is rounded up."""
    assert water_filling.split_tolerance(8 * 5120, 8) == 10
    assert water_filling.split_tolerance(8 * 5120 - 1, 8) == 10
    assert water_filling.split_tolerance(8 * 511, 8) == 0
    for load_e, row_p, w in instances():
        tolerance = 8 * water_filling.split_tolerance(load_e.sum(), w)
        filling = water_filling.fill(load_e, row_p, w, tolerance)
        best = water_filling.fill(load_e, row_p, w).bound
        assert filling.bound <= best <= filling.level_w(w).max()
        assert filling.level_w(w).max() <= filling.bound + tolerance


def test_a_ring_needs_paths(monkeypatch):
    """Sweeps move rows by one device at a time, and stop far from the optimum. Where
    paths run out, the bound stays below the fullest device."""
    load_e, row_p, w = ring()
    swept = water_filling.sweep(load_e, row_p, w)
    assert swept.sweeps == water_filling.MAX_SWEEPS
    assert swept.level_w(w).max() > swept.bound + 50
    monkeypatch.setattr(water_filling, "PATHS_PER_DEVICE", 0)
    filling = water_filling.fill(load_e, row_p, w)
    assert filling.bound < filling.level_w(w).max()


def test_no_sweep_makes_squares_or_the_fullest_device_larger():
    for load_e, row_p, w in instances():
        levels = [
            water_filling.sweep(load_e, row_p, w, max_sweeps=sweeps).level_w(w)
            for sweeps in range(4)
        ]
        assert np.array_equal(levels[0], even(load_e, row_p, w))
        for before_w, after_w in itertools.pairwise(levels):
            assert (after_w**2).sum() <= (before_w**2).sum()
            assert after_w.max() <= before_w.max()


def test_poured_is_the_least_sum_of_squares_and_the_first_get_the_rest():
    rng = np.random.default_rng(0)
    for _ in range(100):
        ground = rng.integers(0, 6, rng.integers(1, 5)).tolist()
        load = int(rng.integers(0, 8))
        splits = [
            split
            for split in itertools.product(range(load + 1), repeat=len(ground))
            if sum(split) == load
        ]
        squares = [sum((g + x) ** 2 for g, x in zip(ground, s)) for s in splits]
        best_splits = [s for s, x in zip(splits, squares) if x == min(squares)]
        assert tuple(water_filling.pour(ground, load)) == max(best_splits)


def test_the_example_of_the_module():
    row_p = np.array([0, -1, 1, 0, 2, 1])
    assert water_filling.sweep([6, 4, 2], row_p, 3).rows_p.tolist() == [
        4,
        0,
        2,
        2,
        2,
        2,
    ]


def test_experts_of_one_color_share_no_device():
    """The slots of an expert on several devices have one color, and others none."""
    assert edge_coloring(np.array([0, 1, 0, 2, 1, 2]), 3).tolist() == [0, 1, 0, 2, 1, 2]
    for load_e, row_p, w in instances():
        color_p, slots = edge_coloring(row_p, w), len(row_p) // w
        slot_q = np.flatnonzero(color_p >= 0)
        device_q, color_q = slot_q // slots, color_p[slot_q]
        assert len(np.unique(color_q * w + device_q)) == len(slot_q)
        for expert in range(len(load_e)):
            devices = np.unique(np.flatnonzero(row_p == expert) // slots)
            is_here_q = row_p[slot_q] == expert
            assert len(np.unique(color_q[is_here_q])) == (len(devices) > 1)
            assert is_here_q.sum() == len(devices) * (len(devices) > 1)
        assert color_p.max() < max_colors(len(load_e), len(row_p))


def test_sweeps_of_the_device_give_the_same_bits():
    num_experts, w, slots, max_sweeps = 64, 16, 8, water_filling.MAX_SWEEPS
    swept = jax.jit(functools.partial(water_fill, max_sweeps=max_sweeps))
    for seed in range(12):
        rng = np.random.default_rng(seed)
        row_p = scattered(rng, num_experts, w, slots)
        load_e = zipf(rng, num_experts, 1000 * w, rng.uniform(0.0, 2.0))
        tolerance = int(rng.choice([0, 0, 5]))
        start = water_filling.sweep(load_e, row_p, w, max_sweeps=0)
        slot_cw = slots_by_color(row_p, w, num_experts)
        cell = slot_cw >= 0
        amount_cw = np.where(cell, start.rows_p[slot_cw], 0)
        on_device = swept(
            jnp.asarray(np.where(cell, row_p[slot_cw], -1), jnp.int32),
            jnp.asarray(amount_cw, jnp.int32),
            jnp.asarray(start.level_w(w) - amount_cw.sum(axis=0), jnp.int32),
            jnp.int32(edge_coloring(row_p, w).max() + 1),
            jnp.int32(tolerance),
        )
        expected = water_filling.sweep(load_e, row_p, w, tolerance, max_sweeps)
        amount_cw = np.where(cell, expected.rows_p[slot_cw], 0)
        assert_close(np.asarray(on_device.amount_cw), amount_cw)
        assert_close(np.asarray(on_device.level_w), expected.level_w(w))
        assert int(on_device.bound) == expected.bound
        assert int(on_device.sweeps) == expected.sweeps


def slots_by_color(row_p: np.ndarray, w: int, num_colors: int) -> np.ndarray:
    """Return the slot of each color on each device, -1 for none; [c, w]."""
    color_p, slot_cw = edge_coloring(row_p, w), np.full((num_colors, w), -1)
    slot_q = np.flatnonzero(color_p >= 0)
    slot_cw[color_p[slot_q], slot_q // (len(row_p) // w)] = slot_q
    return slot_cw
