"""Choose which train step runs next: the loop-free one, or the exact one.

    init -> observe, every step -> runs_loop_free

A step *overflows* where round 0 of an exchange cannot carry all rows. The exact step
carries them in loops, and the host waits at each loop, rows or not. The loop-free step
has none, and where it overflows it is thrown away, with the step dispatched behind it,
and its batch runs in the exact step. With a share of s overflowing steps, in seconds
per step above a loop-free one that is kept:

    exact        loops_sec
    loop-free    s (2 step_sec + loops_sec)

The rows that loops carry cost the same in both, s times, and cancel. Overflows come in
bursts, for a hot expert stays: hence a moving share. After a burst it sinks below the
price in about as many steps as the waits of these steps take to cost an overflow.
"""

import dataclasses
from typing import NamedTuple

from moejax.balance.decision import duration

NUM_THROWN_AWAY = 2
"""Loop-free steps that one overflow wastes: the step, and the one behind it."""


class Prices(NamedTuple):
    """Modelled times from which the next step is chosen, in seconds."""

    step_sec: float
    """Time of a loop-free step."""
    loops_sec: float
    """Time for which the host waits at the loops of an exact step."""

    def extra_sec(self, share: float, *, is_loop_free: bool) -> float:
        """Return the expected time per step above a loop-free step that is kept, where
        a share of steps overflows."""
        if not is_loop_free:
            return self.loops_sec
        return share * (NUM_THROWN_AWAY * self.step_sec + self.loops_sec)

    def prefers_loop_free(self, share: float) -> bool:
        """Return whether the loop-free step is the cheaper one."""
        return self.extra_sec(share, is_loop_free=True) <= self.extra_sec(
            share, is_loop_free=False
        )

    def line(self, share: float) -> str:
        """Return the comparison as a clause for the log."""
        loop_free = duration(self.extra_sec(share, is_loop_free=True))
        exact = duration(self.extra_sec(share, is_loop_free=False))
        return (
            f"{share:.1%} of steps overflow (moving share), so that loop-free steps "
            f"cost {loop_free} more per step, and loops {exact} (modelled)"
        )


@dataclasses.dataclass(frozen=True)
class State:
    """Everything that the choice remembers between steps; checkpoints hold it."""

    share: float = 0.0
    """Moving share of steps that overflowed."""
    runs_loop_free: tuple[bool, bool] = (True, True)
    """Whether the step behind the last observed one is the loop-free one, and the step
    after that. The former is dispatched before the last one is observed."""


def observe(
    state: State,
    prices: Prices,
    half_life_steps: float,
    *,
    overflowed: bool,
    is_redone: bool,
) -> State:
    """Return the state after one more step, in which an exchange overflowed or not.

    Where the step is run again (`is_redone`), the step behind it is dispatched again
    too, and is the one that is the cheaper now.
    """
    keep = 0.5 ** (1 / half_life_steps)
    share = keep * state.share + (1 - keep) * overflowed
    cheaper = prices.prefers_loop_free(share)
    behind = cheaper if is_redone else state.runs_loop_free[1]
    return State(share, (behind, cheaper))
