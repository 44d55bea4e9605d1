"""Runs under water-filling and dynamic replication have the losses of plain expert
parallelism, and every step meets its certified bound."""

import numpy as np
import pytest

from tests.support.close import assert_close
from tests.support.run_main import metric_lines
from tests.support.watched_run import BALANCED, config, restored, run_here, watched
from tests.support.workers import LiveWorkers
from train import job

pytestmark = pytest.mark.slow
HOME = ("Balance.policy = 'home'", "Train.num_steps = 24")
MICROMOE = ("Balance.policy = 'micromoe'", "Train.num_steps = 24")
DYNAMIC = (*HOME, "Dispatch.split = 'dynamic'")
MERGED = "Dispatch.group = 'data_expert'"
COUNTED = (
    "rows_lw",
    "fullest_pair",
    "rounds",
    "device_max_over_bound",
    "expert_max_over_mean",
)
RUNS = [
    MICROMOE,
    pytest.param((*MICROMOE, MERGED), marks=pytest.mark.long),
    pytest.param(DYNAMIC, marks=pytest.mark.long),
    pytest.param((*DYNAMIC, MERGED), marks=pytest.mark.long),
    pytest.param((*DYNAMIC, "Model.remat = 'full'"), marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def house():
    with watched() as house:
        yield house


@pytest.fixture(scope="module")
def home(house, tmp_path_factory):
    return run_here(house, tmp_path_factory.mktemp("home"), *HOME)


@pytest.mark.parametrize("params", RUNS)
def test_losses_are_those_of_home_and_rows_at_their_bound(
    house, home, tmp_path, params
):
    run = run_here(house, tmp_path, *params)
    losses, expected = (
        np.float32([line["loss"] for line in r.steps.values()]) for r in (run, home)
    )
    assert_close(losses, expected)
    worst = max(max(line["device_max_over_bound"]) for line in run.steps.values())
    assert worst <= 1 + 1 / 512 + 1e-3  # a device has hundreds of rows: allow one
    skew = max(max(line["device_max_over_mean"]) for line in home.steps.values())
    assert skew > 1.3
    if "Dispatch.split = 'dynamic'" in params:
        even = max(max(line["device_max_over_mean"]) for line in run.steps.values())
        assert even <= 1.02


def test_a_run_that_goes_on_from_home_begins_spread(home):
    """With the checkpoint's home plan, the new policy would have no replicas."""
    for params in (MICROMOE, (*MICROMOE, MERGED)):
        plan = restored(home.run_dir, *params)[2].plan
        assert np.count_nonzero(plan.slot_to_expert_lp >= 0) > plan.num_experts


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ((*HOME, "Dispatch.split = 'water_filling'"), "makes none: use 'micromoe'"),
        (
            ("Balance.sends_states = True", "Balance.policy = 'flexmoe'"),
            "Balance.sends_states=True needs Dispatch.store='resident'",
        ),
        (
            (*MICROMOE, "Dispatch.split = 'dynamic'"),
            "use Balance.policy='home' with it",
        ),
        (
            (*MICROMOE, "Dispatch.slots_per_device = 9"),
            "more replicas than there are devices",
        ),
        ((*DYNAMIC, "Dispatch.copies_per_device = 0"), "of each are always enough"),
        (
            (*MICROMOE, "Dispatch.fused_split = True"),
            "use Dispatch.fused_split = False",
        ),
    ],
)
def test_what_cannot_be_is_said_before_the_run(params, words):
    with pytest.raises((ValueError, NotImplementedError)) as error:
        job.prepare(config(*params))
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.long
@pytest.mark.parametrize("params", [(*MICROMOE, MERGED), DYNAMIC])
def test_two_processes_split_as_one(house, tmp_path, params):
    """Routing is recorded, so all counts of all steps are the same integers."""
    alone, run_dir = tmp_path / "alone", tmp_path / "workers"
    run_here(house, alone, *params)
    balanced = [f"--gin_file={BALANCED}"]
    with LiveWorkers(run_dir, 2, *params, of_main=balanced) as live:
        ended = live.end()
    assert ended.code == 0, ended.err
    counted, expected = (
        [
            {name: x.get(name) for name in COUNTED}
            for x in metric_lines(r)
            if "loss" in x
        ]
        for r in (run_dir, alone)
    )
    assert len(counted) == 24
    assert counted == expected
