"""All kinds of faults. A new kind is one entry of FAULTS and one function.

A fault finds the run in the state that it names. Its function disturbs the run, raises
Broken if the promise is not kept, and brings the run to its next step, past the newest
good checkpoint. It returns the seconds from the fault to the answer that `within_sec`
limits, or None where the answer comes at the next start.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Literal

from tools.faults.reference import sha256
from tools.faults.run import (
    LIMIT_SEC,
    STOPPED_SEC,
    Broken,
    Run,
    mount,
    unmount,
)
from tools.faults.worker import DIE_IN_SAVE, FLIP

DEATH_SEC = 3.0 + 2.0
"""Limit on the time from a death to the end of all processes: the launcher's promise,
and two seconds for a machine with more processes than cores."""
FILLING = "filling"
MISMATCHES = (
    "Optimizer.learning_rate = 1e-2",
    "Optimizer.weight_decay = 0.2",
    "Model.norm_eps = 1e-5",
    "Data.seed = 7",
    "Train.seed = 7",
    "Checkpoint.every_steps = 5",
    "Data.corpus = '{other}'",
)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One kind of fault, and what is promised."""

    name: str
    promise: str
    state: Literal["running", "resting"]
    """Whether the run trains, or has been stopped with two checkpoints at least."""
    act: Callable[[Run, random.Random], float | None]
    within_sec: float | None = None
    may_be_early: bool = False
    """Whether it may also hit a run that has not done its first step."""
    min_processes: int = 1
    needs_mounts: bool = False
    """Whether only root can make it. The run directory is then on a small disk."""


def kill(run: Run, rng: random.Random) -> float:
    """Kill one process: all are gone, and the launcher starts them again."""
    pids = run.pids()
    os.kill(rng.choice(pids), signal.SIGKILL)
    sec = _expect_restart(run, pids, 137)
    run.go_on()
    return sec


def kill_in_save(run: Run, rng: random.Random) -> float:
    """Kill one process that has begun to write a checkpoint, as above."""
    pids = run.pids()
    run.give({"kind": DIE_IN_SAVE, "process": rng.randrange(run.num_processes)})
    sec = _expect_restart(run, pids, 137)
    run.go_on()
    return sec


def kill_launcher(run: Run, rng: random.Random) -> float:
    """Kill the launcher: its processes die with it."""
    pids = run.pids()
    run.signal_launcher(signal.SIGKILL)
    sec = run.expect_gone(pids)
    run.expect_end(-signal.SIGKILL)
    run.go_on()
    return sec


def stop_for_ever(run: Run, rng: random.Random) -> float:
    """Stop one process for ever: the launcher takes it for dead."""
    pids = run.pids()
    os.kill(rng.choice(pids), signal.SIGSTOP)
    sec = _expect_restart(run, pids, 137)
    run.go_on()
    return sec


def stop_for_a_second(run: Run, rng: random.Random) -> None:
    """Stop one process for a second: nothing happens, and the steps go on."""
    pids = run.pids()
    victim = rng.choice(pids)
    os.kill(victim, signal.SIGSTOP)
    try:
        time.sleep(1.0)
    finally:
        os.kill(victim, signal.SIGCONT)
    run.wait_for_steps(2)
    if run.pids() != pids:
        raise Broken("a process that was stopped for one second was replaced")


def terminate_worker(run: Run, rng: random.Random) -> float:
    """Ask one process to stop: all save the same step, and are started again."""
    pids = run.pids()
    os.kill(rng.choice(pids), signal.SIGTERM)
    sec = _expect_restart(run, pids, 75)
    run.go_on(_expect_saved(run))
    return sec


def terminate_launcher(run: Run, rng: random.Random) -> float:
    """Ask the launcher to stop: all is saved, and it ends with 75."""
    sec = run.stop()
    run.go_on(_expect_saved(run))
    return sec


def fill_disk(run: Run, rng: random.Random) -> float:
    """Fill the disk: the run ends with 3 and says so, and refuses to start on the full
    disk. Then make room again."""
    disk, pids = run.place.disk, run.pids()

    def has_ended() -> bool:
        _fill(disk)
        return run.has_ended()

    try:
        sec = run.wait_until(has_ended, "an end on the full disk")
        run.expect_end(3)
        run.expect_gone(pids)
        _expect_line(run, ("space", "room"))
        _fill(disk)
        before = _written(run.place.run_dir)
        run.start()
        run.expect_end(3)
        _expect_line(run, ("space", "room"))
        if _written(run.place.run_dir) != before:
            raise Broken("a start on the full disk changed what was written")
    finally:
        (disk / FILLING).unlink(missing_ok=True)
    run.go_on()
    return sec


def make_read_only(run: Run, rng: random.Random) -> float:
    """Make the folder of checkpoints read-only: the run ends with 3 and says so."""
    folder, pids = run.place.checkpoints, run.pids()
    mount("--bind", folder, folder)
    try:
        _remount_read_only(run, folder)
        sec = run.expect_end(3)
    finally:
        unmount(folder)
    run.expect_gone(pids)
    _expect_line(run, ("Read-only",))
    run.go_on()
    return sec


def flip_bit(run: Run, rng: random.Random) -> float:
    """Flip a bit of one copy of a replicated parameter: the run ends with 3, and names
    leaf and device. Only bits that a sum cannot round away are flipped."""
    order = {
        "kind": FLIP,
        "process": rng.randrange(run.num_processes),
        "device": rng.randrange(8),
        "leaf": rng.randrange(1000),
        "element": rng.randrange(10**6),
        "bit": rng.randrange(16, 30),
    }
    flipped = run.give(order)
    sec = run.expect_end(3)
    words = flipped["leaf"].rpartition("/")[2], f"device {flipped['device']} "
    if not all(word in run.error() for word in words):
        raise Broken(f"the line names not both {words}: {run.error()[:300]}")
    run.go_on()
    return sec


def mismatch(run: Run, rng: random.Random) -> None:
    """Start with another value on one process: all end with 2 before the first step,
    and nothing that was written changes."""
    index = rng.randrange(run.num_processes)
    binding = rng.choice(MISMATCHES).format(other=run.place.shared / "other")
    before = _written(run.place.run_dir)
    run.start(f"{index}:{binding}")
    run.expect_end(2)
    if _written(run.place.run_dir) != before:
        raise Broken(f"{binding} on process {index} changed what was written")
    name = binding.split(" ")[0].partition(".")[2]
    if name not in run.error():
        raise Broken(f"the line does not name {name}: {run.error()[:300]}")
    run.go_on()


def damage_checkpoint(run: Run, rng: random.Random) -> None:
    """Damage the newest checkpoint: it is set aside, the one before is used."""
    *_, before, newest = run.saved_steps()
    how = rng.choice((_flip_arrays, _remove_arrays, _cut_record, _garble_record))
    folder = run.place.checkpoints / str(newest)
    how(folder, rng)
    run.go_on(before)
    if "starting again" in run.text():
        raise Broken("it crashed, and was started again")
    if f"CORRUPT CHECKPOINT {newest} renamed" not in run.text():
        raise Broken(f"it does not say that {newest} is damaged")
    if not list(folder.parent.glob(f"{newest}.corrupt*")):
        raise Broken(f"{how.__name__}: {newest} was not set aside")


FAULTS = (
    Fault(
        "kill", "all end, start again, and lose nothing that was saved",
        "running", kill, DEATH_SEC, may_be_early=True,
    ),
    Fault(
        "kill in a save", "the torn checkpoint goes, the one before it is used",
        "running", kill_in_save,
    ),
    Fault(
        "kill the launcher", "its processes end",
        "running", kill_launcher, DEATH_SEC, may_be_early=True,
    ),
    Fault(
        "stop for ever", "after --stopped_sec all end and start again",
        "running", stop_for_ever, STOPPED_SEC + DEATH_SEC, may_be_early=True,
    ),
    Fault("stop for a second", "nothing happens", "running", stop_for_a_second),
    Fault(
        "terminate a process", "all save the same step (75) and start again",
        "running", terminate_worker, 60,
    ),
    Fault(
        "terminate the launcher", "all save the same step, exit code 75",
        "running", terminate_launcher, 60,
    ),
    Fault(
        "full disk", "exit code 3, one line names the folder and the space",
        "running", fill_disk, 60, needs_mounts=True,
    ),
    Fault(
        "read-only disk", "exit code 3, one line names the folder",
        "running", make_read_only, 60, needs_mounts=True,
    ),
    Fault(
        "flipped bit", "exit code 3, one line names leaf and device",
        "running", flip_bit, 90,
    ),
    Fault(
        "mismatch", "exit code 2 before a step, one line names the field",
        "resting", mismatch, min_processes=2,
    ),
    Fault("checkpoint", "set aside, named, never used", "resting", damage_checkpoint),
)  # fmt: skip
NAMES = tuple(fault.name for fault in FAULTS)


def _expect_restart(run: Run, pids: list[int], code: int) -> float:
    """Wait until these processes are gone, and the launcher starts again after an
    attempt that ended with `code`. Return the seconds until they were gone."""
    sec = run.expect_gone(pids)
    run.wait_until(lambda: "starting again" in run.new_text(), "a restart")
    line = f"ended with {code}: "
    if line not in run.new_text():
        raise Broken(f"the launcher did not say {line!r} of the attempt")
    return sec


def _expect_saved(run: Run) -> int:
    """Return the step that a run says it stopped at. Raises Broken unless there is a
    checkpoint of it."""
    told = re.search(
        r"stopped by signal \d+ at step (\d+); all is saved", run.new_text()
    )
    if told is None or int(told[1]) not in run.saved_steps():
        raise Broken(f"not saved: {told and told[0]}, there are {run.saved_steps()}")
    return int(told[1])


def _expect_line(run: Run, words: tuple[str, ...]) -> None:
    """Raise Broken unless the error line names the folder and one of these words."""
    line = run.error()
    if str(run.place.run_dir) not in line or not any(word in line for word in words):
        raise Broken(f"the line names no folder, or none of {words}: {line[:300]}")


def _written(run_dir: pathlib.Path) -> dict[str, str]:
    """Return the sha256 of each file that a run has written, logs and lock left out."""
    paths = [p for p in run_dir.rglob("*") if p.is_file() and p.name != ".lock"]
    return {str(path): sha256(path) for path in paths if path.parent.name != "logs"}


def _fill(folder: pathlib.Path) -> None:
    """Fill the disk down to the last page."""
    for size in (2**16, 2**12):
        with (
            contextlib.suppress(OSError),
            (folder / FILLING).open("ab", buffering=0) as file,
        ):
            while file.write(bytes(size)) == size:
                pass


def _remount_read_only(run: Run, folder: pathlib.Path) -> None:
    """Remount a folder read-only at the first moment at which no file of it is open for
    writing: the kernel refuses it before."""
    words = ["mount", "-o", "remount,bind,ro", str(folder)]
    end_sec = time.monotonic() + LIMIT_SEC
    while subprocess.run(words, check=False, capture_output=True).returncode:
        if time.monotonic() > end_sec or run.has_ended():
            raise Broken("the folder was never idle, and stayed writable")


def _array_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of array data of a checkpoint that are not empty."""
    paths = (folder / "state").rglob("d/*")
    files = [path for path in paths if path.is_file() and path.stat().st_size]
    if not files:
        raise Broken(f"{folder} has no files of array data")
    return files


def _flip_arrays(folder: pathlib.Path, rng: random.Random) -> None:
    """Flip a bit in the middle half of each file of array data."""
    for path in _array_files(folder):
        data = bytearray(path.read_bytes())
        at = rng.randrange(len(data) // 4, max(1, 3 * len(data) // 4))
        data[at] ^= 1 << rng.randrange(8)
        path.write_bytes(data)


def _remove_arrays(folder: pathlib.Path, rng: random.Random) -> None:
    for path in _array_files(folder):
        path.unlink()


def _cut_record(folder: pathlib.Path, rng: random.Random) -> None:
    path = folder / "record" / "metadata"
    os.truncate(path, int(path.stat().st_size * rng.random()))


def _garble_record(folder: pathlib.Path, rng: random.Random) -> None:
    """Change one number of the record to another, so that it is still JSON."""
    path = folder / "record" / "metadata"
    record = json.loads(path.read_text())
    record["meta"]["num_owners"] = 1 + record["meta"]["num_owners"]
    path.write_text(json.dumps(record))
