"""A policy whose plan is invalid is refused in one line: in replay, before the first
step of a run, and at each plan that the balancer takes."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from moejax.balance import controller
from moejax.balance.policies import POLICIES, Policy, check_on_skewed_load, check_plan
from moejax.balance.settings import Settings
from moejax.config import Balance, Config
from moejax.perf.cost_model import NOTES
from moejax.plan.expert_plan import EMPTY, ExpertPlan
from moejax.plan.layout import Layout
from tests.support.resolved import make_run
from tools import replay

L, W, E = 3, 4, 8
LAYOUT = Layout(
    E, W, 3, 64, "ragged", store="resident", offers_per_device=2, copies_per_device=2
)
LOST = (
    "policy 'lossy' returned a plan that cannot run: layer {} has no slot for expert {}"
)


def drop_hottest(load_lwe, layout, cost, current, layer: int = 0):
    """Return the home plan without the hottest expert of one layer."""
    table_lp = ExpertPlan.home_in(layout, len(load_lwe)).slot_to_expert_lp.copy()
    hottest = load_lwe[layer].sum(axis=0).argmax()
    table_lp[layer, table_lp[layer] == hottest] = EMPTY
    return ExpertPlan(table_lp, layout.num_experts)


@pytest.fixture(params=[0, 2])
def layer(request, monkeypatch) -> int:
    """The layer in which the policy 'lossy' loses the hottest expert."""
    plan = functools.partial(drop_hottest, layer=request.param)
    monkeypatch.setitem(POLICIES, "lossy", Policy(plan, ("resident",)))
    return request.param


def load(hottest: int) -> np.ndarray:
    """Return a load of which one expert has more than half."""
    load_lwe = np.full((L, W, E), 10)
    load_lwe[:, :, hottest] = 200
    return load_lwe


def test_replay_names_the_policy_the_layer_and_the_expert(
    monkeypatch, tmp_path, capsys
):
    """Replay plans layer by layer, and knows the layers' numbers from the trace."""
    monkeypatch.setitem(POLICIES, "lossy", Policy(drop_hottest, ("resident",)))
    path = tmp_path / "a.npz"
    tokens = np.repeat(load(5)[None, :2], 3, axis=0)
    np.savez(path, tokens=tokens, layer=np.array([4, 9]))
    words = ["--trace", str(path), "--devices", str(W), "--policies", "lossy", "--json"]
    assert replay.main(words) == 2
    error = json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
    assert error.startswith(LOST.format(4, 5))


def test_a_run_checks_its_policy_on_a_skewed_load(layer):
    with pytest.raises(ValueError, match=LOST.format(layer, r"\d")):
        check_on_skewed_load("lossy", POLICIES["lossy"], LAYOUT, NOTES, L)
    with pytest.raises(ValueError, match=LOST.format(layer, r"\d")):
        make_run(Config(balance=Balance(policy="lossy"))).check_policy()
    other_store = dataclasses.replace(LAYOUT, store="transient")
    check_on_skewed_load("lossy", POLICIES["lossy"], other_store, NOTES, L)


def test_the_balancer_takes_no_invalid_plan(layer):
    settings = Settings.of(
        Balance(policy="lossy", every_steps=1, half_life_steps=1.0), 4, ("resident",)
    )
    state = controller.init(settings, LAYOUT, ExpertPlan.home_in(LAYOUT, L), L)
    state = controller.observe(settings, state, 0, load(6), np.zeros(L, int))
    with pytest.raises(ValueError, match=LOST.format(layer, 6)):
        controller.decide(settings, NOTES, state, 0)


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        (None, "policy 'a' returned a NoneType: it must return an ExpertPlan"),
        (ExpertPlan.home(L, E), "policy 'a' returned a plan that cannot run: the plan"),
        (
            ExpertPlan(np.zeros((1, LAYOUT.num_slots), np.int32), E),
            "layer 0 has no slot for experts 1, 2, 3, 4, 5, 6, 7",
        ),
    ],
)
def test_other_invalid_plans(plan, match):
    with pytest.raises(ValueError, match=match):
        check_plan("a", plan, LAYOUT)
