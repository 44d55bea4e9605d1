"""The treaty between host and device: shapes, limits and every complaint."""

import dataclasses

import numpy as np
import pytest

from moejax.layout import ROW_MULTIPLE, Layout, Topology
from moejax.plan import ExpertPlan
from moejax.types import Placement

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


def plan_of(table=TABLE, num_experts=4, dtype=np.int32) -> ExpertPlan:
    return ExpertPlan(np.array(table, dtype), num_experts)


def test_topology_counts_devices_and_names_its_axes():
    topology = Topology(dc=2, data=3, expert=4, tensor=5)
    assert topology.sizes == (2, 3, 4, 5)
    assert topology.num_devices == 120
    assert topology.num_batch_shards == 24
    assert str(topology) == "dc=2, data=3, expert=4, tensor=5"
    assert Topology().num_devices == 1


@pytest.mark.parametrize(
    ("assignments", "factor", "rows"),
    [
        (1024, 1.5, 384),  # 1.5 * 1024 / 4, a multiple of 8 already
        (100, 1.5, 40),  # 37.5, rounded up
        (128, 1.0, 32),
        (129, 1.0, 40),
        (5, 1.5, 5),  # one device has no more than 5 rows for anybody
    ],
)
def test_home_rows_per_peer(assignments, factor, rows):
    layout = Layout.home(8, 4, assignments, buffer_factor=factor)
    assert layout.rows_per_peer == rows
    even_share = factor * assignments / 4
    assert layout.rows_per_peer >= min(even_share, assignments)
    assert layout.rows_per_peer % ROW_MULTIPLE == 0 or rows == assignments
    assert (layout.slots_per_device, layout.num_slots) == (2, 8)
    assert (layout.transport, layout.exchange) == ("padded", "exact")


def test_home_takes_rows_per_peer_as_given_up_to_all_assignments():
    assert Layout.home(8, 4, 100, rows_per_peer=3).rows_per_peer == 3
    assert Layout.home(8, 4, 100, rows_per_peer=1000).rows_per_peer == 100


def test_home_on_one_device_is_local_and_holds_every_row():
    """No factor and no padding: what one device sends itself is known exactly."""
    for assignments in (8, 100):
        layout = Layout.home(8, 1, assignments, transport="padded")
        assert (layout.transport, layout.rows_per_peer) == ("local", assignments)


def test_home_passes_transport_and_exchange_on():
    layout = Layout.home(8, 4, 64, transport="ragged", exchange="capacity")
    assert (layout.transport, layout.exchange) == ("ragged", "capacity")


@pytest.mark.parametrize(
    ("rows_per_peer", "per_round", "per_slot"),
    [(64, 16, 21), (10, 3, 3), (4, 1, 1), (1, 1, 1)],
)
def test_rounds_and_capacity_follow_from_rows_per_peer(
    rows_per_peer, per_round, per_slot
):
    layout = dataclasses.replace(LAYOUT, rows_per_peer=rows_per_peer)
    assert layout.rows_per_round == per_round
    assert layout.rows_per_slot == per_slot


def test_layouts_are_keys():
    """A compiled step is found by its layout."""
    again = dataclasses.replace(LAYOUT)
    assert {LAYOUT: "step"}[again] == "step"
    assert dataclasses.replace(LAYOUT, rows_per_peer=11) != LAYOUT


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: dataclasses.replace(LAYOUT, num_experts=8),
            ["2 x 3 slots", "num_experts=8", "slots_per_device to at least 4"],
        ),
        (
            lambda: dataclasses.replace(LAYOUT, rows_per_peer=0),
            ["rows_per_peer=0", "at least 1"],
        ),
        (
            lambda: dataclasses.replace(LAYOUT, transport="local"),
            ["transport='local'", "2 devices", "'padded' or 'ragged'"],
        ),
        (
            lambda: Layout.home(60, 8, 64),
            ["num_experts=60", "expert axis (8)", "use 56 or 64"],
        ),
        (lambda: Layout.home(3, 8, 64), ["num_experts=3", "use 8 or 16"]),
        (
            lambda: plan_of(dtype=np.int64).validate(),
            ["must be int32 [layers, slots]", "int64 [2, 6]"],
        ),
        (
            lambda: plan_of(TABLE[0]).validate(),
            ["must be int32 [layers, slots]", "int32 [6]"],
        ),
        (
            lambda: plan_of([[0, 1, 2, 4]]).validate(),
            ["experts 0..3 or -1 (empty)", "hold 0..4"],
        ),
        (
            lambda: plan_of([[0, 1, 2, 3, -2]]).validate(),
            ["experts 0..3 or -1 (empty)", "hold -2..3"],
        ),
        (
            lambda: plan_of([TABLE[0], [0, 0, 1, 1, -1, -1]]).validate(),
            ["layer 1", "experts [2, 3]", "every expert needs one"],
        ),
        (
            lambda: plan_of().validate(Layout.home(4, 2, 64)),
            ["4 experts in 6 slots", "the layout 4 in 4"],
        ),
        (
            lambda: plan_of().validate(Layout(2, 2, 3, 8, store="sharded")),
            ["4 experts in 6 slots", "the layout 2 in 6"],
        ),
        (
            lambda: ExpertPlan.from_json(
                '{"num_experts": 3, "slot_to_expert_lp": [[0, 1, 1]]}'
            ),
            ["layer 0", "experts [2]"],
        ),
    ],
)
def test_complaint_names_the_rule_the_value_and_what_to_do(make, words):
    with pytest.raises(ValueError) as error:
        make()
    for word in words:
        assert word in str(error.value)


def test_home_plan():
    plan = ExpertPlan.home(2, 4)
    assert plan.slot_to_expert_lp.tolist() == [[0, 1, 2, 3]] * 2
    assert (plan.num_layers, plan.num_slots, plan.is_home) == (2, 4, True)
    assert plan.validate(Layout.home(4, 2, 64)) is plan
    assert not plan_of().is_home
    assert not plan_of([[1, 0, 2, 3]]).is_home


def test_validate_takes_replicas_and_empty_slots():
    plan = plan_of()
    assert plan.validate(LAYOUT) is plan


def test_moves_leads_from_one_plan_to_the_other():
    """Each row says which slot receives which expert; emptied slots receive nothing."""
    old, new = plan_of(), plan_of([[0, 1, 2, 2, 3, 0], [3, 2, -1, 0, -1, 1]])
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
    plan = plan_of()
    again = ExpertPlan.from_json(plan.to_json())
    assert again == plan
    assert again.slot_to_expert_lp.dtype == np.int32


def test_plans_are_equal_by_value():
    plan, same, other = plan_of(), plan_of(), plan_of([[0, 1, 2, 3, 0, -1], TABLE[1]])
    assert plan == same
    assert hash(plan) == hash(same)
    assert plan.digest == same.digest
    assert plan != other
    assert plan.digest != other.digest
    assert plan != plan_of(num_experts=5)
    assert plan != "plan"
    assert len({plan, same, other}) == 2


def test_digest_is_four_letters_that_stay_the_same():
    """Logs of two runs are compared by it."""
    assert ExpertPlan.home(1, 4).digest == "baed"
    transposed = np.asfortranarray(plan_of().slot_to_expert_lp)
    assert ExpertPlan(transposed, 4).digest == plan_of().digest


def test_plan_is_immutable():
    """A plan is a key: neither its fields nor the array that made it change it."""
    table_lp = np.array(TABLE, np.int32)
    plan = ExpertPlan(table_lp, 4)
    table_lp[0, 0] = 3
    assert plan == plan_of()
    with pytest.raises(ValueError, match="read-only"):
        plan.slot_to_expert_lp[0, 0] = 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.num_experts = 5


def test_placement_inverts_a_plan_without_replicas():
    plan = plan_of([[2, -1, 0, 3, 1, -1], [0, 1, 2, 3, 3, -1]])
    placement = Placement.of_plan(plan.validate(LAYOUT), LAYOUT)
    assert placement.slot_to_expert_lp is plan.slot_to_expert_lp
    assert placement.slot_lq.tolist() == [[2, 4, 0, 3, 1, 5], [0, 1, 2, 3, 4, 5]]
    assert placement.expert_lq.tolist() == [[0, 1, 2, 3, -1, -1], [0, 1, 2, 3, 3, -1]]
    assert placement.replica_lq[1].tolist() == [0, 0, 0, 0, 1, 0]
    assert placement.local_lq[1].tolist() == [0, 0, 0, 0, 1, 0]


def test_capacity_mode_needs_a_row_for_each_slot():
    with pytest.raises(ValueError, match=r"rows_per_peer=2 .* 3 slots: raise"):
        Layout(
            num_experts=4,
            num_devices=2,
            slots_per_device=3,
            rows_per_peer=2,
            exchange="capacity",
            store="sharded",
        )
