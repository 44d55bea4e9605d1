"""Faults that signals make: processes that die, stop, or are asked to stop."""

import os
import random
import re
import signal
import time

from tools.faults.run import STOPPED_SEC, Broken, Run

DEATH_SEC = 3.0 + 2.0
"""Limit on the time from a death to the end of all processes: the launcher's promise,
and two seconds for a machine with more processes than cores."""
TERM_SEC = 60.0
"""Limit on the time from SIGTERM to the end of all processes. A step may wait until
a new layout is compiled."""


def kill(run: Run, rng: random.Random) -> None:
    """Kill one process: all are gone in time, and the launcher starts them again."""
    pids = run.pids()
    run.mark()
    os.kill(rng.choice(pids), signal.SIGKILL)
    run.expect_gone(pids, DEATH_SEC)
    _expect_restart(run, 137)


def kill_launcher(run: Run, rng: random.Random) -> None:
    """Kill the launcher: its processes die with it."""
    pids = run.pids()
    run.signal_launcher(signal.SIGKILL)
    run.expect_gone(pids, DEATH_SEC)
    run.expect_end(-signal.SIGKILL, DEATH_SEC)


def stop_for_ever(run: Run, rng: random.Random) -> None:
    """Stop one process for ever: the launcher takes it for dead."""
    pids = run.pids()
    run.mark()
    os.kill(rng.choice(pids), signal.SIGSTOP)
    run.expect_gone(pids, STOPPED_SEC + DEATH_SEC)
    _expect_restart(run, 137)


def stop_for_a_second(run: Run, rng: random.Random) -> None:
    """Stop one process for a second: nothing happens, and the steps go on."""
    pids = run.pids()
    victim, step = rng.choice(pids), run.last_step()
    os.kill(victim, signal.SIGSTOP)
    try:
        time.sleep(1.0)
    finally:
        os.kill(victim, signal.SIGCONT)
    run.wait_until(lambda: run.last_step() >= step + 2, "two more steps", TERM_SEC)
    if run.pids() != pids:
        raise Broken("a process that was stopped for one second was replaced")


def terminate_worker(run: Run, rng: random.Random) -> None:
    """Ask one process to stop: all save the same step, and are started again."""
    pids = run.pids()
    run.mark()
    os.kill(rng.choice(pids), signal.SIGTERM)
    run.expect_gone(pids, TERM_SEC)
    _expect_restart(run, 75)
    _expect_saved(run)


def terminate_launcher(run: Run, rng: random.Random) -> None:
    """Ask the launcher to stop: all is saved, and it ends with 75."""
    run.mark()
    run.stop(TERM_SEC)
    _expect_saved(run)


def _expect_restart(run: Run, code: int) -> None:
    line = f"ended with {code}: "
    run.wait_until(
        lambda: "starting again" in run.text(is_new=True), "a restart", TERM_SEC
    )
    if line not in run.text(is_new=True):
        raise Broken(f"the launcher did not say {line!r} of the attempt")


def _expect_saved(run: Run) -> None:
    """Raise Broken unless the step that a run says it stopped at has a checkpoint."""
    text = run.text(is_new=True)
    said = re.search(r"stopped by signal \d+ at step (\d+); all is saved", text)
    if said is None or int(said[1]) not in run.saved_steps():
        raise Broken(f"not saved: {said and said[0]}, there are {run.saved_steps()}")
    run.expect_resumed_from(int(said[1]))
