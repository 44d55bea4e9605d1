"""Test the race without a cluster: loads, arms, budgets, turns, figures and results."""

import argparse
import contextlib
import dataclasses
import json
import math
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.support.run_main import ROOT
from tools.testbed import arms, budget, race
from tools.testbed.loads import LOADS, Sizes, make_load, thin
from tools.testbed.run import parse
from tools.testbed.standings import Side, compare_losses, figures, series, standings
from tools.testbed.turns import Block, Metrics, Run, order, take_turns
from train.config import gin_reader

TOOL = ROOT / "tools" / "testbed" / "run.py"
CFG = gin_reader.load([race.CONFIG], [])
SIZES = Sizes(
    num_steps=120, micro_batches=2, num_layers=2, num_experts=32, num_devices=8
)
HOME = {
    "store": "owned", "prefetch": False, "num_devices": 8, "slots_per_device": 4,
    "rows_per_peer": 256, "home_chunks": 1,
}  # fmt: skip
EXPERT_BYTES = 3 * CFG.model.d_model * CFG.moe.d_expert * 4
STEPS = 8
"""Steps of each of the two made runs below."""


def device_ratio(count_rle: np.ndarray) -> np.ndarray:
    """Return device max/mean under home, [micro-batches, layers]."""
    rows_rlw = count_rle.reshape(*count_rle.shape[:2], 8, 4).sum(axis=-1)
    return rows_rlw.max(axis=-1) / rows_rlw.mean(axis=-1)


@pytest.mark.parametrize("name", LOADS[1:])
def test_a_synthetic_load_is_skewed_and_depends_on_its_seed_alone(name):
    one, again, other = (make_load(name, SIZES, seed, None) for seed in (0, 0, 1))
    assert one.shape == (SIZES.num_rows, 2, 32)
    assert (one == again).all()
    assert not np.allclose(one, other)
    assert np.isfinite(one).all()
    assert one.min() > 0
    assert device_ratio(one).max() > 1.8
    assert not np.allclose(one[0], one[1]), "micro-batches of a step differ"


def test_the_hot_expert_jumps_to_another_device_every_20_steps():
    count_rle = make_load("jump", SIZES, 3, None)
    hot_rl = count_rle.argmax(axis=-1)
    hot_tl = hot_rl[:: SIZES.micro_batches]
    assert (np.repeat(hot_tl, 2, axis=0) == hot_rl).all()
    moves_t = np.flatnonzero((np.diff(hot_tl, axis=0) != 0).all(axis=1)) + 1
    assert moves_t.tolist() == [20, 40, 60, 80, 100]
    assert ((hot_tl[moves_t] // 4) != (hot_tl[moves_t - 1] // 4)).all()


def test_bursts_come_from_an_even_load():
    ratio_t = device_ratio(make_load("burst", SIZES, 0, None))[::2, 0]
    is_hot_t = ratio_t > 2
    assert np.flatnonzero(np.diff(is_hot_t)).tolist() == [9, 19, 49, 59, 89, 99]
    assert ratio_t[~is_hot_t].max() < 1.3


def test_a_recording_is_followed_sample_by_sample(tmp_path):
    """Two of three layers are taken, the most skewed; a sample without micro-batches
    serves two steps, and the last samples serve the run."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(90, 110, (9, 3, 8, 32)).astype(np.uint16)
    tokens[:, 0, :, 3] += 900
    tokens[:, 2, :, 9] += 400
    path = tmp_path / "trace.npz"
    np.savez(path, tokens=tokens)
    sizes = dataclasses.replace(SIZES, num_steps=16)
    count_rle = make_load("recorded", sizes, 0, path)
    expected_tle = tokens[1:, [0, 2]].sum(axis=2)
    assert (count_rle == np.repeat(expected_tle, 4, axis=0)).all()
    with pytest.raises(ValueError, match="lower --steps by at least 1"):
        make_load("recorded", dataclasses.replace(sizes, num_steps=19), 0, path)
    by_micro_batch = rng.integers(1, 99, (5, 2, 4, 8, 32))
    np.savez(path, tokens=by_micro_batch)
    count_rle = make_load("recorded", dataclasses.replace(sizes, num_steps=10), 0, path)
    assert (count_rle[5] == by_micro_batch[1, :, 1].sum(axis=1)).all()


def test_home_beside_an_arm_sees_loads_of_each_of_its_blocks():
    count_rle = np.arange(2 * 122)[:, None, None] * np.ones((1, 2, 32))
    sizes = dataclasses.replace(SIZES, num_steps=122)
    thinned = thin(count_rle, sizes, 2, 20, 4)
    steps = thinned[::2, 0, 0] / 2
    assert (thinned[1::2] == thinned[::2] + 1).all(), "whole steps"
    assert steps[2:10].tolist() == [4, 9, 14, 19, 24, 29, 34, 39]
    assert len(steps) == 4 * 6, "then it begins anew, beside the next arm"
    assert steps[:2].tolist() == [114, 119]


def test_bad_recordings_and_loads(tmp_path):
    path = tmp_path / "trace.npz"
    with pytest.raises(ValueError, match="is not a file: name a recorded routing"):
        make_load("recorded", SIZES, 0, path)
    np.savez(path, tokens=np.ones((9, 2, 8, 16)))
    with pytest.raises(ValueError, match=r"a race needs \[samples, layers, "):
        make_load("recorded", SIZES, 0, path)
    np.savez(path, tokens=np.ones((900, 1, 8, 32)))
    with pytest.raises(ValueError, match="has 1 layers, and the model has 2"):
        make_load("recorded", SIZES, 0, path)
    with pytest.raises(ValueError, match="--load surge is not a load: use recorded"):
        make_load("surge", SIZES, 0, None)


def test_arms_are_named_in_their_order():
    assert arms.names(None, "recorded") == list(arms.ARMS)
    assert arms.names(None, "jump") == [x for x in arms.ARMS if x in arms.AT_JUMPS]
    assert arms.names("micromoe, forced", "drift") == ["forced", "micromoe"]
    assert arms.names("all", "drift")[0] == arms.CEILING
    with pytest.raises(ValueError, match="--arms flexmo is not an arm: use forced"):
        arms.names("flexmo", "jump")


@pytest.mark.parametrize("name", arms.ARMS)
def test_every_arm_is_a_valid_configuration_of_its_policy_alone(name):
    cfg = gin_reader.load([race.CONFIG], arms.params(name, CFG))
    changed = {
        part
        for part in ("mesh", "model", "moe", "router", "optimizer", "data", "train")
        if getattr(cfg, part) != getattr(CFG, part)
    }
    assert not changed, "an arm changes how a run balances, and nothing else"
    own = cfg.moe.num_experts // cfg.mesh.expert
    assert (cfg.dispatch.slots_per_device or own) in (own, own + 1, own + own // 2)


def test_bytes_of_a_layout():
    buffers = 2 * 8 * 256 * CFG.model.d_model * 4
    assert budget.used(HOME, CFG) == budget.Bytes(0, buffers)
    chunked = budget.used(HOME | {"home_chunks": 5}, CFG)
    assert chunked == budget.Bytes(0, 12 * buffers // 8)
    resident = HOME | {"store": "resident", "slots_per_device": 6}
    assert budget.used(resident, CFG) == budget.Bytes(12 * EXPERT_BYTES, buffers)
    assert budget.limit(HOME, 6, CFG) == 12 * EXPERT_BYTES + buffers
    full = gin_reader.load([race.CONFIG], ["Model.remat = 'full'"])
    for store, prefetch, layers in (
        ("transient", False, 1), ("transient", True, 2), ("resident", False, 2),
    ):  # fmt: skip
        layout = resident | {"store": store, "prefetch": prefetch}
        assert budget.used(layout, full).slots == layers * 6 * EXPERT_BYTES
    changes = [{"changes": {"slots_per_device": [6, 7]}}, {"changes": {}}]
    assert budget.most_used(resident, changes, CFG).slots == 14 * EXPERT_BYTES
    most_bytes = budget.limit(HOME, 6, CFG)
    budget.require_within("flexmoe", resident, most_bytes, CFG)
    with pytest.raises(ValueError, match=r"arm flexmoe takes .* and the budget is"):
        budget.require_within("flexmoe", resident, most_bytes - 1, CFG)


def test_turns_alternate_in_mirrored_pairs():
    assert order(4) == [0, 1, 1, 0, 0, 1, 1, 0]
    assert order(3).count(0) == order(3).count(1) == 3


class FakeProgram:
    """A program that writes a line of metrics, or two, whenever it is let go on."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path, self.step, self.is_held = path, 0, True

    def go_on(self) -> None:
        self.is_held = False

    def hold(self) -> None:
        self.is_held = True

    def require_running(self) -> None:
        assert not self.is_held
        self.step += 1
        with self.path.open("a") as file:
            file.write(json.dumps({"step": self.step, "step_msec": 1.0}) + "\n")
            file.write('{"step": 99, "step_ms')  # a line that is not whole yet
            file.truncate(file.tell() - len('{"step": 99, "step_ms'))


def test_runs_take_turns_and_one_is_always_held(tmp_path):
    programs = [FakeProgram(tmp_path / f"{index}.jsonl") for index in range(2)]
    runs = [
        Run(name, program, Metrics(program.path))
        for name, program in zip(("arm", "home"), programs)
    ]
    for run in runs:
        run.advance(2, 10.0)
    blocks = take_turns(runs, (3, 2), 2, 10.0)
    assert [(b.run, b.first_step, b.last_step) for b in blocks] == [
        ("arm", 3, 5), ("home", 3, 4), ("home", 5, 6), ("arm", 6, 8),
    ]  # fmt: skip
    assert all(program.is_held for program in programs)
    assert blocks[3].paused_sec > blocks[1].sec + blocks[2].sec
    assert blocks[0].num_steps == 3
    assert blocks[0].step_sec == blocks[0].sec / 3


def test_what_an_ended_race_has_left_is_no_step_of_a_run(tmp_path):
    """An arm starts in an empty folder: the metrics of a run that was killed there
    would pass for its first steps."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 7, "step_msec": 1.0}) + "\n")

    @contextlib.contextmanager
    def held(command):
        assert not path.exists()
        path.parent.mkdir(exist_ok=True)
        yield FakeProgram(path)

    live = argparse.Namespace(held=held)
    with race._first_steps(live, [], tmp_path) as run:
        assert run.metrics.last_step == race.FIRST_STEPS


def test_a_run_that_takes_too_long_is_an_error(tmp_path):
    run = Run("arm", FakeProgram(tmp_path / "a.jsonl"), Metrics(tmp_path / "b.jsonl"))
    with pytest.raises(OSError, match=r"arm has not done step 2 after 0\.01 s"):
        run.advance(2, 0.01)


def made_side(
    sec: float, rows: list[float], loss_apart: float = 0.0, dropped: float = 0.0
) -> Side:
    """Return a run of two blocks of four steps each, of `sec` seconds a step, paused
    for 7 seconds before the second, while it waits for the plan of step 8; it adopts a
    swap at step 5, and has a relayout planned anew that is given up."""
    records = []
    for step in range(1, STEPS + 3):
        record = {
            "step": step, "loss": 5.0 + loss_apart * step, "dropped_share": dropped,
            "step_msec": 1e3 * (sec + 7 * (step == 7)),
            "device_max_over_mean": rows, "home_std_over_std": [2.0, None],
            "modelled_step_msec": 1e3 * 0.8 * sec,
            "modelled_parts_msec": {"experts": 500.0 * sec, "wait": 300.0 * sec},
        }  # fmt: skip
        if step == 5:
            record["adopt_msec"] = 40.0
        if step in (6, 8):
            record["plan_wait_msec"] = 20.0 + 7e3 * (step == 8)
        records.append(record)
    for adopt_step, kind in ((5, "swap"), (9, "relayout"), (9, "relayout")):
        change = {"slots_per_device": [6, 7]} if kind == "relayout" else {}
        decision = {"kind": kind, "adopt_step": adopt_step, "changes": change}
        records.append({"step": 4, "decision": decision})
    blocks = [Block("x", 3, 6, 4 * sec, 0.0), Block("x", 7, 10, 4 * sec, 7.0)]
    return Side(blocks, records)


def test_the_figures_of_an_arm():
    layout = HOME | {"store": "resident", "slots_per_device": 6}
    arm, home = made_side(0.5, [1.2, 1.0], 1e-6, 0.25), made_side(2.0, [4.0, 3.0])
    made = figures(arm, home, layout, CFG)
    assert made["sec_per_step"] == 0.5
    assert made["home_sec_per_step"] == 2.0
    assert made["speedup"] == 4.0
    assert made["speedup_of_blocks"] == {"p50": 4.0, "min": 4.0, "max": 4.0}
    assert made["max_over_mean_p50"] == 1.1
    assert made["rb_p50"] is None, "half of the figures are infinite"
    assert made["dropped_share"] == 0.25
    assert made["bytes_of_slots"] == 12 * EXPERT_BYTES, "no relayout was adopted"
    assert (made["num_swaps"], made["num_relayouts"], made["adopt_sec"]) == (1, 0, 0.04)
    assert made["plan_wait_sec"] == 0.04, "the pause in a wait is none of it"
    parts = {"experts": 0.25, "wait": 0.15, "adoptions": 0.01, "rest": 0.09}
    assert made["parts_sec"] == parts, "they sum to the wall time"
    assert made["prediction"]["num_steps"] == STEPS - 1, "one step adopted a plan"
    assert made["prediction"]["bias"] == pytest.approx(-0.2)
    assert made["prediction"]["correlation"] is None
    json.dumps(made, allow_nan=False)


def test_of_two_decisions_for_a_step_the_later_one_was_adopted():
    side = made_side(0.5, [1.0])
    records = [
        x | ({"adopt_msec": 1.0} if x["step"] == 9 else {}) for x in side.records
    ]
    relayout = {"kind": "relayout", "adopt_step": 9, "changes": {}}
    side = Side(side.blocks, [*records, {"step": 8, "decision": relayout}])
    assert [x["adopt_step"] for x in side.adopted] == [5, 9]
    assert side.adopted[1] is relayout


def test_a_side_that_adopts_in_each_step_has_a_prediction():
    side = made_side(0.5, [1.0])
    side = Side(side.blocks, [x | {"adopt_msec": 1.0} for x in side.records])
    made = figures(side, side, HOME, CFG)
    assert made["prediction"]["num_steps"] == STEPS


def test_pauses_around_an_empty_block_are_both_taken_out():
    side = made_side(0.5, [1.0])
    first, second = side.blocks
    empty = Block("x", 7, 6, 0.01, 3.0)
    second = dataclasses.replace(second, paused_sec=4.0)
    side = Side([first, empty, second], side.records)
    assert series(side)["sec"] == [0.5] * STEPS


def test_an_empty_block_counts_in_sums_alone():
    arm, home = made_side(0.5, [1.0]), made_side(2.0, [4.0])
    empty = Block("x", 11, 10, 0.01, 1.0)
    arm = dataclasses.replace(arm, blocks=[*arm.blocks, empty])
    home = dataclasses.replace(home, blocks=[*home.blocks, empty])
    made = figures(arm, home, HOME, CFG)
    assert made["speedup_of_blocks"]["min"] == 4.0
    assert made["num_steps"] == STEPS
    assert made["speedup"] < 4.0


def test_losses_are_equal_up_to_a_share_of_each_step():
    home, near, far = (
        series(made_side(1.0, [1.0], apart)) for apart in (0.0, 0.9e-5, 1.1e-5)
    )
    assert compare_losses(near, home)["equals_home"]
    apart = compare_losses(far, home)
    assert not apart["equals_home"]
    assert math.isclose(apart["apart_per_step_max"], 1.1e-5, rel_tol=1e-6)
    assert math.isclose(apart["last_apart"], 10 * 1.1e-5, rel_tol=1e-6)


def test_pauses_are_no_part_of_a_steps_time():
    made = series(made_side(0.5, [1.2, 1.0]))
    assert made["step"] == list(range(3, 11))
    assert made["sec"] == [0.5] * STEPS
    assert made["max_over_mean"] == [1.2] * STEPS
    assert made["adopted"] == [5]


def test_arms_stand_beside_forced_balance():
    made = {"forced": {"speedup": 4.0}, "home": {"speedup": 1.0}}
    made["flexmoe"] = {"speedup": 3.0}
    shares = {n: x["of_forced_balance"] for n, x in standings(made, "forced").items()}
    assert shares == {"forced": 1.0, "home": 0.25, "flexmoe": 0.75}
    del made["forced"]
    assert standings(made, "forced")["home"]["of_forced_balance"] is None
    unslowed = {"forced": {"speedup": None}, "home": {"speedup": None}}
    assert standings(unslowed, "forced")["home"]["of_forced_balance"] is None


def options(tmp_path, **changes) -> race.Options:
    """Return options of a race on a synthetic load."""
    words = ["race", "--load=jump", "--steps=40", "--arms=home", f"--out={tmp_path}"]
    given = vars(parse(words))
    fields = {field.name for field in dataclasses.fields(race.Options)}
    given = argparse.Namespace(**{k: v for k, v in given.items() if k in fields})
    return race.Options(**vars(given) | changes)


def test_results_are_read_again_and_not_mixed(tmp_path):
    """A race whose arms all have a result runs nothing; other settings are refused."""
    plan = race.make_plan(options(tmp_path))
    made = figures(made_side(1.0, [4.0]), made_side(1.0, [4.0]), HOME, CFG)
    result = {"settings": plan.settings("home"), "figures": made}
    result["arm"] = series(made_side(1.0, [4.0]))
    result |= {"has_quota": True, "is_shaped": True, "budget_bytes": 7}
    (tmp_path / "jump_seed0" / "home.json").write_text(json.dumps(result))
    record = race.race(options(tmp_path))
    assert list(record["arms"]) == ["home"]
    home = record["arms"]["home"]
    for field in (
        "sec_per_step", "speedup", "of_forced_balance", "max_over_mean_p50",
        "dropped_share", "bytes_of_slots",
    ):  # fmt: skip
        assert field in home
    assert (record["seeds"], record["budget_bytes"]) == ([0], 7)
    assert record["order"]["by_step_msec"] == ["home"]
    assert home["loss"]["equals_home"]
    assert home["loss"]["should_equal_home"]
    assert "home" in race.table(record)[1]
    for changes, what in (
        ({"quota": 0.5}, "quota"),
        ({"gin_param": ["Moe.d_expert = 256"]}, "config_sha256"),
        ({"calibration": TOOL}, "calibration_sha256"),
        ({"arms": "flexmoe", "home_steps": 3}, "home_steps"),
    ):
        with pytest.raises(ValueError, match=f"made with another {what}: name another"):
            race.race(options(tmp_path, **changes))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arms=hom"], "--arms hom is not an arm: use forced, home"),
        (["--steps=50"], "--steps 50 must be a multiple of --block_steps 40"),
        (["--steps=5"], "--steps 5 must be at least --block_steps 40"),
        (["--home_steps=41"], "--home_steps 41 must be from 1 to --block_steps 40"),
        (["--trace=no/such.npz"], "--trace no/such.npz is not a file"),
        (["--calibration=no.json"], "--calibration no.json is not a file"),
        (["--quota=-1"], "quota=-1.0 must be 0.02 to 1024 cores"),
        (["--rate_mbit=0.01"], "rate_mbit=0.01 must be 0.1 to 100000 Mb/s"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(words, message, tmp_path):
    result = subprocess.run(
        [sys.executable, TOOL, "race", f"--out={tmp_path}", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.root
@pytest.mark.long
def test_two_arms_race_and_a_second_call_runs_nothing(tmp_path):
    """Four processes with half a core each, 20 steps of each run."""
    command = [
        sys.executable, TOOL, "race", "--arms=forced,home,flexmoe",
        "--load=jump", "--steps=20", "--block_steps=5", "--home_steps=2",
        "--quota=0.5", "--json",
        f"--gin_file={ROOT / 'tests' / 'support' / 'race.gin'}", f"--out={tmp_path}",
    ]  # fmt: skip
    records = []
    for _ in range(2):
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        records.append(json.loads(result.stdout.splitlines()[-1]))
    assert records[0] == records[1]
    assert "starting" not in result.stderr
    made = records[0]["arms"]
    assert list(made) == ["forced", "home", "flexmoe"]
    assert made["flexmoe"]["loss"]["equals_home"]
    assert made["forced"]["max_over_mean_p50"] == 1.0
    assert made["flexmoe"]["num_swaps"] > 0
    assert made["flexmoe"]["max_over_mean_p50"] < 2
    assert all(arm["num_steps"] >= 20 for arm in made.values())


@pytest.mark.root
@pytest.mark.long
@pytest.mark.parametrize("load", ["drift", "burst", "task"])
def test_the_other_loads_race_too(load, tmp_path):
    """Four processes with half a core each, the arms of synthetic loads."""
    command = [
        sys.executable, TOOL, "race", f"--load={load}", "--steps=60",
        "--block_steps=20", "--home_steps=5", "--quota=0.5", "--json",
        f"--gin_file={ROOT / 'tests' / 'support' / 'race.gin'}", f"--out={tmp_path}",
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    made = json.loads(result.stdout.splitlines()[-1])["arms"]
    assert list(made) == list(arms.AT_JUMPS)
    home = made["home"]["max_over_mean_p50"]
    for name in ("micromoe", "dynamic"):
        assert made[name]["max_over_mean_p50"] < home
    for name in set(made) - {"forced"}:
        assert made[name]["loss"]["equals_home"], name
        assert made[name]["num_steps"] >= 60
