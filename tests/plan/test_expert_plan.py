"""Expert plans: validity and all errors, needs of copies, changes of slots, JSON."""

import dataclasses
import json

import numpy as np
import pytest

from moejax.moe.types import Placement
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout

LAYOUT = Layout(
    num_experts=4,
    num_devices=2,
    slots_per_device=3,
    rows_per_peer=10,
    store="resident",
    offers_per_device=2,
    copies_per_device=3,
)
# 4 experts in 6 slots of 2 devices: expert 0 has two replicas, slot 5 is empty.
TABLE = [[0, 1, 0, 2, 3, -1], [3, 2, 1, 0, -1, -1]]
OWNERS = [[2, 0, 3, 1], [0, 1, 2, 3]]


def make_plan(
    table=TABLE, num_experts=4, dtype=np.int32, owners=None, owner_dtype=np.int32
) -> ExpertPlan:
    owned_le = None if owners is None else np.array(owners, owner_dtype)
    return ExpertPlan(np.array(table, dtype), num_experts, owned_le)


def make_layout(store: str, slots: int = 3, **kwargs) -> Layout:
    return Layout(4, 2, slots, 10, store=store, **kwargs)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: make_plan(dtype=np.int64).validate(),
            ["slot_to_expert_lp must be int32 of two dims", "int64 [2, 6]"],
        ),
        (
            lambda: make_plan(TABLE[0]).validate(),
            ["slot_to_expert_lp must be int32 of two dims", "int32 [6]"],
        ),
        (
            lambda: make_plan([[0, 1, 2, 4]]).validate(),
            ["experts 0..3 or -1 (empty)", "hold 0..4"],
        ),
        (
            lambda: make_plan([[0, 1, 2, 3, -2]]).validate(),
            ["experts 0..3 or -1 (empty)", "hold -2..3"],
        ),
        (
            lambda: make_plan([TABLE[0], [0, 0, 1, 1, -1, -1]]).validate(),
            ["layer 1", "experts [2, 3]", "every expert needs one"],
        ),
        (
            lambda: make_plan().validate(Layout.home(4, 2, 64)),
            ["4 experts in 6 slots", "the layout has 4 in 4"],
        ),
        (
            lambda: make_plan().validate(Layout(2, 2, 3, 8, store="sharded")),
            ["4 experts in 6 slots", "the layout has 2 in 6"],
        ),
        (
            lambda: ExpertPlan.from_json(
                '{"num_experts": 3, "slot_to_expert_lp": [[0, 1, 1]]}'
            ),
            ["layer 0", "experts [2]"],
        ),
        (
            lambda: make_plan(owners=OWNERS, owner_dtype=np.int64).validate(),
            ["owned_le must be int32 of two dims", "int64 [2, 4]"],
        ),
        (
            lambda: make_plan(owners=[[0, 1, 2, 2], [0, 1, 2, 3]]).validate(),
            ["owned_le", "every expert once", "[2, 4]"],
        ),
        (
            lambda: make_plan(owners=OWNERS[:1]).validate(),
            ["owned_le", "every expert once", "[2, 4]"],
        ),
        (
            lambda: make_plan([[0, 2, 1, 3]]).validate(make_layout("owned", 2)),
            ["store='owned'", "the same permutation"],
        ),
        (
            lambda: make_plan(owners=OWNERS).validate(make_layout("sharded")),
            ["store='sharded'", "no owners", "leave owned_le out"],
        ),
        (
            lambda: make_plan().validate(
                make_layout("transient", offers_per_device=1, copies_per_device=1)
            ),
            [
                "offers_per_device=2 and copies_per_device=2",
                "the layout has 1 and 1",
                "compile a layout with larger budgets, or plan fewer copies",
            ],
        ),
    ],
)
def test_complaint_is_one_line_that_says_what_is_wrong(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_home_plan():
    plan = ExpertPlan.home(2, 4)
    assert plan.slot_to_expert_lp.tolist() == [[0, 1, 2, 3]] * 2
    assert (plan.num_layers, plan.num_slots, plan.is_home) == (2, 4, True)
    assert plan.validate(Layout.home(4, 2, 64)) is plan
    assert not make_plan().is_home
    assert not make_plan([[1, 0, 2, 3]]).is_home


def test_validate_takes_replicas_and_empty_slots():
    plan = make_plan()
    assert plan.validate(LAYOUT) is plan


def test_moves_leads_from_one_plan_to_the_other():
    """Each row names a slot and the expert that it receives; emptied slots have
    none."""
    old, new = make_plan(), make_plan([[0, 1, 2, 2, 3, 0], [3, 2, -1, 0, -1, 1]])
    moves_m3 = old.moves(new)
    assert moves_m3.tolist() == [[0, 2, 2], [0, 5, 0], [1, 5, 1]]
    assert moves_m3.dtype == np.int32
    table_lp = old.slot_to_expert_lp.copy()
    for layer, slot, expert in moves_m3:
        table_lp[layer, slot] = expert
    filled_lp = new.slot_to_expert_lp >= 0
    np.testing.assert_array_equal(table_lp[filled_lp], new.slot_to_expert_lp[filled_lp])
    assert old.moves(old).shape == (0, 3)


def test_json_round_trip():
    plan = make_plan()
    again = ExpertPlan.from_json(plan.to_json())
    assert again == plan
    assert again.slot_to_expert_lp.dtype == np.int32
    assert "owned_le" not in json.loads(plan.to_json())


def test_json_round_trip_of_owners():
    plan = make_plan(owners=OWNERS)
    again = ExpertPlan.from_json(plan.to_json())
    assert again == plan
    assert again.owned_le.dtype == np.int32
    assert not again.is_logical
    damaged = plan.to_json().replace("[2, 0, 3, 1]", "[2, 0, 3, 3]")
    with pytest.raises(ValueError, match="every expert once"):
        ExpertPlan.from_json(damaged)


def test_owners_tell_plans_apart():
    """Owners count in equality, as a key and in logs. Logical order is the default."""
    plan, other = make_plan(), make_plan(owners=OWNERS)
    assert plan != other
    assert plan.digest != other.digest
    assert len({plan, other}) == 2
    logical = make_plan(owners=[[0, 1, 2, 3]] * 2)
    assert (plan, plan.digest, hash(plan)) == (logical, logical.digest, hash(logical))


def test_plans_are_equal_by_value():
    plan, same, other = (
        make_plan(),
        make_plan(),
        make_plan([[0, 1, 2, 3, 0, -1], TABLE[1]]),
    )
    assert plan == same
    assert hash(plan) == hash(same)
    assert plan.digest == same.digest
    assert plan != other
    assert plan.digest != other.digest
    assert plan != make_plan(num_experts=5)
    assert plan != "plan"
    assert len({plan, same, other}) == 2


def test_digest_is_four_letters_that_stay_the_same():
    """Users compare the logs of two runs by the digest."""
    assert ExpertPlan.home(1, 4).digest == "baed"
    transposed = np.asfortranarray(make_plan().slot_to_expert_lp)
    assert ExpertPlan(transposed, 4).digest == make_plan().digest


def test_plan_is_immutable():
    """A plan is a dict key: its fields and the array that made it cannot change it."""
    table_lp = np.array(TABLE, np.int32)
    plan = ExpertPlan(table_lp, 4)
    table_lp[0, 0] = 3
    assert plan == make_plan()
    with pytest.raises(ValueError, match="read-only"):
        plan.slot_to_expert_lp[0, 0] = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.num_experts = 5


def test_placement_inverts_a_plan_without_replicas():
    plan = make_plan([[2, -1, 0, 3, 1, -1], [0, 1, 2, 3, 3, -1]])
    placement = Placement.from_plan(plan.validate(LAYOUT), LAYOUT)
    assert placement.slot_to_expert_lp is plan.slot_to_expert_lp
    assert placement.slot_lq.tolist() == [[2, 4, 0, 3, 1, 5], [0, 1, 2, 3, 4, 5]]
    assert placement.expert_lq.tolist() == [[0, 1, 2, 3, -1, -1], [0, 1, 2, 3, 3, -1]]
    assert placement.replica_lq[1].tolist() == [0, 0, 0, 0, 1, 0]
    assert placement.local_lq[1].tolist() == [0, 0, 0, 0, 1, 0]


def test_needs_are_the_most_that_one_device_offers_and_holds():
    """The needs are maxima over two devices, which own two experts each."""
    assert make_plan([[0, 1, 0, 2, 3, -1]]).needs(2) == (
        0,
        0,
    )  # expert 0 twice at its owner
    assert make_plan([[0, 1, 2, 2, 3, 0]]).needs(2) == (1, 1)
    assert make_plan([[0, 1, 2, 3, 0, 1]]).needs(2) == (2, 2)
    assert make_plan([[3, 2, 1, 0, -1, -1]]).needs(2) == (2, 2)
    # With these owners, the first plan has no copies.
    assert make_plan([[3, 2, -1, 0, 1, -1]], owners=[[2, 3, 1, 0]]).needs(2) == (0, 0)
    both = make_plan([[0, 1, 0, 2, 3, -1], [0, 1, 2, 2, 3, 0]])
    assert both.needs(2) == (1, 1)


def test_a_plan_in_more_slots_has_empty_ones():
    plan = make_plan(owners=OWNERS)
    wide = plan.resized(make_layout("transient", 4))
    assert wide.slot_to_expert_lp.tolist() == [
        [0, 1, 0, -1, 2, 3, -1, -1],
        [3, 2, 1, -1, 0, -1, -1, -1],
    ]
    assert np.array_equal(wide.owned_le, plan.owned_le)
    assert wide.resized(LAYOUT) == plan


def test_a_plan_in_fewer_slots_loses_replicas_and_no_expert():
    layout = make_layout("resident", 2, offers_per_device=2, copies_per_device=2)
    narrow = make_plan([[0, 1, 0, 2, 3, 1]]).resized(layout)
    assert narrow.slot_to_expert_lp.tolist() == [[0, 1, 2, 3]]
    rng = np.random.default_rng(3)
    for _ in range(20):
        rest = rng.integers(-1, 4, 4)
        row_p = rng.permutation(np.r_[np.arange(4), rest]).astype(np.int32)
        ExpertPlan(row_p[None], 4).resized(layout).validate(layout)


def test_where_slots_do_not_do_the_plan_is_home():
    crowded = make_plan([[0, 1, 2, 3, -1, -1]])  # three experts on device 0
    layout = make_layout("resident", 2, offers_per_device=2, copies_per_device=2)
    assert crowded.resized(layout) == ExpertPlan.home_in(layout, 1)
    owned = make_layout("owned", 2)
    assert make_plan(owners=OWNERS).resized(owned) == ExpertPlan.home_in(owned, 2)


def test_a_sharded_plan_has_no_owners():
    plan = make_plan(owners=OWNERS).resized(make_layout("sharded", 4))
    assert plan.is_logical
    assert plan.validate(make_layout("sharded", 4)) is plan


def test_home_in_more_slots():
    plan = ExpertPlan.home_in(LAYOUT, 1).validate(LAYOUT)
    assert plan.slot_to_expert_lp.tolist() == [[0, 1, -1, 2, 3, -1]]
    assert plan.needs(2) == (0, 0)
    assert not plan.is_home
    assert plan.is_logical
