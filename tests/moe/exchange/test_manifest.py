"""Test the manifest: each choice has a slot of its expert, each token one row for each
destination, the windows carry every row once and fit into their buffers, and capacity
mode counts what it drops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.axes import EXPERT, make_mesh
from moejax.moe.exchange.manifest import (
    Manifest,
    fullest_pair,
    manifest,
    num_dropped,
    rows_here,
)
from moejax.moe.exchange.rounds import num_rounds
from moejax.moe.mesh_roles import on_mesh
from moejax.moe.types import Placement
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.groups import GROUP_AXES
from moejax.plan.layout import Layout, Topology
from tests.support.layers import placed
from tests.support.manifests import make_manifest
from tests.support.split_cases import E, W, make_slots, quotas

N, K, SLOTS = 12, 2, 5
CAPACITY = 2
"""Rows from one source to one slot in capacity mode."""


@functools.cache
def program(split: str, exchange: str):
    """Return a layout and run(expert_wnk, placement), which returns manifests, drops,
    rows and fullest pairs, all with a leading device dim."""
    layout = Layout(
        E, W, SLOTS, N, store="sharded", split=split, exchange=exchange, top_k=K,
        rows_per_device=CAPACITY * W * SLOTS,
    )  # fmt: skip
    mesh = make_mesh(Topology(expert=W), jax.devices()[:W])
    mesh_layout = on_mesh(mesh, layout)

    def body(expert_wnk, placement):
        sent, _ = manifest(expert_wnk[0], placement, mesh_layout)
        rows, pair = rows_here(sent, mesh_layout), fullest_pair(sent, layout)
        out = sent, num_dropped(expert_wnk[0], sent.slot_nk), rows, pair
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], out)

    specs = {"in_specs": (P(EXPERT), P()), "out_specs": P(EXPERT), "check_vma": False}
    return layout, jax.jit(jax.shard_map(body, mesh=mesh, **specs))


def choices(rng) -> np.ndarray:
    """Return distinct experts of each token; many tokens choose expert 0, and some
    choices are empty."""
    chance_e = np.r_[5.0, 2.0, np.ones(E - 2)]
    noise = rng.gumbel(size=(W, N, E))
    expert_wnk = np.argsort(-(np.log(chance_e) + noise), axis=-1)[..., :K]
    return np.where(rng.random((W, N, K)) < 0.1, -1, expert_wnk).astype(np.int32)


def run_case(seed: int, split: str, exchange: str = "exact"):
    """Return choices, slots, and the results of `program` for a random case."""
    layout, run = program(split, exchange)
    expert_wnk, row_p = choices(np.random.default_rng(seed)), make_slots(seed, SLOTS)
    placement = Placement.from_plan(ExpertPlan(row_p[None], E), layout).layer(0)
    return expert_wnk, row_p, *jax.device_get(run(expert_wnk, placement))


@pytest.mark.parametrize("split", ["even", "local_first"])
def test_every_choice_has_a_slot_of_its_expert(split):
    for seed in range(8):
        expert_wnk, row_p, sent, dropped, _, _ = run_case(seed, split)
        counts_we = (expert_wnk[..., None] == np.arange(E)).sum((1, 2)).astype(np.int32)
        assert not dropped.any()
        assert (sent.counts_up == quotas(counts_we, row_p, split)).all()
        expert_of_p1 = np.append(row_p, -1)  # slot -1 for a choice of -1
        assert np.array_equal(expert_of_p1[sent.slot_nk], expert_wnk)
        for me in range(W):
            count_p = np.bincount(
                sent.slot_nk[me][sent.slot_nk[me] >= 0], minlength=W * SLOTS
            )
            assert np.array_equal(count_p, sent.counts_up[me, me])


def test_a_token_has_one_row_for_each_device_of_its_choices():
    for seed in range(4):
        _, _, sent, _, rows_w, fullest_w = run_case(seed, "local_first")
        for name in ("counts_up", "rows_uw", "rows_uf", "first_uf"):
            table = getattr(sent, name)
            assert (table == table[0]).all(), "all devices know who receives how much"
        pair_ww = sent.counts_up[0].reshape(W, W, SLOTS).sum(axis=2)
        assert np.array_equal(rows_w, pair_ww.sum(axis=0))
        rows_uw = rows_by_definition(sent.slot_nk, W)[0]
        assert np.array_equal(sent.rows_uw[0], rows_uw)
        assert (rows_uw < pair_ww).any()
        assert (rows_uw <= pair_ww).all()
        assert (fullest_w == (rows_uw * ~np.eye(W, dtype=bool)).max()).all()


def rows_by_definition(slot_unk: np.ndarray, num_destinations: int):
    """Return the number of rows from each source to each destination, and a list of
    (token, choices) of each, in order of tokens."""
    num, per = len(slot_unk), W * SLOTS // num_destinations
    rows_uf = np.zeros((num, num_destinations), int)
    rows = {}
    for source, slot_nk in enumerate(slot_unk):
        for token, slot_k in enumerate(slot_nk):
            for destination in sorted(set(slot_k[slot_k >= 0] // per)):
                here = [
                    c
                    for c, p in enumerate(slot_k)
                    if p >= 0 and p // per == destination
                ]
                rows.setdefault((source, destination), []).append((token, here))
                rows_uf[source, destination] += 1
    return rows_uf, rows


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 2])
def test_choices_of_a_token_gather_where_the_split_allows(nodes):
    """The slots of choices are those of a definition. Each slot has as many as the
    split says, and fewer rows travel than where choices fill slots in order."""
    k, n = 3, 40
    axes = GROUP_AXES["dc_expert" if nodes > 1 else "expert"]
    layout = Layout(
        E, W, SLOTS, n * nodes, "hierarchical" if nodes > 1 else "padded",
        store="sharded", axes=axes, split="even", top_k=k, num_nodes=nodes,
        rows_per_node=n,
    )  # fmt: skip
    run = make_manifest(Topology(dc=nodes, expert=W // nodes), layout, lambda s, _: s)
    num_sent = {True: 0, False: 0}
    for seed in range(6):
        rng = np.random.default_rng(seed)
        expert_wnk = np.argsort(rng.random((W, n, E)), axis=-1)[..., :k]
        expert_wnk = np.where(rng.random((W, n, k)) < 0.1, -1, expert_wnk)
        row_p = make_slots(seed, SLOTS)
        placement = placed(ExpertPlan(row_p[None], E), layout)
        sent = jax.device_get(
            run(expert_wnk.astype(np.int32).reshape(-1, k), placement)
        )
        for me in range(W):
            counts_e = (expert_wnk[me][..., None] == np.arange(E)).sum((0, 1))
            quota_p = sent.counts_up[me, me]
            assert np.array_equal(np.bincount(row_p + 1, quota_p)[1:], counts_e)
            for wishes in (True, False):
                slot_nk = slots_by_definition(
                    expert_wnk[me], quota_p, row_p, me if wishes else None, nodes
                )
                assert not wishes or np.array_equal(sent.slot_nk[me], slot_nk)
                rows_f = rows_by_definition(slot_nk[None], W)[0][0]
                num_sent[wishes] += rows_f.sum() - rows_f[me]
    assert num_sent[True] < 0.94 * num_sent[False]


def slots_by_definition(expert_nk, quota_p, row_p, me, nodes: int) -> np.ndarray:
    """Return the slot of each choice of source `me`: wishes are met first, by order of
    choices and tokens, and other choices fill slots in order, those whose wish was not
    met first. Without `me` there are no wishes."""
    n, k = expert_nk.shape
    per_node = W // nodes
    slot_nk, left_p = np.full((n, k), -1), quota_p.copy()

    def devices(expert):
        return sorted(
            {int(p) // SLOTS for p in np.flatnonzero((row_p == expert) & (quota_p > 0))}
        )

    def worth(place, sets):
        """Return the rank of a place (a device or node); `sets` are the places of each
        choice of the token, `own` that of the source."""
        if any(found == {place} for found in sets):
            return k + 1
        return sum(place in found for found in sets)

    wishes = {}
    for t, expert_k in enumerate(expert_nk):
        by_device = [set(devices(e)) for e in expert_k]
        by_node = [{d // per_node for d in found} for found in by_device]
        for c, found in enumerate(by_device):
            if me is None or len(found) < 2:
                continue
            ranks = {}
            for d in found:
                rank = k + 1 if d == me else worth(d, by_device)
                node = d // per_node
                far = k + 1 if node == me // per_node else worth(node, by_node)
                far = far if nodes > 1 else 0
                if max(rank, far) > 1:
                    ranks[d] = (far, rank)
            if ranks:
                best = max(sorted(ranks), key=ranks.get)
                on_best = (row_p == expert_k[c]) & (quota_p > 0)
                on_best &= np.arange(len(row_p)) // SLOTS == best
                wishes[t, c] = int(np.flatnonzero(on_best)[-1])
    in_order = [(t, c) for c in range(k) for t in range(n)]
    for t, c in in_order:
        slot = wishes.get((t, c), -1)
        if slot >= 0 and left_p[slot]:
            slot_nk[t, c], left_p[slot] = slot, left_p[slot] - 1
    for t, c in sorted(in_order, key=lambda at: wishes.get(at, len(row_p))):
        if slot_nk[t, c] < 0 and expert_nk[t, c] >= 0:
            slot = np.flatnonzero((row_p == expert_nk[t, c]) & (left_p > 0))[0]
            slot_nk[t, c], left_p[slot] = slot, left_p[slot] - 1
    return slot_nk


BUFFERS = [(3, 12, 3), (2, 40, 2), (12, 9, 12), (1, 7, 1), (12, 200, 12)]
"""Rows per peer, rows per device, rows per node; the last hold everything."""


@pytest.mark.slow
@pytest.mark.parametrize("split", ["local_first", "even"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_windows_carry_each_row_once_and_fit_their_buffers(nodes, split):
    """In rounds of any buffers, by the tables of all sources: rows to a device, or to a
    node and from there to its devices, and rows that a device computes."""
    axes = GROUP_AXES["dc_expert" if nodes > 1 else "expert"]
    transport = "hierarchical" if nodes > 1 else "padded"
    mesh = Topology(dc=nodes, expert=W // nodes)
    seen = set()
    for per_peer, per_device, per_node in BUFFERS:
        layout = Layout(
            E, W, SLOTS, per_peer, transport=transport, store="sharded", axes=axes,
            split=split, top_k=K, rows_per_device=per_device, num_nodes=nodes,
            rows_per_node=per_node,
        )  # fmt: skip
        run = make_manifest(mesh, layout, lambda s, _, x=layout: (s, num_rounds(s, x)))
        for seed in range(4):
            expert_wnk = choices(np.random.default_rng(seed))
            plan = ExpertPlan(make_slots(seed, SLOTS)[None], E)
            sent, rounds = jax.device_get(
                run(expert_wnk.reshape(W * N, K), placed(plan, layout))
            )
            assert_windows(sent, int(rounds[0]), layout)
            seen.add(int(rounds[0]))
    assert 1 in seen
    assert max(seen) > 3


def assert_windows(sent: Manifest, rounds: int, layout: Layout) -> None:
    """Assert that the windows of all rounds together carry every row, and each fits."""
    nodes, f = layout.num_nodes, layout.num_destinations
    rows_uf, rows = rows_by_definition(sent.slot_nk, f)
    assert np.array_equal(sent.rows_uf[0], rows_uf)
    per_node, first_uf = W // nodes, sent.first_uf[0]
    carried = 0
    for r in range(rounds):
        begin_uf = (
            0 * first_uf if r == 0 else first_uf + (r - 1) * layout.rows_per_round
        )
        end_uf = first_uf if r == 0 else begin_uf + layout.rows_per_round
        room = (layout.rows_per_node if nodes > 1 else layout.rows_per_peer,
                layout.rows_per_peer, layout.rows_per_device)  # fmt: skip
        if r:
            each = layout.rows_per_round
            room = each, nodes * each, layout.computed_per_round
        computed_w, passed_ww = np.zeros(W, int), np.zeros((W, W), int)
        for (source, destination), found in rows.items():
            inside = found[begin_uf[source, destination] : end_uf[source, destination]]
            carried += len(inside)
            relay = destination * per_node + source % per_node
            stays = destination == (source // per_node if nodes > 1 else source)
            stays &= layout.keeps_home_rows
            assert stays or len(inside) <= room[0]
            for token, here in inside:
                devices = sent.slot_nk[source, token, here] // SLOTS
                np.add.at(computed_w, devices, 1)
                others = {relay} if layout.keeps_home_rows else set()
                for device in set(devices) - others if nodes > 1 else ():
                    passed_ww[relay, device] += 1
        assert computed_w.max() <= room[2]
        assert passed_ww.max() <= room[1]
    assert carried == rows_uf.sum()
    ranks = sent.rank_nk[sent.slot_nk >= 0]
    assert ranks.min() == 0
    assert ranks.max() == rows_uf.max() - 1


def test_capacity_drops_the_last_choices_and_counts_them():
    """A source sends at most CAPACITY rows to one slot, and what is dropped is counted.

    The first rows of an expert are kept, in this order: all first choices before any
    second choice, then by token.
    """
    some_dropped = False
    for seed in range(8):
        expert_wnk, _, sent, dropped, _, _ = run_case(seed, "local_first", "capacity")
        _, _, whole, _, _, _ = run_case(seed, "local_first")
        assert (sent.counts_up == np.minimum(whole.counts_up, CAPACITY)).all()
        assert (sent.first_uf == sent.rows_uf).all(), "round 0 carries what is kept"
        for me in range(W):
            lost = whole.counts_up[me, me].sum() - sent.counts_up[me, me].sum()
            assert dropped[me] == lost
            some_dropped |= lost > 0
            expert_a = expert_wnk[me].reshape(-1)
            kept_a = sent.slot_nk[me].reshape(-1) >= 0
            for expert in range(E):
                own_a = np.flatnonzero(expert_a == expert)
                ranked = own_a[np.lexsort((own_a // K, own_a % K))]
                is_kept = kept_a[ranked]
                assert not (is_kept[1:] > is_kept[:-1]).any()
    assert some_dropped
