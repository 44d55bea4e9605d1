"""Traffic that the planner predicts for splits that depend on the load."""

import itertools

import numpy as np
import pytest

from moejax.balance.policies.micromoe.density import density
from moejax.perf.traffic import (
    Dealing,
    device_rows,
    max_over_mean,
    over_mean,
    rows_by_slot,
)
from moejax.plan import water_filling
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout

W, E = 4, 8


def test_loads_over_their_mean_by_layer():
    load_lx = np.array([[6.0, 2, 1], [0, 0, 0]])
    assert over_mean(load_lx).tolist() == [[2, 2 / 3, 1 / 3], [1, 1, 1]]
    assert [max_over_mean(load_x) for load_x in load_lx] == [2, 1]


def make_load(seed: int) -> np.ndarray:
    """Return skewed numbers of rows by source and expert, [w, e]."""
    rng = np.random.default_rng(seed)
    chance_e = rng.permutation(np.arange(1.0, E + 1) ** -rng.uniform(0.0, 2.0))
    total = int(rng.choice([10, 10_000]))
    return rng.multinomial(total, chance_e / chance_e.sum(), size=W).astype(float)


def make_plan_row(seed: int, slots: int = 4) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rest = rng.integers(-1, E, W * slots - E)
    return rng.permutation(np.r_[np.arange(E), rest]).astype(np.int32)


def home_in(slots: int) -> np.ndarray:
    copies = slots - E // W
    layout = Layout(
        E, W, slots, 8, store="transient", split="dynamic", offers_per_device=E // W,
        copies_per_device=copies,
    )  # fmt: skip
    return ExpertPlan.home_in(layout, 1).slot_to_expert_lp[0]


def test_water_filling_deals_every_row_as_near_to_the_optimum_as_a_step_does():
    for seed in range(40):
        load_we, row_p = make_load(seed), make_plan_row(seed)
        rows_wp = rows_by_slot(load_we, row_p, W, "water_filling")
        for expert in range(E):
            sums_w = rows_wp[:, row_p == expert].sum(axis=1)
            assert np.allclose(sums_w, load_we[:, expert])
        assert not rows_wp[:, row_p < 0].any()
        best = np.ceil(density(row_p, load_we.sum(axis=0), W))
        fullest = device_rows(rows_wp).max()
        tolerance = water_filling.split_tolerance(load_we.sum(), W)
        assert best - 1e-6 <= fullest <= best + tolerance + 1e-6


def test_with_nodes_rows_stay_where_replicas_need_them():
    """On their device first, then on their node, as a step deals them."""
    device_p = np.arange(W * 4) // 4
    for num, node_w in ((W, np.arange(W)), (2, np.arange(W) // 2)):
        for seed in range(20):
            load_we, row_p = np.rint(make_load(seed)), make_plan_row(seed)
            rows_wp = rows_by_slot(load_we, row_p, W, "water_filling", Dealing((W, 2)))
            slots_p = rows_by_slot(load_we, row_p, W, "water_filling").sum(axis=0)
            assert np.allclose(rows_wp.sum(axis=0), slots_p)
            for expert, node in itertools.product(range(E), range(num)):
                there_p = (row_p == expert) & (node_w[device_p] == node)
                stay = rows_wp[node_w == node][:, there_p].sum()
                rows = load_we[node_w == node, expert].sum()
                assert np.isclose(stay, min(rows, slots_p[there_p].sum()))


def test_each_source_gives_its_replicas_the_same_shares():
    """Device 1 must compute 10 of the 50 rows of expert 0: a fifth from each source."""
    load_we = np.array([[30.0, 10.0], [20.0, 20.0]])
    load_we[:, 1] = [10, 20]
    rows_wp = rows_by_slot(load_we, np.array([0, -1, 0, 1]), 2, "water_filling")
    assert np.allclose(rows_wp, [[24, 0, 6, 10], [16, 0, 4, 20]])


def test_dynamic_gives_every_device_the_mean_to_one_row():
    for seed in range(40):
        load_we = make_load(seed)
        rows_wp = rows_by_slot(load_we, home_in(2 * E // W), W, "dynamic")
        assert np.ptp(device_rows(rows_wp)) <= 1 + 1e-6
        assert np.allclose(rows_wp.sum(axis=1), load_we.sum(axis=1))


def test_dynamic_copies_go_to_empty_slots_and_owners_may_be_any():
    """One expert, owned by device 1, has all rows. Each other device takes a quarter in
    its first slot for copies."""
    load_we = np.zeros((W, E))
    load_we[:, 5] = 100
    row_p = home_in(4).copy()
    row_p[[4, 9]] = row_p[[9, 4]]  # owners of experts 2 and 5
    rows_wp = rows_by_slot(load_we, row_p, W, "dynamic")
    used = np.flatnonzero(rows_wp.sum(axis=0))
    assert used.tolist() == [2, 4, 10, 14]
    assert np.allclose(rows_wp[:, used], 100 / W)


@pytest.mark.parametrize("split", ["water_filling", "dynamic"])
def test_loads_are_rounded_to_whole_rows(split):
    """A mean over steps is not an integer, so loads are rounded first. Rounding does
    not change the shares of the replicas by a row or more."""
    load_we, row_p = make_load(1), home_in(4)
    noise_we = np.random.default_rng(0).uniform(-0.4, 0.4, (W, E)) / W
    shares_wp, near_wp = (
        rows_by_slot(x_we, row_p, W, split) / x_we.sum() * load_we.sum()
        for x_we in (load_we, np.maximum(load_we + noise_we, 0))
    )
    assert np.abs(shares_wp - near_wp).max() < 1
