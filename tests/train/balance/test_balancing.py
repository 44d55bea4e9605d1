"""Runs with the balancer on: swaps that compile nothing, relayouts that compile in the
background, splits, and runs that go on under other settings; test_resume.py kills them.

All tests in this file share programs and runs.
"""

import shutil

import numpy as np
import pytest

from moejax.balance.planning import Observed
from tests.support.close import assert_close
from tests.support.plan_history import plan_records, tables
from tests.support.run_main import checkpoint_record
from tests.support.run_schema import check_run
from tests.support.watched_run import (
    MESH,
    WAITED_STEPS,
    Done,
    House,
    assert_same_run,
    restored,
    run_here,
    speeds,
    watched,
)
from train.balance.record import BalanceRecord
from train.checkpoint.checksum import describe_arrays
from train.data.feed import feed
from train.eval import held_out
from train.step.compiled import on_devices

pytestmark = pytest.mark.slow
NUM_STEPS, SAVED_STEP = 39, 30
PENDING_STEP = 25
"""Step at which a relayout is pending, and a swap is decided."""
HOME = "Balance.policy = 'home'"


@pytest.fixture(scope="module")
def house():
    with watched() as house:
        yield house


@pytest.fixture(scope="module")
def cheap(tmp_path_factory):
    """Return a calibration with slow collectives and devices, so that relayouts pay."""
    path = tmp_path_factory.mktemp("calibration") / "cheap.json"
    return speeds(path, MESH)


@pytest.fixture(scope="module")
def swaps(house, tmp_path_factory):
    return run_here(house, tmp_path_factory.mktemp("swaps") / "run")


@pytest.fixture(scope="module")
def owners(house, cheap, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("owners") / "run"
    params = "Balance.policy = 'smartmoe'", f"Balance.calibration = '{cheap}'"
    return run_here(house, run_dir, *params)


@pytest.fixture(scope="module")
def home(house, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("home") / "run"
    return run_here(house, run_dir, HOME)


@pytest.fixture(scope="module")
def relayout(house, tmp_path_factory, cheap):
    return run_here(house, tmp_path_factory.mktemp("relayout") / "run", *pending(cheap))


def test_swaps_compile_nothing(swaps, owners):
    for done in (swaps, owners):
        assert {x["kind"] for x in done.decisions} <= {"swap", "keep"}
        assert len(done.adopted) >= 3
        first, third = done.adopted[0], done.adopted[2]
        assert third + 1 < SAVED_STEP, "a save may compile something"
        there = done.compiled_before
        assert there[2] == there[first] == there[third + 1]


def test_a_decision_is_adopted_lag_steps_after(swaps, relayout):
    """Steps run under a plan from its adoption up to the next one."""
    for done in (swaps, relayout):
        first, last = {}, {}  # decisions by the step of their adoption
        for x in done.decisions:
            if x["kind"] != "keep":
                first.setdefault(x["adopt_step"], x)
                last[x["adopt_step"]] = x
        assert sorted(first) == done.adopted
        for x in first.values():
            lag_steps = {"swap": 2, "relayout": 20}[x["kind"]]
            assert x["adopt_step"] == x["step"] + lag_steps
        changes = [last[step] for step in done.adopted]
        digests = [changes[0]["digest_before"], *(x["digest"] for x in changes)]
        for step, line in done.steps.items():
            num_adopted = sum(adopted <= step for adopted in done.adopted)
            assert line["plan"] == digests[num_adopted]


def test_files_keep_their_schema_and_plans_are_those_of_the_steps(
    swaps, owners, relayout
):
    for done in (swaps, owners, relayout):
        counts = check_run(done.run_dir)
        assert counts["step"] == NUM_STEPS
        assert counts["decision_line"] == len(done.decisions)
        assert counts["attempt_begin"] == counts["attempt_end"] == 1
        assert counts["goodput_line"] >= 2
        lines = plan_records(done.run_dir)
        assert [line["step"] for line in lines] == [1, *done.adopted]
        for step, record in done.steps.items():
            in_use = [line for line in lines if line["step"] <= step][-1]
            assert record["plan"] == in_use["digest"]
        *_, last_lp = tables(lines)
        assert np.array_equal(last_lp, done.plan(NUM_STEPS).slot_to_expert_lp)
        kinds = ["relayout"] * (done is relayout)
        assert [x["kind"] for x in lines if "bytes" in x] == ["start", *kinds]
        assert all(x["bytes"] for x in lines if "bytes" in x)


def test_a_swap_evens_the_devices(swaps):
    """Devices are even from the first step on; the hot expert stays for ten steps."""
    for step in swaps.adopted[:3]:
        before, after = (
            max(swaps.steps[s]["device_max_over_mean"]) for s in (step - 1, step)
        )
        assert after < 1.5
        assert before > 2


def test_steps_say_how_even_the_home_placement_would_be(swaps):
    """Until the first swap the home placement is what the run has."""
    first = swaps.adopted[0]
    for step, line in swaps.steps.items():
        home_l = line["home_device_max_over_mean"]
        if step < first:
            assert home_l == line["device_max_over_mean"]
            assert line["home_std_over_std"] == [1.0] * len(home_l)
        assert line["modelled_step_msec"] > 0
        is_collected = step > 2 and (step - 2) % 5 == 0
        assert ("modelled_saving_msec" in line) == is_collected
        assert ("plan_wait_msec" in line) == is_collected
    savings_msec = {
        step: line["modelled_saving_msec"]
        for step, line in swaps.steps.items()
        if "modelled_saving_msec" in line
    }
    before = [x for step, x in savings_msec.items() if step - 2 < first]
    after = [x for step, x in savings_msec.items() if step - 2 >= first]
    last = swaps.steps[max(swaps.steps)]
    assert max(last["home_std_over_std"]) > 1.5
    assert max(before) < max(after)
    assert max(before) < 0, "slots for copies cost a little beside the home placement"


def test_steps_and_swaps_go_on_while_a_relayout_compiles(relayout):
    """The relayout gets another plan lag_steps before it is adopted, because the hot
    expert is another one by then."""
    change, again = [x for x in relayout.decisions if x["kind"] == "relayout"]
    ((begin, end),) = relayout.background
    assert change["step"] + 2 <= begin + 1, "it is known lag_steps after its decision"
    assert begin + WAITED_STEPS <= end <= change["adopt_step"]
    assert (again["step"], again["adopt_step"]) == (28, change["adopt_step"])
    assert again["digest"] != change["digest"]
    plans = [relayout.steps[s]["plan"] for s in range(begin, change["adopt_step"])]
    assert again["digest"] not in plans
    swaps = [x for x in relayout.decisions if x["kind"] == "swap"]
    meanwhile = [x["digest"] for x in swaps if begin < x["adopt_step"] < 30]
    assert len(meanwhile) == 2
    assert set(meanwhile) <= set(plans)


def test_plans_may_change_at_every_step(house, tmp_path):
    """The smallest gain is worth a swap. A run that goes on from a checkpoint, in which
    several swaps wait, is the same run."""
    lag_steps = 3
    run_dir, params = tmp_path / "run", [
        "Balance.policy = 'eplb'", f"Balance.lag_steps = {lag_steps}",
        "Balance.every_steps = 1", "Balance.cooldown_steps = 0",
        "Balance.half_life_steps = 1.0", "Balance.act_above = 1.001",
        "Checkpoint.every_steps = 12", "Train.num_steps = 20",
    ]  # fmt: skip
    whole = run_here(house, run_dir, *params)
    swaps = [x for x in whole.decisions if x["kind"] == "swap"]
    assert len(swaps) >= 10
    assert {x["adopt_step"] - x["step"] for x in swaps} == {lag_steps}
    assert whole.adopted == [x["adopt_step"] for x in swaps if x["adopt_step"] <= 20]
    meta = checkpoint_record(run_dir, 12)["meta"]
    balance = BalanceRecord.from_json(meta["balance"])
    pending = [x["step"] for x in swaps if x["step"] <= 12 < x["adopt_step"]]
    assert set(pending) <= set(uncollected(balance))
    assert set(uncollected(balance)) <= set(range(13 - lag_steps, 13))
    resumed = tmp_path / "resumed"
    shutil.copytree(run_dir, resumed)
    shutil.rmtree(resumed / "checkpoints" / "20")
    run_here(house, resumed, *params)
    assert_same_run(resumed, run_dir)


@pytest.mark.parametrize("policy", ["home", "eplb", "smartmoe"])
def test_a_checkpoint_goes_on_under_any_other_policy(
    house, swaps, relayout, owners, tmp_path, policy
):
    """The arrays in logical order and the loss of the next step are the same."""
    there = tmp_path / "checkpoints" / str(SAVED_STEP)
    shutil.copytree(swaps.run_dir / "checkpoints" / str(SAVED_STEP), there)
    job, state, now = restored(tmp_path, f"Balance.policy = '{policy}'")
    state = now.logical(now.begin(1, state))
    assert describe_arrays(state) == checkpoint_record(tmp_path, SAVED_STEP)["arrays"]
    placement = on_devices(now.plan, now.layout, job.model.mesh)
    batch_size, sharding = job.cfg.train.batch_size, job.window_sharding
    windows = feed(job.batches, SAVED_STEP, batch_size, 1, sharding)
    step = house.programs[now.layout, job.model.mesh].train
    _, metrics = step(now.physical(state), placement, windows)
    expected = swaps.steps[SAVED_STEP + 1]["loss"]
    assert_close(np.asarray(metrics.loss), np.float32(expected))


def test_a_checkpoint_is_restored_on_four_devices(swaps):
    params = ("Mesh.expert = 2", "Train.num_simulated_devices = 4")
    _, state, now = restored(swaps.run_dir, *params)
    record = checkpoint_record(swaps.run_dir, NUM_STEPS)
    assert describe_arrays(now.logical(now.begin(1, state))) == record["arrays"]


def test_what_a_store_of_slices_saves_is_whole(house, relayout, home):
    """The run ends under another store than the one that it saves for. Its evaluation
    equals that of the arrays in logical order."""
    *_, change = [x for x in relayout.decisions if x["kind"] == "relayout"]
    assert change["changes"]["store"] == ["resident", "sharded"]
    assert_evaluates_alike(house, relayout, HOME)


def test_owners_are_permuted_and_a_checkpoint_is_not(house, owners, home):
    """Smartmoe moves master parameters and both moments; all equal those of home."""
    assert not owners.plan(NUM_STEPS).is_logical
    _, moved, _ = restored(owners.run_dir, HOME)
    _, stayed, _ = restored(home.run_dir, HOME)
    assert_close(moved, stayed)
    assert_evaluates_alike(house, owners, HOME)


MICROMOE, DYNAMIC = "Balance.policy = 'micromoe'", "Dispatch.split = 'dynamic'"


@pytest.mark.parametrize(
    "params",
    [
        (MICROMOE,),
        pytest.param((HOME, DYNAMIC), marks=pytest.mark.long),
    ],
)
def test_a_split_has_the_losses_of_home_and_rows_at_their_bound(
    house, home, tmp_path, params
):
    """Losses are those of plain expert parallelism, and each step meets its certified
    bound."""
    run = run_here(house, tmp_path, *params, "Train.num_steps = 24")
    losses, expected = (
        np.float32([line["loss"] for line in list(r.steps.values())[:24]])
        for r in (run, home)
    )
    assert_close(losses, expected)
    worst = max(max(line["device_max_over_bound"]) for line in run.steps.values())
    assert worst <= 1 + 1 / 512 + 1e-3  # a device has hundreds of rows: allow one
    skew = max(max(line["device_max_over_mean"]) for line in home.steps.values())
    assert skew > 1.3
    if DYNAMIC in params:
        even = max(max(line["device_max_over_mean"]) for line in run.steps.values())
        assert even <= 1.02


def test_a_run_that_goes_on_from_home_begins_spread(home):
    """With the checkpoint's home plan, the new policy would have no replicas."""
    plan = restored(home.run_dir, MICROMOE)[2].plan
    assert np.count_nonzero(plan.slot_to_expert_lp >= 0) > plan.num_experts


def pending(calibration) -> list[str]:
    """Return settings for a relayout from copies to slices, which need fewer
    collectives. It is decided at step 10 and adopted at step 30."""
    words = [f"Balance.calibration = '{calibration}'"]
    words += ["Balance.max_slots_per_device = 3"]
    return [*words, f"Checkpoint.every_steps = {PENDING_STEP}"]


def uncollected(balance: BalanceRecord) -> list[int]:
    """Return the steps with a reply that is not collected, or is yet to be made."""
    snapshot = balance.planner
    events = [x.step for x in snapshot.events if isinstance(x, Observed)]
    return [x.step for x in snapshot.replies] + events


def assert_evaluates_alike(house: House, done: Done, *params: str) -> None:
    """Assert that the checkpoint under `params` gives the run's last evaluation."""
    job, state, now = restored(done.run_dir, *params)
    model = job.model.relaid(now.layout)
    evaluation = held_out.evaluate(
        house.programs[model.layout, model.mesh].evaluate,
        now.begin(1, state),
        on_devices(now.plan, now.layout, model.mesh),
        job.held_out,
        job.window_sharding,
    )
    assert_close(np.float32(evaluation.loss), np.float32(done.evaluated[NUM_STEPS]))
