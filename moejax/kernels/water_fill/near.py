"""Sweeps that even what bins pay, where units cost more the farther they come.

A unit costs its bin what the tier says that it is in: the first rooms of a cell are
cheap, what does not fit pays more.

    tier            0 own device     1 own node      2 far
    units           room_jcw[0]      room_jcw[1]     any number
    price           16               18              32        (sixteenths of a row)

Each item is spread anew over its bins, colour by colour as in xla.py, so that the sum
of costs to the 8th power is the least that it can be. That sum is convex and falls, to
the rounding of units and pulls, and a power so high weighs the fullest bins most: with
squares a bin near its units took up to twice the others' to spare them the way.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moejax.kernels import varying_alike
from moejax.kernels.water_fill.portable import HUGE, MAX_SWEEPS, same_item, sum_over

Prices = tuple[int, int, int]
POWER = 8
PULL_UNITS = 256
STEP = 16 * PULL_UNITS
"""Of levels: two units of a cell differ in margin by at least that."""


class Evened(NamedTuple):
    amount_cw: Int[Array, "c w"]
    cost_w: Int[Array, " w"]
    """What each bin pays, what is fixed included."""
    sweeps: Int[Array, ""]


def even_costs(
    item_cw: Int[Array, "c w"],
    amount_cw: Int[Array, "c w"],
    room_jcw: Int[Array, "2 c w"],
    cost_w: Int[Array, " w"],
    prices: Prices,
    colours: Int[Array, ""],
    max_sweeps: int = MAX_SWEEPS,
) -> Evened:
    """Amounts of the same items that even `cost_w`, what bins pay for `amount_cw` and
    all that is fixed: sixteenths of a row, rising `prices` from 16.

    Ends when a sweep changed nothing, or after `max_sweeps`. All costs together must be
    less than 2 ** 30.
    """

    def goes_on(state):
        _, _, sweeps, changed = state
        return changed & (sweeps < max_sweeps)

    def sweep(state):
        before_cw, cost_w, sweeps, _ = state

        def step(c, state):
            amount_cw, cost_w = state
            tiers = _Tiers(room_jcw[:, c], prices)
            base_w = cost_w - tiers.cost(amount_cw[c])
            new_w = _poured(tiers, item_cw[c], amount_cw[c], base_w)
            return amount_cw.at[c].set(new_w), base_w + tiers.cost(new_w)

        amount_cw, cost_w = jax.lax.fori_loop(0, colours, step, (before_cw, cost_w))
        return amount_cw, cost_w, sweeps + 1, jnp.any(amount_cw != before_cw)

    item_cw, amount_cw, room_jcw, cost_w, colours = varying_alike(
        item_cw, amount_cw, room_jcw, cost_w, colours
    )
    state = (amount_cw, cost_w, jnp.int32(0), jnp.bool_(True))
    state = varying_alike(*state, item_cw)[:4]
    amount_cw, cost_w, sweeps, _ = jax.lax.while_loop(goes_on, sweep, state)
    return Evened(amount_cw, cost_w, sweeps)


class _Tiers(NamedTuple):
    """Of the cells of one colour."""

    room_jw: Array
    prices: Prices

    def parts(self, amount_w):
        """Units in each tier."""
        own_w = jnp.minimum(amount_w, self.room_jw[0])
        near_w = jnp.minimum(amount_w - own_w, self.room_jw[1])
        return own_w, near_w, amount_w - own_w - near_w

    def cost(self, amount_w):
        return tier_cost(amount_w, self.room_jw, self.prices)

    def next_unit(self, amount_w):
        """Price and pull of the next unit."""
        own_w, near_w = self.room_jw

        def of_tier(value_j):
            value_w = jnp.where(amount_w < own_w + near_w, value_j[1], value_j[2])
            return jnp.where(amount_w < own_w, value_j[0], value_w)

        return of_tier(self.prices), of_tier(pulls(self.prices))

    def up_to(self, level_w, base_w):
        """Units whose margin is at most STEP times the level.

        The margin of a unit on a cost of y is pull * (y + price / 2).
        """
        own_w, near_w = self.room_jw
        starts = (base_w, own_w * self.prices[0], near_w * self.prices[1])
        rooms = (own_w, near_w, HUGE)
        start_w, units_w = 0, 0
        for price, pull, more_w, room_w in zip(
            self.prices, pulls(self.prices), starts, rooms
        ):
            start_w = start_w + more_w
            twice_w = level_w // pull * (2 * STEP) + level_w % pull * (2 * STEP) // pull
            last_w = (twice_w - price) >> 1
            fit_w = jnp.maximum(last_w - start_w + price, 0) // price
            units_w = units_w + jnp.minimum(fit_w, room_w)
        return units_w


def pulls(prices: Prices) -> Prices:
    """By what a cost y counts where the next unit has that price.

    The margin of a power, price * y ** (POWER - 1), orders units as its root does.
    """
    roots = [(price / prices[0]) ** (1 / (POWER - 1)) for price in prices]
    return tuple(round(PULL_UNITS * root) for root in roots)


def tier_cost(amount_w, room_jw, prices: Prices):
    """What a cell's bin pays for its units."""
    own_w, near_w, far_w = _Tiers(room_jw, prices).parts(amount_w)
    return own_w * prices[0] + near_w * prices[1] + far_w * prices[2]


def _poured(tiers: _Tiers, item_w, amount_w, base_w):
    """One colour's items, each spread anew: every unit where its margin is least; of
    equal ones the first bins get more."""
    same_vw = same_item(item_w)
    total_w = sum_over(same_vw, amount_w)
    next_w = _margin_level(tiers, amount_w, base_w)
    low_w = jnp.min(jnp.where(same_vw, next_w[:, None], HUGE), axis=0) - 1
    high_w = jnp.max(jnp.where(same_vw, next_w[:, None], 0), axis=0)
    low_w, high_w = jnp.where(item_w < 0, 0, low_w), jnp.where(item_w < 0, 1, high_w)

    # All units up to the low level fit; up to the high one they do not.
    def goes_on(state):
        low_w, high_w = state
        return jnp.any(high_w - low_w > 1)

    def halve(state):
        low_w, high_w = state
        middle_w = low_w + (high_w - low_w) // 2
        fits_w = sum_over(same_vw, tiers.up_to(middle_w, base_w)) <= total_w
        return jnp.where(fits_w, middle_w, low_w), jnp.where(fits_w, high_w, middle_w)

    low_w, _ = jax.lax.while_loop(goes_on, halve, (low_w, high_w))
    new_w = jnp.where(item_w < 0, 0, tiers.up_to(low_w, base_w))
    left_w = total_w - sum_over(same_vw, new_w)
    return new_w + _gets_one(tiers, same_vw, new_w, base_w, low_w, left_w)


def _gets_one(tiers: _Tiers, same_vw, new_w, base_w, low_w, left_w):
    """Of cells whose next unit is within a STEP, those with the least margins."""
    is_next_w = _margin_level(tiers, new_w, base_w) <= low_w + 1
    price_w, pull_w = tiers.next_unit(new_w)
    # Twice the margin over the low level: at most 2 * STEP, though products wrap.
    over_w = pull_w * (2 * (base_w + tiers.cost(new_w)) + price_w) - low_w * (2 * STEP)
    bin_w = jnp.arange(len(new_w))
    over_v1, bin_v1 = over_w[:, None], bin_w[:, None]
    is_before_vw = (over_v1 < over_w) | ((over_v1 == over_w) & (bin_v1 < bin_w))
    place_w = jnp.sum(
        same_vw & is_next_w[:, None] & is_before_vw, axis=0, dtype=jnp.int32
    )
    return (is_next_w & (place_w < left_w)).astype(jnp.int32)


def _margin_level(tiers: _Tiers, amount_w, base_w):
    """Margin of the next unit in STEPs, rounded up."""
    price_w, pull_w = tiers.next_unit(amount_w)
    twice_w = 2 * (base_w + tiers.cost(amount_w)) + price_w
    rest_w = twice_w % (2 * STEP) * pull_w
    return twice_w // (2 * STEP) * pull_w - (-rest_w // (2 * STEP))
