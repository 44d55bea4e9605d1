"""Sweeps of water-filling in plain XLA operations, one color at a time.

The cells of a color are one row over all bins. Which bins hold the same item is found
by comparing every bin v with every bin w, so that the code needs no sort and no
scatter.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moejax.kernels import varying_alike


class Filled(NamedTuple):
    """Result of water-filling, all int32."""

    amount_cw: Int[Array, "c w"]
    """Number of units in each cell."""
    level_w: Int[Array, " w"]
    """Number of units in each bin, fixed units included."""
    bound: Int[Array, ""]
    """Certificate: in every filling the fullest bin has at least this level."""
    sweeps: Int[Array, ""]
    """Number of sweeps that were made."""


def water_fill(
    item_cw: Int[Array, "c w"],
    amount_cw: Int[Array, "c w"],
    fixed_w: Int[Array, " w"],
    colors: Int[Array, ""],
    tolerance: Int[Array, ""],
    max_sweeps: int,
) -> Filled:
    """Return the result of water_fill (moejax.kernels.water_fill), on any device."""

    def goes_on(state):
        _, level_w, bound, sweeps, changed = state
        return (jnp.max(level_w) > bound + tolerance) & changed & (sweeps < max_sweeps)

    def sweep(state):
        before_cw, level_w, _, sweeps, _ = state

        def step(c, state):
            amount_cw, level_w = state
            new_w = pour(item_cw[c], amount_cw[c], level_w)
            level_w = level_w + new_w - amount_cw[c]
            return amount_cw.at[c].set(new_w), level_w

        amount_cw, level_w = jax.lax.fori_loop(0, colors, step, (before_cw, level_w))
        bound = certificate(item_cw, amount_cw, fixed_w, level_w, colors)
        changed = jnp.any(amount_cw != before_cw)
        return amount_cw, level_w, bound, sweeps + 1, changed

    item_cw, amount_cw, fixed_w, colors, tolerance = varying_alike(
        item_cw, amount_cw, fixed_w, colors, tolerance
    )
    level_w = fixed_w + jnp.sum(amount_cw, axis=0, dtype=jnp.int32)
    bound = certificate(item_cw, amount_cw, fixed_w, level_w, colors)
    state = (amount_cw, level_w, bound, jnp.int32(0), jnp.bool_(True))
    state = varying_alike(*state)
    amount_cw, level_w, bound, sweeps, _ = jax.lax.while_loop(goes_on, sweep, state)
    return Filled(amount_cw, level_w, bound, sweeps)


def pour(
    item_w: Int[Array, " w"], amount_w: Int[Array, " w"], level_w: Int[Array, " w"]
) -> Int[Array, " w"]:
    """Return new amounts of one color, each item spread over its bins so that the sum
    of squared levels is minimal.

    Units that are left over by rounding go one each to the item's bins whose ground is
    not above the surface, the lowest bin number first.
    """
    same_vw = same_item(item_w)
    ground_w = level_w - amount_w
    lower_vw = _before(ground_w) & same_vw
    count_w = _count(lower_vw)
    total_w = sum_over(same_vw, amount_w) + sum_over(lower_vw, ground_w)
    full_w = jax.lax.div(total_w, jnp.maximum(count_w, 1))
    surface_w = jnp.min(jnp.where(same_vw, full_w[:, None], HUGE), axis=0)
    new_w = jnp.where(item_w < 0, 0, jnp.maximum(surface_w - ground_w, 0))
    left_w = sum_over(same_vw, amount_w - new_w)
    is_wet_w = ground_w <= surface_w
    bin_w = jnp.arange(len(item_w))
    rank_w = _count(same_vw & is_wet_w[:, None] & (bin_w[:, None] < bin_w))
    return new_w + (is_wet_w & (rank_w < left_w)).astype(jnp.int32)


def certificate(item_cw, amount_cw, fixed_w, level_w, colors) -> Int[Array, ""]:
    """Return a lower bound for the level of the fullest bin in any filling: the maximum
    over k of ceil(r / k), with r the units that can be only in the k fullest bins."""
    rank_w = _count(_before(-level_w)) - 1
    rank_k = jnp.arange(len(rank_w), dtype=jnp.int32)

    def step(c, inside_k):
        # All units of an item count from the item's least full bin on.
        same_vw = same_item(item_cw[c])
        last_w = jnp.max(jnp.where(same_vw, rank_w[:, None], -1), axis=0)
        return inside_k + sum_over(last_w[:, None] == rank_k, amount_cw[c])

    inside_k = sum_over(rank_w[:, None] == rank_k, fixed_w)
    inside_k = jax.lax.fori_loop(0, colors, step, inside_k)
    inside_k = jnp.cumsum(inside_k, dtype=jnp.int32)
    return jnp.max(jax.lax.div(inside_k + rank_k, rank_k + 1))


HUGE = jnp.iinfo(jnp.int32).max
"""Stands for infinity in a minimum."""


def same_item(item_w):
    """Return whether bins v and w hold the same item, bool [v, w].

    Callers reduce over v, the first dim, because a CPU does that four times faster than
    over the last dim.
    """
    return (item_w[:, None] == item_w) & (item_w >= 0)


def _before(height_w):
    """Return whether bin v comes before bin w, or is the same bin, when bins are sorted
    by height and number, bool [v, w]."""
    bin_w = jnp.arange(len(height_w))
    height_v1, bin_v1 = height_w[:, None], bin_w[:, None]
    return (height_v1 < height_w) | ((height_v1 == height_w) & (bin_v1 <= bin_w))


def sum_over(mask_vw, value_v):
    """Sum the values of the bins v that a mask [v, w] selects for each bin w."""
    return jnp.sum(jnp.where(mask_vw, value_v[:, None], 0), axis=0, dtype=jnp.int32)


def _count(mask_vw):
    """Count the true elements in each column of a mask [v, w]."""
    return jnp.sum(mask_vw, axis=0, dtype=jnp.int32)
