"""Layouts: sizes that follow from the fields, and wrong fields."""

import dataclasses
import json

import pytest

from moejax.plan.layout import Layout, Topology, max_aligned_rows
from moejax.plan.parallel import Domain, Tensor

LAYOUT = Layout(
    num_experts=4, num_devices=2, slots_per_device=3, rows_per_peer=10,
    store="resident", offers_per_device=2, copies_per_device=3,
)  # fmt: skip
TRANSIENT = dataclasses.replace(LAYOUT, store="transient", slots_per_device=5)
"""Room for each own expert and each copy, as splits that make replicas need it."""


def changed(layout: Layout = LAYOUT, **fields) -> Layout:
    return dataclasses.replace(layout, **fields)


def test_a_topology_counts_devices_and_batch_shards():
    topology = Topology(dc=2, data=3, expert=4, tensor=5)
    assert topology.sizes == (2, 3, 4, 5)
    assert (topology.num_devices, topology.num_batch_shards) == (120, 24)


@pytest.mark.parametrize(
    ("num_devices", "assignments", "fields", "rows"),
    [
        (4, 1024, {}, 384),  # 1.5 * 1024 / 4 is a multiple of 8
        (4, 100, {}, 40),  # 37.5, rounded up
        (4, 128, {"buffer_factor": 1.0}, 32),
        (4, 129, {"buffer_factor": 1.0}, 40),
        (4, 5, {}, 5),  # a device has at most 5 rows for any peer
        (4, 100, {"halves": True}, 24),  # 18.75 in each half
        (4, 100, {"buffer_factor": 1e9}, 100),
        (4, 1024, {"top_k": 8}, 128),  # 8 of 8 experts: each token once to each device
        (4, 1024, {"top_k": 2}, 360),  # a quarter of 512 tokens twice, 11 / 28 once
        (4, 96, {"num_nodes": 2, "transport": "hierarchical"}, 80),  # of two sources
        (1, 100, {}, 100),  # a device knows what it sends itself
        (4, 100, {"domain": Domain((4,), (2,))}, 80),  # 75 for the other domain
    ],
)
def test_rows_per_peer_at_home(num_devices, assignments, fields, rows):
    """One device has nobody to send to, whatever transport is asked for."""
    fields = {"transport": "padded"} | fields
    if "num_nodes" in fields:
        fields["axes"] = ("dc", "expert")
    layout = Layout.home(8, num_devices, assignments, **fields)
    assert layout.rows_per_peer == rows
    transport = fields.get("transport", "padded")
    assert layout.transport == ("local" if num_devices == 1 else transport)
    assert (layout.slots_per_device, layout.num_slots) == (8 // num_devices, 8)


def test_the_members_of_domains_are_neighbours_along_the_shared_axes():
    """Data centres 0 and 1 form a domain for each index of the expert axis."""
    members = Domain((4, 2), (2, 1)).members()
    assert members == [[0, 2], [1, 3], [4, 6], [5, 7]]


@pytest.mark.parametrize(
    ("tensor", "inner", "parts", "gathered", "windows", "senders", "sources"),
    [
        (Tensor("s1", 2, 2), {}, 2, 1, 1, 8, 8),
        (Tensor("s1h", 2, 4), {"expert": 2}, 2, 1, 1, 16, 16),
        (Tensor("s2", 2, 2), {}, 1, 1, 2, 8, 4),
        (Tensor("base", 4, 2), {"tensor": 2}, 2, 2, 1, 4, 4),
        (Tensor("base", 2, 4), {"expert": 2}, 1, 4, 1, 4, 4),
        (Tensor("local", 2, 1), {}, 1, 1, 1, 1, 1),
    ],
)
def test_sizes_by_schedule(tensor, inner, parts, gathered, windows, senders, sources):
    """Numbers of a layer whose experts four owners split."""
    assert tensor.inner == inner
    assert (tensor.num_parts, tensor.num_gathered) == (parts, gathered)
    assert tensor.num_windows == windows
    assert (tensor.num_senders(4), tensor.num_sources(4)) == (senders, sources)


@pytest.mark.parametrize(
    ("rows", "groups", "multiple", "expected"),
    [(300, 3, 128, 640), (300, 3, 1, 300), (2, 3, 64, 128), (0, 3, 64, 0)],
)
def test_aligned_rows_are_the_most_that_groups_can_take(
    rows, groups, multiple, expected
):
    assert max_aligned_rows(rows, groups, multiple) == expected
    if multiple > 1:
        assert changed(align_rows=multiple).align_rows == multiple


@pytest.mark.parametrize(
    ("fields", "per_round", "per_slot"),
    [
        ({"rows_per_device": 64}, 8, 10),
        ({"rows_per_device": 10}, 2, 1),
        ({"rows_per_device": 64, "top_k": 4}, 3, 10),  # a row has 3 slots at most
        ({"rows_per_device": 400}, 10, 66),  # no more than in round 0
    ],
)
def test_rounds_and_capacity_follow_from_rows_per_device(fields, per_round, per_slot):
    layout = changed(**fields)
    assert (layout.rows_per_round, layout.rows_per_slot) == (per_round, per_slot)
    assert layout.computed_per_round == 2 * per_round * layout.max_choices


def test_buffers_hold_what_round_0_needs_of_devices():
    """A device computes a quarter of the 1024 choices of each of 4 sources."""
    sizes = {"transport": "padded", "top_k": 2}
    assert Layout.home(8, 4, 1024, **sizes).rows_per_device == 1536
    assert Layout.home(8, 4, 1024, 1e9, **sizes).rows_per_device == 4 * 512 * 2
    assert Layout(8, 4, 2, 16, top_k=4).rows_per_device == 4 * 16 * 2


def test_a_step_has_loops_where_the_buffer_may_not_carry_all_rows():
    assert not LAYOUT.has_loops(10)
    assert LAYOUT.has_loops(11)
    assert not changed(overflow="redo").has_loops(11)
    assert not changed(exchange="capacity").has_loops(11)
    assert changed(overflow="redo").with_rounds == LAYOUT


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: changed(num_experts=8), "2 x 3 slots .* at least 4"),
        (lambda: changed(rows_per_peer=0), "rows_per_peer=0 must be at least 1"),
        (lambda: changed(transport="local"), "transport='local' .* 2 devices"),
        (lambda: changed(transport="hierarchical"), "one mesh axis after the other"),
        (lambda: changed(axes=("data",)), "must be those of a group"),
        (lambda: Layout.home(60, 8, 64), r"num_experts=60 .* \(8\): use 56 or 64"),
        (lambda: Layout.home(3, 8, 64), "num_experts=3 .* use 8 or 16"),
        (lambda: changed(offers_per_device=3), "offers_per_device=3 .* the 2 experts"),
        (lambda: changed(copies_per_device=4), "copies_per_device=4 .* and 3 slots"),
        (lambda: changed(copies_per_device=-1), "copies_per_device=-1 .* not negative"),
        (lambda: changed(store="sharded"), "must be 0, and are 2 and 3"),
        (lambda: Layout.home(4, 2, 64, slots_per_device=3), "store='owned' .* has 6"),
        (lambda: changed(TRANSIENT, gather="step"), "gather='step' .*'transient'"),
        (lambda: changed(split="dynamic"), "split='dynamic' .* not 'resident'"),
        (lambda: changed(TRANSIENT, split="dynamic", offers_per_device=0),
         "at least 1, and they are 0 and 3: 2 of each are always enough"),
        (lambda: changed(TRANSIENT, split="dynamic", exchange="capacity"),
         "exchange='capacity' they would decide"),
        (lambda: changed(TRANSIENT, split="dynamic", slots_per_device=4),
         "slots_per_device=4: use 5"),
        (lambda: changed(split="top_up", top_up_copies=1),
         "at least 1, and they are 1 and 0: use split='water_filling'"),
        (lambda: changed(split="top_up", top_up_copies=1, top_up_offers=4),
         r"\(0, 1, 4\) must be at most \(1048576, 4, 3\)"),
        (lambda: changed(split="top_up", top_up_copies=1, top_up_offers=1,
                         exchange="capacity"), "copies would decide which rows"),
        (lambda: changed(fp8="e3m4"), "fp8='e3m4' must be 'none', 'e4m3' or 'e5m2'"),
        (lambda: changed(kernels="fast"), "kernels='fast' must be"),
        (lambda: changed(align_rows=96), "align_rows=96 must be 1, 64 or 128"),
        (lambda: changed(rows_per_device=5, exchange="capacity"),
         "rows_per_device=5 is less than one row from each of 2 sources"),
        (lambda: changed(exchange="capacity", overflow="redo"), "overflow='redo'"),
        (lambda: Layout(4, 2, 2, 8, domain=Domain((4,), (2,))), "axis sizes"),
        (lambda: Layout(4, 2, 2, 8, transport="ragged", tensor=Tensor("s2", 2, 2)),
         "transport='ragged' works with"),
        (lambda: Layout(4, 2, 2, 9, tensor=Tensor("s2", 2, 2)), "use a multiple of 2"),
        (lambda: Layout(4, 2, 2, 8, axes=("tensor",), tensor=Tensor("local", 2, 1)),
         "store='owned' and transport='local', not"),
    ],
)  # fmt: skip
def test_wrong_fields_are_refused_in_one_line(make, words):
    with pytest.raises(ValueError, match=words) as error:
        make()
    assert "\n" not in str(error.value)


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
