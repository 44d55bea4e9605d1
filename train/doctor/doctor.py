"""Compare the kernels and collectives of a run with their definitions, on its devices.

    check           for `train/main.py --check`: the outcomes, for a table
    require_right   at each start of a run on GPUs, which ends where something is wrong

All processes check together and get the same outcomes, those of all devices, through
the coordinator, and so end alike.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator

import jax

from moejax.resolve.resolved import Resolved
from train.doctor.collectives import collective_checks, run_collective
from train.doctor.kernels import kernel_checks, run_kernel
from train.doctor.outcome import Outcome, from_text, merge, to_text
from train.launch import failures
from train.launch.agreement import merged
from train.launch.program import FAILED, RunFailed
from train.messages import one_line


def require_right(run: Resolved) -> int:
    """Check the devices of a run, and return the number of checks. Raises RunFailed if
    something is wrong on them."""
    outcomes = check(run)
    if wrong := [str(outcome) for outcome in outcomes if not outcome.is_right]:
        raise RunFailed(f"WRONG ON THESE DEVICES: {'; '.join(wrong)}")
    return len(outcomes)


def check(run: Resolved) -> list[Outcome]:
    """Check the devices of a run, and return what all processes have found.

    A check that takes longer than Processes.watchdog_sec ends all processes, with its
    name. What raises an error is wrong.
    """
    mesh, devices = run.mesh_layout.mesh, list(run.mesh.local_devices)
    work = [(x, functools.partial(run_kernel, x, devices)) for x in kernel_checks(run)]
    work += [
        (x, functools.partial(run_collective, x, mesh)) for x in collective_checks(run)
    ]
    outcomes, limit_sec = [], run.cfg.processes.watchdog_sec
    for each, compare in work:
        with _time_limit(each.name, limit_sec):
            try:
                outcome = compare()
            except Exception as error:
                outcome = Outcome(
                    name=each.name,
                    avoided_by=each.avoided_by,
                    error=float("inf"),
                    allowed=0.0,
                    devices=tuple(device.id for device in devices),
                    process=jax.process_index(),
                    detail=f"{type(error).__name__}: {one_line(error, 300)}",
                )
        outcomes.append(outcome)
    with _time_limit("other processes", limit_sec):
        return from_text(merged("outcomes of the doctor", to_text(outcomes), merge))


@contextlib.contextmanager
def _time_limit(name: str, limit_sec: int) -> Iterator[None]:
    """End all processes, with the name of what hangs, if a block takes longer than
    `limit_sec`. 0 never ends them."""
    line = (
        f"DOCTOR HANGS: the check of {name} has not ended after {limit_sec} s "
        "(Processes.watchdog_sec): a device or a link does not answer, or a process is "
        "missing; NCCL_DEBUG=INFO says more of GPUs"
    )
    timer = threading.Timer(limit_sec, failures.end_all, (FAILED, line))
    timer.daemon = True
    if limit_sec:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def table(outcomes: list[Outcome], run: Resolved, sec: float) -> str:
    """Return outcomes as a table, and a line about each that is wrong."""
    width = max((len(outcome.name) for outcome in outcomes), default=0)
    lines = [f"{'':5}  {'check':{width}}  {'error':>8}  {'allowed':>8}"]
    for each in outcomes:
        state = "right" if each.is_right else "WRONG"
        error = f"{each.error:8.2g}  {each.allowed:8.2g}"
        lines.append(f"{state}  {each.name:{width}}  {error}")
    wrong = [str(outcome) for outcome in outcomes if not outcome.is_right]
    devices = f"{run.mesh.size} x {run.mesh.devices.flat[0].device_kind}"
    result = f"{len(wrong)} wrong" if wrong else "all right"
    lines.append(f"{len(outcomes)} checks on {devices} in {sec:.1f} s: {result}")
    return "\n".join(lines + wrong)
