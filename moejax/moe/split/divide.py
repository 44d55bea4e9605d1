"""Splits: division of each expert's rows among its replicas, in int32.

    split(counts_we, placement, layout) -> Division

All devices know the counts of all sources, and each device computes the whole division.
No float takes part, so all get the same bits. Slots are sorted by expert (q, see
Placement). The quotas of an expert's replicas sum to the source's count.

    even            every replica gets an equal share
    local_first     rows stay on a device that has their expert
    water_filling   the fullest device gets as few rows as these replicas allow
    top_up          the same, and a few copies where it would still be above a limit
    dynamic         replicas are made for these loads, so that all devices get the mean
    shadow          the hottest experts get copies on all devices, where that pays
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from moejax.moe.split import dynamic, shadow
from moejax.moe.split import top_up as topping
from moejax.moe.split import water_filling as water
from moejax.moe.split.deal import Division, deal, share_out
from moejax.moe.types import Placement
from moejax.plan.layout import Layout
from moejax.plan.water_filling import TOLERANCE_BITS

Splitter = Callable[[Array, Placement, Layout], Division]
"""Signature of a split."""


def divide(
    counts_ue: Int[Array, "u e"], placement: Placement, layout: Layout
) -> Division:
    """Divide the rows of a layer's sources by the split that the layout names.

    If a device has several sources (Layout.num_sources), the split sees them as one,
    and the device's rows for each slot are then divided among them.
    """
    split, w = SPLITS[layout.split], layout.num_devices
    if layout.split == "even" or len(counts_ue) == w:
        return split(counts_ue, placement, layout)
    counts_wie = counts_ue.reshape(w, -1, counts_ue.shape[1])
    per_device = counts_wie.shape[1]
    rows_per_peer = layout.rows_per_peer * per_device
    layout = dataclasses.replace(layout, rows_per_peer=rows_per_peer)
    counts_we = jnp.sum(counts_wie, axis=1, dtype=jnp.int32)
    quota_wq, bound, placement = split(counts_we, placement, layout)

    expert_q = jnp.maximum(placement.expert_lq, 0)
    quota_wiq = jax.vmap(share_out, (0, 0, None))(counts_wie, quota_wq, expert_q)
    quota_uq = quota_wiq.reshape(-1, len(expert_q))
    return Division(quota_uq, bound, placement)


def even(
    counts_we: Int[Array, "w e"], placement: Placement, layout: Layout
) -> Division:
    """Deal the rows of each expert round-robin to its replicas.

    The rows of an expert are numbered over all sources, and the i-th row goes to
    replica i mod r. So each replica gets an equal share of every source's rows, and of
    all rows, up to one row.
    """
    expert_q, replicas_q = _replicas(placement, layout)
    count_wq = jnp.where(placement.expert_lq < 0, 0, counts_we[:, expert_q])
    before_wq = jnp.cumsum(count_wq, axis=0) - count_wq
    quota_wq = _round_robin(before_wq, count_wq, placement.replica_lq, replicas_q)
    return Division(quota_wq, mean_rows(counts_we, layout), placement)


def local_first(
    counts_we: Int[Array, "w e"], placement: Placement, layout: Layout
) -> Division:
    """Keep rows on their device if it has their expert; deal the others round-robin.

    On such a device rows are spread evenly over the expert's replicas there. Rows of
    other devices are dealt to all replicas, as in `even`.
    """
    expert_q, replicas_q = _replicas(placement, layout)
    is_full_q = placement.expert_lq >= 0
    count_wq = jnp.where(is_full_q, counts_we[:, expert_q], 0)
    device_q = placement.slot_lq // layout.slots_per_device
    replicas_we = (
        jnp.zeros_like(counts_we)
        .at[device_q, expert_q]
        .add(is_full_q.astype(jnp.int32))
    )
    replicas_here_wq = replicas_we[:, expert_q]
    far_wq = jnp.where(replicas_here_wq > 0, 0, count_wq)
    before_wq = jnp.cumsum(far_wq, axis=0) - far_wq
    far_wq = _round_robin(before_wq, far_wq, placement.replica_lq, replicas_q)
    near_wq = _round_robin(
        0, count_wq, placement.local_lq, jnp.maximum(replicas_here_wq, 1)
    )
    is_here_wq = device_q == jnp.arange(layout.num_devices)[:, None]
    quota_wq = jnp.where(
        replicas_here_wq > 0, jnp.where(is_here_wq, near_wq, 0), far_wq
    )
    return Division(quota_wq, mean_rows(counts_we, layout), placement)


def water_filling(
    counts_we: Int[Array, "w e"], placement: Placement, layout: Layout
) -> Division:
    """Minimize the rows of the fullest device; keep rows on their device if possible.

    This solves the linear program of MicroMoE (arXiv 2511.16947, LPP 1) in integers, to
    within 1/512 of the mean above a certified lower bound.
    """
    mean = mean_rows(counts_we, layout)
    tolerance = mean >> TOLERANCE_BITS
    filling = water.fill(
        jnp.sum(counts_we, axis=0, dtype=jnp.int32), placement, layout, tolerance
    )
    quota_wq = deal(counts_we, filling.rows_q, placement, layout)
    return Division(quota_wq, filling.bound, placement)


def top_up(
    counts_we: Int[Array, "w e"], placement: Placement, layout: Layout
) -> Division:
    """Water-fill, and make a few copies of experts for this layer and micro-batch alone
    where the fullest device would be above the limit (moejax.moe.split.top_up)."""
    load_e = jnp.sum(counts_we, axis=0, dtype=jnp.int32)
    tolerance = mean_rows(counts_we, layout) >> TOLERANCE_BITS
    placement, rows_q, bound = topping.top_up(load_e, placement, layout, tolerance)
    return Division(deal(counts_we, rows_q, placement, layout), bound, placement)


def dynamic_replication(
    counts_we: Int[Array, "w e"], placement: Placement, layout: Layout
) -> Division:
    """Make copies of experts for this layer and micro-batch alone, so that every device
    gets the mean number of rows (moejax.moe.split.dynamic)."""
    placement, rows_q = dynamic.pair(
        jnp.sum(counts_we, axis=0, dtype=jnp.int32), placement, layout
    )
    quota_wq = deal(counts_we, rows_q, placement, layout)
    return Division(quota_wq, mean_rows(counts_we, layout), placement)


def shadowing(
    counts_we: Int[Array, "w e"], placement: Placement, layout: Layout
) -> Division:
    """Copy the hottest experts to all devices for this layer and micro-batch alone,
    where that pays (moejax.moe.split.shadow); rows of theirs stay where they are."""
    placement = shadow.place(counts_we, placement, layout)
    return local_first(counts_we, placement, layout)


SPLITS: dict[str, Splitter] = {
    "even": even,
    "local_first": local_first,
    "water_filling": water_filling,
    "top_up": top_up,
    "dynamic": dynamic_replication,
    "shadow": shadowing,
}
"""Splits by name."""


def mean_rows(counts_ue: Int[Array, "u e"], layout: Layout) -> Int[Array, ""]:
    """Return the mean number of rows per device, rounded up."""
    return -(-jnp.sum(counts_ue, dtype=jnp.int32) // layout.num_devices)


def _replicas(placement: Placement, layout: Layout):
    """Return the expert of the q-th slot (0 for an empty one), and how many replicas
    the expert has (at least 1)."""
    expert_q = jnp.maximum(placement.expert_lq, 0)
    full_q = (placement.expert_lq >= 0).astype(jnp.int32)
    replicas_e = jnp.zeros(layout.num_experts, jnp.int32).at[expert_q].add(full_q)
    return expert_q, jnp.maximum(replicas_e, 1)[expert_q]


def _round_robin(before_wq, count_wq, replica_q, replicas_q):
    """Return how many of the numbers before .. before + count - 1 are `replica` modulo
    `replicas`."""

    def up_to(end_wq):
        return (end_wq + replicas_q - 1 - replica_q) // replicas_q

    return up_to(before_wq + count_wq) - up_to(before_wq)
