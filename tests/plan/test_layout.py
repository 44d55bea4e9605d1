"""Layouts: shapes, limits and all errors."""

import dataclasses
import json

import pytest

from moejax.plan.layout import ROW_MULTIPLE, Layout, Topology
from moejax.plan.parallel import Domain, Tensor

LAYOUT = Layout(
    num_experts=4,
    num_devices=2,
    slots_per_device=3,
    rows_per_peer=10,
    store="resident",
    offers_per_device=2,
    copies_per_device=3,
)


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
        (1024, 1.5, 384),  # 1.5 * 1024 / 4 is a multiple of 8
        (100, 1.5, 40),  # 37.5, rounded up
        (128, 1.0, 32),
        (129, 1.0, 40),
        (5, 1.5, 5),  # a device has at most 5 rows for any peer
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


def test_chunks_at_home_hold_all_rows_of_a_device_and_no_more():
    sizes = {"rows_per_peer": 30, "split": "local_first"}
    chunks = [Layout.home(8, 4, 100, home_chunks=n, **sizes) for n in (1, 3, 9)]
    assert [layout.home_chunks for layout in chunks] == [1, 3, 4]
    assert [layout.num_chunks for layout in chunks] == [4, 6, 7]
    assert chunks[-1].num_sorted_rows(30) == 210
    assert Layout.home(8, 1, 100, home_chunks=9).home_chunks == 1


def test_home_takes_rows_per_peer_as_given_up_to_all_assignments():
    assert Layout.home(8, 4, 100, rows_per_peer=3).rows_per_peer == 3
    assert Layout.home(8, 4, 100, rows_per_peer=1000).rows_per_peer == 100


def test_home_on_one_device_is_local_and_holds_every_row():
    """Buffers have neither a factor nor padding: a device knows what it sends
    itself."""
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


def test_a_step_has_loops_where_the_buffer_may_not_carry_all_rows():
    layout = Layout.home(8, 4, 64)
    rows = layout.rows_per_peer
    assert not layout.has_loops(rows)
    assert layout.has_loops(rows + 1)
    assert not dataclasses.replace(layout, overflow="redo").has_loops(rows + 1)


def test_layouts_are_keys():
    """A layout is the key of a compiled step."""
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
            lambda: dataclasses.replace(LAYOUT, offers_per_device=3),
            ["offers_per_device=3", "at most the 2 experts and 3 slots"],
        ),
        (
            lambda: dataclasses.replace(LAYOUT, copies_per_device=-1),
            ["copies_per_device=-1", "not negative"],
        ),
        (
            lambda: dataclasses.replace(LAYOUT, store="sharded"),
            ["store='sharded' has no copies", "must be 0, and are 2 and 3"],
        ),
        (
            lambda: Layout.home(4, 2, 64, slots_per_device=3),
            ["store='owned'", "the layout has 6", "'transient'"],
        ),
        (
            lambda: dataclasses.replace(LAYOUT, store="transient", gather="step"),
            ["gather='step'", "'transient'", "'owned' or 'resident'", "'layer'"],
        ),
        (
            lambda: Layout(
                4, 2, 2, 8, gather="step", domain=Domain((2,), (2,)), transport="local"
            ),
            ["gather='step'", "domain=(2,)", "'layer'"],
        ),
        (
            lambda: Layout(4, 2, 2, 8, store="resident", split="dynamic"),
            ["split='dynamic'", "store='transient'", "'resident'"],
        ),
        (
            lambda: Layout(4, 2, 2, 8, store="transient", split="dynamic"),
            ["split='dynamic'", "offers_per_device", "0 and 0", "2 of each"],
        ),
        (
            lambda: Layout(4, 2, 4, 8, store="transient", split="dynamic",
                           offers_per_device=1, copies_per_device=1),
            ["split='dynamic'", "slots_per_device=4", "use 3"],
        ),
        (
            lambda: Layout(4, 2, 2, 8, fp8="e3m4"),
            ["fp8='e3m4'", "'none', 'e4m3' or 'e5m2'"],
        ),
        (
            lambda: Layout(4, 2, 2, 8, align_rows=96),
            ["align_rows=96", "must be 1, 64 or 128"],
        ),
    ],
)  # fmt: skip
def test_complaint_names_the_rule_the_value_and_what_to_do(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


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


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"domain": Domain((2, 2), (1, 2)), "axes": ("dc", "expert")},
        {"tensor": Tensor("s1h", 2, 2)},
    ],
)
def test_a_layout_comes_back_from_the_json_of_its_fields(fields):
    layout = Layout(8, 4, 2, 16, **fields)
    record = json.loads(json.dumps(dataclasses.asdict(layout)))
    assert Layout.from_record(record) == layout
