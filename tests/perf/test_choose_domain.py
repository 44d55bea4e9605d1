"""The choice of a domain against HybridEP's tables and formulas, and general laws."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from moejax.perf.calibration import Calibration
from moejax.perf.choose_domain import (
    LayerTraffic,
    candidates,
    choose,
    predict,
    share_leaving,
)
from tests.support.calibrations import ideal, stream
from tests.support.close import assert_close

ROWS = ("all_to_all dc", "all_to_all expert")


# Table VII: number of device pairs that exchange rows, and that gather, for S = 1, 2,
# ..
FREQUENCIES = {
    8: ([56, 24, 8, 0], [0, 8, 24, 56]),
    16: ([240, 112, 48, 16, 0], [0, 16, 48, 112, 240]),
    32: ([992, 480, 224, 96, 32, 0], [0, 32, 96, 224, 480, 992]),
}


@pytest.mark.parametrize("devices", FREQUENCIES)
def test_partners_are_those_of_table_vii(devices):
    """A device sends each partner D S / G bytes of rows, or its P_E bytes of
    experts."""
    here = stream(1e6, 3e5, sizes={"dc": devices})
    for power, pairs in enumerate(zip(*FREQUENCIES[devices], strict=True)):
        size = 2**power
        prediction = predict(here, (size,), ideal(dc=1e9))
        rows = prediction.total_bytes("all_to_all") / 2 / (1e6 * size / devices)
        experts = prediction.total_bytes("all_gather") / 3e5
        result = devices * rows, devices * experts
        assert result == pytest.approx(pairs)
        assert share_leaving(size, devices) == pytest.approx(
            1 - pairs[1] / devices / (devices - 1)
        )


# Table IV: Lat_PE in sec, D and P_E in bytes, domains at 128 Gb/s and at 128 GB/s.
TABLE_IV = {
    "Mix-1": (4.9e-5, 8e6, 4.7e6, 1, 2),
    "Mix-2": (4.9e-5, 8e6, 2.35e6, 2, 4),
    "AG-only-1": (9.9e-5, 3e6, 9.4e4, 8, 8),
    "AG-only-2": (9.9e-5, 3e6, 4.7e4, 8, 8),
}


@pytest.mark.parametrize("name", TABLE_IV)
def test_table_iv_comes_out_if_its_gigabits_are_gigabytes(name):
    """128 Gb/s are 16 GB/s, which give smaller domains than the published 2 and 4."""
    pre_expert_sec, row_bytes, expert_bytes, gigabits, gigabytes = TABLE_IV[name]
    here = stream(row_bytes, expert_bytes, pre_expert_sec)
    assert choose(here, ideal(dc=128e9 / 8)).value == (gigabits,)
    assert choose(here, ideal(dc=128e9)).value == (gigabytes,)


def test_table_iv_in_milliseconds():
    here = stream(8e6, 4.7e6, 4.9e-5)
    sec = {d: p.sec for d, p in choose(here, ideal(dc=16e9)).alternatives.items()}
    assert 1e3 * sec[1,] == pytest.approx(0.924, abs=5e-4)
    assert 1e3 * sec[2,] == pytest.approx(1.044, abs=5e-4)


@pytest.mark.parametrize(
    ("dcs", "measured_sec", "error"),
    [(2, (20.35 - 12.65) / 96, 0.05), (4, (28.46 - 18.59) / 96, 0.13)],
)
def test_table_v_rises_as_24_all_to_alls_through_a_shared_card(
    dcs, measured_sec, error
):
    """Compare Tutel's seconds per additional MB of D, from 96 to 192 MB.

    8 GPUs share 10 Gb/s, and 6 layers of 4 all_to_alls make 24. The model is 4 % below
    for 2 DCs and 12 % above for 4.
    """
    here = stream(1e6, 3.6e5, sizes={"dc": dcs, "expert": 8}, is_training=True)
    lines = ideal(sharers=8, dc=10e9 / 8, expert=16e9)
    term = next(
        t for t in predict(here, (1, 1), lines).terms if t.name == "all_to_all dc"
    )
    assert term.count == 4
    assert 6 * term.sec == pytest.approx(measured_sec, rel=error)


# Measured between two DCs of two processes over 200 Mb/s. Columns: D and P_E in MB;
# msec of the forward pass, plain and gathered over dc; msec of both with the backward
# pass.
MEASURED = [
    (0.5, 0.25, 44, 24, 95, 58), (0.5, 1, 55, 98, 104, 181),
    (0.5, 4, 58, 471, 140, 803), (2, 0.25, 241, 27, 514, 106),
    (2, 1, 263, 98, 470, 214), (2, 4, 282, 453, 585, 837),
    (8, 0.25, 1057, 56, 1991, 136), (8, 1, 1095, 190, 2123, 291),
    (8, 4, 1038, 534, 2308, 1061),
]  # fmt: skip


@pytest.mark.parametrize("row", MEASURED, ids=str)
def test_the_model_picks_what_was_fastest_in_nine_of_nine(row):
    """At the shaped rate, the model gives D / (25 MB/s) for a pair of all_to_alls, and
    P_E / (25 MB/s) for a gather."""
    rows, experts, *msec = row
    lines = ideal(sharers=2, dc=200e6 / 8, expert=math.inf)
    for is_training, plain, moved in ((False, *msec[:2]), (True, *msec[2:])):
        here = stream(
            rows * 1e6, experts * 1e6, sizes={"dc": 2, "expert": 2},
            is_training=is_training,
        )  # fmt: skip
        sec = [predict(here, domain, lines).sec for domain in ((1, 1), (2, 1))]
        passes = 1 + is_training
        assert sec == pytest.approx([passes * 0.08 * rows, passes * 0.08 * experts])
        assert (sec[0] < sec[1]) == (plain < moved)


def random_case(rng) -> tuple[LayerTraffic, Calibration]:
    dcs, experts = (int(n) for n in rng.choice([1, 2, 3, 4, 6], 2))
    lines = ideal(1, dc=10 ** rng.uniform(6, 9), expert=10 ** rng.uniform(8, 11))
    here = LayerTraffic(
        row_bytes=10 ** rng.uniform(5, 8), expert_bytes=10 ** rng.uniform(5, 8),
        pre_expert_sec=10 ** rng.uniform(-4, -1), expert_sec=2e-3,
        sizes={"dc": dcs, "expert": experts}, compression=float(rng.choice([1, 50])),
        num_micro_batches=int(rng.integers(1, 4)),
        is_training=bool(rng.integers(2)), remat=str(rng.choice(["none", "full"])),
        dense_sec=1e-3, is_prefetched=bool(rng.integers(2)),
    )  # fmt: skip
    return here, lines


def defined_sec(s: LayerTraffic, domain, lines: Calibration) -> float:
    """Return the time by Equations 8 to 12 for two levels, with the backward pass."""
    (slow, fast), (s0, s1) = s.sizes.values(), domain
    dc, near = (
        lines.collectives["all_to_all"][a]["bytes_per_sec"] for a in ("dc", "expert")
    )
    experts = (s0 - 1) / dc + s0 * (s1 - 1) / near
    is_once = s.compression > 1
    out = s.expert_bytes / s.compression * experts
    out /= s.num_micro_batches if is_once else 1
    pair = 2 * s.row_bytes * ((1 - s0 / slow) / dc + (1 - s1 / fast) / near)
    before = s.pre_expert_sec
    is_hidden = s.is_prefetched and not is_once
    forward = (max(before, out) if is_hidden else before + out) + pair
    forward += s.expert_sec
    if not s.is_training:
        return forward
    back = s.expert_bytes * experts
    again = 0.0
    if s.remat == "full":
        again = before + s.expert_sec + pair
        if not is_once:
            again += max(0.0, out - before) if is_hidden else out
    work = 2 * (before + s.expert_sec)
    return forward + again + work + pair + back + s.dense_sec


def test_choose_is_brute_force_over_the_divisors():
    rng = np.random.default_rng(0)
    chosen = set()
    for _ in range(200):
        here, lines = random_case(rng)
        choice = choose(here, lines)
        every = [
            (i, j)
            for i, j in itertools.product(range(1, 7), repeat=2)
            if here.sizes["dc"] % i == here.sizes["expert"] % j == 0
        ]
        want = {domain: defined_sec(here, domain, lines) for domain in every}
        result = {domain: p.sec for domain, p in choice.alternatives.items()}
        assert_close({d: result[d] for d in sorted(result)}, dict(sorted(want.items())))
        fastest = [d for d in every if want[d] <= min(want.values()) * (1 + 1e-9)]
        assert choice.value == min(fastest, key=lambda d: (math.prod(d), d))
        assert "\n" not in choice.why
        for prediction in choice.alternatives.values():
            assert prediction.sec == sum(t.sec for t in prediction.terms)
        chosen.add(choice.value)
    assert len(chosen) > 5


@pytest.mark.parametrize("is_training", [False, True])
def test_all_experts_move_iff_two_chunks_of_rows_are_more(is_training):
    """Experts move iff 2 D > G P_E; training has 4 D against 2 G P_E. In a tie they
    stay."""
    for ratio in (0.3, 0.99, 1.0, 1.01, 4.0):
        here = stream(1e6, ratio * 2e6 / 8, is_training=is_training)  # G P_E = 2 D r
        want = (8,) if ratio < 1 else (1,)
        assert choose(here, ideal(dc=1e8)).value == want


def test_the_best_divisor_is_next_to_the_papers_ratio():
    """The ratio is p* = 1 - B Lat_PE / (P_E (G - 1)) where 2 D < G P_E."""
    for pre_expert_sec in np.linspace(0, 0.5, 21):
        here = stream(1e6, 1e6, pre_expert_sec, sizes={"dc": 12})
        p = 1 - min(1.0, 1e8 * pre_expert_sec / (1e6 * 11))
        best = 12 - p * 11
        divisors = np.array([1, 2, 3, 4, 6, 12])
        below = divisors[divisors <= best + 1e-9].max()
        above = divisors[divisors >= best - 1e-9].min()
        assert choose(here, ideal(dc=1e8)).value[0] in (below, above)


def test_more_rows_or_a_slower_dc_mean_fewer_bytes_of_them():
    """With larger D, rows take fewer seconds per byte. With a slower dc axis, fewer
    bytes cross it. With stronger compression, more experts travel."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        here, lines = random_case(rng)
        here = dataclasses.replace(here, is_prefetched=False)
        waits = []
        for row_bytes in np.geomspace(1e4, 1e9, 12):
            more = dataclasses.replace(here, row_bytes=row_bytes)
            choice = choose(more, lines)
            terms = choice.alternatives[choice.value].terms
            rows = [t.sec for t in terms if t.name in ROWS]
            waits.append(sum(rows) / row_bytes)
        assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(waits))
        sent, sizes = [], []
        for rate in np.geomspace(1e9, 1e5, 12):
            choice = choose(here, ideal(1, dc=rate, expert=1e9))
            terms = choice.alternatives[choice.value].terms
            sent.append(sum(t.bytes for t in terms if "dc" in t.name))
        assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(sent))
        for ratio in (1, 5, 50, 500):
            one = dataclasses.replace(here, sizes={"dc": 12}, compression=ratio)
            sizes.append(choose(one, lines).value[0])
        assert sizes == sorted(sizes)


def test_compression_of_weights_alone_at_most_halves_what_experts_cost():
    """Gradients return uncompressed: P_E / 50 + P_E instead of 2 P_E."""
    whole = stream(1e6, 1e6, is_training=True, is_prefetched=False)
    compressed = dataclasses.replace(whole, compression=50.0)
    sec, fewer = (predict(s, (8,), ideal(dc=1e8)).sec for s in (whole, compressed))
    assert sec / fewer == pytest.approx(2 / 1.02)


def test_a_flat_all_to_all_is_on_the_line_of_the_product():
    """With 16 devices in domains of 2, (1 - 1/8) D leaves a device in one collective.
    With domains across the DCs, rows stay on the fast axis."""
    here = stream(8e6, 1e6, sizes={"dc": 2, "expert": 8}, is_hierarchical=False)
    lines = ideal(dc=1e6, expert=1e9, dc_expert=1e7)
    terms = {t.name: t for t in predict(here, (1, 2), lines).terms}
    assert terms["all_to_all dc_expert"].sec == pytest.approx(2 * 8e6 * 7 / 8 / 1e7)
    terms = {t.name: t for t in predict(here, (2, 1), lines).terms}
    assert terms["all_to_all expert"].sec == pytest.approx(2 * 8e6 * 7 / 8 / 1e9)


def test_the_choice_is_among_the_domains_that_are_given():
    here = stream(1e9, 1e6, sizes={"dc": 4, "expert": 2})
    lines = ideal(dc=1e8, expert=1e9)
    assert choose(here, lines).value == (4, 2)
    choice = choose(here, lines, [(1, 1), (4, 1)])
    assert choice.value == (4, 1)
    assert set(choice.alternatives) == {(1, 1), (4, 1)}


@pytest.mark.parametrize("domain", [(3, 1), (2,), (0, 1), (2, 4)])
def test_a_domain_that_does_not_divide_is_refused_in_a_line(domain):
    here = stream(1e6, 1e6, sizes={"dc": 4, "expert": 2})
    with pytest.raises(ValueError, match="must divide each level") as error:
        predict(here, domain, ideal(dc=1e8, expert=1e9))
    assert "\n" not in str(error.value)
    assert candidates(here.sizes)[0] == (1, 1)
