"""Test the manifest: each row is sent exactly once, in blocks by slot, and capacity
mode counts the rows that it drops."""

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
from moejax.moe.mesh_roles import on_mesh
from moejax.moe.types import Placement
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Topology
from tests.support.split_cases import E, W, make_slots, quotas

N, K, SLOTS = 12, 2, 5
ROWS_PER_PEER = 10  # capacity mode: two rows of one device to one slot


@functools.cache
def program(split: str, exchange: str):
    """Return a layout and run(expert_wnk, placement), which returns manifests, drops,
    rows and fullest pairs, all with a leading device dim."""
    layout = Layout(
        E, W, SLOTS, ROWS_PER_PEER, store="sharded", split=split, exchange=exchange
    )
    mesh = make_mesh(Topology(expert=W), jax.devices()[:W])
    mesh_layout = on_mesh(mesh, layout)

    def body(expert_wnk, placement):
        sent, _ = manifest(expert_wnk[0], placement, mesh_layout)
        rows, pair = rows_here(sent, mesh_layout), fullest_pair(sent, layout)
        out = sent, num_dropped(expert_wnk[0], sent.peer_nk), rows, pair
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


def blocks(sent: Manifest, me: int) -> list[np.ndarray]:
    """Return the assignments that device `me` sends to each slot, in order."""
    ends_p = np.cumsum(sent.counts_up[me, me])
    return np.split(sent.assignment_a[me], ends_p)[:-1]


@pytest.mark.parametrize("split", ["even", "local_first"])
def test_every_choice_is_sent_once_to_a_slot_of_its_expert(split):
    for seed in range(8):
        expert_wnk, row_p, sent, dropped, _, _ = run_case(seed, split)
        counts_we = (expert_wnk[..., None] == np.arange(E)).sum((1, 2)).astype(np.int32)
        assert not dropped.any()
        assert (sent.counts_up == quotas(counts_we, row_p, split)).all()
        for me in range(W):
            expert_a = expert_wnk[me].reshape(-1)
            for expert, assignment_x in zip(row_p, blocks(sent, me)):
                assert np.array_equal(
                    expert_a[assignment_x], [expert] * len(assignment_x)
                )
            all_x = np.concatenate(blocks(sent, me))
            assert np.array_equal(np.sort(all_x), np.flatnonzero(expert_a >= 0))


@pytest.mark.parametrize(
    ("split", "exchange"), [("even", "exact"), ("local_first", "capacity")]
)
def test_peer_and_place_find_each_choice_among_the_rows(split, exchange):
    """Each choice's place counts from the first row of its peer; peer -1 means that the
    row is not sent."""
    for seed in range(8):
        _, _, sent, _, _, _ = run_case(seed, split, exchange)
        for me in range(W):
            peer_a, offset_a = sent.peer_nk[me].ravel(), sent.offset_nk[me].ravel()
            sent_a = np.flatnonzero(peer_a >= 0)
            rank_a = sent.first_w[me][peer_a[sent_a]] + offset_a[sent_a]
            assert np.array_equal(sent.assignment_a[me][rank_a], sent_a)
            assert len(sent_a) == sent.counts_up[me, me].sum()
            slot_a = np.searchsorted(
                np.cumsum(sent.counts_up[me, me]), rank_a, side="right"
            )
            assert np.array_equal(slot_a // SLOTS, peer_a[sent_a])


def test_all_devices_know_who_receives_how_much():
    for seed in range(4):
        _, _, sent, _, rows_w, fullest_w = run_case(seed, "local_first")
        assert (sent.counts_up == sent.counts_up[0]).all()
        pair_ww = sent.counts_up[0].reshape(W, W, SLOTS).sum(axis=2)
        assert np.array_equal(rows_w, pair_ww.sum(axis=0))
        assert (fullest_w == pair_ww.max()).all()


def test_capacity_drops_the_last_choices_and_counts_them():
    """One device sends at most ROWS_PER_PEER // SLOTS rows to one slot, and the dropped
    rows are counted.

    The first rows of an expert are kept, in this order: all first choices before any
    second choice, then by token.
    """
    some_dropped = False
    for seed in range(8):
        expert_wnk, _, sent, dropped, _, _ = run_case(seed, "local_first", "capacity")
        _, _, whole, _, _, _ = run_case(seed, "local_first")
        limit = ROWS_PER_PEER // SLOTS
        assert (sent.counts_up == np.minimum(whole.counts_up, limit)).all()
        for me in range(W):
            lost = whole.counts_up[me, me].sum() - sent.counts_up[me, me].sum()
            assert dropped[me] == lost
            some_dropped |= lost > 0
            expert_a = expert_wnk[me].reshape(-1)
            kept_a = sent.peer_nk[me].reshape(-1) >= 0
            for expert in range(E):
                own_a = np.flatnonzero(expert_a == expert)
                ranked = own_a[np.lexsort((own_a // K, own_a % K))]
                is_kept = kept_a[ranked]
                assert not (is_kept[1:] > is_kept[:-1]).any()
    assert some_dropped
