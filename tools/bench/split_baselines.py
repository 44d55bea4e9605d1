"""Oracles and baselines for the best split of loads over replicas, by others' methods.

    min T   with   sum of x_r over the replicas of e = load_e      (a row per expert)
                   sum of x_r over those of device w <= T          (a row per device)

brute_force        all sets of devices, for small groups; exact, a fraction
flow_optimum       max-flow under Dinkelbach's steps (scipy); exact, a fraction
scipy_optimum      HiGHS through scipy.optimize.linprog
highs_cold         HiGHS through highspy, with a new model each time
warm, solve_warm   HiGHS that keeps its model and its basis, as MicroMoE runs it
with_callback      the same from inside a compiled step, by jax.pure_callback
affine_scaling     the five steps of LPLB, compiled

The first three return the optimum, the others also the rows of each replica, [r].
"""

import dataclasses
import fractions
from collections.abc import Callable

import highspy
import numpy as np
import scipy.optimize
import scipy.sparse as sp
from scipy.sparse import csgraph

MAX_DEVICES = 10
"""Maximum number of devices for `brute_force`, which looks at all sets of devices."""
OPTIONS = {"output_flag": False, "threads": 1, "presolve": "off"}
STEPS, STEP_LENGTH, BIG_M = 5, 0.999, 1000.0
"""Number of steps, length of a step, and cost of the artificial column in LPLB's
solver."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """The replicas of each expert, by expert and device. A second replica of an expert
    on a device changes nothing, and is left out."""

    num_experts: int
    num_devices: int
    expert_r: np.ndarray
    """Expert of each replica, in ascending order."""
    device_r: np.ndarray
    """Device of each replica."""

    @classmethod
    def of(cls, row_p: np.ndarray, num_experts: int, num_devices: int) -> "Problem":
        """Return the problem of one layer's slots, by the expert of each, -1 where
        empty. Every expert must have a slot."""
        slot_p = np.flatnonzero(row_p >= 0)
        device_p = slot_p // (len(row_p) // num_devices)
        pairs = np.unique(np.stack([row_p[slot_p], device_p]), axis=1)
        return cls(num_experts, num_devices, *pairs.astype(np.int32))

    @property
    def held_we(self) -> np.ndarray:
        """Whether each device has a replica of each expert."""
        held_we = np.zeros((self.num_devices, self.num_experts), bool)
        held_we[self.device_r, self.expert_r] = True
        return held_we

    @property
    def num_replicas_e(self) -> np.ndarray:
        """Number of replicas of each expert."""
        return np.bincount(self.expert_r, minlength=self.num_experts)


def brute_force(problem: Problem, load_e: np.ndarray) -> fractions.Fraction:
    """Return the optimum: the maximum over sets D of devices of (rows of the experts
    with all replicas in D) / |D| (MicroMoE, arXiv 2511.16947, Eq. 3).

    Loads are whole rows. Raises ValueError for more than MAX_DEVICES devices.
    """
    w = problem.num_devices
    if w > MAX_DEVICES:
        raise ValueError(
            f"{w} devices have too many sets for brute force: use at most "
            f"{MAX_DEVICES}, or flow_optimum"
        )
    mask_e = (1 << np.arange(w)) @ problem.held_we
    set_d = np.arange(1, 1 << w)
    rows_d = ((mask_e & ~set_d[:, None]) == 0) @ load_e.astype(int)
    size_d = np.bitwise_count(set_d)
    fullest = [int(rows_d[size_d == k].max()) for k in range(1, w + 1)]
    return max(fractions.Fraction(rows, k) for k, rows in enumerate(fullest, 1))


def flow_optimum(problem: Problem, load_e: np.ndarray) -> fractions.Fraction:
    """Return the optimum for groups of any size.

    A target for the fullest device starts at the mean. If not all rows can flow under
    it, the devices that the source still reaches are a denser set, whose density is the
    next target. Capacities are scaled by the target's denominator, so that all are
    whole numbers.
    """
    load_e = load_e.astype(int)
    held_we = problem.held_we
    target = fractions.Fraction(int(load_e.sum()), problem.num_devices)
    while (reached_w := _unmet(problem, load_e, target)).any():
        is_inside_e = ~held_we[~reached_w].any(axis=0)
        target = fractions.Fraction(
            int(load_e[is_inside_e].sum()), int(reached_w.sum())
        )
    return target


def _unmet(problem: Problem, load_e, target: fractions.Fraction) -> np.ndarray:
    """Return the devices [w] that could take rows which find no room under the target;
    none if all rows find room."""
    e, w = problem.num_experts, problem.num_devices
    source, sink = 0, 1 + e + w
    rows_e = load_e * target.denominator
    ends = (
        np.r_[np.full(e, source), 1 + problem.expert_r, 1 + e + np.arange(w)],
        np.r_[1 + np.arange(e), 1 + e + problem.device_r, np.full(w, sink)],
    )
    capacity = np.r_[rows_e, rows_e[problem.expert_r], np.full(w, target.numerator)]
    assert max(rows_e.sum(), target.numerator) < 2**31, "scipy's flows are int32"
    shape = (sink + 1, sink + 1)
    graph = sp.csr_array((capacity.astype(np.int32), ends), shape=shape)
    result = csgraph.maximum_flow(graph, source, sink)
    if result.flow_value == rows_e.sum():
        return np.zeros(w, bool)
    left = graph - result.flow
    left.eliminate_zeros()
    reached = csgraph.breadth_first_order(left, source, return_predecessors=False)
    return np.isin(1 + e + np.arange(w), reached)


def scipy_optimum(problem: Problem, load_e: np.ndarray) -> float:
    """Return the optimum of the linear program by scipy."""
    matrix = _matrix(problem).tocsr()
    e, w = problem.num_experts, problem.num_devices
    cost = np.r_[np.zeros(len(problem.expert_r)), 1.0]
    result = scipy.optimize.linprog(
        cost, matrix[e:], np.zeros(w), matrix[:e], load_e, method="highs"
    )
    assert result.success, result.message
    return float(result.fun)


def _matrix(problem: Problem) -> sp.csc_array:
    """Return the matrix of the linear program: rows for experts, then for devices; a
    column for each replica, then one for T."""
    e, w, r = problem.num_experts, problem.num_devices, len(problem.expert_r)
    row = np.r_[problem.expert_r, e + problem.device_r, e + np.arange(w)]
    column = np.r_[np.arange(r), np.arange(r), np.full(w, r)]
    value = np.r_[np.ones(2 * r), -np.ones(w)]
    return sp.csc_array((value, (row, column)), shape=(e + w, r + 1))


@dataclasses.dataclass(frozen=True)
class Warm:
    """A solver with the model of one problem, and after a solve its basis."""

    problem: Problem
    solver: highspy.Highs
    row_e: np.ndarray


def warm(problem: Problem) -> Warm:
    """Return a solver with the model of a problem. Loads are 0 until the first
    solve."""
    matrix = _matrix(problem)
    matrix.sort_indices()
    num_rows, num_columns = matrix.shape
    e = problem.num_experts
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = num_columns, num_rows
    model.col_cost_ = np.r_[np.zeros(num_columns - 1), 1.0]
    model.col_lower_ = np.zeros(num_columns)
    model.col_upper_ = np.full(num_columns, highspy.kHighsInf)
    model.row_lower_ = np.r_[np.zeros(e), np.full(num_rows - e, -highspy.kHighsInf)]
    model.row_upper_ = np.zeros(num_rows)
    model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    model.a_matrix_.start_ = matrix.indptr
    model.a_matrix_.index_ = matrix.indices
    model.a_matrix_.value_ = matrix.data
    solver = highspy.Highs()
    for name, value in OPTIONS.items():
        solver.setOptionValue(name, value)
    solver.passModel(model)
    return Warm(problem, solver, np.arange(e, dtype=np.int32))


def solve_warm(state: Warm, load_e: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the optimum and rows [r] for new loads. Only the right-hand side of the
    program changes, so the last basis remains dual feasible."""
    load_e = np.asarray(load_e, np.float64)
    solver = state.solver
    solver.changeRowsBounds(len(load_e), state.row_e, load_e, load_e)
    solver.run()
    assert solver.getModelStatus() == highspy.HighsModelStatus.kOptimal
    value = np.array(solver.getSolution().col_value)
    return float(value[-1]), value[:-1]


def highs_cold(problem: Problem, load_e: np.ndarray) -> tuple[float, np.ndarray]:
    """Solve the linear program with a new HiGHS model. Return the optimum and the rows
    of each replica [r]."""
    return solve_warm(warm(problem), load_e)


def with_callback(state: Warm) -> Callable:
    """Return a compiled function from load_e to the rows of each replica, float32 [r],
    which calls the solver on the host."""
    import jax
    import jax.numpy as jnp

    shape = jax.ShapeDtypeStruct(state.problem.expert_r.shape, jnp.float32)

    def on_host(load_e):
        return solve_warm(state, np.asarray(load_e))[1].astype(np.float32)

    return jax.jit(lambda load_e: jax.pure_callback(on_host, shape, load_e))


def affine_scaling(problem: Problem) -> Callable:
    """Return a compiled function load_e -> (rows [r] float32, whether the solution was
    accepted).

    It takes five steps of primal affine scaling in float32 from x = 1, which an
    artificial column of cost 1000 makes feasible. Loads are divided by that of the
    fullest expert. If the solution is not accepted, the rows are an even split. The
    formulas are those of LPLB (github.com/deepseek-ai/LPLB) in the general form of
    SGLang's port: any number of replicas, and experts with a single replica are fixed.
    """
    import jax
    import jax.numpy as jnp

    num_replicas_r = problem.num_replicas_e[problem.expert_r]
    free_f = np.flatnonzero(num_replicas_r > 1)
    expert_f = problem.expert_r[free_f]
    matrix, free_i, fixed_we = _scaling_matrix(problem, free_f)
    cost = np.zeros(matrix.shape[1] + 1, np.float32)
    cost[-2:] = 1.0, BIG_M

    def step(_, state):
        x, a, _ = state
        scaled = a * (x * x)
        y = jax.scipy.linalg.solve(scaled @ a.T, scaled @ cost, assume_a="pos")
        d = x * (cost - a.T @ y)
        return x * (1 - STEP_LENGTH / jnp.max(d) * d), a, d

    @jax.jit
    def solve(load_e):
        load_e = load_e.astype(jnp.float32)
        share_e = load_e / jnp.maximum(jnp.max(load_e), 1)
        b = jnp.concatenate([share_e[free_i], -fixed_we @ share_e])
        a = jnp.column_stack([matrix, b - matrix.sum(axis=1)])
        x = jnp.ones_like(cost)
        x, _, d = jax.lax.fori_loop(0, STEPS, step, (x, a, jnp.zeros_like(x)))
        is_good = (jnp.max(d) < 0.1) & (x[-1] >= 0) & (x[-1] < 1e-4)
        is_good &= jnp.max(jnp.abs(a @ x - b)) < 0.05
        x_f = x[: len(free_f)]
        sum_e = jnp.zeros_like(load_e).at[expert_f].add(x_f)
        even_r = load_e[problem.expert_r] / num_replicas_r.astype(np.float32)
        solved_r = even_r.at[free_f].set(load_e[expert_f] * x_f / sum_e[expert_f])
        return jnp.where(is_good, solved_r, even_r), is_good

    return solve


def _scaling_matrix(problem: Problem, free_f: np.ndarray):
    """Return the matrix of affine scaling, the experts i with several replicas, and a
    table [w, e] that is 1 where an expert's only replica is.

    The matrix has rows for the experts i, then for devices. It has a column for each
    replica of the experts i, then for each device's slack, then for T.
    """
    w, num_free = problem.num_devices, len(free_f)
    free_i, row_f = np.unique(problem.expert_r[free_f], return_inverse=True)
    matrix = np.zeros((len(free_i) + w, num_free + w + 1), np.float32)
    device_rows = matrix[len(free_i) :]
    matrix[row_f, np.arange(num_free)] = 1
    device_rows[problem.device_r[free_f], np.arange(num_free)] = 1
    device_rows[:, num_free:-1] = np.eye(w)
    device_rows[:, -1] = -1
    fixed_we = problem.held_we & (problem.num_replicas_e == 1)
    return matrix, free_i, fixed_we.astype(np.float32)


def round_rows(problem: Problem, rows_r: np.ndarray, load_e: np.ndarray) -> np.ndarray:
    """Round rows [r] to whole rows that sum to each expert's load.

    All are rounded down. Then the replicas of an expert with the largest remainders get
    one more row, the first of them on ties.
    """
    whole_r = np.floor(rows_r + 1e-6).astype(int)
    cut_r = rows_r - whole_r
    left_e = load_e - np.bincount(problem.expert_r, whole_r, problem.num_experts)
    order_r = np.lexsort((-cut_r, problem.expert_r))
    first_e = np.cumsum(problem.num_replicas_e) - problem.num_replicas_e
    rank_r = np.arange(len(rows_r)) - first_e[problem.expert_r]
    whole_r[order_r] += rank_r < left_e[problem.expert_r]
    return whole_r


def max_device_rows(problem: Problem, rows_r: np.ndarray) -> float:
    """Return the rows of the fullest device."""
    return float(np.bincount(problem.device_r, rows_r, problem.num_devices).max())
