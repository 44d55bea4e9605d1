"""Test the function that turns rows per slot into rows from each source to each slot.

Sums over sources and over slots are exact. Pairs of devices are about equally full.
Rows stay at home as far as round 0 carries them, and on their node as far as its
replicas need them.
"""

import functools
import itertools

import jax
import numpy as np
import pytest

from moejax.moe.split.deal import deal, share_out
from moejax.moe.types import Placement
from moejax.perf import traffic
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.plan.parallel import Tensor
from tests.support.split_cases import CASES, E

ROOM = 2**30
"""Rows per peer that no source exceeds."""


@functools.cache
def compiled(layout: Layout):
    """Return `deal` for a layout, jitted."""
    return jax.jit(functools.partial(deal, layout=layout))


def run_deal(
    counts_we, row_p, rows_p, rows_per_peer: int, nodes=1, **fields
) -> np.ndarray:
    """Return the rows from each source to each slot, [w, p]."""
    w, e = counts_we.shape
    # With a tensor axis, rows that stay are in a buffer too.
    tensor = None if rows_per_peer == ROOM else Tensor("s1h", 2, 2)
    fields = {"transport": "ragged" if nodes > 1 else "padded"} | fields
    layout = Layout(
        e, w, len(row_p) // w, rows_per_peer, store="sharded", tensor=tensor,
        num_nodes=nodes, **fields,
    )  # fmt: skip
    placement = Placement.from_plan(ExpertPlan(row_p[None], e).validate(layout), layout)
    placement = placement.layer(0)
    rows_q = rows_p[placement.slot_lq].astype(np.int32)
    quota_wq = np.asarray(compiled(layout)(counts_we, rows_q, placement))
    quota_wp = np.empty_like(quota_wq)
    quota_wp[:, placement.slot_lq] = quota_wq
    return quota_wp


def any_rows(counts_we: np.ndarray, row_p: np.ndarray, seed: int) -> np.ndarray:
    """Return rows per slot that split each expert's load over its devices at random; a
    second slot of an expert on one device gets none."""
    rng, rows_p = np.random.default_rng(seed), np.zeros(len(row_p), np.int64)
    device_p = np.arange(len(row_p)) // (len(row_p) // len(counts_we))
    for expert, load in enumerate(counts_we.sum(axis=0)):
        slots = np.flatnonzero(row_p == expert)
        slots = slots[np.unique(device_p[slots], return_index=True)[1]]
        cuts = np.sort(rng.integers(0, load + 1, len(slots) - 1))
        rows_p[slots] = np.diff(np.r_[0, cuts, load])
    return rows_p


@pytest.mark.parametrize(("rows_per_peer", "nodes"), [(8, 1), (ROOM, 1), (ROOM, 2)])
def test_sums_over_sources_and_over_slots_are_exact(rows_per_peer, nodes):
    for seed, (row_p, counts_we) in enumerate(CASES):
        rows_p = any_rows(counts_we, row_p, seed)
        quota_wp = run_deal(counts_we, row_p, rows_p, rows_per_peer, nodes)
        assert quota_wp.min() >= 0
        assert np.array_equal(quota_wp.sum(axis=0), rows_p)
        for expert in range(E):
            from_w = quota_wp[:, row_p == expert].sum(axis=1)
            assert np.array_equal(from_w, counts_we[:, expert])


def test_with_room_rows_stay_at_home():
    """The rows that stay are the minimum of those on the device and those that its
    replica takes, which no split of the same rows per slot can exceed."""
    device_p = np.arange(len(CASES[0][0])) // 5
    for seed, (row_p, counts_we) in enumerate(CASES):
        rows_p = any_rows(counts_we, row_p, seed)
        quota_wp = run_deal(counts_we, row_p, rows_p, ROOM, transport="ragged")
        here_p = counts_we[device_p, np.maximum(row_p, 0)]
        stays_p = quota_wp[device_p, np.arange(len(row_p))]
        assert np.array_equal(stays_p, np.minimum(here_p, rows_p))


def test_with_whole_buffers_the_fullest_pair_decides_whether_rows_stay():
    """The fullest pair is no fuller than where rows stay first; in some cases they do,
    and in some they must not. The host's model of the split has the same one, and a
    tensor axis changes nothing."""
    w, differ = len(CASES[0][1]), []

    def away(rows_wp):
        pair_ww = rows_wp.reshape(w, w, -1).sum(axis=2)
        return np.where(np.eye(w, dtype=bool), 0, pair_ww).max()

    for seed, (row_p, counts_we) in enumerate(CASES):
        rows_p = any_rows(counts_we, row_p, seed)
        args = counts_we, row_p, rows_p, ROOM
        padded_wp, ragged_wp = (
            run_deal(*args, split="water_filling", transport=transport)
            for transport in ("padded", "ragged")
        )
        assert np.array_equal(padded_wp.sum(axis=0), rows_p)
        assert away(padded_wp) <= away(ragged_wp)
        differ.append(away(padded_wp) < away(ragged_wp))
        for dealt_wp, is_even in ((padded_wp, True), (ragged_wp, False)):
            how = traffic.Dealing((w,), is_even)
            model_wp = traffic.dealt(counts_we.astype(float), rows_p, row_p, how)
            assert abs(away(model_wp) - away(dealt_wp)) < 1e-3 * away(dealt_wp) + 5
        tensor_wp = run_deal(*args[:3], ROOM - 2, split="water_filling")
        assert away(tensor_wp) == away(padded_wp)
    assert 0 < sum(differ) < len(differ)


def test_the_sources_of_a_device_send_alike():
    """Where a device has several sources, each sends its part of an expert's rows to
    each slot, up to the bits that are cut. Both sums are exact."""
    num_sources, rows_per_slot = 3, jax.jit(share_out)
    for seed, (row_p, counts_we) in enumerate(CASES):
        rng, order_q = np.random.default_rng(seed), np.argsort(row_p, kind="stable")
        expert_q = np.maximum(row_p[order_q], 0).astype(np.int32)
        rows_q = np.where(row_p[order_q] < 0, 0, rng.integers(0, 10**6, len(row_p)))
        load_e = np.bincount(expert_q, rows_q, counts_we.shape[1]).astype(np.int64)
        cuts_ce = np.sort(rng.integers(0, load_e + 1, (num_sources - 1, E)), axis=0)
        ends_ie = np.concatenate([0 * load_e[None], cuts_ce, load_e[None]])
        counts_ie = np.diff(ends_ie, axis=0).astype(np.int32)
        sent_iq = np.asarray(
            rows_per_slot(counts_ie, rows_q.astype(np.int32), expert_q)
        )
        assert sent_iq.min() >= 0
        assert np.array_equal(sent_iq.sum(axis=0), rows_q)
        for expert in range(E):
            from_i = sent_iq[:, expert_q == expert].sum(axis=1)
            assert np.array_equal(from_i, counts_ie[:, expert])
        part_iq = counts_ie[:, expert_q] / np.maximum(load_e[expert_q], 1) * rows_q
        assert np.abs(sent_iq - part_iq).max() < 1e-3 * load_e.max() + num_sources


def test_rows_stay_on_their_node():
    """No rows of an expert leave a node whose replicas take rows from other nodes. So
    as many stay as any split of the same rows per slot allows."""
    node_w = np.repeat([0, 1], 2)
    node_p = node_w[np.arange(len(CASES[0][0])) // 5]
    num_far = num_least = 0
    for seed, (row_p, counts_we) in enumerate(CASES):
        rows_p = any_rows(counts_we, row_p, seed)
        far_wp = run_deal(counts_we, row_p, rows_p, ROOM, nodes=2)
        far_wp[node_w[:, None] == node_p] = 0
        num_far += far_wp.sum(dtype=np.int64)
        for expert, node in itertools.product(range(E), range(2)):
            there_p = (row_p == expert) & (node_p == node)
            leave = far_wp[node_w == node][:, row_p == expert].sum()
            assert not (leave and far_wp[:, there_p].any())
            rows = counts_we[node_w == node, expert].sum(dtype=np.int64)
            num_least += max(rows - rows_p[there_p].sum(), 0)
    assert num_far == num_least


def test_one_hot_expert_on_half_of_the_devices_fills_pairs_evenly():
    """Every source sends about the same number of rows to each replica, and keeps no
    more at home than round 0 carries."""
    w, rows = 16, 1024
    counts_we = np.zeros((w, w), np.int32)
    counts_we[:, 0] = rows
    row_ws = np.full((w, 2), -1, np.int32)
    row_ws[:, 0] = np.arange(w)
    row_ws[1:8, 1] = 0
    rows_p = np.where(row_ws.reshape(-1) == 0, w * rows // 8, 0)
    pair_ww = (
        run_deal(counts_we, row_ws.reshape(-1), rows_p, 256).reshape(w, w, 2).sum(2)
    )
    away_ww = np.where(np.eye(w, dtype=bool), 0, pair_ww)
    assert pair_ww.max() <= 256
    assert (np.diagonal(pair_ww)[:8] > rows // 8).all()
    assert away_ww.max() <= rows // 8 + w
