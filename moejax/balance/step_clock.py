"""The times of steps, by which a run sees that a link has become slow.

A calibration is measured once, before a run. While the run goes on, its own steps show
what has changed: under one layout and steady loads a step takes as long as it took. If
it takes longer by `extra`, and its collectives over the slowest axis of the group were
predicted to take `wires` of it, that axis has become slower:

    slowdown  <-  slowdown * (1 + extra / wires), at least 1

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
"""Share of the normal time by which a step must be longer or shorter to count. Times of
steps on one machine differ by a tenth from minute to minute (docs/testbed.md)."""


@dataclasses.dataclass(frozen=True)
class StepClock:
    """Times of the steps under the current layout. Arrays are never written to."""

    sec_t: np.ndarray
    """Seconds of the last steps, the newest last."""
    num_seen: int
    """Number of steps since the layout was adopted."""
    normal_sec: float | None
    """Time of a step under this layout; None while too few were seen."""
    slowdown: float
    """Factor by which the slowest axis is slower than it was calibrated."""


def init() -> StepClock:
    """Return a clock that has seen nothing."""
    return StepClock(np.zeros(0), 0, None, 1.0)


def observe(clock: StepClock, step_sec: float) -> StepClock:
    """Return the clock after one more step."""
    num_seen = clock.num_seen + 1
    if num_seen <= WARM_UP_STEPS:
        return dataclasses.replace(clock, num_seen=num_seen)
    sec_t = np.append(clock.sec_t, step_sec)[-NORMAL_STEPS:]
    normal_sec = clock.normal_sec
    if normal_sec is None and len(sec_t) == NORMAL_STEPS:
        normal_sec = float(np.median(sec_t))
    return StepClock(sec_t, num_seen, normal_sec, clock.slowdown)


def forget(clock: StepClock) -> StepClock:
    """Return the clock for another plan or layout, under which steps take other
    times."""
    return dataclasses.replace(
        clock, sec_t=clock.sec_t[:0], num_seen=0, normal_sec=None
    )


def extra_sec(clock: StepClock) -> float:
    """Return by how much the last steps were longer than normal ones, or shorter; 0
    where that is not clear."""
    if clock.normal_sec is None:
        return 0.0
    extra = float(np.median(clock.sec_t[-RECENT_STEPS:])) - clock.normal_sec
    return extra if abs(extra) > CLEARLY * clock.normal_sec else 0.0


def settle(clock: StepClock, wires_sec: float) -> StepClock:
    """Return the clock in which `extra_sec` is the new normal: the slowest axis is
    slower or faster by what collectives of `wires_sec` a step took longer or shorter.

    `wires_sec` is their time as it is predicted with today's slowdown.
    """
    extra = extra_sec(clock)
    if extra == 0.0 or wires_sec <= 0:
        return clock
    factor = max(1.0, clock.slowdown * (1 + extra / wires_sec))
    return dataclasses.replace(
        clock, normal_sec=clock.normal_sec + extra, slowdown=factor
    )
