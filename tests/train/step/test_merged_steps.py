"""The train step over merged groups equals the step over one expert axis, gathers
nothing over data, and continues from checkpoints of either kind."""

import dataclasses
import functools
import math
import re
import shutil

import numpy as np
import pytest

from moejax.plan.expert_plan import ExpertPlan
from tests.support.close import assert_close
from tests.support.primitives import equations
from tests.support.random_plans import odd_plans, random_plan
from tests.support.run_main import ROOT, metric_lines
from tests.support.run_main import run as run_main
from tests.support.steps import (
    MICRO_BATCHES,
    ONE_EXPERT,
    SMALL,
    STORES,
    E,
    L,
    StepCase,
    case_maker,
    check_step,
    make_case,
    model_from,
    one_step,
    warm_state,
)

pytestmark = [pytest.mark.slow, pytest.mark.long]


@functools.cache
def merged_case(store: str) -> StepCase:
    """Return the small step of support/steps.py over a group of eight devices."""
    sizes = {"slots_per_device": 3, **STORES[store], "group": "data_expert"}
    if "offers_per_device" in sizes:
        sizes["offers_per_device"] = 1
    if store == "owned":
        sizes["slots_per_device"] = 1
    micro_batches = MICRO_BATCHES.get(store, 1)
    cfg = dataclasses.replace(
        SMALL,
        dispatch=dataclasses.replace(SMALL.dispatch, **sizes),
        train=dataclasses.replace(SMALL.train, accumulate_steps=micro_batches),
    )
    return case_maker(model_from(cfg, "float32"))


CASES = ["resident", "owned", "prefetched", "sharded"]


@pytest.mark.parametrize("store", CASES)
def test_a_merged_step_is_the_step_of_one_expert_axis(store):
    """Loss, gradients, moments and parameters agree, from one state under any plan."""
    start, case = warm_state("float32"), merged_case(store)
    expected = one_step(make_case("owned", "float32"), start, ExpertPlan.home(L, E))
    rng, plans = np.random.default_rng(5), []
    if store != "owned":
        plans = list(odd_plans(case.model.layout, L).values())
    plans += [random_plan(rng, case.model.layout, L) for _ in range(2)]
    for plan in plans:
        check_step(one_step(case, start, plan), expected, "float32")


def gathered_over_data(case: StepCase) -> list[int]:
    """Return the input sizes of our own gathers over data and of their transposes."""
    return [
        eqn.invars[0].aval.size
        for eqn, _ in equations(case.traced.jaxpr)
        if re.match("all_gather|reduce_scatter", eqn.primitive.name)
        and "data" in eqn.params["axis_name"]
    ]


def compiled_over_data(case: StepCase) -> list[int]:
    """Return the sizes of the compiled step's gathers and reduce-scatters, but for
    those whose axes are named and are not data."""
    found = []
    for line in case.step.as_text().splitlines():
        result = re.search(r"= (.*) (all-gather|reduce-scatter)\(", line)
        axes = re.search(r"replica_groups=mesh\[.*?\] \{(.*?)\}", line)
        if result and (axes is None or "data" in axes[1]):
            shapes = re.findall(r"\[([0-9,]+)\]", result[1])
            found += [math.prod(map(int, shape.split(","))) for shape in shapes]
    return found


@pytest.mark.parametrize("store", CASES)
def test_no_expert_weight_is_gathered_over_data(store):
    """Neither we nor XLA's partitioner gather expert weights over data, as happens with
    groups along expert."""
    plain, case = make_case("owned", "float32"), merged_case(store)
    for over_data in (gathered_over_data, compiled_over_data):
        assert max(over_data(plain)) >= ONE_EXPERT
        assert max(over_data(case), default=0) < ONE_EXPERT


@pytest.mark.parametrize("is_back", [False, True])
def test_a_checkpoint_goes_on_merged_and_back(tmp_path, is_back):
    """With the balancer on, each leg starts from the other's checkpoint. Its losses are
    those of a run that was never merged."""
    plain, legs = tmp_path / "plain", tmp_path / "legs"
    gin_file = ROOT / "tests" / "support" / "balanced.gin"
    often = ("Checkpoint.every_steps = 7", "Checkpoint.keep_last = 9")

    def leg(run_dir, num_steps: int, *params: str):
        params = (f"Train.num_steps = {num_steps}", *often, *params)
        ended = run_main(run_dir, *params, gin_file=gin_file)
        assert (ended.code, ended.err) == (0, "")
        return ended.out

    leg(plain, 20)
    shutil.copytree(plain, legs)
    (legs / "summary.json").unlink()  # as if the run had been stopped at step 7
    for folder in (legs / "checkpoints").glob("[0-9]*"):
        if folder.name != "7":
            shutil.rmtree(folder)
    messages = leg(legs, 14, "Dispatch.group = 'data_expert'")
    assert "resumed at step 7" in messages
    assert "dispatch.group: 'expert' saved, 'data_expert' here" in messages
    assert re.search("step 1[0-4]  adopted", messages), "a plan with replicas, merged"
    if is_back:
        assert "resumed at step 14" in leg(legs, 20)

    def losses(run_dir):
        return np.float32([x["loss"] for x in metric_lines(run_dir) if "loss" in x])

    assert losses(legs).shape == (20 if is_back else 14,)
    assert_close(losses(legs), losses(plain)[: len(losses(legs))])
