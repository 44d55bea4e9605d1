"""Every store under every plan is the same function: slots and their gradients by
definition, an MoE layer against moe/reference.py, and the tables of copies."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.axes import BATCH_AXES, make_mesh, sharding
from moejax.config import Moe, Router
from moejax.moe import reference, route
from moejax.moe.types import Placement
from moejax.moe.weights import stores
from moejax.plan.expert_plan import CopyTables, ExpertPlan, copied, copy_tables
from moejax.plan.layout import Layout, Topology
from tests.moe.test_layer import EXPERTS, SEQ, WIDTH, split_modules
from tests.support.close import assert_close
from tests.support.random_plans import odd_plans, random_plan

TOPOLOGY, BATCH, TOP_K, HIDDEN, SLOTS = Topology(data=2, expert=4), 8, 2, 32, 6
OWN = EXPERTS // TOPOLOGY.expert
COPIES = {"offers_per_device": OWN, "copies_per_device": SLOTS}
QUICK = {"xla_backend_optimization_level": 0}  # compiled in half the time
ASSIGNMENTS = BATCH * SEQ * TOP_K // TOPOLOGY.num_batch_shards


def layout_of(store: str, split: str = "even", rows_per_peer=ASSIGNMENTS) -> Layout:
    """With room for all rows in round 0, unless told otherwise."""
    return Layout.home(
        EXPERTS,
        TOPOLOGY.expert,
        ASSIGNMENTS,
        rows_per_peer,
        slots_per_device=OWN if store == "owned" else SLOTS,
        store=store,
        split=split,
        **(COPIES if store in ("transient", "resident") else {}),
    )


def plans_for(layout: Layout, num_random: int) -> list[ExpertPlan]:
    rng = np.random.default_rng(1)
    odd = [] if layout.store == "owned" else odd_plans(layout, 1).values()
    return [*odd, *(random_plan(rng, layout, 1) for _ in range(num_random))]


@functools.cache
def make_slots(layout: Layout, dtype: str):
    """run(masters, placement, d_slots) -> slots, gradients of the masters."""
    mesh = make_mesh(TOPOLOGY)

    def run(masters, placement, d_slots):
        slots, pull = jax.vjp(
            lambda masters: stores.slots(masters, placement, layout, mesh, dtype),
            masters,
        )
        return slots, pull(jax.tree.map(lambda leaf: leaf.astype(dtype), d_slots))[0]

    return jax.jit(run, compiler_options=QUICK)


def slots_case(layout: Layout, plan: ExpertPlan):
    """Masters in logical order, placement and gradients of slots, at random."""
    rng, p = np.random.default_rng(0), layout.num_slots
    masters = {
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
    placement = Placement.of_plan(plan.validate(layout), layout).layer(0)
    return masters, placement, d_slots


def slots_run(layout, plan, dtype, masters, placement, d_slots):
    """Slots, and gradients in logical order, NumPy."""
    owned_e = plan.owned_le[0]
    masters = {name: leaf[owned_e] for name, leaf in masters.items()}
    run = make_slots(layout, dtype)
    slots, grads = jax.device_get(run(masters, placement, d_slots))
    return slots, {name: leaf[np.argsort(owned_e)] for name, leaf in grads.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("store", ["owned", "resident", "sharded"])
def test_slots_hold_their_experts_and_replicas_are_summed(store, dtype):
    """Slots bit for bit, zeros where they are empty; gradients of empty ones go
    nowhere. ('transient' and 'resident' are one function here.)"""
    layout = layout_of(store)
    for plan in plans_for(layout, 4):
        masters, placement, d_slots = slots_case(layout, plan)
        slots, grads = slots_run(layout, plan, dtype, masters, placement, d_slots)
        expert_p = plan.slot_to_expert_lp[0]
        is_full_p = (expert_p >= 0)[:, None, None]
        wide = {
            n: leaf.astype(jnp.dtype(dtype))[expert_p] for n, leaf in masters.items()
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


@pytest.mark.parametrize("store", ["owned", "resident", "sharded"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_in_one_replica_reaches_its_expert(store, value):
    """A sum that hid it would let a step go wrong unseen."""
    layout = layout_of(store)
    for plan in plans_for(layout, 2):
        masters, placement, d_slots = slots_case(layout, plan)
        slot = int(np.flatnonzero(plan.slot_to_expert_lp[0] == 0)[-1])
        d_slots["down"][slot, 3, 5] = value
        _, grads = slots_run(layout, plan, "float32", masters, placement, d_slots)
        assert not np.isfinite(grads["down_efd"][0, 3, 5])


MOE = Moe(num_experts=EXPERTS, top_k=TOP_K, d_expert=HIDDEN)
PULL_BTD = np.random.default_rng(2).normal(size=(BATCH, SEQ, WIDTH)).astype(np.float32)
gradients = functools.partial(jax.value_and_grad, has_aux=True)
compiled = functools.partial(jax.jit, compiler_options=QUICK)


@functools.cache
def make_layer(layout: Layout):
    """step(params, placement, x, choices), and its parameters."""
    mesh = make_mesh(TOPOLOGY)
    graph, params, rest = split_modules(mesh, MOE, Router())

    def run(params, placement, x_btd, forced_btk):
        layer = nnx.merge(graph, params, rest)["moe"]
        y_btd, sums = layer(x_btd, placement, layout, None, forced_btk)
        return jnp.sum(y_btd * PULL_BTD), (y_btd, sums)

    return mesh, compiled(gradients(run, (0, 2))), params


@functools.cache
def make_reference():
    """step(params, x, choices) by definition, on one device."""
    here = make_mesh(Topology(), jax.devices()[:1])
    graph, _, rest = split_modules(here, MOE, Router())

    def run(params, x_btd, forced_btk):
        layer, x_nd = nnx.merge(graph, params, rest)["moe"], x_btd.reshape(-1, WIDTH)
        args = (layer.router_de[...], layer.bias_e[...], Router(), TOP_K, SEQ)
        routes, _, _ = route.route(x_nd, *args, forced_btk.reshape(-1, TOP_K))
        y_nd = reference.moe(x_nd, routes, layer.masters())
        return jnp.sum(y_nd.reshape(x_btd.shape) * PULL_BTD), y_nd

    return compiled(gradients(run, (0, 1)))


def in_order(params, owned_e: np.ndarray):
    """Masters as a plan's owners hold them; the router stays logical."""

    def ordered(path, leaf):
        return leaf if "router" in jax.tree_util.keystr(path) else leaf[owned_e]

    return jax.tree_util.tree_map_with_path(ordered, params)


def skewed(rng) -> np.ndarray:
    """Distinct choices, expert 0 chosen by most tokens, some experts by none."""
    chance_e = np.r_[8.0, 3.0, np.ones(EXPERTS - 4), 1e-9, 1e-9]
    noise = rng.gumbel(size=(BATCH, SEQ, EXPERTS))
    order = np.argsort(-(np.log(chance_e) + noise), axis=-1)
    return order[..., :TOP_K].astype(np.int32)


def check(layout: Layout, plan: ExpertPlan, seed: int = 0):
    """Output and every gradient of the layer; no row is lost. Returns its sums."""
    mesh, step, params = make_layer(layout)
    forced_btk = skewed(np.random.default_rng(seed))
    x_btd = np.random.default_rng(seed).normal(size=PULL_BTD.shape).astype(np.float32)
    placement = Placement.of_plan(plan.validate(layout), layout).layer(0)
    owned_e = plan.owned_le[0]
    args = jax.device_put((x_btd, forced_btk), sharding(mesh, BATCH_AXES))
    (_, (y_btd, sums)), grads = step(in_order(params, owned_e), placement, *args)
    (_, y_nd), expected = make_reference()(params, x_btd, forced_btk)
    assert_close(y_btd.reshape(-1, WIDTH), y_nd)
    expected = (in_order(expected[0], owned_e), expected[1])
    assert_close(jax.device_get(grads), jax.device_get(expected))
    assert int(jnp.sum(sums.rows)) == forced_btk.size
    return sums


@pytest.mark.parametrize(
    ("store", "split"),
    [
        ("transient", "even"),
        ("sharded", "local_first"),
        pytest.param("owned", "even", marks=pytest.mark.long),
        pytest.param("transient", "local_first", marks=pytest.mark.long),
        pytest.param("sharded", "even", marks=pytest.mark.long),
    ],
)
def test_any_plan_is_the_same_layer(store, split):
    layout = layout_of(store, split)
    for seed, plan in enumerate(plans_for(layout, 6)):
        check(layout, plan, seed)


@pytest.mark.long
@pytest.mark.parametrize("store", ["transient", "sharded"])
def test_later_rounds_carry_rows_to_replicas_too(store):
    layout = layout_of(store, "even", 3)
    rounds = [
        int(np.max(check(layout, plan, seed).rounds))
        for seed, plan in enumerate(plans_for(layout, 6))
    ]
    assert max(rounds) > 1


def by_definition(row_p, owned_e, num_devices):
    """[w, e]: a device has a slot of an expert whose owner is another."""
    slots, own = len(row_p) // num_devices, len(owned_e) // num_devices
    return [
        [
            e in row_p[w * slots : (w + 1) * slots]
            and e not in owned_e[w * own : (w + 1) * own]
            for e in range(len(owned_e))
        ]
        for w in range(num_devices)
    ]


def random_case(rng):
    """Any row, any owners, 8 experts on 4 devices of 3 slots."""
    row_p = rng.permutation(np.r_[np.arange(8), rng.integers(-1, 8, 4)])
    layout = Layout(8, 4, 3, 8, store="transient", offers_per_device=2,
                    copies_per_device=3)  # fmt: skip
    return row_p.astype(np.int32), rng.permutation(8).astype(np.int32), layout


def test_copied_is_held_but_not_owned():
    rng = np.random.default_rng(0)
    for _ in range(20):
        row_p, owned_e, _ = random_case(rng)
        assert copied(row_p, owned_e, 4).tolist() == by_definition(row_p, owned_e, 4)


def filled(tables: CopyTables, owned_e, layout: Layout) -> np.ndarray:
    """The expert in every slot, following the tables as the device does."""
    own_we = owned_e.reshape(layout.num_devices, -1)
    offered = [
        e_x[o] if o >= 0 else -1
        for e_x, offer_o in zip(own_we, tables.offer_wo)
        for o in offer_o
    ]
    rows = []
    for own_e, want_c, fill_s in zip(own_we, tables.want_wc, tables.fill_ws):
        have = [*own_e, *(offered[c] if c >= 0 else -1 for c in want_c)]
        rows += [have[i] if i >= 0 else -1 for i in fill_s]
    return np.array(rows)


def test_copy_tables_fill_every_slot_with_its_expert():
    rng = np.random.default_rng(1)
    for _ in range(50):
        row_p, owned_e, layout = random_case(rng)
        tables = copy_tables(row_p, owned_e, layout)
        assert all(table.dtype == np.int32 for table in tables)
        assert tables.offer_wo.shape == (4, 2)
        assert tables.want_wc.shape == (4, 3)
        assert np.array_equal(filled(tables, owned_e, layout), row_p)
        needs = ExpertPlan(row_p[None], 8, owned_e[None]).needs(4)
        assert (tables.offer_wo >= 0).sum(axis=1).max(initial=0) == needs.offers
        assert (tables.want_wc >= 0).sum(axis=1).max(initial=0) == needs.copies


def test_without_copies_their_tables_are_empty():
    row_p, owned_e, layout = random_case(np.random.default_rng(2))
    sharded = dataclasses.replace(
        layout, store="sharded", offers_per_device=0, copies_per_device=0
    )
    tables = copy_tables(row_p, owned_e, sharded)
    assert tables.offer_wo.shape == tables.want_wc.shape == (4, 0)
