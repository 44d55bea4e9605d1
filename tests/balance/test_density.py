"""Compare the densest set of devices with its definition, with linear programs and with
integer programs."""

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, linprog, milp

from moejax.balance.policies.micromoe.density import (
    dense_prefix,
    densest,
    density,
    device_holds,
    in_sets,
    set_sizes,
    subset_sums,
)
from moejax.plan.expert_plan import EMPTY
from tests.support.close import assert_close

SIZES = [(4, 8, 3), (8, 16, 4), (16, 32, 3), (24, 48, 3), (64, 256, 5), (64, 256, 8)]
"""Numbers of devices, experts and slots per device. For the small ones the function
looks at all sets of devices, for the large ones it does not."""


def make_case(seed: int, sizes) -> tuple[np.ndarray, np.ndarray]:
    """Return random slots and a skewed load in whole rows.

    Each device has its own experts and random others. A slot may be empty, and a device
    may have an expert twice. A tenth of the experts have no rows.
    """
    rng = np.random.default_rng(seed)
    w, e, s = sizes
    own_we = np.arange(e).reshape(w, -1)
    other_wc = rng.integers(-1, e, (w, s - e // w))
    zipf_e = 1 / np.arange(1, e + 1) ** rng.choice([0.4, 0.8, 1.2, 2.0])
    load_e = np.round(1e5 * rng.permutation(zipf_e)) * (rng.random(e) > 0.1)
    return np.concatenate([own_we, other_wc], axis=1).reshape(-1), load_e


def defined_density(row_p, load_e, w) -> float:
    """Return the largest number of rows per device over all sets of devices, of rows
    whose experts have replicas in the set alone."""
    device_p = np.arange(len(row_p)) // (len(row_p) // w)
    best = 0.0
    for size in range(1, w + 1):
        for devices in itertools.combinations(range(w), size):
            outside = set(row_p[~np.isin(device_p, devices)].tolist())
            rows = sum(x for e, x in enumerate(load_e) if e not in outside)
            best = max(best, rows / size)
    return best


def program(row_p, load_e, w):
    """Return the linear program of a split as (cost, upper matrix, equality matrix).

    It has a column for each (expert, device); the last column is the fullest device.
    """
    expert_x, device_x = np.nonzero(device_holds(row_p, len(load_e), w).T)
    num_columns = len(expert_x) + 1
    upper_wx = np.zeros((w, num_columns))
    upper_wx[device_x, np.arange(num_columns - 1)] = 1
    upper_wx[:, -1] = -1
    equal_ex = np.zeros((len(load_e), num_columns))
    equal_ex[expert_x, np.arange(num_columns - 1)] = 1
    return np.eye(num_columns)[-1], upper_wx, equal_ex


@pytest.mark.parametrize("seed", range(8))
def test_density_equals_its_definition(seed):
    w = (2, 3, 5, 7)[seed % 4]
    row_p, load_e = make_case(seed, (w, 2 * w, 4))
    assert density(row_p, load_e, w) == pytest.approx(defined_density(row_p, load_e, w))


@pytest.mark.parametrize("sizes", SIZES)
def test_density_is_the_optimum_of_the_linear_program(sizes):
    for seed in range(3):
        row_p, load_e = make_case(seed, sizes)
        cost, upper_wx, equal_ex = program(row_p, load_e, sizes[0])
        optimum = linprog(cost, upper_wx, np.zeros(sizes[0]), equal_ex, load_e).fun
        assert_close(density(row_p, load_e, sizes[0]), optimum, dtype=np.float32)


def test_the_best_split_in_whole_rows_is_the_density_rounded_up():
    for seed in range(6):
        row_p, load_e = make_case(seed, (6, 12, 3))
        load_e = np.round(load_e / 1000)
        cost, upper_wx, equal_ex = program(row_p, load_e, 6)
        limits = [
            LinearConstraint(upper_wx, -np.inf, 0),
            LinearConstraint(equal_ex, load_e, load_e),
        ]
        whole = np.ones(len(cost))
        best = milp(cost, constraints=limits, integrality=whole, bounds=Bounds(0)).fun
        assert math.ceil(density(row_p, load_e, 6) - 1e-9) == round(best)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_densest_set_has_the_rows_that_it_reports(sizes):
    w, e, _ = sizes
    for seed in range(3):
        row_p, load_e = make_case(seed, sizes)
        best = densest(row_p, load_e, w)
        is_away_e = device_holds(row_p, e, w)[~best.is_in_w].any(axis=0)
        assert best.rows == pytest.approx(load_e[~is_away_e].sum())
        assert best.rows_per_device >= load_e.sum() / w * (1 - 1e-12)


def test_the_density_of_a_long_ring_is_that_of_its_densest_arc():
    """On a ring of 64 devices with a sine wave as load, rows move through many devices,
    and the densest set is an arc."""
    device = np.arange(64)
    load_e = 1000 * (1 + 0.5 * np.sin(device / 64 * 2 * np.pi))
    row_p = np.stack([device, (device + 1) % 64], axis=1).reshape(-1)
    arcs = [
        load_e[np.arange(a, a + n - 1) % 64].sum() / n
        for a in range(64)
        for n in range(2, 64)
    ]
    expected = max([*arcs, load_e.sum() / 64])
    assert density(row_p, load_e, 64) == pytest.approx(expected)


@pytest.mark.parametrize("w", [3, 20])
def test_without_replicas_it_is_the_own_load_and_with_all_the_mean(w):
    load_e = np.random.default_rng(w).random(2 * w)
    home_p = np.arange(2 * w)
    own = load_e.reshape(w, 2).sum(axis=1).max()
    assert density(home_p, load_e, w) == pytest.approx(own)
    everywhere_p = np.tile(np.arange(2 * w), w)
    assert density(everywhere_p, load_e, w) == pytest.approx(load_e.sum() / w)
    twice_p = np.repeat(home_p, 2)
    assert density(twice_p, load_e, w) == pytest.approx(own)
    with_empty_p = np.insert(home_p, np.arange(0, 2 * w, 2), EMPTY)
    assert density(with_empty_p, load_e, w) == pytest.approx(own)
    assert density(home_p, np.zeros(2 * w), w) == 0


@pytest.mark.parametrize("w", [1, 2, 5, 8])
def test_subset_sums_are_those_of_the_experts_inside(w):
    rng = np.random.default_rng(w)
    held_we = rng.random((w, 9)) < 0.4
    held_we[rng.integers(w, size=9), np.arange(9)] = True
    value_e = rng.random(9)
    sums = subset_sums(held_we, value_e)
    is_in_dw = in_sets(np.arange(1 << w), w)
    expected = [value_e[~held_we[~is_in_w].any(axis=0)].sum() for is_in_w in is_in_dw]
    assert_close(sums, np.array(expected))
    sizes = set_sizes(w)
    assert sizes[0] == np.inf
    assert np.array_equal(sizes[1:], is_in_dw[1:].sum(axis=1))


def test_a_dense_prefix_is_nearly_the_densest():
    for seed in range(6):
        row_p, load_e = make_case(seed, (64, 256, 6))
        held_we = device_holds(row_p, 256, 64)
        is_in_w = dense_prefix(held_we, load_e)
        rows = load_e[~held_we[~is_in_w].any(axis=0)].sum() / is_in_w.sum()
        best = density(row_p, load_e, 64)
        assert 0.98 * best <= rows <= best * (1 + 1e-12)
