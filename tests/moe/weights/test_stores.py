"""Test that every store computes the same function under every plan.

Slots and their gradients are compared with their definition, and the tables of copies
with the plan.
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.axes import make_mesh
from moejax.moe.mesh_roles import on_mesh
from moejax.moe.weights import slots, stores
from moejax.plan.expert_plan import CopyTables, ExpertPlan, copy_tables, find_copies
from moejax.plan.layout import Layout
from tests.support.close import assert_close
from tests.support.layers import (
    ALONE,
    EXPERTS,
    HIDDEN,
    MERGED,
    MESHES,
    WIDTH,
    layer_layout,
    placed,
)
from tests.support.random_plans import odd_plans, random_plan


def plans_for(layout: Layout, num_random: int) -> list[ExpertPlan]:
    """Return odd plans, if the store can have them, and random plans of one layer."""
    rng = np.random.default_rng(1)
    odd = [] if layout.store == "owned" else odd_plans(layout, 1).values()
    return [*odd, *(random_plan(rng, layout, 1) for _ in range(num_random))]


TOPOLOGY = MESHES["data2_expert4"]


@functools.cache
def make_slots(layout: Layout, dtype: str):
    """Return run(master_params, placement, d_slots) -> slots, gradients of
    master_params."""
    mesh_layout = on_mesh(make_mesh(TOPOLOGY), layout)

    def run(master_params, placement, d_slots):
        made, pull = jax.vjp(
            lambda master_params: (
                slots.make_slots(
                    master_params, placement, mesh_layout, dtype, "float32"
                )[0].weights
            ),
            master_params,
        )
        return made, pull(jax.tree.map(lambda leaf: leaf.astype(dtype), d_slots))[0]

    return jax.jit(run)


def slots_case(layout: Layout, plan: ExpertPlan):
    """Return random float32 master parameters in logical order, the plan's placement,
    and random gradients of slots."""
    rng, p = np.random.default_rng(0), layout.num_slots
    master_params = {
        name: rng.normal(size=shape).astype(np.float32)
        for name, shape in {
            "gate_edf": (EXPERTS, WIDTH, HIDDEN),
            "up_edf": (EXPERTS, WIDTH, HIDDEN),
            "down_efd": (EXPERTS, HIDDEN, WIDTH),
        }.items()
    }
    d_slots = {
        "into": rng.normal(size=(p, WIDTH, 2, HIDDEN)).astype(np.float32),
        "down": rng.normal(size=(p, HIDDEN, WIDTH)).astype(np.float32),
    }
    return master_params, placed(plan, layout), d_slots


def run_slots(layout, plan, dtype, master_params, placement, d_slots):
    """Return the slots, and the gradients in logical order, as NumPy arrays."""
    owned_e = plan.owned_le[0]
    master_params = {name: leaf[owned_e] for name, leaf in master_params.items()}
    run = make_slots(layout, dtype)
    slots, grads = jax.device_get(run(master_params, placement, d_slots))
    return slots, {name: leaf[np.argsort(owned_e)] for name, leaf in grads.items()}


STORES = [("owned", "float32"), ("resident", "bfloat16"), ("sharded", "float32")]
"""Stores, each with a dtype. 'transient' and 'resident' are one function here."""


@pytest.mark.parametrize("axes", [ALONE, MERGED])
@pytest.mark.parametrize(("store", "dtype"), STORES)
def test_slots_hold_their_experts_and_replicas_are_summed(store, dtype, axes):
    """Slots hold the bits of their experts, and zeros if they are empty; gradients of
    replicas are summed. Gradients of empty slots are ignored. In a group of two axes
    copies travel in two levels."""
    check_slots(store, dtype, num_random=4, axes=axes)


def test_slots_of_many_experts_sum_replicas_by_segment(monkeypatch):
    """Gradients reach the owners through sums by segment too, as they are with many
    experts on CPUs."""
    monkeypatch.setattr(stores, "MIN_SEGMENTS", 1)
    make_slots.cache_clear()
    check_slots("resident", "float32", num_random=1)
    make_slots.cache_clear()


def check_slots(store: str, dtype: str, num_random: int, axes=ALONE) -> None:
    """Compare slots and gradients of odd and random plans with their definition."""
    layout = layer_layout(TOPOLOGY, store, axes)
    for plan in plans_for(layout, num_random):
        master_params, placement, d_slots = slots_case(layout, plan)
        slots, grads = run_slots(layout, plan, dtype, master_params, placement, d_slots)
        expert_p = plan.slot_to_expert_lp[0]
        is_full_p = (expert_p >= 0)[:, None, None]
        wide = {
            n: leaf.astype(jnp.dtype(dtype))[expert_p]
            for n, leaf in master_params.items()
        }
        wide = {name: np.where(is_full_p, leaf, 0) for name, leaf in wide.items()}
        into = np.stack([wide["gate_edf"], wide["up_edf"]], axis=2)
        assert np.array_equal(slots["into"], into)
        assert np.array_equal(slots["down"], wide["down_efd"])
        hit_ep = expert_p == np.arange(EXPERTS)[:, None]
        into_edgf = np.tensordot(hit_ep, d_slots["into"].astype(np.float64), 1)
        expected = {
            "gate_edf": into_edgf[:, :, 0],
            "up_edf": into_edgf[:, :, 1],
            "down_efd": np.tensordot(hit_ep, d_slots["down"].astype(np.float64), 1),
        }
        assert_close(grads, expected, dtype=dtype)


@pytest.mark.parametrize(("store", "dtype"), STORES)
def test_a_gradient_that_is_not_finite_reaches_its_expert(store, dtype):
    """A NaN or infinity in the gradient of one replica stays in the sum, so that the
    step is skipped."""
    layout = layer_layout(TOPOLOGY, store)
    for plan, value in zip(plans_for(layout, 2), (np.nan, np.inf) * 3, strict=False):
        master_params, placement, d_slots = slots_case(layout, plan)
        slot = int(np.flatnonzero(plan.slot_to_expert_lp[0] == 0)[-1])
        d_slots["down"][slot, 3, 5] = value
        _, grads = run_slots(layout, plan, dtype, master_params, placement, d_slots)
        assert not np.isfinite(grads["down_efd"][0, 3, 5])


def replicated(num_rows: int, num_slots: int) -> np.ndarray:
    """Return the rows of slots, int32 [s]: each row at least once, some -1 between."""
    rng = np.random.default_rng(num_rows)
    more = rng.integers(-1, num_rows, num_slots - num_rows)
    return rng.permutation(np.r_[np.arange(num_rows), more]).astype(np.int32)


def sum_in_order(d_sx: np.ndarray, index_s: np.ndarray, num_rows: int) -> np.ndarray:
    """Return the sums by row, added in float32 in the order of slots."""
    sum_qx = np.zeros((num_rows, *d_sx.shape[1:]), np.float32)
    for row, d_x in zip(index_s, d_sx, strict=True):
        if row >= 0:
            sum_qx[row] += d_x
    return sum_qx


MANY = stores.MIN_SEGMENTS


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((4, 9), "bfloat16"),
        ((MANY - 1, 60), "float32"),
        ((MANY, 60), "float32"),
        ((256, 400), "float16"),
    ],
)
def test_sums_by_row_are_those_of_their_definition(sizes, dtype):
    """Sums by product and by segment are those of a loop over slots. With many rows in
    float32 on a CPU they have the bits of that loop, run after run."""
    (num_rows, num_slots), rng = sizes, np.random.default_rng(0)
    index_s = replicated(num_rows, num_slots)
    d_sx = rng.normal(size=(num_slots, 5, 33)).astype(jnp.dtype(dtype))
    sums = jax.jit(stores.sum_by_row, static_argnums=2)
    found_qx = np.asarray(sums(d_sx, index_s, num_rows))
    assert found_qx.dtype == np.float32
    expected_qx = sum_in_order(d_sx.astype(np.float32), index_s, num_rows)
    assert_close(found_qx, expected_qx, dtype="float32")
    if num_rows >= MANY and dtype == "float32":
        assert np.array_equal(found_qx, expected_qx)
    assert np.array_equal(found_qx, np.asarray(sums(d_sx, index_s, num_rows)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_no_scatter_sums_in_an_order_of_its_own(dtype, monkeypatch):
    gpu = SimpleNamespace(platform="gpu")
    monkeypatch.setattr(stores, "device_here", lambda: gpu)
    index_s = replicated(256, 320)
    program = jax.make_jaxpr(lambda d_sx: stores.sum_by_row(d_sx, index_s, 256))
    text = str(program(jnp.zeros((320, 8), dtype)))
    assert "dot_general" in text
    assert "scatter" not in text
    assert text.count("f32[320,8]") == (dtype == "float32")  # its own copy, or none


def defined_copies(row_p, owned_e, num_devices):
    """Return [w, e]: whether a device has a slot of an expert that another device
    owns."""
    slots, own = len(row_p) // num_devices, len(owned_e) // num_devices
    return [
        [
            e in row_p[w * slots : (w + 1) * slots]
            and e not in owned_e[w * own : (w + 1) * own]
            for e in range(len(owned_e))
        ]
        for w in range(num_devices)
    ]


def random_case(rng, num_nodes: int = 1):
    """Return random slots and owners of 8 experts on 4 devices with 3 slots each, and
    their layout."""
    row_p = rng.permutation(np.r_[np.arange(8), rng.integers(-1, 8, 4)])
    layout = Layout(8, 4, 3, 8, store="transient", offers_per_device=2,
                    copies_per_device=3, axes=MERGED, num_nodes=num_nodes)  # fmt: skip
    layout = dataclasses.replace(layout, **layout.most_between_nodes)
    return row_p.astype(np.int32), rng.permutation(8).astype(np.int32), layout


def follow_tables(tables: CopyTables, owned_e, layout: Layout) -> np.ndarray:
    """Return the expert in every slot, found by following the tables as a device
    does: what its node offers and takes from other nodes is within its reach."""

    def at(values, index_x):
        return [values[i] if i >= 0 else -1 for i in index_x]

    own_we, nodes = owned_e.reshape(layout.num_devices, -1), layout.num_copy_nodes
    offered = [at(*pair) for pair in zip(own_we, tables.offer_wo)]
    near_m = np.array(offered).reshape(nodes, -1).tolist()
    sent_mo = [at(*pair) for pair in zip(near_m, tables.node_offer_mo)]
    sent = [expert for sent_o in sent_mo for expert in sent_o]
    reach_m = [x + at(sent, want) for x, want in zip(near_m, tables.node_want_mc)]
    rows = []
    for device, own_e in enumerate(own_we):
        reach = reach_m[device * nodes // layout.num_devices]
        have = [*own_e, *at(reach, tables.want_wc[device])]
        rows += at(have, tables.fill_ws[device])
    return np.array(rows)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_copy_tables_fill_every_slot_with_its_expert(num_nodes):
    rng = np.random.default_rng(1)
    for _ in range(50):
        row_p, owned_e, layout = random_case(rng, num_nodes)
        copied_we = find_copies(row_p, owned_e, 4).tolist()
        assert copied_we == defined_copies(row_p, owned_e, 4)
        tables = copy_tables(row_p, owned_e, layout)
        assert all(table.dtype == np.int32 for table in tables)
        assert tables.offer_wo.shape == (4, 2)
        assert tables.want_wc.shape == (4, 3)
        assert np.array_equal(follow_tables(tables, owned_e, layout), row_p)
        needs = ExpertPlan(row_p[None], 8, owned_e[None]).needs(4, num_nodes)
        of_devices = tables.offer_wo, tables.want_wc
        of_nodes = tables.node_offer_mo, tables.node_want_mc
        used = [(x >= 0).sum(axis=1).max(initial=0) for x in (*of_devices, *of_nodes)]
        assert needs == tuple(used)
