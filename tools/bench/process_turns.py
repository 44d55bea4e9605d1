"""Timing in turns of programs that several processes run together."""

import pathlib
import time
from collections.abc import Callable

from tools.bench.timer import in_turns

UPLINK = pathlib.Path("/sys/class/net/uplink/statistics/tx_bytes")
"""File with the bytes that left this process's DC, on a testbed."""


def make_barrier(mesh) -> Callable[[], object]:
    """Return a barrier: a function that returns when all processes have called it. It
    is cheaper than JAX's own barrier."""
    import jax

    from tools.bench.collective_times import make_collective

    several = tuple(axis for axis, size in mesh.shape.items() if size > 1)
    meet = make_collective(mesh, "all_reduce", several, 1, "float32", 1)
    return lambda: jax.block_until_ready(meet.run(*meet.arguments))


def time_runs(runs, turns: int, meet: Callable, sent: list | None = None) -> list[list]:
    """Return the seconds of each run in each turn; the slowest process counts.

    `sent`, if given, has a list for each run. The bytes that left this DC during the
    run are appended there, also in the warm-up turn.
    """
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    from train.launch.processes import are_several

    sec_nt = np.zeros((len(runs), turns), np.float32)
    for turn, index in in_turns(range(len(runs)), turns):
        meet()
        before, begin = sent_bytes(), time.perf_counter()
        jax.block_until_ready(runs[index]())
        passed_sec = time.perf_counter() - begin
        if turn >= 0:
            sec_nt[index, turn] = passed_sec
        if sent is not None:
            meet()
            sent[index].append(sent_bytes() - before)
    if are_several():
        sec_nt = multihost_utils.process_allgather(sec_nt).max(axis=0)
    return sec_nt.astype(float).tolist()


def sent_bytes() -> int:
    """Return the bytes that have left this process's DC; 0 without a testbed."""
    return int(UPLINK.read_text()) if UPLINK.is_file() else 0
