"""Sweeps of water-filling in plain XLA operations, a color at a time.

A color is a row of bins; items of it are told apart by comparing every bin v with
every bin w, so that nothing is sorted and no scatter is needed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moejax.kernels import varying_alike


class Filled(NamedTuple):
    amount_cw: Int[Array, "c w"]
    """What lies in each cell."""
    level_w: Int[Array, " w"]
    """Sum of each bin, what is fixed included."""
    bound: Int[Array, ""]
    """Certificate: no filling has a lower fullest bin."""
    sweeps: Int[Array, ""]


def water_fill(
    item_cw: Int[Array, "c w"],
    amount_cw: Int[Array, "c w"],
    fixed_w: Int[Array, " w"],
    colors: Int[Array, ""],
    tolerance: Int[Array, ""],
    max_sweeps: int,
) -> Filled:
    """As moejax.kernels.water_fill.water_fill says."""

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
    """One color's items, each spread anew over its bins as water finds its level: the
    least sum of squared levels. Left-over units go to the lowest bins by number."""
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
    place_w = _count(same_vw & is_wet_w[:, None] & (bin_w[:, None] < bin_w))
    return new_w + (is_wet_w & (place_w < left_w)).astype(jnp.int32)


def certificate(item_cw, amount_cw, fixed_w, level_w, colors) -> Int[Array, ""]:
    """max over k of ceil(what can lie nowhere but in the k fullest bins / k)."""
    rank_w = _count(_before(-level_w)) - 1
    rank_k = jnp.arange(len(rank_w), dtype=jnp.int32)

    def step(c, inside_k):
        # All of an item counts from its last bin on.
        same_vw = same_item(item_cw[c])
        last_w = jnp.max(jnp.where(same_vw, rank_w[:, None], -1), axis=0)
        return inside_k + sum_over(last_w[:, None] == rank_k, amount_cw[c])

    inside_k = sum_over(rank_w[:, None] == rank_k, fixed_w)
    inside_k = jax.lax.fori_loop(0, colors, step, inside_k)
    inside_k = jnp.cumsum(inside_k, dtype=jnp.int32)
    return jnp.max(jax.lax.div(inside_k + rank_k, rank_k + 1))


HUGE = jnp.iinfo(jnp.int32).max


def same_item(item_w):
    """Whether two bins hold the same item. Reductions are over the first dim: the CPU
    does those four times faster."""
    return (item_w[:, None] == item_w) & (item_w >= 0)


def _before(height_w):
    """[v, w]: bin v stands before bin w, or is it, when they are sorted by height."""
    bin_w = jnp.arange(len(height_w))
    height_v1, bin_v1 = height_w[:, None], bin_w[:, None]
    return (height_v1 < height_w) | ((height_v1 == height_w) & (bin_v1 <= bin_w))


def sum_over(mask_vw, value_v):
    return jnp.sum(jnp.where(mask_vw, value_v[:, None], 0), axis=0, dtype=jnp.int32)


def _count(mask_vw):
    return jnp.sum(mask_vw, axis=0, dtype=jnp.int32)
