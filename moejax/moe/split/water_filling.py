"""Water-filling: rows per replica that minimize the rows of the fullest device, int32.

    load_e -> rows_q

Sweeps of water-filling (moejax.kernels.water_fill) come within a row or two of the
optimum if the plan spreads its experts widely. They may stop above the certified lower
bound. Then rows are moved along shortest augmenting paths of replicas, from devices
above the bound to devices below it. If no such path is left, the devices that can be
reached hold no row that could go to any other device, so their mean is a higher lower
bound. Hence the search ends at the integer optimum, ceil(max density)
(docs/decisions/0011).

The definition, in NumPy, is moejax.plan.water_filling.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moejax.kernels import varying_alike
from moejax.kernels.water_fill import choose_water_fill, water_fill
from moejax.moe.split.deal import find_active
from moejax.moe.types import Placement
from moejax.plan.edge_coloring import max_colors
from moejax.plan.layout import Layout
from moejax.plan.water_filling import MAX_SWEEPS, PATHS_PER_DEVICE


class Filling(NamedTuple):
    """Rows of each slot, and a lower bound on the rows of the fullest device."""

    rows_q: Int[Array, " q"]
    """Rows of the q-th slot."""
    bound: Int[Array, ""]
    """Certificate: in any split the fullest device has at least this many rows."""
    sweeps: Int[Array, ""]
    """Number of sweeps of water-filling."""
    paths: Int[Array, ""]
    """Number of searches for a path. Each one moved rows or raised the bound."""


@jax.named_scope("water")
def fill(
    load_e: Int[Array, " e"],
    placement: Placement,
    layout: Layout,
    tolerance: Int[Array, ""],
) -> Filling:
    """Return the rows of each slot that minimize the rows of the fullest device.

    Over the slots of an expert they sum to its load. The fullest device has at most
    `bound + tolerance` rows, or more if PATHS_PER_DEVICE * w searches were not enough.
    With tolerance 0 that is the optimum.
    """
    w, num_colors = layout.num_devices, placement.num_colors_l
    most_colors = max_colors(layout.num_experts, layout.num_slots)
    kernel = choose_water_fill(most_colors, w).value
    expert_q, device_q, is_active_q = find_active(placement, layout)
    rows_q = _divide_evenly(load_e, expert_q, is_active_q, placement)

    color_q = placement.color_lq
    item_cw = tabulate_by_color(expert_q, placement, layout, empty=-1)
    amount_cw = tabulate_by_color(rows_q, placement, layout)
    is_fixed_q = is_active_q & (color_q < 0)
    fixed_w = jnp.zeros(w, jnp.int32).at[device_q].add(jnp.where(is_fixed_q, rows_q, 0))
    filled = water_fill(
        item_cw,
        amount_cw,
        fixed_w,
        num_colors,
        tolerance,
        max_sweeps=MAX_SWEEPS,
        fused=layout.kernels == "auto" and kernel == "hopper",
    )
    rows_q = jnp.where(color_q < 0, rows_q, filled.amount_cw[color_q, device_q])

    graph = _Graph(expert_q, device_q, is_active_q, layout.num_experts)
    rows_q, bound, paths = _augment(
        graph, rows_q, filled.level_w, filled.bound, tolerance
    )
    return Filling(rows_q, bound, filled.sweeps, paths)


def tabulate_by_color(
    value_q: Int[Array, " q"], placement: Placement, layout: Layout, empty: int = 0
) -> Int[Array, "c w"]:
    """Return the values of the slots that have a color, by color and device.

    No two slots of a color are on one device. Other cells are `empty`.
    """
    colors = max_colors(layout.num_experts, layout.num_slots)
    color_q = jnp.where(placement.color_lq < 0, colors, placement.color_lq)
    device_q = placement.slot_lq // layout.slots_per_device
    blank_cw = jnp.full((colors, layout.num_devices), empty, jnp.int32)
    return blank_cw.at[color_q, device_q].set(value_q, mode="drop")


def _divide_evenly(load_e, expert_q, is_active_q, placement):
    """Divide each expert's load evenly among the devices that have it.

    The first ones get one row more if it does not divide evenly. A second slot of the
    expert on the same device gets nothing.
    """
    active_q = is_active_q.astype(jnp.int32)
    replicas_e = jnp.zeros_like(load_e).at[expert_q].add(active_q)
    before_q = jnp.cumsum(active_q, dtype=jnp.int32) - active_q
    first_q = jnp.arange(len(expert_q)) - placement.replica_lq
    index_q = before_q - before_q[first_q]
    replicas_q, load_q = jnp.maximum(replicas_e, 1)[expert_q], load_e[expert_q]
    share_q = load_q // replicas_q + (index_q < load_q % replicas_q)
    return jnp.where(is_active_q, share_q, 0)


class _Graph(NamedTuple):
    """Bipartite graph of experts and the devices that have them; edges are slots."""

    expert_q: Array
    device_q: Array
    is_active_q: Array
    num_experts: int

    def at_device(self, is_q: Array, num_devices: int) -> Array:
        """Return whether each device has an active slot where `is_q` is true."""
        is_q = is_q & self.is_active_q
        return jnp.zeros(num_devices, bool).at[self.device_q].max(is_q)

    def at_expert(self, is_q: Array) -> Array:
        """Return whether `is_q` is true for any active slot of the same expert, for
        each slot."""
        is_q = is_q & self.is_active_q
        has_e = jnp.zeros(self.num_experts, bool).at[self.expert_q].max(is_q)
        return has_e[self.expert_q]


def _augment(graph: _Graph, rows_q, load_w, bound, tolerance):
    """Move rows along shortest paths until the fullest device is within `tolerance` of
    the bound. Return the rows, the bound and the number of searches."""
    w = len(load_w)

    def goes_on(state):
        _, load_w, bound, paths = state
        is_above = jnp.max(load_w) > bound + tolerance
        return is_above & (paths < PATHS_PER_DEVICE * w)

    def step(state):
        rows_q, load_w, bound, paths = state
        hops_w, hops = _search(graph, rows_q, load_w, bound)
        is_reached_w, is_low_w = hops_w < w, load_w < bound
        sink = jnp.argmax(is_reached_w & is_low_w)
        has_path = is_reached_w[sink] & is_low_w[sink]
        hops = jnp.where(has_path, hops, 0)
        moved_q, source, amount = _trace(graph, rows_q, hops_w, hops, sink)
        room = jnp.minimum(load_w[source] - bound, bound - load_w[sink])
        amount = jnp.where(has_path, jnp.minimum(amount, room), 0)
        inside = jnp.sum(jnp.where(is_reached_w, load_w, 0), dtype=jnp.int32)
        num_reached = jnp.sum(is_reached_w, dtype=jnp.int32)
        raised = -(-inside // jnp.maximum(num_reached, 1))
        load_w = load_w.at[source].add(-amount).at[sink].add(amount)
        bound = jnp.where(has_path, bound, raised)
        return rows_q + amount * moved_q, load_w, bound, paths + 1

    state = varying_alike(rows_q, load_w, bound, jnp.int32(0))
    rows_q, _, bound, paths = jax.lax.while_loop(goes_on, step, state)
    return rows_q, bound, paths


def _search(graph: _Graph, rows_q, load_w, bound):
    """Search breadth-first from all devices above the bound for one below it.

    Return the number of hops to each device (w if it was not reached), and the number
    of hops searched. A hop moves a row to another replica of its expert.
    """
    w = len(load_w)

    def goes_on(state):
        hops_w, _, has_grown = state
        return has_grown & ~jnp.any((hops_w < w) & (load_w < bound))

    def step(state):
        hops_w, hops, _ = state
        gives_q = graph.at_expert((hops_w[graph.device_q] == hops) & (rows_q > 0))
        is_new_w = graph.at_device(gives_q, w) & (hops_w == w)
        return jnp.where(is_new_w, hops + 1, hops_w), hops + 1, jnp.any(is_new_w)

    hops_w = jnp.where(load_w > bound, 0, w).astype(jnp.int32)
    state = varying_alike(hops_w, jnp.int32(0), jnp.bool_(True), load_w)[:3]
    hops_w, hops, _ = jax.lax.while_loop(goes_on, step, state)
    return hops_w, hops


def _trace(graph: _Graph, rows_q, hops_w, hops, sink):
    """Trace the path to the device `sink` backwards.

    Return +1 for slots that take rows and -1 for slots that give them, the device where
    the path begins, and the number of rows that can move along it.
    """
    slot_q = jnp.arange(len(rows_q))

    def step(i, state):
        moved_q, device, amount = state
        is_before_q = hops_w[graph.device_q] == hops - 1 - i
        gives_q = is_before_q & (rows_q > 0) & graph.is_active_q
        is_here_q = (graph.device_q == device) & graph.is_active_q
        taker = jnp.argmax(is_here_q & graph.at_expert(gives_q))
        same_q = graph.expert_q == graph.expert_q[taker]
        giver = jnp.argmax(gives_q & same_q)
        change_q = (slot_q == taker).astype(jnp.int32) - (slot_q == giver)
        amount = jnp.minimum(amount, rows_q[giver])
        return moved_q + change_q, graph.device_q[giver], amount

    no_limit = jnp.int32(jnp.iinfo(jnp.int32).max)
    start = jnp.zeros_like(rows_q), sink.astype(jnp.int32), no_limit
    state = varying_alike(*start, rows_q)
    return jax.lax.fori_loop(0, hops, step, state[:3])
