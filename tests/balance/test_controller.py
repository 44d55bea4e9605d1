"""Test the balancer's controller: when it acts, what it chooses, and that its state is
a value that survives JSON."""

import dataclasses
import itertools

import numpy as np
import pytest

from moejax.balance import adoptions, candidates, codec, controller
from moejax.balance.adoptions import Adoptions
from moejax.balance.candidates import Candidate
from moejax.plan.expert_plan import EMPTY, ExpertPlan
from tests.support.balanced_run import (
    COST,
    EVEN,
    LAYOUT,
    OWN,
    BalancedRun,
    E,
    L,
    hot,
    noisy,
    settings,
    worst,
)

pytestmark = pytest.mark.usefixtures("policies_of_tests")
NARROW = dataclasses.replace(LAYOUT, slots_per_device=2)
"""LAYOUT without room for copies: only a relayout helps."""
HOME = ExpertPlan.home_in(LAYOUT, L)


def test_below_the_threshold_nothing_is_decided():
    load_lwe = hot(0, 0.2)  # device 0 has 0.314 of the rows: 1.257 times the mean
    run = BalancedRun.start(settings(act_above=1.3, margin=0.0))
    assert 1.25 < worst(run.state, load_lwe) < 1.3
    assert run.go(range(60), lambda step: load_lwe).decisions == []
    run = BalancedRun.start(settings(act_above=1.24))
    assert run.go(range(9), lambda step: load_lwe).changes()


def test_between_the_thresholds_it_decides_only_if_it_was_above():
    """Between rest_below and act_above the controller goes on deciding if the load was
    above act_above before.

    With a margin of 0.9 no change pays, so that each decision is a keep.
    """
    quiet = settings(margin=0.9, half_life_steps=1.0, cooldown_steps=0, act_above=1.6)
    assert quiet.rest_below == pytest.approx(1.2)
    run, between = BalancedRun.start(quiet), hot(0, 0.25)  # 1.43
    for steps, load_lwe, decision_steps in (
        (range(20), between, []),
        (range(20, 40), hot(0, 0.5), [20, 25, 30, 35]),
        (range(40, 60), between, [40, 45, 50, 55]),
        (range(60, 80), EVEN, []),
        (range(80, 100), between, []),
    ):
        num_decisions = len(run.decisions)
        run.go(steps, lambda step, load_lwe=load_lwe: load_lwe)
        assert [d.step for d in run.decisions[num_decisions:]] == decision_steps
    assert set(run.kinds()) == {"keep"}


def test_it_decides_only_at_its_steps_and_after_an_observation():
    run = BalancedRun.start(settings(every_steps=7, margin=0.9, cooldown_steps=0))
    assert controller.decide(run.settings, COST, run.state, 0) == (run.state, None)
    run.go(range(1, 30), lambda step: hot(0, 0.5))
    assert [d.step for d in run.decisions] == [7, 14, 21, 28]


def test_a_decision_is_adopted_at_its_step_and_blocks_others_until_then():
    run = BalancedRun.start(settings(every_steps=1, lag_steps=6, cooldown_steps=1))
    run.go(range(6), lambda step: hot(0, 0.5))
    (swap,) = run.decisions
    assert (swap.kind, swap.step, swap.adopt_step) == ("swap", 0, 6)
    assert run.state.swaps == (swap,)
    assert (run.state.plan, run.state.last_change_step) == (HOME, None)
    run.go([6], lambda step: hot(0, 0.5))
    assert (run.state.plan, run.state.last_change_step) == (swap.plan, 6)
    assert not run.state.swaps


@pytest.mark.parametrize("lag_steps", [1, 3])
def test_without_a_cooldown_the_plan_may_change_at_every_step(lag_steps):
    """As many swaps wait as a lag has steps. Each is planned from the one before, and
    they are adopted in their order."""
    often = settings(
        every_steps=1, lag_steps=lag_steps, cooldown_steps=0, act_above=1.1,
        half_life_steps=1.0,
    )  # fmt: skip
    run = BalancedRun.start(often)
    adopted, num_waiting = [], []
    for step in range(40):
        run.go([step], lambda step: hot(step % E, 0.5))
        adopted.append(run.state.plan.digest)
        num_waiting.append(len(run.state.swaps))
    swaps = run.changes()
    assert len(swaps) >= 10
    assert max(num_waiting) == lag_steps
    assert all(b.digest_before == a.plan.digest for a, b in itertools.pairwise(swaps))
    for swap in swaps:
        assert swap.adopt_step == swap.step + lag_steps
        assert adopted[swap.adopt_step : swap.adopt_step + 1] in (
            [],
            [swap.plan.digest],
        )


@pytest.mark.parametrize("spare_steps", [-1, 0])
def test_a_relayout_is_begun_only_if_the_run_adopts_it(spare_steps):
    """The first relayout is decided at step 5 and adopted at step 16. A keep says why
    there is none: one is pending, is too late, or cools down."""
    last = settings(relayout_lag_steps=11, num_steps=16 + spare_steps)
    run = BalancedRun.start(last, layout=NARROW).go(range(20), lambda step: hot(0, 0.5))
    assert [(d.step, d.adopt_step) for d in run.changes()] == (
        [] if spare_steps else [(5, 16)]
    )
    *_, last_keep = (d for d in run.decisions if d.kind == "keep")
    assert "step 16" in last_keep.why
    assert ("after the last, 15" in last_keep.why) == bool(spare_steps)
    cooling = dataclasses.replace(run.state, relayout=None, last_change_step=7)
    assert controller._barred(settings(), cooling, 10) == "no relayout before step 27"


def test_a_kept_plan_says_what_a_relayout_would_save():
    """A row takes a millisecond. Device 0 has 1600 rows of expert 0 and 228 of expert
    1. With a replica of expert 0 on each device, the fullest device has 400 + 2 * 228.
    A step takes three times the forward pass, in two layers, so that a relayout saves
    6 * (1.828 - 0.856) s.
    """
    dear = dataclasses.replace(COST, compile_sec=1e4)
    run = BalancedRun.start(settings(), dear, NARROW)
    early, late = run.go(range(9), lambda step: hot(0, 0.5)).decisions
    assert "before loads were seen for a half life" in early.why
    assert late.why.startswith("relayout saves 5.8 s/step, too little in 500 steps")
    assert late.why.endswith("asked again at step 25")


@pytest.mark.parametrize(("num_steps", "pays"), [(180, False), (181, True)])
def test_a_change_is_counted_over_the_steps_that_are_left(num_steps, pays):
    """A relayout saves 5.8 s a step (above). Decided at step 5 and adopted at step 9,
    it is in use for 172 or 173 steps, and compiles for 172.5 times what it saves."""
    run = BalancedRun.start(settings(num_steps=num_steps), layout=NARROW)
    gain_sec = 6 * (1.828 - 0.856)
    run.cost = dataclasses.replace(COST, compile_sec=172.5 * gain_sec)
    run.go(range(6), lambda step: hot(0, 0.5))
    assert [d.kind for d in run.decisions] == ["keep", "relayout" if pays else "keep"]
    assert f" in {num_steps - 8} steps" in run.decisions[-1].why


def test_only_stores_that_the_settings_allow_are_considered():
    """The cheapest of the allowed stores is chosen.

    Here collectives are slow and bytes are free. Gathered slots ('sharded') take one
    collective a step; owners and copies take two.
    """
    slow = dataclasses.replace(
        COST, latency_sec=0.1, bytes_per_expert=0.0, bytes_per_move=0.0
    )
    for stores, becomes in ((None, "sharded"), (("resident",), "resident")):
        chosen = settings(policy="flexmoe", stores=stores, act_above=1.05)
        run = BalancedRun.start(chosen, slow).go(range(1, 60), lambda step: hot(0, 0.5))
        assert run.changes()
        assert run.state.layout.store == becomes


def test_after_an_adoption_it_rests_for_the_cooldown():
    """No decision is made within the cool-down after an adoption, although another
    expert is hot as soon as the first has replicas."""
    run = BalancedRun.start(settings(every_steps=1, cooldown_steps=25))
    run.go(range(200), lambda step: hot(step // 4 % E, 0.5))
    adoption_steps = [d.adopt_step for d in run.changes()]
    decision_steps = [d.step for d in run.decisions]
    assert len(adoption_steps) > 3
    for at in adoption_steps:
        assert not [step for step in decision_steps if at <= step < at + 25]


def test_after_a_keep_no_decision_is_made_within_the_cooldown():
    run = BalancedRun.start(settings(every_steps=1, margin=0.9, cooldown_steps=25))
    run.go(range(150), lambda step: hot(0, 0.5))
    assert set(run.kinds()) == {"keep"}
    later_steps = [d.step for d in run.decisions if d.step > 25]
    assert len(later_steps) >= 4
    assert all(b - a == 25 for a, b in itertools.pairwise(later_steps))


def random_run(seed, **changes):
    """Return a run and a function that gives loads for each step: random hot experts
    that change every 20 steps, different in each layer, with noise."""
    rng = np.random.default_rng(seed)
    experts, shares = rng.integers(0, E, (30, L)), rng.uniform(0.1, 0.6, (30, L))

    def load_of_step(step):
        at = step // 20 % 30
        load = [hot(e, s, 1)[0] for e, s in zip(experts[at], shares[at])]
        return noisy(np.stack(load), np.random.default_rng(1000 * seed + step))

    return BalancedRun.start(settings(**changes)), load_of_step


def relayout_run(**changes):
    """Return a run with two hot experts of one owner, which is another one every 25
    steps, and a function that gives its loads. Three slots a device level one hot
    expert, and four level two: a relayout is decided at step 10 and adopted at 70."""
    values = {"relayout_lag_steps": 60, "cooldown_steps": 5, "max_slots_per_device": 4}
    run = BalancedRun.start(settings(**values | changes))

    def load_of_step(step: int) -> np.ndarray:
        first = step // 25 * OWN % E
        return (hot(first, 0.9) + hot(first + 1, 0.9)) // 2

    return run, load_of_step


@pytest.mark.parametrize(
    ("make_run", "changes", "is_to_be_cut"),
    [
        (random_run, {"seed": 7}, lambda state: not state.swaps),
        (
            random_run,
            {"seed": 5, "cooldown_steps": 0, "every_steps": 2, "half_life_steps": 1.0},
            lambda state: len(state.swaps) == 2,
        ),
        (relayout_run, {}, lambda state: state.swaps and state.relayout),
    ],
    ids=["quiet", "two swaps", "swap and relayout"],
)
def test_a_state_from_json_goes_on_as_the_state(make_run, changes, is_to_be_cut):
    """A run from a saved state makes the same decisions as the run that was saved, and
    has the same state bit for bit after 80 steps."""
    run, load_of_step = make_run(**changes)
    step = 0
    while step < 40 or not is_to_be_cut(run.state):
        run.go([step], load_of_step)
        step += 1
    text = codec.dumps(run.state)
    assert codec.dumps(codec.loads(text)) == text
    twin = BalancedRun(run.settings, run.cost, codec.loads(text), [])
    run.decisions = []
    for each in (run, twin):
        each.go(range(step, step + 80), load_of_step)
    assert run.changes()
    assert [codec.dumps(d) for d in run.decisions] == [
        codec.dumps(d) for d in twin.decisions
    ]
    assert codec.dumps(run.state) == codec.dumps(twin.state)


def test_swaps_go_on_while_a_relayout_is_pending():
    """Swaps keep the load even in the layout in use, and must pay before it is left.
    The relayout gets a plan for the load that is forecast for its adoption, because its
    first one is outdated by then."""
    run, load_of_step = relayout_run()
    run.go(range(70), load_of_step)
    first, *swaps, again = run.changes()[1:]
    assert (first.kind, first.step, first.adopt_step) == ("relayout", 10, 70)
    assert [d.kind for d in swaps] == ["swap"] * 4
    assert all(d.layout == first.layout_before for d in swaps)
    assert all(d.device_max_over_mean_after < 1.7 for d in swaps)
    assert all(f" in {70 - d.adopt_step} steps" in d.why for d in swaps)
    assert (again.kind, again.step, again.adopt_step) == ("relayout", 67, 70)
    assert again.layout == first.layout
    assert again.digest_before == swaps[-1].plan.digest == run.state.plan.digest
    run.go([70], load_of_step)
    assert run.state.layout == first.layout
    assert run.state.plan == again.plan.validate(first.layout)
    outdated = dataclasses.replace(run.state, plan=first.plan)
    load_lwe = load_of_step(70)
    assert worst(run.state, load_lwe) < 1.25 < worst(outdated, load_lwe)


@pytest.mark.parametrize("every_steps", [1, 2, 7])
def test_no_swap_is_adopted_with_a_relayout_or_after_it_in_its_old_layout(every_steps):
    run, load_of_step = relayout_run(every_steps=every_steps, relayout_lag_steps=31)
    run.go(range(200), load_of_step)
    relayouts = [d for d in run.changes() if d.kind == "relayout"]
    assert relayouts
    layout = LAYOUT
    for decision in sorted(run.changes(), key=lambda d: (d.adopt_step, d.step)):
        assert decision.layout_before == layout or decision.kind == "relayout"
        layout = decision.layout
    due_steps = [d.adopt_step for d in run.changes() if d.kind == "swap"]
    assert not set(due_steps) & {d.adopt_step for d in relayouts}
    assert len(set(due_steps)) == len(due_steps)


def test_what_a_swap_saves_is_not_counted_for_a_relayout():
    """One hot expert that jumps is nearly level with three slots, once the plan is new:
    a fourth slot would save little, however uneven the old plan is."""
    run, _ = relayout_run(margin=0.2)
    run.go(range(200), lambda step: hot(step // 25 % E, 0.5))
    assert {d.kind for d in run.changes()} == {"swap"}


def test_a_relayout_that_no_longer_pays_is_given_up():
    """The plan in use stays, and the layout may be proposed again."""
    run, load_of_step = relayout_run()
    run.go(range(67), load_of_step)
    plan = run.state.plan
    assert run.state.relayout is not None
    run.settings = dataclasses.replace(run.settings, margin=0.9)
    run.go(range(67, 70), load_of_step)
    given_up = run.decisions[-1]
    assert (given_up.kind, given_up.step) == ("keep", 67)
    assert "relayout saves" in given_up.why
    assert (run.state.relayout, run.state.swaps, run.state.refused) == (None, (), ())
    assert (run.state.plan, run.state.layout) == (plan, LAYOUT)


def test_other_processes_know_from_decisions_what_is_in_use_and_what_waits():
    run, load_of_step = relayout_run()
    other = adoptions.Adoptions(
        run.state.layout, run.state.plan, run.state.policy, (), None
    )
    for step in range(75):
        if adoptions.is_due(other, step):
            other = adoptions.adopt(other)
        num_decisions = len(run.decisions)
        run.go([step], load_of_step)
        for decision in run.decisions[num_decisions:]:
            other = adoptions.pend(other, decision)
        assert other == Adoptions(
            *(getattr(run.state, f.name) for f in dataclasses.fields(Adoptions))
        )
    assert other.layout != LAYOUT


def test_swaps_do_not_postpone_a_relayout_for_ever(monkeypatch):
    """There are never three swaps in a row if both kinds always pay and a relayout pays
    more.

    A swap may follow a relayout at once, and a second swap may be preferred. The next
    change is then a relayout.
    """
    run = BalancedRun.start(settings(every_steps=1, cooldown_steps=10))
    wide = dataclasses.replace(LAYOUT, slots_per_device=4)

    def candidate(plan, layout, gain_sec):
        return Candidate(plan, layout, 1.0, gain_sec, 1e-9, 0.0, 0.0, 1, "spread")

    def swaps(question):
        table_lp = np.roll(question.plan.slot_to_expert_lp, LAYOUT.slots_per_device, 1)
        return [candidate(ExpertPlan(table_lp, E), question.layout, 1.0)]

    def relayouts(question):
        layout = wide if question.layout == LAYOUT else LAYOUT
        return [candidate(question.plan.resized(layout), layout, 2.0)]

    monkeypatch.setattr(candidates, "swap", swaps)
    monkeypatch.setattr(candidates, "relayouts", relayouts)
    run.go(range(120), lambda step: hot(0, 0.5))
    kinds = run.kinds()[2:]  # before, too few steps were observed for a relayout
    kinds = [kind for kind in kinds if kind != "keep"]  # at the last call of a relayout
    assert len(kinds) >= 4
    assert set(kinds) == {"swap", "relayout"}
    triples = zip(kinds, kinds[1:], kinds[2:])
    assert all(triple != ("swap",) * 3 for triple in triples)


def test_a_layout_that_is_refused_is_not_proposed_again():
    """A layout that could not be compiled or was too large is not proposed again; other
    layouts may be."""
    waiting = settings(cooldown_steps=10, lag_steps=1000, every_steps=1)
    run = BalancedRun.start(waiting, layout=NARROW)
    layouts = []
    for step in range(0, 150, 30):
        run.go(range(step, step + 30), lambda step: hot(0, 0.5))
        if run.state.relayout is not None:
            layouts.append(run.state.relayout.layout)
            run.state = controller.refuse(run.state)
            again = codec.loads(codec.dumps(run.state))
            assert again.refused == tuple(layouts)
            assert again.layout == NARROW
    assert layouts
    assert len(set(layouts)) == len(layouts)


def test_pairs_under_an_older_plan_are_forgotten():
    run = BalancedRun.start(settings()).go(range(3), lambda step: hot(0, 0.5))
    assert run.state.tracker.fullest_lt.shape[1] == 3
    adopted = controller.adopt(run.state)
    assert adopted.last_change_step == 3
    late = controller.observe(run.settings, adopted, 4, EVEN, np.full(L, 9))
    assert late.tracker.fullest_lt.tolist() == [[9]] * L
    tracker = dataclasses.replace(adopted.tracker, step=1)
    late = dataclasses.replace(adopted, tracker=tracker)
    late = controller.observe(run.settings, late, 2, EVEN, np.full(L, 999))
    assert late.tracker.fullest_lt.shape[1] == 0


def test_a_changed_half_life_counts_from_then_on():
    run = BalancedRun.start(settings()).go(range(3), lambda step: EVEN)
    other = settings(half_life_steps=9.0)
    state = controller.observe(other, run.state, 3, EVEN, np.zeros(L, int))
    assert state.tracker.half_life_steps == 9.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lag_steps": 0}, "Balance.lag_steps=0 must be at least 1"),
        ({"act_above": 1.0}, "Balance.act_above=1.0 must be above 1"),
        ({"margin": -0.1}, "Balance.margin=-0.1 must be at least 0"),
        ({"margin": 1.0}, "Balance.margin=1.0 must be below 1"),
        ({"every_steps": 0}, "Balance.every_steps=0 must be at least 1"),
        ({"half_life_steps": 0}, "Balance.half_life_steps=0 must be at least 1"),
        ({"half_life_steps": float("nan")}, "Balance.half_life_steps=nan must be"),
        ({"policy": "flexmo"}, "did you mean 'flexmoe'"),
        ({"policy": "quux"}, "use one of them"),
        ({"policy": "prophet", "num_nodes": 2}, "Balance.num_nodes=2 is an option of"),
        ({"policy": "eplb", "stores": ("owned",)}, "Balance.policy='eplb' plans for"),
        ({"max_slots_per_device": None}, "max_slots_per_device=None must be a number"),
        ({"relayout_lag_steps": 2}, "Balance.relayout_lag_steps=2 must exceed"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(changes, words):
    with pytest.raises(ValueError, match=words) as info:
        settings(**changes)
    assert "\n" not in str(info.value)


def test_a_start_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"max_slots_per_device=2 is less than the 3"):
        controller.init(settings(max_slots_per_device=2), LAYOUT, HOME, L)
    with pytest.raises(ValueError, match=r"the plan has 2 layers and the model 3"):
        controller.init(settings(), LAYOUT, HOME, L + 1)
    gap = HOME.slot_to_expert_lp.copy()
    gap[gap == 0] = EMPTY
    with pytest.raises(ValueError, match=r"layer 0 has no slot for experts \[0\]"):
        controller.init(settings(), LAYOUT, ExpertPlan(gap, E), L)
