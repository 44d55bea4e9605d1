"""The planner as a pure function of events."""

import numpy as np
import pytest

from moejax.balance import adoptions, codec, planning
from moejax.balance.planning import Adopted, Snapshot
from moejax.plan.expert_plan import ExpertPlan
from tests.support.balanced_run import new_planner, observed

NUM_STEPS = 60


@pytest.fixture(scope="module")
def events_and_replies():
    """The events of a loop that adopts what is due, in their order, and the replies."""
    task, snapshot = new_planner()
    planner, events, replies = snapshot.planner, [], []
    for step in range(1, NUM_STEPS):
        new = [Adopted()] if adoptions.is_due(planner.state, step) else []
        for event in [*new, observed(step)]:
            planner, reply = planning.take(task, planner, event)
            replies += [] if reply is None else [reply]
            events.append(event)
    return events, replies


def test_each_asked_step_has_a_reply(events_and_replies):
    _, replies = events_and_replies
    assert [reply.step for reply in replies] == list(range(5, NUM_STEPS, 5))
    kinds = [reply.decision.kind for reply in replies if reply.decision]
    assert kinds.count("swap") >= 3


@pytest.mark.parametrize("seed", range(3))
def test_a_snapshot_with_events_to_take_goes_on_to_the_same_replies(
    seed, events_and_replies
):
    """The loop may save at any time, with any number of events that are not taken."""
    rng, (events, replies) = np.random.default_rng(seed), events_and_replies
    task, snapshot = new_planner()
    assert codec.loads(codec.dumps(task)) == task
    whole = Snapshot(snapshot.planner, tuple(events)).settled(task)
    assert list(whole.replies) == replies
    cuts = sorted(rng.integers(0, len(events), 2))
    taken = Snapshot(snapshot.planner, tuple(events[: cuts[0]])).settled(task)
    saved = Snapshot(taken.planner, tuple(events[cuts[0] : cuts[1]]), taken.replies)
    restored = codec.loads(codec.dumps(saved)).settled(task)
    rest = Snapshot(restored.planner, tuple(events[cuts[1] :]), restored.replies)
    assert codec.dumps(rest.settled(task)) == codec.dumps(whole)


def test_the_saving_is_that_of_the_plan_of_the_step(events_and_replies):
    """The counts of a step come after the next step's plan was adopted, or before."""
    task, snapshot = new_planner()
    events, replies = events_and_replies
    number = next(i for i, x in enumerate(events) if isinstance(x, Adopted))
    before = Snapshot(snapshot.planner, tuple(events[:number])).settled(task).planner
    due_step = before.state.swaps[0].adopt_step
    old, new = before.state.plan, before.state.swaps[0].plan
    after, _ = planning.take(task, before, Adopted())
    assert planning._in_use(after, due_step - 1)[0] == old
    assert planning._in_use(after, due_step)[0] == new
    reply = next(reply for reply in replies if reply.step >= due_step)
    home_layout, load_lwe = task.home_layout, observed(reply.step).tokens_lwe
    home = ExpertPlan.home_in(home_layout, len(load_lwe))
    saving_sec = task.cost.step_sec(load_lwe, home, home_layout)
    saving_sec -= task.cost.step_sec(load_lwe, new, after.state.layout)
    assert reply.saving_sec == pytest.approx(saving_sec)
