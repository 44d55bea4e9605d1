"""CPU quotas by control groups, one group for each process of a cluster.

    v1   <mount of the cpu controller>/moejax-testbed/p0  cpu.cfs_quota_us, .._period_us
    v2   /sys/fs/cgroup/moejax-testbed/p0                 cpu.max

A quota may change while processes run, so programs can compile without one and take
their steps under it.

Processes that share cores disturb one another beyond their quotas: threads wander
between cores, and each that wakes up takes a core from one that computes. So they are
scheduled as batches (SCHED_BATCH), and under a quota of at most one core process i
stays on core i modulo the number of cores. A step of configs/race_cpu.gin, eight
processes on two cores, took 1.8 s without either, 1.0 s as batches (docs/testbed.md).
"""

import contextlib
import dataclasses
import errno
import os
import pathlib
import time

from tools.testbed.network import END_SEC, Unavailable, end_processes

NAME = "moejax-testbed"
PERIOD_USEC = 50_000
"""Period of a quota. A process with quota 0.25 may run 12.5 ms in each 50 ms, which is
short beside a step."""
MOUNT = pathlib.Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True)
class Groups:
    """Control groups of a cluster: one folder per process, by its index."""

    folders: tuple[pathlib.Path, ...]
    is_v2: bool


def set_up(count: int) -> Groups:
    """Make `count` control groups without a quota.

    Raises Unavailable. What was made before the error remains, for `remove`.
    """
    if os.geteuid() != 0:
        raise Unavailable("cpu quotas need root")
    controller = _controller()
    if controller is None:
        raise Unavailable(f"there is no cpu controller of cgroup v1 or v2 in {MOUNT}")
    root, is_v2 = controller
    parent = root / NAME
    folders = tuple(parent / f"p{index}" for index in range(count))
    try:
        parent.mkdir(exist_ok=True)
        if is_v2:
            for folder in (root, parent):
                (folder / "cgroup.subtree_control").write_text("+cpu")
        for folder in folders:
            folder.mkdir(exist_ok=True)
        groups = Groups(folders, is_v2)
        set_quota(groups, None)
    except OSError as error:
        raise Unavailable(f"cgroups cannot be made: {error}") from None
    return groups


def set_quota(groups: Groups, cores: float | None) -> None:
    """Limit each process to `cores` from now on, and to one core if that is at most
    one. None: no limit."""
    for index, folder in enumerate(groups.folders):
        for name, text in quota_files(cores, is_v2=groups.is_v2).items():
            (folder / name).write_text(text)
        threads = folder / ("cgroup.threads" if groups.is_v2 else "tasks")
        for thread in map(int, threads.read_text().split()):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(thread, cores_of(index, cores))


def quota_files(cores: float | None, *, is_v2: bool) -> dict[str, str]:
    """Return the text of each file of a control group that sets this quota."""
    quota_usec = None if cores is None else round(cores * PERIOD_USEC)
    if is_v2:
        quota = "max" if quota_usec is None else quota_usec
        return {"cpu.max": f"{quota} {PERIOD_USEC}"}
    quota = -1 if quota_usec is None else quota_usec
    return {"cpu.cfs_period_us": str(PERIOD_USEC), "cpu.cfs_quota_us": str(quota)}


def cores_of(index: int, quota: float | None) -> set[int]:
    """Return the cores that process `index` may use under a quota."""
    cores = sorted(os.sched_getaffinity(0))
    return set(cores) if quota is None or quota > 1 else {cores[index % len(cores)]}


def prefix(groups: Groups, index: int, quota: float | None) -> tuple[str, ...]:
    """Return the words that, before a command, run it in the control group of process
    `index` and on its cores, in the same process."""
    members = str(groups.folders[index] / "cgroup.procs")
    cores = ",".join(map(str, sorted(cores_of(index, quota))))
    script = 'echo $$ > "$0" && exec chrt --batch 0 taskset --cpu-list "$@"'
    return ("sh", "-c", script, members, cores)


def leftovers() -> list[str]:
    """Return the testbed's control group if it exists: a list of one path or none."""
    controller = _controller()
    parent = None if controller is None else controller[0] / NAME
    return [] if parent is None or not parent.is_dir() else [str(parent)]


def remove() -> list[str]:
    """End the processes in the testbed's control groups, remove the groups, and return
    the paths that were removed."""
    removed = leftovers()
    for parent in map(pathlib.Path, removed):
        for folder in [*sorted(parent.glob("p*")), parent]:
            _remove(folder)
    return removed


def _remove(folder: pathlib.Path) -> None:
    """Remove one control group, trying for END_SEC.

    A group is busy until the last thread in it has ended, which may be after the main
    thread of its process.
    """
    end_sec = time.monotonic() + END_SEC
    while True:
        pids = (folder / "cgroup.procs").read_text().split()
        end_processes([int(pid) for pid in pids])
        try:
            folder.rmdir()
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > end_sec:
                raise
        time.sleep(0.02)


def _controller() -> tuple[pathlib.Path, bool] | None:
    """Return the folder of the cpu controller's groups and whether it is cgroup v2, or
    None if there is no such controller."""
    for name in ("cpu", "cpu,cpuacct"):
        if (MOUNT / name / "cpu.cfs_period_us").is_file():
            return MOUNT / name, False
    controllers = MOUNT / "cgroup.controllers"
    if controllers.is_file() and "cpu" in controllers.read_text().split():
        return MOUNT, True
    return None
