"""Compare the densest set of devices with linear programs."""

import numpy as np
import pytest
from scipy.optimize import linprog

from moejax.balance.policies.micromoe.density import (
    dense_prefix,
    densest,
    density,
    device_holds,
)
from tests.support.close import assert_close

SIZES = [
    (1, 3, 4), (2, 4, 3), (5, 10, 4), (7, 14, 4), (16, 32, 3), (24, 48, 3),
    (64, 256, 5), (64, 256, 8),
]  # fmt: skip
"""Numbers of devices, experts and slots per device. For up to 16 devices the function
looks at all sets of devices, for more it moves rows along paths."""


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


def optimum(row_p, load_e, w) -> float:
    """Return the rows of the fullest device under the best split, by a linear program.

    It has a column for each (expert, device); the last column is the fullest device.
    """
    expert_x, device_x = np.nonzero(device_holds(row_p, len(load_e), w).T)
    num_columns = len(expert_x) + 1
    upper_wx = np.zeros((w, num_columns))
    upper_wx[device_x, np.arange(num_columns - 1)] = 1
    upper_wx[:, -1] = -1
    equal_ex = np.zeros((len(load_e), num_columns))
    equal_ex[expert_x, np.arange(num_columns - 1)] = 1
    cost_x = np.eye(num_columns)[-1]
    return linprog(cost_x, upper_wx, np.zeros(w), equal_ex, load_e).fun


@pytest.mark.parametrize("sizes", SIZES)
def test_the_densest_set_proves_the_optimum_of_the_linear_program(sizes):
    w, e, _ = sizes
    for seed in range(3):
        row_p, load_e = make_case(seed, sizes)
        best = densest(row_p, load_e, w)
        expected = optimum(row_p, load_e, w)
        assert_close(best.rows_per_device, expected, dtype=np.float32)
        is_away_e = device_holds(row_p, e, w)[~best.is_in_w].any(axis=0)
        assert best.rows == pytest.approx(load_e[~is_away_e].sum())
        assert density(row_p, np.zeros(e), w) == 0


def test_rows_move_far_around_a_ring():
    """On a ring of 64 devices with a sine wave as load, rows move through many devices,
    and the densest set is an arc."""
    device = np.arange(64)
    load_e = 1000 * (1 + 0.5 * np.sin(device / 64 * 2 * np.pi))
    row_p = np.stack([device, (device + 1) % 64], axis=1).reshape(-1)
    expected = optimum(row_p, load_e, 64)
    assert_close(density(row_p, load_e, 64), expected, dtype=np.float32)


def test_a_dense_prefix_is_nearly_the_densest():
    for seed in range(6):
        row_p, load_e = make_case(seed, (64, 256, 6))
        held_we = device_holds(row_p, 256, 64)
        is_in_w = dense_prefix(held_we, load_e)
        rows = load_e[~held_we[~is_in_w].any(axis=0)].sum() / is_in_w.sum()
        best = density(row_p, load_e, 64)
        assert 0.98 * best <= rows <= best * (1 + 1e-12)
