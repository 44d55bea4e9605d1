"""Steps in flight, with programs that only count: whatever overflows, and whenever the
run settles, each batch is trained on once and in order, and its statistics are read
once."""

import dataclasses
import random
import types

import numpy as np
import pytest

from moejax.balance.overflows import Prices
from moejax.config import Config, Dispatch, Moe
from moejax.plan.layout import Topology
from moejax.resolve.resolved import Resolved
from tests.support.resolved import make_run
from train.in_flight import InFlight

NUM_STEPS = 200


@dataclasses.dataclass(frozen=True)
class Metrics:
    """Metrics of a step on "devices" that compute at once."""

    is_redo_needed: bool
    rounds: int

    @property
    def routing(self):
        return types.SimpleNamespace(rounds_l=np.array([1, self.rounds]))

    @property
    def loss(self):
        return types.SimpleNamespace(is_ready=lambda: True)

    def copy_to_host_async(self) -> None:
        """Do nothing: they are on the host."""


@dataclasses.dataclass
class Programs:
    """Train steps whose state is the list of batches that changed it, with the plan."""

    overflows: set[int]
    num_runs: int = 0
    loop_free: bool = True

    def run(self, step, state, placement, windows, *, is_loop_free):
        self.num_runs += 1
        rounds = 1 + (step in self.overflows)
        is_redo_needed = len(state) != step - 1 or (is_loop_free and rounds > 1)
        if not is_redo_needed:
            kind = "loop-free" if is_loop_free else "exact"
            state = (*state, (windows, placement, kind))
        return state, Metrics(is_redo_needed, rounds)


class FakeRun:
    """A training loop around an InFlight: it settles all steps at random, and then
    changes the plan or goes on from a checkpoint."""

    def __init__(self, overflows, prices, rng=None):
        self.programs, self.lines = Programs(overflows), []
        self.balancing = types.SimpleNamespace(
            placement=0, steps=self.programs, say=self.lines.append
        )
        self.run, self.rng = fake_resolved(prices), rng
        self.in_flight = self.make()
        self.kept, self.state = [], ()
        for step in range(1, NUM_STEPS + 1):
            self.state = self.in_flight.dispatch(step, self.state, f"batch {step}")
            if len(self.in_flight) > 1:
                self.read()
            if rng is not None and rng.random() < 0.1:
                self.settle()
                self.balancing.placement += 1
                meta = self.in_flight.meta()
                self.in_flight = self.make()
                self.in_flight.restore(meta)
        self.settle()

    def make(self) -> InFlight:
        watchdog = types.SimpleNamespace(at=lambda what: None)
        return InFlight(self.run, self.balancing, watchdog)

    def read(self) -> None:
        self.state, kept = self.in_flight.settle(self.state)
        assert not kept.metrics.is_redo_needed
        self.kept.append(kept)

    def settle(self) -> None:
        while len(self.in_flight):
            self.read()

    @property
    def redone(self) -> set[int]:
        return {x.step for x in self.kept if x.is_redone}


def fake_resolved(prices: Prices) -> Resolved:
    """Return what InFlight reads of a run with overflow 'redo'."""
    cfg = Config(
        mesh=Topology(expert=4),
        moe=Moe(num_experts=8),
        dispatch=Dispatch(overflow="redo"),
    )
    run = make_run(cfg)
    return types.SimpleNamespace(
        layout=run.layout, settings=run.settings, overflow_prices=prices
    )


ALWAYS = Prices(step_sec=0.0, loops_sec=1.0)
"""Prices at which the loop-free step is always the cheaper one."""
DEAR = Prices(step_sec=1.0, loops_sec=0.1)
"""Prices at which steps are exact for a while after an overflow."""


@pytest.mark.parametrize("prices", [ALWAYS, DEAR])
@pytest.mark.parametrize("seed", range(4))
def test_each_batch_is_trained_on_once_and_in_order(seed, prices):
    rng = random.Random(seed)
    share = rng.choice([0.01, 0.2, 0.9])
    overflows = {s for s in range(1, NUM_STEPS + 1) if rng.random() < share}
    done = FakeRun(overflows, prices, rng)
    assert [x.step for x in done.kept] == list(range(1, NUM_STEPS + 1))
    assert [windows for windows, _, _ in done.state] == [x.windows for x in done.kept]
    assert [x.windows for x in done.kept] == [f"batch {x.step}" for x in done.kept]
    # A step runs again under the plan that it was dispatched with.
    assert [plan for _, plan, _ in done.state] == [x.placement for x in done.kept]
    kinds = {x.step: kind for x, (_, _, kind) in zip(done.kept, done.state)}
    assert all(kinds[step] == "exact" for step in overflows)
    assert done.redone <= overflows
    if prices is ALWAYS:
        assert done.redone == overflows
        assert {s for s, kind in kinds.items() if kind == "exact"} == overflows
        assert not done.lines


def test_when_a_run_settles_does_not_change_what_it_runs():
    """The choice between programs follows from overflows alone, so that a run that was
    resumed, or evaluated more often, has the same bits."""
    rng = random.Random(0)
    overflows = {s for s in range(1, NUM_STEPS + 1) if rng.random() < 0.05}
    whole, other = FakeRun(overflows, DEAR), FakeRun(overflows, DEAR, rng)
    kinds = [[kind for *_, kind in done.state] for done in (whole, other)]
    assert kinds[0] == kinds[1]
    assert whole.redone == other.redone
    assert {"exact", "loop-free"} == set(kinds[0])


def test_an_overflow_wastes_two_steps():
    assert FakeRun({50}, ALWAYS).programs.num_runs == NUM_STEPS + 2
    assert FakeRun(set(), ALWAYS).programs.num_runs == NUM_STEPS
    # A line says when the exact steps become the cheaper ones, and when not any more.
    assert len(FakeRun({50}, DEAR).lines) == 2
