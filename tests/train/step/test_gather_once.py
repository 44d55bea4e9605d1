"""A step whose slots are gathered over data once equals one that gathers them in every
layer of every micro-batch, and gathers nothing over data in a layer."""

import dataclasses
import functools

import numpy as np
import pytest

from moejax.config import Balance, Config
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from tests.support.close import assert_close
from tests.support.primitives import equations
from tests.support.random_plans import random_plan
from tests.support.run_main import ROOT, metric_lines
from tests.support.run_main import run as run_main
from tests.support.steps import (
    ONE_EXPERT,
    SMALL,
    E,
    L,
    StepCase,
    case_maker,
    check_step,
    home,
    make_case,
    model_from,
    one_step,
    warm_state,
)
from train.step.compiled import trace_train_step


@dataclasses.dataclass(frozen=True)
class Case:
    """Settings of a step that is compared with both values of Dispatch.gather."""

    store: str = "owned"
    mesh: tuple[int, ...] = (1, 2, 4, 1)
    """Sizes of dc, data, expert and tensor."""
    micro_batches: int = 1
    remat: str = "full"
    split: str = "even"
    schedule: str = "auto"


def configure(case: Case, gather: str) -> Config:
    """Return SMALL with the settings of a case."""
    mesh = Topology(*case.mesh)
    own, fields = E // mesh.expert, {"store": case.store, "gather": gather}
    if case.store == "resident":
        fields |= {"slots_per_device": own + 1, "offers_per_device": own}
        fields |= {"copies_per_device": own + 1, "split": case.split}
    fields["schedule"] = case.schedule
    steps = case.micro_batches
    return dataclasses.replace(
        SMALL,
        mesh=mesh,
        model=dataclasses.replace(SMALL.model, remat=case.remat),
        dispatch=dataclasses.replace(SMALL.dispatch, **fields),
        train=dataclasses.replace(SMALL.train, accumulate_steps=steps),
        balance=Balance(policy="home" if case.split == "even" else "micromoe"),
    )


@functools.cache
def compiled(case: Case, gather: str, dtype: str) -> StepCase:
    return case_maker(model_from(configure(case, gather), dtype))


@pytest.mark.slow
def test_a_step_in_float64(doubles):
    """Two micro-batches whose gradients are summed in whole slots, against one batch
    whose gradients are summed where parameters rest."""
    start, once = warm_state(doubles), compiled(Case(micro_batches=2), "step", doubles)
    expected = one_step(make_case("owned", doubles), start, ExpertPlan.home(L, E))
    plans = [home(once), random_plan(np.random.default_rng(1), once.model.layout, L)]
    for plan in plans:
        check_step(one_step(once, start, plan), expected, doubles)


GRID = (
    Case(),
    Case(remat="none", micro_batches=2),
    Case("resident", micro_batches=2),
    Case("resident", remat="none"),
    Case("resident", micro_batches=2, split="water_filling"),
    Case(mesh=(1, 2, 2, 2), micro_batches=2),
    Case("resident", mesh=(1, 2, 2, 2), schedule="s1h"),
    Case(mesh=(1, 2, 2, 2), schedule="local", micro_batches=2),
    Case(mesh=(2, 2, 2, 1), micro_batches=2),
    Case("resident", mesh=(2, 2, 2, 1)),
    Case(mesh=(1, 8, 1, 1), micro_batches=2),
    Case(mesh=(8, 1, 1, 1)),
)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("case", GRID, ids=str)
def test_a_step_on_any_mesh(case):
    """Loss, gradients, moments and parameters agree in float32, up to the order of the
    sums over micro-batches and devices."""
    once, each = (compiled(case, gather, "float32") for gather in ("step", "layer"))
    start, plans = warm_state("float32"), [home(once)]
    plans.append(random_plan(np.random.default_rng(1), once.model.layout, L))
    for plan in plans:
        check_step(one_step(once, start, plan), one_step(each, start, plan), "float32")


@pytest.mark.parametrize("store", ["owned", "resident"])
@pytest.mark.parametrize("gather", ["step", "layer"])
def test_experts_travel_over_data_once_a_step(gather, store):
    """A layer gathers two arrays (gate with up, and down) and scatters their gradients.
    With remat it gathers twice in each micro-batch, if the step does not."""
    micro_batches = 2
    case = Case(store, micro_batches=micro_batches)
    traced = trace_train_step(model_from(configure(case, gather), "float32"))
    per_layer = 2 if gather == "step" else 3 * micro_batches
    assert num_over_data(traced.jaxpr) == 2 * L * per_layer


def num_over_data(jaxpr) -> int:
    """Return how many arrays of experts our collectives gather over data, or scatter,
    in a step."""
    return sum(
        trips
        for eqn, trips in equations(jaxpr)
        if eqn.primitive.name.startswith(("all_gather", "reduce_scatter"))
        and eqn.params["axis_name"] == ("data",)
        and eqn.invars[0].aval.size >= ONE_EXPERT
    )


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("gathers", [("step", "layer"), ("layer", "step")])
def test_a_checkpoint_and_swaps_go_on_under_the_other(tmp_path, gathers):
    """With the balancer on, the losses of two legs are those of a run with one way to
    gather. The second leg resumes the checkpoint of the first."""
    plain, legs = tmp_path / "plain", tmp_path / "legs"
    gin_file = ROOT / "tests" / "support" / "balanced.gin"
    often = ("Checkpoint.every_steps = 7", "Checkpoint.keep_last = 9")

    def leg(run_dir, num_steps: int, gather: str):
        params = (f"Train.num_steps = {num_steps}", f"Dispatch.gather = '{gather}'")
        ended = run_main(run_dir, *params, *often, gin_file=gin_file)
        assert (ended.code, ended.err) == (0, "")
        return ended.out

    assert " swap " in leg(plain, 20, gathers[1])
    leg(legs, 14, gathers[0])
    (legs / "summary.json").unlink()  # as if the run had been stopped
    messages = leg(legs, 20, gathers[1])
    assert "resumed at step 14" in messages

    def losses(run_dir):
        return np.float32([x["loss"] for x in metric_lines(run_dir) if "loss" in x])

    assert losses(legs).shape == (20,)
    assert_close(losses(legs), losses(plain))


@pytest.mark.slow
@pytest.mark.long
def test_programs_from_a_compilation_cache_compute_the_same(tmp_path, monkeypatch):
    """The second run finds the programs of the first (docs/testbed.md)."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    digests, programs = [], []
    for name in ("fresh", "cached"):
        params = ("Train.num_steps = 20", "Dispatch.gather = 'step'")
        ended = run_main(tmp_path / name, *params)
        assert (ended.code, ended.err) == (0, "")
        digests.append(ended.record["digest"])
        programs.append(sorted(path.name for path in cache.rglob("*-cache")))
    assert digests[0] == digests[1]
    assert programs[0] == programs[1] != []
