"""A run sees a slow link by the times of its steps, and changes its domain."""

import dataclasses

import numpy as np
import pytest

from moejax.balance import codec, controller, step_clock
from moejax.balance.settings import Settings
from moejax.perf.cost_model import cost_model
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.plan.parallel import Domain
from tests.support.calibrations import KINDS, calibration, line

L, W, E, ROWS = 2, 8, 16, 512
DCS = dataclasses.replace(
    calibration(1e12), mesh={"dc": 2, "data": 1, "expert": 4, "tensor": 1},
    collectives={
        kind: {"dc": line(1e10), "expert": line(1e10), "dc_expert": line(1e10)}
        for kind in KINDS
    },
    device_kind="cpu", when="2026-01-01",
)  # fmt: skip
SIZES = {
    "d_model": 64, "d_expert": 64, "itemsize": 4, "micro_batches": 1,
    "other_flops_per_device": 1e6, "group": ("dc", "expert"), "tokens": ROWS,
}  # fmt: skip
COST = cost_model(DCS, **SIZES)


def way(shared) -> Layout:
    """Return the layout of plain expert parallelism, or of a domain."""
    domain = None if shared is None else Domain((2, 4), shared)
    return Layout.home(
        E, W, ROWS, buffer_factor=1.0, slots_per_device=2, store="resident",
        offers_per_device=1, copies_per_device=1, axes=("dc", "expert"), domain=domain,
    )  # fmt: skip


PLAIN, SHARED = way(None), way((2, 1))
SETTINGS = Settings(
    policy="flexmoe", every_steps=5, lag_steps=2, relayout_lag_steps=10,
    cooldown_steps=10, horizon_steps=1000, half_life_steps=4.0, margin=0.05,
    max_slots_per_device=2, ways=(PLAIN, SHARED),
)  # fmt: skip
EVEN_LWE = np.full((L, W, E), ROWS // E)


REST_SEC = COST.step_sec(EVEN_LWE, ExpertPlan.home_in(PLAIN, L), PLAIN)


def seconds(state, load_lwe, slowdown: float) -> float:
    """Return the time of a step whose dc links are slower by a factor: what the cost
    model says, and as long again for what it leaves out."""
    there = COST.slowed(state.layout.axes, slowdown)
    return REST_SEC + there.step_sec(load_lwe, state.plan, state.layout)


def go(state, steps, slowdown: float, settings=SETTINGS, load_lwe=EVEN_LWE):
    """Return the state after steps with these loads, and the decisions."""
    decisions = []
    for step in steps:
        coming = controller.next_adoption(state)
        if coming is not None and step >= coming.adopt_step:
            state = controller.adopt(state)
        sec = seconds(state, load_lwe, slowdown)
        sec *= 1 + 0.05 * (-1) ** step  # a clock that shakes
        args = load_lwe, np.full(L, ROWS // W), sec, COST
        state = controller.observe(settings, state, step, *args)
        state, decision = controller.decide(settings, COST, state, step)
        decisions += [decision] if decision is not None else []
    return state, decisions


def start(settings=SETTINGS):
    return controller.init(settings, PLAIN, ExpertPlan.home_in(PLAIN, L), L)


def test_a_link_cut_to_a_tenth_brings_a_domain():
    """Nothing changes while links are as they were calibrated. After the cut the run
    sees it in RECENT_STEPS, decides at the next step that is asked, and finds about the
    factor. A state that came back from JSON decides the same."""
    state, decisions = go(start(), range(30), 1.0)
    assert [d for d in decisions if d.kind != "keep"] == []
    assert state.clock.slowdown == 1.0
    again = codec.loads(codec.dumps(state))
    ends = [go(each, range(30, 60), 10.0) for each in (state, again)]
    (state, decisions), (_, others) = ends
    assert [str(d) for d in decisions] == [str(d) for d in others]
    relayout = next(d for d in decisions if d.kind == "relayout")
    assert relayout.layout.domain == SHARED.domain
    assert relayout.step <= 30 + step_clock.RECENT_STEPS + SETTINGS.every_steps
    assert relayout.changes["domain"] == (None, (2, 1))
    assert state.layout.domain == SHARED.domain
    assert state.clock.slowdown == pytest.approx(10.0, rel=0.2)


@pytest.mark.parametrize(
    "changes",
    [
        {"ways": (PLAIN,)},  # there is nothing to change to
        {"relayout_lag_steps": 10, "num_steps": 35},  # no time to adopt it
    ],
)
def test_nothing_changes_where_nothing_can(changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    state, _ = go(start(settings), range(30), 1.0, settings)
    state, decisions = go(state, range(30, 60), 10.0, settings)
    assert [d for d in decisions if d.kind != "keep"] == []
    assert state.layout.domain is None


def test_a_pending_relayout_is_given_up_when_its_link_recovers():
    """A pending relayout is judged anew as soon as the run sees another speed, not at
    its last call."""
    settings = dataclasses.replace(SETTINGS, relayout_lag_steps=100)
    state, _ = go(start(), range(30), 1.0, settings)
    state, _ = go(state, range(30, 50), 10.0, settings)
    assert state.relayout.layout.domain == SHARED.domain
    state, decisions = go(state, range(50, 70), 1.0, settings)
    (given_up,) = [d for d in decisions if d.gives_up]
    assert given_up.kind == "keep"
    assert given_up.step <= 50 + step_clock.RECENT_STEPS + SETTINGS.every_steps
    assert (state.relayout, state.layout) == (None, PLAIN)


def test_a_hot_expert_is_no_slow_link():
    """Steps take longer, as the cost model says for their loads."""
    state, _ = go(start(), range(20), 1.0)
    hot_lwe = EVEN_LWE.astype(float)
    hot_lwe[:, :, 0] = 3 * ROWS
    before_sec, after_sec = (seconds(state, x, 1.0) for x in (EVEN_LWE, hot_lwe))
    assert after_sec > 1.5 * before_sec
    state, _ = go(state, range(20, 60), 1.0, load_lwe=hot_lwe)
    assert state.clock.slowdown == 1.0


def test_presumed_speeds_are_not_corrected():
    presumed = dataclasses.replace(DCS, when="presumed")
    cost = cost_model(presumed, **SIZES)
    state = start()
    for step in range(40):
        sec = 1.0 if step < 20 else 9.0
        args = EVEN_LWE, np.full(L, ROWS // W), sec, cost
        state = controller.observe(SETTINGS, state, step, *args)
        state, _ = controller.decide(SETTINGS, cost, state, step)
    assert state.clock.slowdown == 1.0


def test_a_link_that_recovers_is_seen_too():
    """Under the same layout steps become short again."""
    clock = step_clock.init()
    for slowdown in (1.0, 10.0, 1.0):
        for _ in range(step_clock.NORMAL_STEPS + step_clock.WARM_UP_STEPS):
            modelled_sec = 0.5 * clock.slowdown
            clock = step_clock.observe(clock, 0.5 + 0.5 * slowdown, modelled_sec)
        clock = step_clock.settle(clock, 0.5 * clock.slowdown)
        assert clock.slowdown == pytest.approx(slowdown)
    assert step_clock.forget(clock).normal_sec is None
