"""Test that the oracles of the best split agree, and that baselines are correct."""

import fractions

import jax
import numpy as np
import pytest

from tests.support.close import assert_close
from tools.bench import split_baselines
from tools.bench.split_baselines import Problem

SIZES = [(4, 2, 2), (8, 4, 2), (16, 8, 2), (24, 8, 3), (10, 10, 1), (6, 3, 3)]
"""Experts, devices, and the number of slots over that of experts."""


def random_row(rng, num_experts: int, num_devices: int, copies: int) -> np.ndarray:
    """Return the experts of random slots: each expert has at least one, and the other
    slots hold any expert or none."""
    rest = rng.integers(-1, num_experts, num_experts * (copies - 1))
    row_p = np.r_[np.arange(num_experts), rest]
    row_p = np.r_[row_p, np.full(-len(row_p) % num_devices, -1)]
    return rng.permutation(row_p).astype(np.int32)


def loads(rng, num_experts: int) -> list[np.ndarray]:
    """Return five loads: mild Zipf, steep Zipf, one hot expert, even loads, and many
    experts without rows."""
    rank_e = rng.permutation(num_experts) + 1.0
    zipf = [rng.multinomial(5000, p / p.sum()) for p in (rank_e**-0.4, rank_e**-2.0)]
    hot_e = np.where(np.arange(num_experts) == 1, 1000, 3)
    sparse_e = np.where(rng.random(num_experts) < 0.5, 0, zipf[0])
    return [*zipf, hot_e, np.full(num_experts, 7), sparse_e]


def cases():
    rng = np.random.default_rng(0)
    for num_experts, num_devices, copies in SIZES:
        for load_e in loads(rng, num_experts):
            row_p = random_row(rng, num_experts, num_devices, copies)
            yield Problem.of(row_p, num_experts, num_devices), load_e


def test_oracles_agree_on_the_optimum():
    for problem, load_e in cases():
        exact = split_baselines.brute_force(problem, load_e)
        assert split_baselines.flow_optimum(problem, load_e) == exact
        by_scipy = split_baselines.scipy_optimum(problem, load_e)
        by_highs, rows_r = split_baselines.highs_cold(problem, load_e)
        assert (by_scipy, by_highs) == pytest.approx((float(exact),) * 2, abs=1e-6)
        assert split_baselines.max_device_rows(problem, rows_r) == pytest.approx(
            by_highs
        )


def test_flow_and_highs_agree_where_there_are_too_many_sets():
    rng = np.random.default_rng(1)
    row_p = random_row(rng, 64, 32, 2)
    problem = Problem.of(row_p, 64, 32)
    for load_e in loads(rng, 64):
        exact = split_baselines.flow_optimum(problem, load_e)
        by_scipy = split_baselines.scipy_optimum(problem, load_e)
        assert by_scipy == pytest.approx(float(exact), abs=1e-6)
    with pytest.raises(ValueError, match="32 devices have too many sets"):
        split_baselines.brute_force(problem, load_e)


def test_optimum_by_hand():
    """Expert 0 is on devices 0 and 1, and expert 1 only on device 1, so the optimum is
    (11 + 4) / 2. Device 2 has the rest. A second replica of expert 2 on its own device
    changes nothing."""
    problem = Problem.of(np.array([0, -1, 0, 1, 2, 2], np.int32), 3, 3)
    load_e = np.array([11, 4, 6])
    assert split_baselines.brute_force(problem, load_e) == fractions.Fraction(15, 2)
    assert problem.expert_r.tolist() == [0, 0, 1, 2]
    assert problem.device_r.tolist() == [0, 1, 1, 2]


def test_warm_solver_follows_new_loads_and_so_does_its_callback():
    rng = np.random.default_rng(2)
    problem = Problem.of(random_row(rng, 16, 4, 2), 16, 4)
    state = split_baselines.warm(problem)
    in_step = split_baselines.with_callback(split_baselines.warm(problem))
    for load_e in loads(rng, 16):
        exact = float(split_baselines.brute_force(problem, load_e))
        optimum, rows_r = split_baselines.solve_warm(state, load_e)
        assert optimum == pytest.approx(exact)
        assert_close(np.bincount(problem.expert_r, rows_r), load_e * 1.0)
        called_r = jax.device_get(in_step(load_e.astype(np.int32)))
        fullest = split_baselines.max_device_rows(problem, called_r)
        assert fullest == pytest.approx(exact, rel=1e-5)


def test_affine_scaling_nears_the_optimum_of_a_cube():
    """The two hottest experts of each device have a copy on another device. Loads are
    drawn from N(1, 0.3)."""
    rng = np.random.default_rng(3)
    copies_of = np.array([[3, 0, 1, 2, 7, 4, 5, 6], [6, 7, 4, 5, 0, 1, 2, 3]])
    own_ws = np.arange(64).reshape(8, 8)
    copied_ws = np.full((8, 2), -1)
    for j in range(2):
        copied_ws[copies_of[j], j] = own_ws[:, j]
    row_p = np.c_[own_ws, copied_ws].reshape(-1).astype(np.int32)
    problem = Problem.of(row_p, 64, 8)
    solve = split_baselines.affine_scaling(problem)
    for _ in range(4):
        load_ws = np.maximum(rng.normal(1, 0.3, (8, 8)), 0) * 1000
        load_e = -np.sort(-load_ws, axis=1).reshape(-1).astype(np.int32)
        rows_r, is_accepted = jax.device_get(solve(load_e))
        exact = float(split_baselines.brute_force(problem, load_e))
        assert is_accepted
        assert_close(
            np.bincount(problem.expert_r, rows_r),
            load_e * 1.0, dtype=np.float32,
        )  # fmt: skip
        assert (
            exact * (1 - 1e-5)
            <= split_baselines.max_device_rows(problem, rows_r)
            < 1.03 * exact
        )


def test_loads_without_an_accepted_solution_are_split_evenly():
    """At this skew of 16 experts, solutions are accepted for some loads only."""
    rng = np.random.default_rng(5)
    row_p = rng.permutation(np.repeat(np.arange(16), 2)).astype(np.int32)
    problem = Problem.of(row_p, 16, 8)
    solve = split_baselines.affine_scaling(problem)
    share_e = np.arange(1, 17.0) ** -2.2
    is_even = []
    for _ in range(40):
        load_e = rng.multinomial(4000, rng.permutation(share_e / share_e.sum()))
        rows_r, is_accepted = jax.device_get(solve(load_e.astype(np.int32)))
        even_r = (load_e / problem.num_replicas_e)[problem.expert_r]
        is_even.append(np.allclose(rows_r, even_r))
        assert is_even[-1] != is_accepted
    assert 0 < sum(is_even) < 40


def test_rounded_rows_sum_to_loads_and_stay_within_a_row():
    for problem, load_e in cases():
        _, rows_r = split_baselines.highs_cold(problem, load_e)
        whole_r = split_baselines.round_rows(problem, rows_r, load_e)
        assert (np.abs(whole_r - rows_r) < 1 + 1e-5).all()
        sum_e = np.bincount(problem.expert_r, whole_r, problem.num_experts)
        assert sum_e.tolist() == load_e.tolist()
