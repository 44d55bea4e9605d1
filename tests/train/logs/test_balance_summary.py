"""Test the lines at the end of a run about what balancing has saved."""

import dataclasses
import json

import pytest

from moejax.config import Balance, Config
from train.logs.balance_summary import balance_lines, summarise_balance

HOME = Config()
FLEXMOE = dataclasses.replace(HOME, balance=Balance(policy="flexmoe"))


def write_log(path, num_steps: int, *, is_balanced: bool) -> None:
    """Two layers; the home placement is at 2.0 throughout, a swap is adopted at step 14
    and a relayout at step 34."""
    lines = []
    for step in range(1, num_steps + 1):
        ratio = 2.0 if step < 14 or not is_balanced else 1.25
        record = {"step": step, "loss": 1.0, "device_max_over_mean": [1.0, ratio]}
        record["step_msec"] = {1: 9000.0, 14: 400.0}.get(step, 100 * ratio)
        record["modelled_step_msec"] = 60 * ratio
        if is_balanced:
            record["home_device_max_over_mean"] = [2.0, 1.5]
            record["home_std_over_std"] = [1.0, None if step < 14 else 3.0]
            if step % 10 == 0:
                record["modelled_saving_msec"] = 0.0 if step == 10 else 4.0
            if step in (14, 34):
                record["adopt_msec"] = 1.0
        lines.append(json.dumps(record))
    for kind, step, adopt_step in (
        ("swap", 10, 14),
        ("keep", 20, 24),
        ("relayout", 22, 34),
        ("swap", 40, 44),  # the run ends before
    ):
        decision = {"kind": kind, "step": step, "adopt_step": adopt_step}
        lines.append(json.dumps({"step": step, "decision": decision}))
    path.write_text("\n".join(lines))


def test_a_balanced_run_is_compared_with_the_home_placement(tmp_path):
    write_log(tmp_path / "metrics.jsonl", 40, is_balanced=True)
    summary = summarise_balance(tmp_path / "metrics.jsonl", FLEXMOE)
    assert (summary["num_swaps"], summary["num_relayouts"]) == (1, 1)
    ratio, home = summary["device_max_over_mean"], summary["home_device_max_over_mean"]
    assert (ratio["first"], ratio["last"], ratio["max"]) == (2.0, 1.25, 2.0)
    assert ratio["mean"] == pytest.approx((13 * 2 + 27 * 1.25) / 40, abs=1e-4)
    assert home["mean"] == 2.0
    assert summary["modelled_saving_msec"] == 3.0
    assert summary["home_std_over_std"] == 1.0  # 40 of the 67 that are known
    assert summary["measured"] == {
        "before_msec": 200.0, "after_msec": 125.0,
        "saved_sec": pytest.approx(0.2 * 27 - (0.125 * 26 + 0.4)),
        "of_sec": pytest.approx(0.2 * 27),
    }  # fmt: skip
    lines = balance_lines(summary, FLEXMOE, "presumed")
    assert lines[-1].startswith("measured        1.75 s saved of 5.4 s, waits counted")
    *_, priced = balance_lines(summary, FLEXMOE, "measured, in a.json")
    assert priced.startswith("priced          75 of 125 ms a step")
    bars = [line.split("|")[1] for line in lines if "|" in line]
    assert bars == [13 * "@" + 27 * ":", 40 * "@"]


def test_a_run_without_balancing_has_its_own_figures_alone(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert summarise_balance(path, HOME) is None
    write_log(path, 13, is_balanced=False)
    with path.open("a") as file:
        for step, share in ((14, 0.01), (15, 0.03)):
            record = {"step": step, "device_max_over_mean": [2.0]}
            file.write("\n" + json.dumps(record | {"dropped_share": share}))
    summary = summarise_balance(path, HOME)
    assert summary.keys() == {
        "policy", "device_max_over_mean", "dropped_share", "priced",
    }  # fmt: skip
    assert summary["device_max_over_mean"]["mean"] == 2.0
    assert summary["dropped_share"] == pytest.approx(0.02)
    assert len(balance_lines(summary, HOME, "presumed")) == 2
