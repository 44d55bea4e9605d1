"""Compare water-filling, top-up, dynamic replication and shadowing on a device with
their definitions in NumPy, bit for bit.

Bounds and tables of copies are compared too.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.moe.split import dynamic, shadow
from moejax.moe.split import top_up as moe_top_up
from moejax.moe.split import water_filling as moe_water
from moejax.moe.types import Placement
from moejax.plan import dynamic_replication, shadowing, top_up, water_filling
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from tests.support.replica_loads import replicated, ring, scattered, zipf


def by_slot(value_q, slot_q) -> np.ndarray:
    """Return values of slots sorted by expert in the order of slots."""
    value_p = np.empty_like(np.asarray(value_q))
    value_p[np.asarray(slot_q)] = np.asarray(value_q)
    return value_p


def test_water_filling_with_its_paths():
    e, w, s = 64, 16, 8
    layout = Layout(e, w, s, 8, store="sharded", split="water_filling")
    fill = jax.jit(functools.partial(moe_water.fill, layout=layout))
    for seed in range(24):
        rng = np.random.default_rng(seed)
        row_p = (
            scattered(rng, e, w, s) if seed % 2 else replicated(rng, e, w, s * w // e)
        ).astype(np.int32)
        load_e = zipf(rng, e, 1000 * w, rng.uniform(0, 2))
        check_filling(fill, layout, load_e, row_p, tolerance=int(rng.choice([0, 0, 5])))


def check_filling(fill, layout, load_e, row_p, tolerance: int):
    """Assert that water-filling equals its definition; return the number of paths."""
    plan = ExpertPlan(row_p[None], layout.num_experts).validate(layout)
    placement = Placement.from_plan(plan, layout).layer(0)
    result = fill(
        jnp.asarray(load_e, jnp.int32), placement, tolerance=jnp.int32(tolerance)
    )
    expected = water_filling.fill(load_e, row_p, layout.num_devices, tolerance)
    assert np.array_equal(by_slot(result.rows_q, placement.slot_lq), expected.rows_p)
    assert int(result.bound) == expected.bound
    assert int(result.sweeps) == expected.sweeps
    return int(result.paths)


@pytest.mark.slow
def test_a_ring_needs_many_paths():
    """Water-filling needs many paths if each device shares experts with its neighbours
    alone and the load is a wave."""
    load_e, row_p, w = ring()
    layout = Layout(len(load_e), w, len(row_p) // w, 8, store="sharded",
                    split="water_filling")  # fmt: skip
    fill = jax.jit(functools.partial(moe_water.fill, layout=layout))
    assert check_filling(fill, layout, load_e, row_p.astype(np.int32), 0) > w // 4


@pytest.mark.parametrize(
    ("slack", "offers", "copies"), [(0, 2, 1), (51, 1, 2), (300, 4, 4)]
)
def test_top_up_with_its_tables(slack, offers, copies):
    """Plans are random, and may have an expert twice on a device."""
    e, w, s = 32, 8, 6
    num_copies, budgets = [], {"top_up_copies": copies, "top_up_offers": offers}
    layout = Layout(
        e, w, s, 8, store="sharded", split="top_up", top_up_slack=slack, **budgets
    )
    add = jax.jit(functools.partial(moe_top_up.top_up, layout=layout.topped_up))
    for seed in range(24):
        rng = np.random.default_rng(seed)
        row_p = scattered(rng, e, w, s)
        load_e = zipf(rng, e, int(rng.choice([5, 1000, 10**6])), rng.uniform(0, 2.5))
        plan = ExpertPlan(row_p[None], e).validate(layout)
        tolerance = water_filling.split_tolerance(load_e.sum(), w)
        result = add(
            jnp.asarray(load_e, jnp.int32),
            Placement.from_plan(plan, layout).layer(0),
            tolerance=jnp.int32(tolerance),
        )
        room = ((0, 0), (0, copies))
        row_p = np.pad(row_p.reshape(w, s), room, constant_values=-1).reshape(-1)
        expected = top_up.top_up(load_e, row_p, layout.topped_up)
        used = result.placement
        assert np.array_equal(by_slot(used.expert_lq, used.slot_lq), expected.row_p)
        assert np.array_equal(by_slot(result.rows_q, used.slot_lq), expected.rows_p)
        assert np.array_equal(used.offer_lwo, expected.offer_wo)
        assert np.array_equal(used.want_lwc, expected.want_wc)
        assert int(result.bound) == expected.bound
        check_order(used, layout.topped_up)
        num_copies.append(expected.num_copies)
    assert len(set(num_copies)) > 2


def check_order(placement, layout: Layout) -> None:
    """Assert that the tables by expert are those of a plan with these slots."""
    row_p = by_slot(placement.expert_lq, placement.slot_lq)
    plan = ExpertPlan(row_p[None], layout.num_experts)
    # A plan's slots are those of `layout`, which has the slots for copies.
    alone = {"split": "even", "top_up_slack": 0, "top_up_copies": 0, "top_up_offers": 0}
    expected = Placement.from_plan(plan, dataclasses.replace(layout, **alone)).layer(0)
    for name in ("slot_lq", "expert_lq", "replica_lq", "local_lq"):
        assert np.array_equal(getattr(placement, name), getattr(expected, name))


@pytest.mark.parametrize(("offers", "copies"), [(2, 1), (1, 3)])
def test_dynamic_replication_with_its_tables(offers, copies):
    w, own = 8, 4
    e = w * own
    layout = Layout(
        e, w, own + copies, 8, store="transient", split="dynamic",
        offers_per_device=offers, copies_per_device=copies,
    )  # fmt: skip
    pair = jax.jit(functools.partial(dynamic.pair, layout=layout))
    for seed in range(30):
        rng = np.random.default_rng(seed)
        load_e = zipf(rng, e, int(rng.choice([5, 1000, 100_000])), rng.uniform(0, 2.5))
        owned_e = rng.permutation(e).astype(np.int32)
        home_p = ExpertPlan.home_in(layout, 1).slot_to_expert_lp[0].copy()
        home_p[home_p >= 0] = owned_e
        plan = ExpertPlan(home_p[None], e, owned_e[None]).validate(layout)
        placement, rows_q = pair(
            jnp.asarray(load_e, jnp.int32), Placement.from_plan(plan, layout).layer(0)
        )
        expected = dynamic_replication.pair(load_e, owned_e, layout)
        slot_q = placement.slot_lq
        assert np.array_equal(by_slot(rows_q, slot_q), expected.rows_p)
        assert np.array_equal(by_slot(placement.expert_lq, slot_q), expected.row_p)
        assert np.array_equal(placement.slot_to_expert_lp, expected.row_p)
        assert_copies(placement, owned_e, layout)


@pytest.mark.parametrize(
    ("w", "own", "offers", "copies", "price", "toll"),
    [(4, 2, 2, 3, 40, 0), (5, 1, 1, 2, 3000, 700)],
)
def test_shadows_with_their_tables(w, own, offers, copies, price, toll):
    e, num_shadows = w * own, 0
    layout = Layout(
        e, w, own + copies, 8, store="transient", split="shadow",
        offers_per_device=offers, copies_per_device=copies, shadow_price=price,
        exchange_toll=toll,
    )  # fmt: skip
    place = jax.jit(functools.partial(shadow.place, layout=layout))
    for seed in range(20):
        rng = np.random.default_rng(seed)
        total = int(rng.choice([5, 1000, 100_000]))
        load_e = zipf(rng, e, total, rng.uniform(0, 2.5))
        load_we = rng.multinomial(load_e, np.full(w, 1 / w)).T
        owned_e = rng.permutation(e).astype(np.int32)
        home_p = ExpertPlan.home_in(layout, 1).slot_to_expert_lp[0].copy()
        home_p[home_p >= 0] = owned_e
        plan = ExpertPlan(home_p[None], e, owned_e[None]).validate(layout)
        at_home = Placement.from_plan(plan, layout).layer(0)
        placement = place(jnp.asarray(load_we, jnp.int32), at_home)
        shadows = shadowing.choose(load_we, owned_e, layout)
        owner_e = np.argsort(owned_e) // own
        row_ws = home_p.reshape(w, -1).copy()
        for slot, expert in enumerate(shadows, own):
            row_ws[np.arange(w) != owner_e[expert], slot] = expert
        assert np.array_equal(placement.slot_to_expert_lp, row_ws.reshape(-1))
        slot_q, expert_q = placement.slot_lq, placement.expert_lq
        assert np.array_equal(by_slot(expert_q, slot_q), row_ws.reshape(-1))
        assert_copies(placement, owned_e, layout)
        num_shadows += len(shadows)
    assert num_shadows > 0


def assert_copies(placement, owned_e, layout: Layout) -> None:
    """Assert that each full slot gets an own expert, or a copy of an owner's offer."""
    w, own = layout.num_devices, layout.experts_per_device
    row_ws = np.asarray(placement.slot_to_expert_lp).reshape(w, -1)
    owned_wi = owned_e.reshape(w, own)
    for device in range(w):
        for slot, fill in enumerate(np.asarray(placement.fill_lws)[device]):
            expert = row_ws[device, slot]
            if fill < 0:
                assert expert == -1
            elif fill < own:
                assert expert == owned_wi[device, fill]
            else:
                offer = int(placement.want_lwc[device, fill - own])
                owner, index = divmod(offer, layout.offers_per_device)
                assert expert == owned_wi[owner, placement.offer_lwo[owner, index]]
