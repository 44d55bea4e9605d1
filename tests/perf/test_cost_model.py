"""The cost model: each term by hand, a published figure, and calibrations."""

import dataclasses

import numpy as np
import pytest

from moejax.perf.calibration import Calibration, leaving_bytes
from moejax.perf.cost_model import NOTES, CostModel, cost_model, tight
from moejax.perf.traffic import device_rows, pair_rows, rows_by_slot
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.plan.parallel import Domain, Tensor
from tests.support.calibrations import KINDS, line

# A row of 10 FLOPs and 2 bytes at 100 FLOP/s and 4 bytes/s: compute 0.1 s, send 0.5 s.
COST = CostModel(
    flops_per_row=10, bytes_per_row=2, bytes_per_expert=40, bytes_per_move=120,
    flops_per_sec=100, bytes_per_sec=4,
)  # fmt: skip
PAIR_WW = np.array([[5.0, 1, 2], [3, 9, 0], [4, 4, 1]])


@pytest.fixture(autouse=True)
def no_cards(monkeypatch):
    """Cards would outweigh rows of two bytes (tests/resolve/test_sent_bytes.py)."""
    monkeypatch.setattr("moejax.perf.cost_model.CARD_BYTES", 0)


def make_layout(store="owned", slots=2, transport="ragged", **kwargs) -> Layout:
    return Layout(6, 3, slots, 3, transport=transport, store=store, **kwargs)


PADDED = make_layout(transport="padded")
COPIED, FETCHED = (
    make_layout(store, 4, offers_per_device=1, copies_per_device=2)
    for store in ("resident", "transient")
)
ONE_SEC = 40 / 4 * 2 / 3
"""Time of one expert one way: two thirds of it go to or come from others."""


@pytest.mark.parametrize(
    ("layout", "changes", "seconds"),
    [
        # Devices send 3, 3 and 8 rows to others and receive 7, 5 and 2.
        (make_layout(), {}, 8 * 0.5),
        # The fullest pair has 9 rows: 3 in round 0, then 1 in each of 6 rounds.
        (make_layout(), {"latency_sec": 0.25}, 8 * 0.5 + 7 * 0.25),
        (PADDED, {"latency_sec": 0.25}, 2 * (3 + 6) * 0.5 + 7 * 0.25),
        # With another split it is in no buffer, but a device can compute 9 rows:
        # 4 of 9, and later the other 5 in rounds of ceil(9 / 4 / 3) = 1.
        (make_layout(split="local_first"), {"latency_sec": 0.25}, 8 * 0.5 + 6 * 0.25),
        (dataclasses.replace(PADDED, exchange="capacity"), {"latency_sec": 0.25},
         2 * 3 * 0.5 + 0.25),
        # At most one row per pair and micro-batch: it fits into round 0 of each.
        (make_layout(), {"latency_sec": 0.25, "micro_batches": 7}, 8 * 0.5 + 7 * 0.25),
        (PADDED, {"latency_sec": 0.25, "micro_batches": 7}, 7 * (2 * 3 * 0.5 + 0.25)),
    ],
)  # fmt: skip
def test_wires_by_transport(layout, changes, seconds):
    """Ragged rows take the most sent or received off a device, and padded ones whole
    buffers. The pair with most rows left decides the rounds."""
    cost = dataclasses.replace(COST, **changes)
    assert cost.rows_sec(PAIR_WW, layout) == pytest.approx(4 * seconds)
    if layout.exchange == "exact" and layout.transport == "padded":
        empty_sec = cost.micro_batches * (2 * 3 * 0.5 + 0.25)
        none_ww = np.zeros((3, 3))
        assert cost.rows_sec(none_ww, layout) == pytest.approx(4 * empty_sec)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_counted_rows_give_the_time_of_the_load(micro_batches):
    """The time from the rows that a step counts is that from its load, where the load
    is the same in every micro-batch; the step has the rest of its blocks too."""
    cost = dataclasses.replace(
        COST, latency_sec=0.25, micro_batches=micro_batches, other_sec=0.5, remat="full"
    )
    rng = np.random.default_rng(2)
    layout = dataclasses.replace(FETCHED, transport="padded", rows_per_device=1000)
    plan = ExpertPlan.home_in(layout, 2)
    load_lwe = rng.poisson(40, (2, 3, 6)).astype(float) * micro_batches
    rows = [
        rows_by_slot(load_we, row_p, 3, "even")
        for load_we, row_p in zip(load_lwe, plan.slot_to_expert_lp)
    ]
    fullest_device_l = np.array([device_rows(x).max() for x in rows])
    fullest_pair_l = np.array([pair_rows(x).max() for x in rows]) / micro_batches
    mean_l = np.array([device_rows(x).mean() for x in rows])
    counts = mean_l, fullest_device_l, fullest_pair_l, layout
    parts = cost.counted_step_parts(*counts, num_blocks=5)
    assert parts.total - parts.blocks == pytest.approx(
        cost.step_sec(load_lwe, plan, layout)
    )
    shared = cost.step_parts(load_lwe, plan, layout, num_blocks=5)
    assert dataclasses.astuple(shared) == pytest.approx(dataclasses.astuple(parts))
    # forward, backward twice as long, forward again
    assert parts.blocks == pytest.approx(5 * micro_batches * 4 * 0.5)
    row_sec = cost.flops_per_row / cost.flops_per_sec
    assert parts.experts == pytest.approx(4 * mean_l.sum() * row_sec)
    waits = (fullest_device_l - mean_l).sum()
    assert waits > 0
    assert parts.wait == pytest.approx(4 * waits * row_sec)
    sync = [cost.sync_sec(layout, x * row_sec) for x in fullest_device_l]
    assert parts.copies == pytest.approx(sum(sync))


@pytest.mark.parametrize(
    ("layout", "changes", "seconds"),
    [
        (make_layout(), {}, 0),
        (COPIED, {}, 2 * 3 * ONE_SEC),
        (COPIED, {"micro_batches": 2}, 2 * 3 * ONE_SEC),
        (FETCHED, {"micro_batches": 2}, 2 * 2 * 3 * ONE_SEC),
        (make_layout("sharded", 4), {}, 2 * 4 * ONE_SEC),
        (make_layout("resident", 4), {"bytes_per_expert": np.inf}, 0),
    ],
)
def test_sync_by_store(layout, changes, seconds):
    cost = dataclasses.replace(COST, **changes)
    assert cost.sync_sec(layout) == pytest.approx(seconds)


def test_slots_are_gathered_in_each_micro_batch_or_once():
    """With remat the backward pass gathers again; gradients are scattered once."""
    cost = dataclasses.replace(COST, micro_batches=4, gather_sec=0.5, remat="full")
    each, once = make_layout(), make_layout(gather="step")
    assert cost.num_gathers(each) == (2 * 4 * 2, 4 * 2)
    assert cost.num_gathers(once) == (2, 2)
    assert cost.weight_terms(each).sec == pytest.approx(24 * 0.5)
    load_we, row_p = np.ones((3, 6)), np.arange(6)
    saved = cost.layer_sec(load_we, row_p, each) - cost.layer_sec(load_we, row_p, once)
    assert saved == pytest.approx(20 * 0.5)


@pytest.mark.parametrize(
    ("forward_sec", "seconds"), [(12, 20 - 15), (4, 20 - 7 + 20 - 14), (100, 0)]
)
def test_prefetched_copies_hide_under_the_block(forward_sec, seconds):
    """Forward (12 s) and attention (3 s) hide 15 of 20 s out; backward (30 s) hides
    20 s back. Nothing hides where collectives are serial."""
    layout, cost = (
        dataclasses.replace(FETCHED, prefetch=True),
        dataclasses.replace(COST, other_sec=3),
    )
    assert cost.sync_sec(layout, forward_sec) == pytest.approx(seconds)
    serial = dataclasses.replace(cost, overlaps=False)
    assert serial.sync_sec(layout, forward_sec) == pytest.approx(40)


def test_prefetched_gathers_over_data_hide_too():
    """Forward (12 s) hides 12 of 20 s of gathers. With remat the backward pass has 36 s
    of work, for 20 s of gathers and 20 s of gradients."""
    cost = dataclasses.replace(COST, gather_sec=5, remat="full", bytes_per_expert=0.0)
    layout = make_layout("sharded", 4)
    assert cost.sync_sec(layout, 12) == pytest.approx(3 * 20)
    ahead = dataclasses.replace(layout, prefetch=True)
    assert cost.sync_sec(ahead, 12) == pytest.approx(8 + 4)
    assert cost.sync_sec(ahead, 20) == 0


def test_a_layer_by_hand():
    """Expert 0 has 12 rows from device 0, and two replicas on devices 0 and 2."""
    load_we = np.zeros((3, 6))
    load_we[0, 0], load_we[1, 2] = 12, 4
    row_p = np.array([0, 1, -1, 2, 3, -1, 4, 5, 0])
    layout = make_layout("resident", 3, offers_per_device=1, copies_per_device=1)
    compute, wire = 6 * 0.1, 6 * 0.5
    sync = 2 * 2 * 40 / 4 * 2 / 3
    want = 3 * compute + 4 * wire + sync
    assert COST.layer_sec(load_we, row_p, layout) == pytest.approx(want)
    plan = ExpertPlan(np.stack([row_p, row_p]).astype(np.int32), 6).validate(layout)
    load_lwe = np.stack([load_we, 0 * load_we])
    assert COST.step_sec(load_lwe, plan, layout) == pytest.approx(want + sync)


def test_moves_charge_the_busiest_device_and_only_new_owners():
    layout = make_layout()
    home = ExpertPlan.home(2, 6)
    assert COST.move_sec(home, home, layout) == 0
    free = dataclasses.replace(COST, bytes_per_move=float("inf"))
    assert free.move_sec(home, home, layout) == 0
    owned = np.array([[2, 3, 0, 1, 4, 5], [0, 1, 2, 4, 3, 5]], np.int32)
    moved = ExpertPlan(owned, 6, owned)  # layer 0: two each way; layer 1: one each way
    # There are two rounds and one; in each, a device scatters and gathers one expert.
    assert COST.move_sec(home, moved, layout) == pytest.approx(3 * 2 * 2 / 3 * 120 / 4)
    copies = ExpertPlan(np.array([[0, 1, 2, 2, 3, -1, 4, 5, 0]] * 2, np.int32), 6)
    assert COST.move_sec(home, copies, layout) == 0


def test_a_change_between_lying_by_expert_and_by_width_moves_everything_once():
    home, by_width = ExpertPlan.home(2, 6), make_layout("sharded")
    all_sec = 2 * 2 * 2 / 3 * 120 / 4  # layers x experts per device x share that leaves
    assert COST.move_sec(home, home, by_width, make_layout()) == pytest.approx(all_sec)
    assert COST.move_sec(home, home, make_layout(), by_width) == pytest.approx(all_sec)
    assert COST.move_sec(home, home, by_width, by_width) == 0
    assert COST.move_sec(home, home, make_layout("resident"), make_layout()) == 0


def test_tight_budgets_are_what_the_plan_needs():
    loose = make_layout("resident", 3, offers_per_device=2, copies_per_device=3)
    plan = ExpertPlan(np.array([[0, 1, -1, 2, 3, 0, 4, 5, 0]], np.int32), 6)
    layout = tight(loose, plan)
    assert (layout.offers_per_device, layout.copies_per_device) == (1, 1)
    assert tight(make_layout("sharded", 3), plan) == make_layout("sharded", 3)


@pytest.mark.parametrize(("bytes_per_sec", "msec"), [(3e9, 133), (50e9, 36.5)])
def test_the_notes_preset_gives_the_notes_anchor(bytes_per_sec, msec):
    """The preset's figure is for plain expert parallelism: 16 devices with 4096 rows
    each, and the fullest with 6.54 times the mean."""
    fullest = 6.54 * 4096 / 16
    load_we = np.full((16, 16), (4096 - fullest) / 15)
    load_we[:, 3] = fullest
    cost = dataclasses.replace(NOTES, bytes_per_sec=bytes_per_sec)
    layout = Layout.home(16, 16, 4096, transport="ragged")
    sec = cost.layer_sec(load_we, np.arange(16), layout)
    assert 1e3 * sec == pytest.approx(msec, rel=0.01)


def test_copies_of_top_up_cost_the_budget_where_any_is_made():
    """An even load needs none. The device of a hot expert keeps the limit, and a copy
    and two offers travel there and back."""
    layout = make_layout(
        split="top_up", top_up_slack=102, top_up_copies=1, top_up_offers=2
    )
    even_we, row_p = np.full((3, 6), 4.0), np.arange(6)
    filled = dataclasses.replace(layout, split="even")
    assert COST.layer_sec(even_we, row_p, layout) == pytest.approx(
        COST.layer_sec(even_we, row_p, filled)
    )
    hot_we = even_we.copy()
    hot_we[:, 0] = 10.0
    mean = hot_we.sum() / 3
    prediction = COST.predict(hot_we, row_p, layout)
    sec = {term.name: term.sec for term in prediction.terms}
    assert sec["experts"] + sec["wait"] <= 3 * 1.1 * mean * 0.1
    found = [t.sec for t in prediction.terms if t.name.endswith("copies")]
    assert found == [pytest.approx(3 * ONE_SEC)] * 2
    assert prediction.sec == pytest.approx(COST.layer_sec(hot_we, row_p, layout))


CALIBRATION = Calibration(
    device_kind="cpu", mesh={"dc": 1, "data": 1, "expert": 8, "tensor": 1},
    compute_dtype="float32", collectives={"all_to_all": {"expert": line(2e9, 1e-5)}},
    flops_per_sec=3e12, matmul_r2=0.98, compile_sec=7.5, when="2026-01-01",
)  # fmt: skip
SIZES = {
    "d_model": 8, "d_expert": 16, "itemsize": 2, "micro_batches": 4,
    "other_flops_per_device": 6e9,
}  # fmt: skip


def test_a_cost_model_of_a_calibration():
    assert cost_model(CALIBRATION, **SIZES) == CostModel(
        flops_per_row=6 * 8 * 16, bytes_per_row=16, bytes_per_expert=3 * 8 * 16 * 2,
        bytes_per_move=3 * 8 * 16 * 12, flops_per_sec=3e12, bytes_per_sec=2e9,
        latency_sec=1e-5, other_sec=2e-3, compile_sec=7.5, micro_batches=4,
        overlaps=False, calibration=CALIBRATION,
    )  # fmt: skip
    gpu = dataclasses.replace(CALIBRATION, device_kind="NVIDIA H100 80GB HBM3")
    assert cost_model(gpu, **SIZES).overlaps


def test_one_device_on_the_expert_axis_needs_no_all_to_all():
    mesh = {**CALIBRATION.mesh, "expert": 1}
    alone = dataclasses.replace(CALIBRATION, mesh=mesh, collectives={})
    assert cost_model(alone, **SIZES).latency_sec == 0
    without = dataclasses.replace(CALIBRATION, collectives={})
    with pytest.raises(ValueError, match="no all_to_all over the 'expert' axis"):
        cost_model(without, **SIZES)


def test_what_remat_does_again_is_charged_again():
    """Each device sends one row to each: forward takes 0.3 s, and an exchange 1 s."""
    load_we, row_p = np.ones((3, 6)) / 2, np.arange(6)
    layout = make_layout("transient", offers_per_device=1, copies_per_device=1)
    out_sec = COST.sync_sec(layout) / 2
    for remat, computed, exchanged, fetched in (
        ("none", 3, 4, 1), ("dispatch", 4, 4, 2), ("full", 4, 5, 2),
    ):  # fmt: skip
        cost = dataclasses.replace(COST, remat=remat)
        expected = computed * 0.3 + exchanged * 1.0 + (fetched + 1) * out_sec
        assert cost.layer_sec(load_we, row_p, layout) == pytest.approx(expected)


def test_data_parallel_devices_share_an_expert():
    """Each device sends its part of the hidden width; the layer gathers full slots."""
    collectives = CALIBRATION.collectives | {"all_gather": {"data": line(4e9)}}
    mesh = {**CALIBRATION.mesh, "data": 4}
    shared = dataclasses.replace(CALIBRATION, mesh=mesh, collectives=collectives)
    one, four = (
        cost_model(c, **SIZES)
        for c in (dataclasses.replace(shared, mesh={**mesh, "data": 1}), shared)
    )
    assert four.bytes_per_expert == one.bytes_per_expert / 4
    assert four.bytes_per_move == one.bytes_per_move / 4
    assert one.gather_sec == 0
    assert four.gather_sec == pytest.approx(3 / 4 * one.bytes_per_expert / 4e9)


MESH = {"dc": 2, "data": 1, "expert": 4, "tensor": 2}
ALIKE = Calibration(
    device_kind="cpu", mesh=MESH, compute_dtype="float32",
    collectives=dict.fromkeys(KINDS, dict.fromkeys(MESH, line(1e9, 1e-5))),
    flops_per_sec=3e12, matmul_r2=1.0, compile_sec=0.0, when="2026-01-01",
)  # fmt: skip
TOKENS, TOP_K, EXPERTS = 256, 2, 16
TRAINED = {
    "d_model": 8, "itemsize": 4, "micro_batches": 1, "other_flops_per_device": 0.0,
    "group": ("dc", "expert"), "tokens": TOKENS,
}  # fmt: skip


def sums(prediction, *cargos: str) -> tuple[int, float, float]:
    """Return the number, bytes and seconds of a prediction's collectives that carry one
    of these."""
    found = [t for t in prediction.terms if t.name.split()[-1] in cargos]
    return sum(t.count for t in found), *(
        pytest.approx(sum(getattr(t, name) for t in found)) for name in ("bytes", "sec")
    )


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("schedule", ["s1h", "s1", "s2", "base"])
def test_rows_of_a_layout_cost_what_the_papers_count(schedule, shards, remat):
    """A layout whose buffers hold exactly the even load has the collectives of a
    shape, whose sizes were counted in compiled programs (test_schedule_census.py)."""
    tensor = Tensor(schedule, 2, shards)
    owners = 8 * 2 // shards
    source_tokens = TOKENS * tensor.num_gathered // tensor.num_parts
    layout = Layout.home(
        EXPERTS, owners, source_tokens * TOP_K, buffer_factor=1.0, tensor=tensor,
        axes=("dc", "expert"),
    )  # fmt: skip
    assert layout.rows_per_peer * owners == source_tokens * TOP_K
    cost = cost_model(ALIKE, d_expert=16 // shards, remat=remat, **TRAINED)
    load_we = np.full((owners, EXPERTS), TOKENS * TOP_K * 8 / EXPERTS / owners)
    row_p = ExpertPlan.home_in(layout, 1).slot_to_expert_lp[0]
    cargos = "rows", "tokens", "gradients"
    found = sums(cost.predict(load_we, row_p, layout), *cargos)
    assert found == published(schedule, shards, remat == "full")


def published(schedule: str, shards: int, is_repeated: bool):
    """Return the number, bytes and seconds of the collectives of Parm's schedules and
    of FSMoE's order, on 8 devices with a tensor axis of 2: kind, bytes of the larger
    array, devices, and how often."""
    tokens = TOKENS * 8 * 4
    rows, within = TOP_K * tokens, max(1, shards // 2)
    owners, sent = 8 * 2 // shards, 2 + is_repeated
    gathered = shards * min(1, shards / 2)  # tokens of tensor groups, under base
    found = {
        "base": [
            ("all_gather", tokens * gathered, shards, 1 + is_repeated),
            ("all_gather", tokens * within, within, 1),
            ("all_to_all", rows * gathered, owners, sent + 2),
            ("all_reduce", rows * gathered, shards, 2),
            ("all_gather", tokens, 2 // min(2, shards), 2),
        ],
        "s1": [
            ("all_to_all", rows * shards / 2, 16, sent + 2),
            ("all_gather", tokens, 2, 2),
        ],
        "s2": [
            ("all_to_all", rows * shards / 2, 16, sent + 2),
            ("all_gather", rows, 2, 2),
        ],
        "s1h": [
            ("all_to_all", rows / 2, owners, sent + 2),
            ("all_gather", rows * shards / 2, shards, sent),
            ("reduce_scatter", rows * shards / 2, shards, 2),
            ("all_gather", tokens, 2, 2),
        ],
    }[schedule]
    found = [(n, n * leaving_bytes(kind, x, w)) for kind, x, w, n in found if w > 1]
    count, size = (sum(values) for values in zip(*found))
    return count, pytest.approx(size), pytest.approx(size / 1e9 + count * 1e-5)


def test_tokens_are_gathered_once_where_they_are_exchanged_in_halves():
    cost = cost_model(ALIKE, d_expert=8, **TRAINED)
    load_we, row_p = np.full((8, EXPERTS), 8.0), np.arange(EXPERTS)
    found = []
    for halves in (False, True):
        layout = Layout.home(
            EXPERTS, 8, 2 * TOKENS * TOP_K, tensor=Tensor("base", 2, 2), halves=halves,
            axes=("dc", "expert"),
        )  # fmt: skip
        found.append(sums(cost.predict(load_we, row_p, layout), "tokens"))
    assert found[0] == found[1]


@pytest.mark.parametrize("shared", [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_a_domain_costs_what_the_stream_model_counts(shared):
    """Rows between domains, and experts that its devices gather, with their
    gradients."""
    mesh = dataclasses.replace(ALIKE, mesh=MESH | {"tensor": 1})
    layout = Layout.home(
        EXPERTS, 8, TOKENS * TOP_K, buffer_factor=1.0, axes=("dc", "expert"),
        domain=Domain((2, 4), shared), transport="hierarchical",
    )  # fmt: skip
    cost = cost_model(mesh, d_expert=16, **TRAINED)
    load_we = np.full((8, EXPERTS), TOKENS * TOP_K / EXPERTS)
    row_p = ExpertPlan.home_in(layout, 1).slot_to_expert_lp[0]
    row_bytes, expert_bytes = TOKENS * TOP_K * 8 * 4, 2 * 3 * 8 * 16 * 4
    (slow, fast), found = shared, cost.predict(load_we, row_p, layout)
    sent = 4 * row_bytes * ((1 - slow / 2) + (1 - fast / 4))
    hops = 4 * ((slow < 2) + (fast < 4))
    assert sums(found, "rows") == (
        hops, pytest.approx(sent), pytest.approx(sent / 1e9 + hops * 1e-5)
    )  # fmt: skip
    gathered, levels = expert_bytes * (slow * fast - 1), (slow > 1) + (fast > 1)
    for kind in ("all_gather", "reduce_scatter"):
        assert found.total_bytes(kind) == pytest.approx(gathered)
        assert found.total_sec(kind) == pytest.approx(gathered / 1e9 + levels * 1e-5)
