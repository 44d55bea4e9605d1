"""Rows that each device sends and computes under a plan, in NumPy.

The functions repeat the splits that run on devices, for loads that need not be whole
numbers. `load_we` is the load of one layer by source device w and expert e, of one
group, or the mean over several groups.
"""

import functools
from typing import NamedTuple

import numpy as np

from moejax.plan import dynamic_replication, top_up, water_filling
from moejax.plan.distinct import distinct_rows
from moejax.plan.layout import Layout, Split
from moejax.plan.together import RowRatios, row_ratios
from moejax.plan.units import unit_loads, unit_order, unit_slots


def layer_rows(load_we: np.ndarray, row_p: np.ndarray, layout: Layout) -> np.ndarray:
    """Return the rows of one layer from each source to each slot under a layout's
    split, float [u, p].

    Without domains sources are devices. With domains they are these, and slots are
    those of all devices of each; rows are of one device of a domain, the mean over all
    (`moejax.plan.units`). With split 'top_up' slots for its copies are the last of each
    device (`Layout.topped_up`), and its copies are those for this load.
    """
    # What shadows a step makes depends on its loads: without them rows are local first.
    split = "local_first" if layout.split == "shadow" else layout.split
    view = layout.exchanged
    load_ue, row_p = unit_loads(load_we, layout), unit_slots(row_p, layout)
    if split == "top_up":
        return _topped_up(load_ue, row_p, view)
    if split == "dynamic":
        return _dynamic(load_ue, row_p, dealing(view), view.offers_per_device)
    return rows_by_slot(load_ue, row_p, view.num_devices, split, dealing(view))


class Dealing(NamedTuple):
    """How a split that may choose deals the rows of each expert to its replicas."""

    levels: tuple[int, ...] = ()
    """Numbers of runs of consecutive devices within which rows are dealt first: as many
    as devices, and nodes."""
    is_even: bool = False
    """Whether rows are dealt without these levels where the fullest pair of devices is
    then less full."""


FLAT = Dealing()
"""Rows are dealt to all replicas alike."""


def dealing(layout: Layout) -> Dealing:
    """Return how the exact splits of a layout deal rows (moejax.moe.split.deal), but
    for a tensor axis, with which room in buffers limits what stays on a device."""
    if not layout.keeps_home_rows:
        return Dealing((layout.num_devices, layout.num_nodes) * layout.deals_near)
    nodes = (layout.num_nodes,) * layout.deals_near
    return Dealing((layout.num_devices, *nodes), layout.deals_evenly)


def has_copies(rows_up: np.ndarray, layout: Layout) -> bool:
    """Return whether split 'top_up' makes copies for the load of `layer_rows`."""
    if layout.split != "top_up":
        return False
    num_units = layout.exchanged.num_devices
    rows_uus = rows_up.reshape(len(rows_up), num_units, -1)
    return bool(rows_uus[..., -layout.top_up_copies :].any())


def rows_by_slot(
    load_we: np.ndarray,
    row_p: np.ndarray,
    num_devices: int,
    split: Split = "even",
    how: Dealing = FLAT,
) -> np.ndarray:
    """Return the rows from each source device to each slot, float [w, p].

    even: each replica of an expert takes an equal share of every source's rows.
    local_first: a source that holds replicas shares its rows among those; the other
    sources share theirs among all replicas.
    water_filling: replicas take the shares that relieve the fullest device, for loads
    rounded to whole rows, as near to the certified bound as in training. Each source
    divides its rows as all sources together do, or as `how` says.
    top_up: as water_filling, without the copies of a micro-batch (`layer_rows` has
    them).
    dynamic: `moejax.plan.dynamic_replication` fills the slots for this load, rounded
    too. `row_p` has a device's own experts, and as many empty slots as it may have
    copies; it may offer all of its own.
    shadow: not here, for what it copies depends on the prices of a layout.
    """
    assert split != "shadow", "the step alone knows which experts are worth a shadow"
    if split in ("water_filling", "top_up"):
        return _water_filling(load_we, row_p, how)
    if split == "dynamic":
        return _dynamic(load_we, row_p, how, load_we.shape[1] // num_devices)
    num_experts = load_we.shape[1]
    full_p = row_p >= 0
    expert_p = np.where(full_p, row_p, 0)
    replicas_e = np.bincount(row_p[full_p], minlength=num_experts)
    share_wp = np.tile(full_p / np.maximum(replicas_e, 1)[expert_p], (num_devices, 1))
    if split == "local_first":
        device_p = np.arange(len(row_p)) // (len(row_p) // num_devices)
        here_wp = (device_p == np.arange(num_devices)[:, None]) & full_p
        local_we = np.zeros((num_devices, num_experts))
        np.add.at(local_we, (device_p[full_p], row_p[full_p]), 1)
        local_wp = local_we[:, expert_p]
        share_wp = np.where(local_wp > 0, here_wp / np.maximum(local_wp, 1), share_wp)
    return load_we[:, expert_p] * share_wp


def pair_rows(rows_wp: np.ndarray) -> np.ndarray:
    """Return the rows from each source device to each device, [w, w]."""
    num_devices = len(rows_wp)
    return rows_wp.reshape(num_devices, num_devices, -1).sum(axis=-1)


class Sent(NamedTuple):
    """Rows of one exchange, as far as buffers and links see them."""

    fullest: float
    """Most rows that one device sends to another, or passes on to it."""
    to_node: float
    """Most rows that one device sends to another node, if rows travel in two levels."""
    left: float
    """Most rows from one source to one destination that round 0 does not carry."""
    off_device: float
    """Most rows that one device sends to others, or receives from them."""


def sent_rows(
    pair_uu: np.ndarray, layout: Layout, ratios: RowRatios | None = None
) -> Sent:
    """Return the rows that travel in one exchange, for the number of choices of each
    source at each device, float [u, u].

    A token sends one row to each destination of its choices: `distinct_rows`, times the
    ratios where it is known which experts tokens choose together. Round 0
    carries of each pair what fits into its buffer, and no more than its share of what
    the receiver can compute, as on devices (moejax.moe.exchange.manifest).
    """
    w = len(pair_uu)
    tokens_u1 = pair_uu.sum(axis=1, keepdims=True) / layout.top_k
    rows_uw = distinct_rows(pair_uu, tokens_u1, layout.choosing)
    if ratios is not None:
        most_uw = np.minimum(pair_uu, tokens_u1)
        rows_uw = np.minimum(rows_uw * ratios.device_w, most_uw)
    # Sources whose tokens lie on the same devices send alike.
    room_w = _room(pair_uu, layout.rows_per_device * w / layout.num_sources)
    computed_uw = np.minimum(1.0, room_w / np.maximum(pair_uu, 1e-300))
    is_home_uw = np.eye(w, dtype=bool)
    off_uw = np.where(is_home_uw, 0.0, rows_uw)
    stays_uw = is_home_uw & layout.keeps_home_rows
    if not layout.has_levels:
        fits_uw = np.where(stays_uw, rows_uw, np.minimum(rows_uw, layout.rows_per_peer))
        left_uw = rows_uw - np.minimum(fits_uw, rows_uw * computed_uw)
        excluded = stays_uw | (is_home_uw & layout.yields_home_rows)
        fullest = np.where(excluded, 0.0, rows_uw).max()
        off_device = np.maximum(off_uw.sum(axis=0), off_uw.sum(axis=1)).max()
        return Sent(float(fullest), 0.0, float(left_uw.max()), float(off_device))
    nodes, per_node = layout.num_nodes, w // layout.num_nodes
    node_uf = pair_uu.reshape(w, nodes, per_node).sum(axis=2)
    choices_uf = node_uf
    node_uf = distinct_rows(choices_uf, tokens_u1, layout.choosing)
    if ratios is not None:
        most_uf = np.minimum(choices_uf, tokens_u1)
        node_uf = np.minimum(node_uf * ratios.node_f, most_uf)
    passed_iw = rows_uw.reshape(nodes, per_node, w).sum(axis=0)
    index_w = np.arange(w) % per_node
    is_home_iw = index_w == np.arange(per_node)[:, None]
    passed_iw = np.where(is_home_iw & layout.keeps_home_rows, 0.0, passed_iw)
    is_home_uf = np.arange(w)[:, None] // per_node == np.arange(nodes)
    is_home_uf &= layout.keeps_home_rows
    away_uf = np.where(is_home_uf, 0.0, node_uf)
    fits_uf = np.where(is_home_uf, node_uf, np.minimum(node_uf, layout.rows_per_node))
    share = min(1.0, layout.rows_per_peer / max(passed_iw.max(), 1e-300))
    computed_uf = computed_uw.reshape(w, nodes, per_node).min(axis=2)
    left_uf = node_uf - np.minimum(fits_uf, node_uf * np.minimum(computed_uf, share))
    return Sent(
        fullest=float(passed_iw.max()),
        to_node=float(away_uf.max()),
        left=float(left_uf.max()),
        off_device=float(off_uw.sum(axis=1).max()),
    )


def ratios_of(
    together_ee: np.ndarray | None, row_p: np.ndarray, layout: Layout
) -> RowRatios | None:
    """Return the ratios for `sent_rows` of one layer with the slots `row_p`; None where
    it is not known which experts tokens choose together, or an expert has replicas."""
    view = layout.exchanged
    if together_ee is None or view.num_slots != view.num_experts:
        return None
    order_e = unit_order(layout)
    expert_us = unit_slots(row_p, layout).reshape(view.num_devices, -1)
    return row_ratios(together_ee[order_e][:, order_e], expert_us, view)


def _room(pair_uw: np.ndarray, capacity: float) -> np.ndarray:
    """Return the largest number to which each column's values can be cut so that their
    sum is at most `capacity`, [w]; infinity where it is anyway."""
    sorted_uw = np.sort(pair_uw, axis=0)
    before_uw = np.cumsum(sorted_uw, axis=0) - sorted_uw
    others_u1 = (len(pair_uw) - np.arange(len(pair_uw)))[:, None]
    room_w = np.max((capacity - before_uw) / others_u1, axis=0)
    return np.where(pair_uw.sum(axis=0) <= capacity, np.inf, room_w)


def device_rows(rows_wp: np.ndarray) -> np.ndarray:
    """Return the rows that each device computes, [w]."""
    return pair_rows(rows_wp).sum(axis=0)


def over_mean(load_lx: np.ndarray) -> np.ndarray:
    """Return loads over their mean along the last dim.

    1 is an even load; where there is no load at all the result is 1 too.
    """
    mean_l1 = load_lx.mean(axis=-1, keepdims=True)
    has_load_l1 = mean_l1 > 0
    return np.where(has_load_l1, load_lx / np.where(has_load_l1, mean_l1, 1), 1.0)


def max_over_mean(load_x: np.ndarray) -> float:
    """Return the largest load over the mean.

    1 is an even load; where there is no load at all the result is 1 too.
    """
    mean = load_x.mean()
    return float(load_x.max() / mean) if mean > 0 else 1.0


def _water_filling(load_we: np.ndarray, row_p: np.ndarray, how: Dealing) -> np.ndarray:
    """Return the rows from each source to each slot under split 'water_filling'."""
    tables = _whole(load_we), np.asarray(row_p, np.int32)
    rows_p = _fill(*(table.tobytes() for table in tables), len(load_we))
    return dealt(load_we, rows_p, row_p, how)


@functools.lru_cache(maxsize=4096)
def _fill(load_e: bytes, row_p: bytes, num_devices: int) -> np.ndarray:
    """Return the rows of each slot under water-filling.

    Results are cached, because the balancer asks for the same ones several times: for
    the max/mean, the pairs of devices and the seconds of one plan.
    """
    load_e, row_p = np.frombuffer(load_e, np.int64), np.frombuffer(row_p, np.int32)
    tolerance = water_filling.split_tolerance(load_e.sum(), num_devices)
    return water_filling.fill(load_e, row_p, num_devices, tolerance).rows_p


def _dynamic(
    load_we: np.ndarray, row_p: np.ndarray, how: Dealing, max_offers: int
) -> np.ndarray:
    """Return the rows from each source to each slot under split 'dynamic', where a
    device offers `max_offers` experts at most."""
    num_devices, num_experts = load_we.shape
    slots, own = len(row_p) // num_devices, num_experts // num_devices
    owned_e = row_p[row_p >= 0]  # no copies: those of the layer are made for the load
    layout = Layout(
        num_experts,
        num_devices,
        slots,
        rows_per_peer=1,
        transport="padded" if num_devices > 1 else "local",
        store="transient",
        split="dynamic",
        offers_per_device=max_offers,
        copies_per_device=slots - own,
    )
    replicas = dynamic_replication.pair(_whole(load_we), owned_e, layout)
    return dealt(load_we, replicas.rows_p, replicas.row_p, how)


def _topped_up(load_ue: np.ndarray, row_p: np.ndarray, layout: Layout) -> np.ndarray:
    """Return the rows from each source to each slot under split 'top_up', copies
    included. `layout` has units as devices."""
    there, w = layout.topped_up, layout.num_devices
    row_us = np.full((w, there.slots_per_device), -1, np.int32)
    row_us[:, : layout.slots_per_device] = row_p.reshape(w, -1)
    tables = _whole(load_ue), row_us.reshape(-1)
    made = _top_up(*(table.tobytes() for table in tables), there)
    return dealt(load_ue, made.rows_p, made.row_p, dealing(layout))


@functools.lru_cache(maxsize=1024)
def _top_up(load_e: bytes, row_p: bytes, layout: Layout) -> top_up.TopUp:
    """Return the slots and rows of split 'top_up', cached as `_fill` is."""
    load_e, row_p = np.frombuffer(load_e, np.int64), np.frombuffer(row_p, np.int32)
    return top_up.top_up(load_e, row_p, layout)


def dealt(
    load_we: np.ndarray, rows_p: np.ndarray, row_p: np.ndarray, how: Dealing
) -> np.ndarray:
    """Return the rows from each source to each slot, float [w, p], where the exact
    splits deal `rows_p` rows of each slot (moejax.moe.split.deal)."""
    dealt_wp = _by_levels(load_we, rows_p, row_p, how.levels)
    if not how.is_even:
        return dealt_wp
    without_wp = _by_levels(load_we, rows_p, row_p, ())
    others_ww = 1 - np.eye(len(load_we))
    pairs = [(others_ww * pair_rows(x)).max() for x in (dealt_wp, without_wp)]
    return dealt_wp if pairs[0] <= pairs[1] else without_wp


def _by_levels(
    load_we: np.ndarray, rows_p: np.ndarray, row_p: np.ndarray, levels: tuple[int, ...]
) -> np.ndarray:
    """Return the rows from each source to each slot, [w, p].

    A source divides the rows of an expert in proportion to `rows_p` of its replicas.
    Rows go first to replicas in the same run of devices, as far as these need them: of
    as many runs as each level has, and only the others anywhere.
    """
    w, e = load_we.shape
    expert_p = np.maximum(row_p, 0)
    device_p = np.arange(len(row_p)) // (len(row_p) // w)
    total_e = np.maximum(np.bincount(expert_p, rows_p, e), 1)
    left_we = load_we
    left_p = rows_p * (load_we.sum(axis=0) / total_e)[expert_p]
    dealt_wp = np.zeros((w, len(row_p)))
    for num in levels:
        node_w = np.arange(w) // (w // num)
        node_p = node_w[device_p]
        room_em = np.bincount(expert_p * num + node_p, left_p, e * num).reshape(e, num)
        rows_em = left_we.reshape(num, -1, e).sum(axis=1).T
        total_p = np.maximum(room_em, rows_em)[expert_p, node_p]
        share_wp = left_we[:, expert_p] * (left_p / np.maximum(total_p, 1e-300))
        share_wp[node_w[:, None] != node_p] = 0.0
        dealt_wp += share_wp
        left_p = np.maximum(left_p - share_wp.sum(axis=0), 0.0)
        dealt_ew = np.zeros((e, w))
        np.add.at(dealt_ew, expert_p, share_wp.T)
        left_we = np.maximum(left_we - dealt_ew.T, 0.0)
    total_e = np.maximum(np.bincount(expert_p, left_p, e), 1e-300)
    return dealt_wp + left_we[:, expert_p] * (left_p / total_e[expert_p])


def _whole(load_we: np.ndarray) -> np.ndarray:
    """Return the load of each expert as a whole number, at least 1 where it has one."""
    load_e = load_we.sum(axis=0)
    return np.maximum(np.rint(load_e), load_e > 0).astype(np.int64)
