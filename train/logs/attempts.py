"""Lines of attempts.jsonl: where and with what each attempt of a run began and ended.

    {"step": 0, "attempt": 1, "at": .., "schema": 2, "device_kind": .., ..}   it begins
    {"step": 60, "attempt": 1, "at": .., "end": "finished", "why": ""}        it ends

An *attempt* is one start of the program on a run directory. One that is killed has no
line of its end. No line is ever removed, so steps fall where an attempt goes on from a
checkpoint, as in goodput.jsonl.
"""

import contextlib
import dataclasses
import importlib.metadata
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from moejax.plan.layout import Topology
from train.logs.schema import SCHEMA
from train.messages import one_line

FILE = "attempts.jsonl"


def begun(step: int, attempt: int, begun_at: float, mesh: Topology) -> dict[str, Any]:
    """Return the line of an attempt that goes on after `step`, and began `begun_at`
    seconds after 1970."""
    return {
        "step": step,
        "attempt": attempt,
        "at": begun_at,
        "schema": SCHEMA,
        "moejax": _version("moejax"),
        "jax": jax.__version__,
        "num_processes": jax.process_count(),
        "num_devices": mesh.num_devices,
        "device_kind": jax.local_devices()[0].device_kind,
        "mesh": dataclasses.asdict(mesh),
    }


@contextlib.contextmanager
def recorded(
    append: Callable[[dict], None],
    begin: dict[str, Any],
    last_step: Callable[[], int],
    num_steps: int,
) -> Iterator[None]:
    """Append the line `begin` of an attempt, and when the block ends that of its end:
    finished if `last_step()` is the last of `num_steps`, else stopped; failed with an
    error."""
    append(begin)
    end, why = "failed", ""
    try:
        yield
        end = "finished" if last_step() >= num_steps else "stopped"
    except BaseException as fault:
        why = one_line(fault) or type(fault).__name__
        raise
    finally:
        line = {"step": last_step(), "attempt": begin["attempt"], "at": time.time()}
        append(line | {"end": end, "why": why})


def _version(package: str) -> str | None:
    """Return the version of an installed package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
