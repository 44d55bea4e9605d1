"""Build random dispatches of rows, and run both permutations of a dispatch with all
their gradients."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.kernels.permute import combine_rows, gather_rows, sum_rows


class Sizes(NamedTuple):
    """Sizes of a dispatch: tokens, choices of each, rows of the buffer, and width."""

    tokens: int
    choices: int
    rows: int
    d: int


SIZES = Sizes(tokens=30, choices=3, rows=100, d=16)


def tables(kept, seed=0, sizes=SIZES):
    """Return positions_nk, assignment_m and source_m of a random dispatch in which the
    share `kept` of all choices got a row."""
    random = np.random.default_rng(seed)
    num_assignments = sizes.tokens * sizes.choices
    num_kept = round(kept * num_assignments)
    kept_a = random.permutation(num_assignments)[:num_kept]
    row_a = random.permutation(sizes.rows)[:num_kept]
    positions_a = np.full(num_assignments, -1, np.int32)
    assignment_m = np.full(sizes.rows, -1, np.int32)
    positions_a[kept_a] = row_a
    assignment_m[row_a] = kept_a
    source_m = np.where(assignment_m < 0, -1, assignment_m // sizes.choices)
    return positions_a.reshape(sizes.tokens, sizes.choices), assignment_m, source_m


def arrays(dtype=jnp.float32, seed=0, sizes=SIZES):
    """Return random x_nd, dout_nd, y_md and gate_nk.

    y_md serves as the rows to combine and as the cotangent of gathered rows.
    """
    random = np.random.default_rng(seed)
    x_nd, dout_nd = (
        jnp.asarray(random.standard_normal((sizes.tokens, sizes.d)), dtype)
        for _ in range(2)
    )
    y_md = jnp.asarray(random.standard_normal((sizes.rows, sizes.d)), dtype)
    gate_nk = random.uniform(0.1, 1, (sizes.tokens, sizes.choices)).astype(np.float32)
    return x_nd, dout_nd, y_md, jnp.asarray(gate_nk)


def both_ways(how, floats, integers):
    """Return the results of all permutations and their gradients, by the implementation
    `how`."""
    x_nd, dout_nd, y_md, gate_nk = floats
    positions_nk, assignment_m, source_m = integers
    gathered_md, gather_vjp = jax.vjp(
        lambda x_nd: gather_rows(x_nd, source_m, positions_nk, implementation=how), x_nd
    )
    combined_nd, combine_vjp = jax.vjp(
        lambda y_md, gate_nk: combine_rows(
            y_md, gate_nk, positions_nk, assignment_m, implementation=how
        ),
        y_md,
        gate_nk,
    )
    summed_nd, sum_vjp = jax.vjp(
        lambda y_md: sum_rows(y_md, positions_nk, source_m, implementation=how), y_md
    )
    (dx_nd,) = gather_vjp(y_md)
    dy_md, dgate_nk = combine_vjp(dout_nd)
    return {
        "gathered": gathered_md,
        "dx": dx_nd,
        "combined": combined_nd,
        "dy": dy_md,
        "dgate": dgate_nk,
        "summed": summed_nd,
        "dsummed": sum_vjp(dout_nd)[0],
    }


both_ways_jit = jax.jit(both_ways, static_argnums=0)
