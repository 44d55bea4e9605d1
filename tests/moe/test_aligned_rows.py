"""Slots whose rows begin at multiples of Layout.align_rows: tables by definition, and
sizes of buffers. test_equals_reference.py compares such layers with the reference."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.axes import make_mesh
from moejax.kernels import varying_alike
from moejax.moe.exchange.dispatch import sort_by_slot
from moejax.moe.mesh_roles import on_mesh
from moejax.plan.layout import Layout, Topology, max_aligned_rows


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


@pytest.mark.parametrize("align", [1, 64])
def test_choices_are_sorted_by_slot(align):
    """Each slot's choices begin at a multiple, in the order of rows; both tables agree.
    Choices of other devices have no place."""
    w, s, k, rows = 4, 5, 3, 24
    layout = Layout.home(w * s, w, 64, align_rows=align, top_k=k)
    mesh_layout = on_mesh(make_mesh(Topology(expert=w), jax.devices()[:w]), layout)
    num_rows = layout.num_sorted_rows(rows * k)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh_layout.mesh, in_specs=P(), out_specs=P("expert")
    )
    def tables(slot_rk):
        found = sort_by_slot(slot_rk, num_rows, mesh_layout)
        return jax.tree.map(
            lambda table: varying_alike(table, found[0])[0][None], found
        )

    for seed in range(8):
        noise_rp = np.random.default_rng(seed).random((rows, w * s))
        slot_rk = noise_rp.argsort(axis=1)[:, :k].astype(np.int32)
        slot_rk[noise_rp[:, :k] < 0.2] = -1
        results = jax.device_get(tables(slot_rk))
        for device, (rows_s, assignment_m, position_rk) in enumerate(zip(*results)):
            expected_m = np.full(num_rows, -1)
            place = 0
            for slot in range(device * s, device * s + s):
                own_a = np.flatnonzero(slot_rk.reshape(-1) == slot)
                expected_m[place : place + len(own_a)] = own_a
                aligned = -(-len(own_a) // align) * align
                assert rows_s[slot % s] == aligned
                place += aligned
            np.testing.assert_array_equal(assignment_m, expected_m)
            placed_a = np.flatnonzero(position_rk.reshape(-1) >= 0)
            assert (assignment_m[position_rk.reshape(-1)[placed_a]] == placed_a).all()
            assert (expected_m >= 0).sum() == len(placed_a)
