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


@pytest.fixture
def lossy(monkeypatch):
    """A function that enters a plan function into POLICIES as 'lossy'."""

    def enter(plan) -> None:
        monkeypatch.setitem(POLICIES, "lossy", Policy(plan, ("resident",)))

    enter(drop_hottest)
    return enter


def load(hottest: int) -> np.ndarray:
    """Return a load of which one expert has more than half."""
    load_lwe = np.full((L, W, E), 10)
    load_lwe[:, :, hottest] = 200
    return load_lwe


def test_replay_names_the_policy_the_layer_and_the_expert(lossy, tmp_path, capsys):
    path = tmp_path / "a.npz"
    tokens = np.repeat(load(5)[None, :2], 3, axis=0)
    np.savez(path, tokens=tokens, layer=np.array([4, 9]))
    words = ["--trace", str(path), "--devices", str(W), "--policies", "lossy", "--json"]
    assert replay.main(words) == 2
    error = json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
    assert error.startswith(LOST.format(4, 5))


def test_the_check_before_the_first_step_is_on_a_skewed_load(lossy):
    with pytest.raises(ValueError, match=LOST.format(0, r"\d")):
        check_on_skewed_load("lossy", POLICIES["lossy"], LAYOUT, NOTES, L)
    lossy(functools.partial(drop_hottest, layer=2))
    with pytest.raises(ValueError, match=LOST.format(2, r"\d")):
        check_on_skewed_load("lossy", POLICIES["lossy"], LAYOUT, NOTES, L)
    other_store = dataclasses.replace(LAYOUT, store="transient")
    policy = POLICIES["lossy"]  # plans for another store
    check_on_skewed_load("lossy", policy, other_store, NOTES, L)


def test_a_run_checks_its_policy(lossy):
    cfg = Config(balance=Balance(policy="lossy"))
    with pytest.raises(ValueError, match=LOST.format(0, r"\d")):
        make_run(cfg).check_policy()


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "home"])
@pytest.mark.parametrize("devices", [1, 4])
def test_every_shipped_policy_passes(name, devices):
    policy = POLICIES[name]
    for store in policy.stores:
        slots = E // devices + (store != "owned")
        budgets = {}
        if store in ("transient", "resident"):
            budgets = {"offers_per_device": 2, "copies_per_device": 1}
        if devices == 1:
            slots, budgets = E, {}
        layout = Layout(
            E, devices, slots, 64, "ragged" if devices > 1 else "local",
            store=store, split=policy.split, **budgets,
        )  # fmt: skip
        check_on_skewed_load(name, policy, layout, NOTES, L)


def test_the_balancer_takes_no_invalid_plan(lossy):
    settings = Settings.of(
        Balance(policy="lossy", every_steps=1, half_life_steps=1.0), 4, ("resident",)
    )
    state = controller.init(settings, LAYOUT, ExpertPlan.home_in(LAYOUT, L), L)
    state = controller.observe(settings, state, 0, load(6), np.zeros(L, int))
    with pytest.raises(ValueError, match=LOST.format(0, 6)):
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
