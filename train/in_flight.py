"""The steps in flight: dispatched, with metrics that the host has not read.

    dispatch step i    the loop-free step, or the exact one: which is the cheaper
    settle step i      read whether it overflowed. If it did, it and all steps behind it
                       have changed nothing: run batch i in the exact step, and dispatch
                       those behind it again

With `Layout.overflow` = 'rounds' every step is exact and none is run again. All
processes read the same flags, so they dispatch the same programs.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from moejax.balance import codec, overflows
from moejax.moe.types import Placement, Windows
from moejax.resolve.resolved import Resolved
from train.balance.balancing import Balancing
from train.launch.processes import Watchdog
from train.step.compiled import Steps
from train.step.state import TrainState
from train.step.step import StepMetrics


@dataclasses.dataclass(frozen=True)
class Dispatched:
    """A step with all that is needed to run its batch again."""

    step: int
    windows: Windows
    placement: Placement
    steps: Steps
    is_loop_free: bool
    metrics: StepMetrics
    is_redone: bool = False

    @property
    def record(self) -> dict[str, Any]:
        """Fields of the step's record that are about overflows; none where no step can
        run again."""
        if self.steps.loop_free is None:
            return {}
        return {"loop_free": self.is_loop_free, "redone": self.is_redone}


class InFlight:
    """The steps in flight, oldest first, and the choice of the next step's program."""

    def __init__(self, run: Resolved, balancing: Balancing, watchdog: Watchdog) -> None:
        self._balancing, self._watchdog = balancing, watchdog
        self.may_redo = run.layout.overflow == "redo"
        """Whether a step in flight may turn out to have changed nothing."""
        self._prices = run.overflow_prices
        self._half_life_steps = run.settings.half_life_steps
        self._state = overflows.State()
        self._queue: list[Dispatched] = []

    def __len__(self) -> int:
        return len(self._queue)

    def restore(self, meta: dict | None) -> None:
        """Go on with the overflows seen before a checkpoint, from its meta record."""
        if meta is not None and meta.get("overflows"):
            self._state = codec.loads(meta["overflows"])

    def meta(self) -> dict[str, Any]:
        """Return the part of a checkpoint's meta record that `restore` reads."""
        return {"overflows": codec.dumps(self._state) if self.may_redo else None}

    def is_computing(self) -> bool:
        """Return whether devices still compute a step that was dispatched."""
        return bool(self._queue) and not self._queue[-1].metrics.loss.is_ready()

    def dispatch(self, step: int, state: TrainState, windows: Windows) -> TrainState:
        """Dispatch a step under the placement in use, begin to copy its metrics, and
        return the state after it."""
        now = self._balancing
        is_loop_free = self._runs_loop_free(step)
        return self._run(step, state, windows, now.placement, now.steps, is_loop_free)

    def settle(self, state: TrainState) -> tuple[TrainState, Dispatched]:
        """Wait for the oldest step in flight, and return it as it was kept. `state` is
        that after the newest, and so is the one returned."""
        oldest = self._queue.pop(0)
        if not self.may_redo:
            return state, oldest
        if not jax.device_get(oldest.metrics.is_redo_needed):
            rounds_l = jax.device_get(oldest.metrics.routing.rounds_l)
            self._observe(oldest.step, bool(np.max(rounds_l) > 1), is_redone=False)
            return state, oldest
        assert oldest.is_loop_free, f"exact step {oldest.step} was dispatched too early"
        self._watchdog.at(f"step {oldest.step}, which is run again")
        self._observe(oldest.step, True, is_redone=True)
        behind, self._queue = self._queue, []
        state = self._again(oldest, state, is_loop_free=False)
        exact = dataclasses.replace(self._queue.pop(0), is_redone=True)
        for later in behind:
            state = self._again(
                later, state, is_loop_free=self._runs_loop_free(later.step)
            )
        return state, exact

    def _again(self, before: Dispatched, state, *, is_loop_free: bool) -> TrainState:
        """Dispatch a step again that has changed nothing."""
        args = before.windows, before.placement, before.steps, is_loop_free
        return self._run(before.step, state, *args)

    def _run(self, step, state, windows, placement, steps, is_loop_free) -> TrainState:
        is_loop_free = is_loop_free and steps.loop_free is not None
        state, metrics = steps.run(
            step, state, placement, windows, is_loop_free=is_loop_free
        )
        # A GPU's guard takes an asynchronous copy for an implicit one.
        with jax.transfer_guard_device_to_host("allow"):
            jax.copy_to_host_async(metrics)
        self._queue.append(
            Dispatched(step, windows, placement, steps, is_loop_free, metrics)
        )
        return state

    def _runs_loop_free(self, step: int) -> bool:
        """Return whether the next step to be dispatched, `step`, is loop-free."""
        return self.may_redo and self._state.runs_loop_free[min(len(self._queue), 1)]

    def _observe(self, step: int, overflowed: bool, *, is_redone: bool) -> None:
        """Take note of whether a step overflowed, and say so if another program is the
        cheaper now."""
        before = self._state
        self._state = overflows.observe(
            before,
            self._prices,
            self._half_life_steps,
            overflowed=overflowed,
            is_redone=is_redone,
        )
        (*_, was_loop_free), (*_, is_loop_free) = (
            x.runs_loop_free for x in (before, self._state)
        )
        if is_loop_free != was_loop_free:
            what = "loop-free steps" if is_loop_free else "steps with later rounds"
            why = self._prices.line(self._state.share)
            self._balancing.say(f"step {step}  {what} follow: {why}")
