"""Expert plans: validity and all errors, needs of copies, changes of slots, JSON."""

import dataclasses
import json

import numpy as np
import pytest

from moejax.moe.types import Placement
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout

# 4 experts in 6 slots of 2 devices: expert 0 has two replicas, slot 5 is empty.
TABLE = [[0, 1, 0, 2, 3, -1], [3, 2, 1, 0, -1, -1]]
OWNERS = [[2, 0, 3, 1], [0, 1, 2, 3]]


def make_plan(
    table=TABLE, num_experts=4, dtype=np.int32, owners=None, owner_dtype=np.int32
) -> ExpertPlan:
    owned_le = None if owners is None else np.array(owners, owner_dtype)
    return ExpertPlan(np.array(table, dtype), num_experts, owned_le)


def make_layout(store: str, slots: int = 3, offers: int = 0, copies: int = 0) -> Layout:
    return Layout(
        4, 2, slots, 10, store=store, offers_per_device=offers, copies_per_device=copies
    )


LAYOUT = make_layout("resident", 3, 2, 3)


@pytest.mark.parametrize(
    ("plan", "layout", "words"),
    [
        (make_plan(dtype=np.int64), None,
         r"slot_to_expert_lp must be int32 of two dims.* int64 \[2, 6\]"),
        (make_plan(TABLE[0]), None, r"int32 of two dims.* int32 \[6\]"),
        (make_plan([[0, 1, 2, 4]]), None, r"experts 0..3 or -1 \(empty\).* hold 0..4"),
        (make_plan([[0, 1, 2, 3, -2]]), None, r"or -1 \(empty\).* hold -2..3"),
        (make_plan([TABLE[0], [0, 0, 1, 1, -1, -1]]), None,
         r"layer 1 .* experts \[2, 3\]: every expert needs one"),
        (make_plan(owners=OWNERS, owner_dtype=np.int64), None,
         r"owned_le must be int32 of two dims.* int64 \[2, 4\]"),
        (make_plan(owners=[[0, 1, 2, 2], [0, 1, 2, 3]]), None,
         r"owned_le .*\[2, 4\] and name every expert once"),
        (make_plan(owners=OWNERS[:1]), None, r"owned_le must have shape \[2, 4\]"),
        (make_plan(), Layout.home(4, 2, 64), "4 experts in 6 slots.* has 4 in 4"),
        (make_plan(), Layout(2, 2, 3, 8, store="sharded"), "the layout has 2 in 6"),
        (make_plan([[0, 2, 1, 3]]), make_layout("owned", 2),
         "store='owned' .* the same permutation"),
        (make_plan(owners=OWNERS), make_layout("sharded"),
         "store='sharded' .* leave owned_le out"),
        (make_plan(), make_layout("transient", 3, 1, 2),
         "offers_per_device=2, copies_per_device=2, .* the layout has 1, 2, 0, 0"),
        (make_plan(), make_layout("transient", 3, 2, 1), "the layout has 2, 1, 0, 0"),
    ],
)  # fmt: skip
def test_an_invalid_plan_is_refused_in_one_line(plan, layout, words):
    with pytest.raises(ValueError, match=words) as error:
        plan.validate(layout)
    assert "\n" not in str(error.value)


def test_the_home_plan_fills_the_first_slots_of_each_device():
    plan = ExpertPlan.home(2, 4)
    assert plan.slot_to_expert_lp.tolist() == [[0, 1, 2, 3]] * 2
    assert (plan.num_layers, plan.num_slots, plan.is_home) == (2, 4, True)
    assert plan.validate(Layout.home(4, 2, 64)) is plan
    assert not make_plan([[1, 0, 2, 3]]).is_home
    wide = ExpertPlan.home_in(LAYOUT, 1).validate(LAYOUT)
    assert wide.slot_to_expert_lp.tolist() == [[0, 1, -1, 2, 3, -1]]
    assert (wide.is_home, wide.is_logical) == (False, True)


def test_moves_leads_from_one_plan_to_the_other():
    """Each row names a slot and the expert that it receives; emptied slots have
    none."""
    old, new = make_plan(), make_plan([[0, 1, 2, 2, 3, 0], [3, 2, -1, 0, -1, 1]])
    moves_m3 = old.moves(new)
    assert moves_m3.tolist() == [[0, 2, 2], [0, 5, 0], [1, 5, 1]]
    assert moves_m3.dtype == np.int32
    assert old.moves(old).shape == (0, 3)


@pytest.mark.parametrize("owners", [None, OWNERS])
def test_a_plan_comes_back_from_json(owners):
    plan = make_plan(owners=owners)
    again = ExpertPlan.from_json(plan.to_json())
    assert again == plan
    assert again.slot_to_expert_lp.dtype == again.owned_le.dtype == np.int32
    assert again.is_logical == ("owned_le" not in json.loads(plan.to_json()))
    damaged = '{"num_experts": 3, "slot_to_expert_lp": [[0, 1, 1]]}'
    with pytest.raises(ValueError, match=r"layer 0 has no slot for experts \[2\]"):
        ExpertPlan.from_json(damaged)


def test_plans_are_values_that_their_tables_and_owners_tell_apart():
    """Logical order is the default of owners. A plan is a dict key: neither its fields
    nor the array that made it can change it."""
    table_lp = np.array(TABLE, np.int32)
    plan = ExpertPlan(table_lp, 4)
    table_lp[0, 0] = 3
    for same in (make_plan(), make_plan(owners=[[0, 1, 2, 3]] * 2)):
        assert (plan, plan.digest, hash(plan)) == (same, same.digest, hash(same))
    for other in (make_plan([[0, 1, 2, 3, 0, -1], TABLE[1]]), make_plan(owners=OWNERS)):
        assert plan != other
        assert plan.digest != other.digest
        assert len({plan, other}) == 2
    assert plan != make_plan(num_experts=5)
    assert plan != "plan"
    with pytest.raises(ValueError, match="read-only"):
        plan.slot_to_expert_lp[0, 0] = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.num_experts = 5


def test_digest_is_four_letters_that_stay_the_same():
    """Users compare the logs of two runs by the digest."""
    assert ExpertPlan.home(1, 4).digest == "baed"
    transposed = np.asfortranarray(make_plan().slot_to_expert_lp)
    assert ExpertPlan(transposed, 4).digest == make_plan().digest


def test_placement_inverts_a_plan_without_replicas():
    plan = make_plan([[2, -1, 0, 3, 1, -1], [0, 1, 2, 3, 3, -1]])
    placement = Placement.from_plan(plan.validate(LAYOUT), LAYOUT)
    assert placement.slot_to_expert_lp is plan.slot_to_expert_lp
    assert placement.slot_lq.tolist() == [[2, 4, 0, 3, 1, 5], [0, 1, 2, 3, 4, 5]]
    assert placement.expert_lq.tolist() == [[0, 1, 2, 3, -1, -1], [0, 1, 2, 3, 3, -1]]
    assert placement.replica_lq[1].tolist() == [0, 0, 0, 0, 1, 0]
    assert placement.local_lq[1].tolist() == [0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("table", "owners", "needs"),
    [
        ([[0, 1, 0, 2, 3, -1]], None, (0, 0)),  # expert 0 twice at its owner
        ([[0, 1, 2, 2, 3, 0]], None, (1, 1)),
        ([[0, 1, 2, 3, 0, 1]], None, (2, 2)),
        ([[3, 2, 1, 0, -1, -1]], None, (2, 2)),
        ([[3, 2, -1, 0, 1, -1]], [[2, 3, 1, 0]], (0, 0)),  # each at its owner
        ([[0, 1, 0, 2, 3, -1], [0, 1, 2, 2, 3, 0]], None, (1, 1)),  # of two layers
    ],
)
def test_needs_are_the_most_that_one_device_offers_and_holds(table, owners, needs):
    """The needs are maxima over two devices, which own two experts each."""
    assert make_plan(table, owners=owners).needs(2)[:2] == needs


def test_a_plan_in_more_slots_has_empty_ones():
    plan = make_plan(owners=OWNERS)
    wide = plan.resized(make_layout("transient", 4))
    assert wide.slot_to_expert_lp.tolist() == [
        [0, 1, 0, -1, 2, 3, -1, -1],
        [3, 2, 1, -1, 0, -1, -1, -1],
    ]
    assert np.array_equal(wide.owned_le, plan.owned_le)
    assert wide.resized(LAYOUT) == plan
    sharded = plan.resized(make_layout("sharded", 4))
    assert sharded.validate(make_layout("sharded", 4)).is_logical


def test_a_plan_in_fewer_slots_loses_replicas_and_no_expert():
    """The home plan takes its place where an expert would have no slot, and under the
    store 'owned'."""
    layout, home_plan = make_layout("resident", 2, 2, 2), ExpertPlan.home_in
    narrow = make_plan([[0, 1, 0, 2, 3, 1]]).resized(layout)
    assert narrow.slot_to_expert_lp.tolist() == [[0, 1, 2, 3]]
    crowded = make_plan([[0, 1, 2, 3, -1, -1]])  # three experts on device 0
    assert crowded.resized(layout) == home_plan(layout, 1)
    owned = make_layout("owned", 2)
    assert make_plan(owners=OWNERS).resized(owned) == home_plan(owned, 2)
    rng = np.random.default_rng(3)
    for _ in range(20):
        rest = rng.integers(-1, 4, 4)
        row_p = rng.permutation(np.r_[np.arange(4), rest]).astype(np.int32)
        ExpertPlan(row_p[None], 4).resized(layout).validate(layout)
