"""Slots whose rows begin at multiples of Layout.align_rows: tables by definition, and
sizes of buffers. test_equals_reference.py compares such layers with the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.axes import make_mesh
from moejax.moe.exchange.dispatch import Window, make_receipt
from moejax.moe.exchange.manifest import Manifest, manifest
from moejax.moe.mesh_roles import on_mesh
from moejax.moe.types import Placement
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Topology, max_aligned_rows
from tests.support.layers import compiled


def test_the_largest_sum_of_aligned_rows_is_reached_and_never_exceeded():
    rng = np.random.default_rng(0)
    for groups in (1, 3, 8):
        for num_rows in (0, 1, 2, 7, 40):
            most = max_aligned_rows(num_rows, groups, 4)
            parts = rng.multinomial(num_rows, np.ones(groups) / groups, 200)
            worst = [min(1, max(num_rows - i, 0)) for i in range(groups)]
            worst[-1] += num_rows - sum(worst)
            sums = (-(-np.vstack([parts, worst]) // 4) * 4).sum(axis=1)
            assert sums.max() == sums[-1] == most, (groups, num_rows)
    assert max_aligned_rows(40, 8, 1) == 40


def sort_arrivals(counts_ws: np.ndarray, rows: int, align: int):
    """Return `arrival_m` and `sorted_m1` row by row, for senders that each fill their
    chunk of `rows` rows from its begin, slot after slot."""
    w, s = counts_ws.shape
    end_ws = counts_ws.cumsum(axis=1)
    num_sorted = max_aligned_rows(w * rows, s, align)
    arrival_m, sorted_m1 = np.full(num_sorted, -1), np.full((w * rows, 1), -1)
    place = 0
    for slot in range(s):
        for sender in range(w):
            first = end_ws[sender, slot] - counts_ws[sender, slot]
            for row in range(first, end_ws[sender, slot]):
                arrival_m[place] = sender * rows + row
                sorted_m1[sender * rows + row] = place
                place += 1
        place = -(-place // align) * align
    return arrival_m, sorted_m1


@pytest.mark.parametrize("align", [1, 64])
def test_tables_by_definition(align):
    """Rows arrive in the order (sender, slot), and are sorted by slot, then sender."""
    rows, w, s = 10, 4, 5
    layout = Layout.home(w * s, w, 64, align_rows=align)
    mesh_layout = on_mesh(make_mesh(Topology(expert=w), jax.devices()[:w]), layout)

    @compiled
    @functools.partial(
        jax.shard_map, mesh=mesh_layout.mesh, in_specs=P(), out_specs=P("expert")
    )
    def tables(counts_up):
        empty_nk = jnp.zeros((rows, 1), jnp.int32)
        sent = Manifest(
            assignment_a=empty_nk[:, 0],
            peer_nk=empty_nk,
            offset_nk=empty_nk,
            first_w=jnp.zeros(w, jnp.int32),
            counts_up=counts_up,
            bound=jnp.int32(0),
        )
        receipt, _ = make_receipt(sent, Window(0, rows), mesh_layout)
        return receipt.arrival_m[None], receipt.sorted_m1[None]

    for seed in range(8):
        rng = np.random.default_rng(seed)
        counts_up = rng.integers(0, 3, (w, w * s)) * rng.integers(0, 2, w * s)
        actual = jax.device_get(tables(counts_up.astype(np.int32)))
        for device in range(w):
            own_ws = counts_up[:, device * s : (device + 1) * s]
            expected = sort_arrivals(own_ws, rows, align)
            for table, definition in zip(actual, expected):
                np.testing.assert_array_equal(table[device], definition)


def test_a_single_sender_sends_rows_where_experts_compute_them():
    """Both sides of the table agree, and every slot's rows begin at a multiple."""
    layout = Layout.home(4, 1, 48, align_rows=64)
    mesh_layout = on_mesh(make_mesh(Topology(), jax.devices()[:1]), layout)
    placement = Placement.from_plan(ExpertPlan.home_in(layout, 1), layout).layer(0)
    expert_nk = np.random.default_rng(0).choice([0, 0, 0, 1, 3], (24, 2))
    expert_nk = expert_nk.astype(np.int32)

    @compiled
    def tables(expert_nk, placement):
        sent, _ = manifest(expert_nk, placement, mesh_layout)
        return make_receipt(sent, Window(0, layout.rows_per_peer), mesh_layout)

    receipt, rows_s = tables(expert_nk, placement)
    count_s = np.bincount(expert_nk.ravel(), minlength=4)
    assert rows_s.tolist() == (-(-count_s // 64) * 64).tolist()
    assignment_m = np.asarray(receipt.assignment_m)
    assert len(assignment_m) == layout.num_sorted_rows(layout.rows_per_peer) == 256
    position_a = np.asarray(receipt.position_nk).ravel()
    assert assignment_m[position_a].tolist() == list(range(48))
    assert (assignment_m >= 0).sum() == 48
    slot_of_first = np.cumsum(np.asarray(rows_s)) - np.asarray(rows_s)
    for slot, first in enumerate(slot_of_first):
        own_a = assignment_m[first : first + count_s[slot]]
        assert (expert_nk.ravel()[own_a] == slot).all()
