"""Test the benchmark of splits: the loads it draws, a tiny run, and bad input."""

import json

import numpy as np
import pytest

from tools.bench import split
from tools.bench.split_cases import Size, draw_counts, make_case, random_plan

VARIANTS = [
    "water_fill", "water_fill_exact", "split", "highs_cold", "highs_warm",
    "highs_callback", "lplb",
]  # fmt: skip


@pytest.mark.parametrize("text", ["64/8/2", "256/64/4", "8/8/8", "16/4/1"])
def test_plans_have_the_right_number_of_replicas_on_different_devices(text):
    size = Size.of(text)
    row_p = random_plan(np.random.default_rng(0), size)
    row_ws = row_p.reshape(size.devices, -1)
    assert set(np.bincount(row_p)) == {size.replicas}
    assert all(len(set(row_s)) == len(row_s) for row_s in row_ws.tolist())


def test_tokens_choose_distinct_experts_by_popularity():
    rng = np.random.default_rng(0)
    popularity_e = np.arange(1, 9.0) ** -1.0
    counts_we = draw_counts(rng, popularity_e, 4, 500, choices=2)
    assert counts_we.sum(axis=1).tolist() == [1000] * 4
    assert counts_we.max() <= 500
    first_e = draw_counts(rng, popularity_e, 4, 5000, choices=1).sum(axis=0)
    share_e = popularity_e / popularity_e.sum()
    assert np.abs(first_e / 20_000 - share_e).max() < 4 * 0.5 / np.sqrt(20_000)


def test_popularity_drifts_and_seeds_repeat():
    size = Size(40, 4, 2)
    cases = [make_case(np.random.default_rng(3), size, 1.2, 3, 2000) for _ in range(2)]
    assert np.array_equal(cases[0].counts_nwe, cases[1].counts_nwe)
    load_ne = cases[0].load_ne
    has_moved_ne = np.abs(np.diff(load_ne, axis=0)) > 6 * np.sqrt(load_ne[1:] + 1)
    assert has_moved_ne.any(axis=1).all()
    assert has_moved_ne.sum(axis=1).max() <= 2


@pytest.mark.slow
def test_all_variants_run_and_ours_reach_the_optimum(capsys, monkeypatch):
    monkeypatch.setattr(split, "SKEWS", (1.0,))
    argv = ["--sizes=16/4/2", "--repeats=1", "--micro_batches=2", "--tokens=600"]
    assert split.main([*argv, "--json"]) == 0
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    record = json.loads(last)
    assert list(record["sizes"]) == ["16/4/2"]
    part = record["sizes"]["16/4/2"]
    variants = part["variants"]
    assert list(variants) == VARIANTS
    assert all(f"| {name} |" in text for name in VARIANTS)
    assert all(
        0 < variant["msec_p50"] <= variant["msec_p90"] for variant in variants.values()
    )
    assert all(
        variant["gap_mean"] <= variant["gap_max"] for variant in variants.values()
    )
    assert record["num_micro_batches"] == 2
    ratio = variants["highs_callback"]["msec_p50"] / variants["water_fill"]["msec_p50"]
    assert part["speedup_over_highs_callback"] == pytest.approx(ratio)

    assert variants["water_fill_exact"]["rows_above_ceil_max"] == 0
    tolerance = 600 >> 9  # rows of the mean device, top-1
    for name in ("water_fill", "split"):
        assert variants[name]["rows_above_ceil_max"] <= tolerance
    assert variants["split"]["gap_max"] == variants["water_fill"]["gap_max"]
    for name in ("highs_cold", "highs_warm", "highs_callback"):
        assert variants[name]["gap_max"] == pytest.approx(0, abs=1e-6)
    assert variants["lplb"]["gap_mean"] > 1e-4


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ("--sizes 64/8", "--sizes has '64/8'"),
        ("--sizes 64/8/x", "--sizes has '64/8/x'"),
        ("--sizes 60/8/2", "60 experts must be divisible by 8 devices"),
        ("--sizes 64/8/9", "more replicas of an expert than devices"),
        ("--repeats 0", "--repeats 0 must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, arguments, rule):
    assert split.main([*arguments.split(), "--json"]) == 2
    out, err = capsys.readouterr()
    assert rule in err
    assert err.count("\n") == 1
    assert json.loads(out)["exit_code"] == 2
