"""The times of steps, by which a run sees that a link has become slow.

A calibration is measured once, before a run. While the run goes on, its own steps show
what has changed. The cost model predicts a step for the loads that it had; what that
leaves out (embedding, head, optimizer, the host) is the *rest* of the step's time.
Under one layout the rest stays, whatever the loads do. If it grows, the first axis of
the group, the slowest one of the mesh, has become slower: with collectives that were
predicted to take `wires_sec` of a step,

    slowdown  <-  slowdown * (1 + growth of the rest / wires_sec)     1 to MAX_SLOWDOWN

The factor divides the speeds of that axis in every later prediction, so that another
schedule, domain or plan can be cheaper. It is part of the balancer's state, as the
loads are: process 0 observes times, and all processes adopt what it decides.
"""

import dataclasses

import numpy as np

NORMAL_STEPS = 10
"""Number of steps under a layout whose median is its normal time."""
RECENT_STEPS = 5
"""Number of the last steps whose median is compared with it."""
WARM_UP_STEPS = 2
"""Number of steps after a change of layout that do not count: they wait for it."""
CLEARLY = 0.25
"""Share of a step's time by which the rest must grow or shrink to count. Times of steps
on one machine differ by a tenth from minute to minute (docs/testbed.md)."""
MAX_SLOWDOWN = 100.0


@dataclasses.dataclass(frozen=True)
class StepClock:
    """Times of the steps under the current plan and layout. Arrays are never written
    to."""

    sec_t: np.ndarray
    """Seconds of the last steps, the newest last."""
    rest_t: np.ndarray
    """What the cost model leaves out of them."""
    num_seen: int
    """Number of steps since the plan and the layout were adopted."""
    normal_sec: float | None
    """Rest of a step under this layout; None while too few steps were seen."""
    slowdown: float
    """Factor by which the slowest axis is slower than it was calibrated."""


def init() -> StepClock:
    """Return a clock that has seen nothing."""
    return StepClock(np.zeros(0), np.zeros(0), 0, None, 1.0)


def observe(clock: StepClock, step_sec: float, modelled_sec: float) -> StepClock:
    """Return the clock after one more step, of which the cost model predicts
    `modelled_sec` with today's slowdown."""
    num_seen = clock.num_seen + 1
    if num_seen <= WARM_UP_STEPS:
        return dataclasses.replace(clock, num_seen=num_seen)
    sec_t = np.append(clock.sec_t, step_sec)[-NORMAL_STEPS:]
    rest_t = np.append(clock.rest_t, step_sec - modelled_sec)[-NORMAL_STEPS:]
    normal_sec = clock.normal_sec
    if normal_sec is None and len(rest_t) == NORMAL_STEPS:
        normal_sec = float(np.median(rest_t))
    return StepClock(sec_t, rest_t, num_seen, normal_sec, clock.slowdown)


def forget(clock: StepClock) -> StepClock:
    """Return the clock for another plan or layout, under which steps take other
    times."""
    return dataclasses.replace(init(), slowdown=clock.slowdown)


def extra_sec(clock: StepClock) -> float:
    """Return by how much the rest of the last steps was longer than normally, or
    shorter; 0 where that is not clear."""
    if clock.normal_sec is None or len(clock.rest_t) < RECENT_STEPS:
        return 0.0
    extra = float(np.median(clock.rest_t[-RECENT_STEPS:])) - clock.normal_sec
    return extra if abs(extra) > CLEARLY * np.median(clock.sec_t) else 0.0


def settle(clock: StepClock, wires_sec: float) -> StepClock:
    """Return the clock in which the slowest axis is slower or faster by `extra_sec`,
    where its collectives take `wires_sec` of a step, predicted with today's slowdown.

    With the new slowdown the rest of a step is the normal one again.
    """
    extra = extra_sec(clock)
    if extra == 0.0 or wires_sec <= 0:
        return clock
    factor = clock.slowdown * (1 + extra / wires_sec)
    return dataclasses.replace(
        clock,
        sec_t=clock.sec_t[:0],
        rest_t=clock.rest_t[:0],
        slowdown=min(max(1.0, factor), MAX_SLOWDOWN),
    )
