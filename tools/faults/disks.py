"""Faults of a disk, and the mounts that they need. Only root can mount."""

import contextlib
import os
import pathlib
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator

from tools.faults.run import Broken, Run

SIZE_MIB = 16
"""Size of the small file system: more than the logs and four checkpoints need."""
NOTICED_SEC = 60.0
"""Limit on the time from a disk that takes no bytes to the end of all processes. The
next save is at most six steps away, and one of them may wait for a compilation."""
FILLING = "filling"


def fill_disk(run: Run, rng: random.Random) -> None:
    """Fill the disk: the run ends with 3 and says so; then make room again."""
    disk, pids = run.place.disk, run.pids()

    def has_ended() -> bool:
        _fill(disk)
        return not run.is_launcher_alive()

    try:
        run.wait_until(has_ended, "an end on the full disk", NOTICED_SEC)
        run.expect_end(3, 1.0)
    finally:
        (disk / FILLING).unlink(missing_ok=True)
    run.expect_gone(pids, 1.0)
    _expect_line(run, ("space", "room"))


def make_read_only(run: Run, rng: random.Random) -> None:
    """Make the folder of checkpoints read-only: the run ends with 3 and says so."""
    folder, pids = run.place.checkpoints, run.pids()
    _mount("--bind", folder, folder)
    try:
        _remount_read_only(run, folder)
        run.wait_until(
            lambda: not run.is_launcher_alive(),
            "an end on a read-only disk",
            NOTICED_SEC,
        )
        run.expect_end(3, 1.0)
    finally:
        unmount(folder)
    run.expect_gone(pids, 1.0)
    _expect_line(run, ("Read-only",))


@contextlib.contextmanager
def small_disk(folder: pathlib.Path) -> Iterator[None]:
    """Mount a file system of SIZE_MIB on a folder while the block runs."""
    _mount("-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", folder)
    try:
        yield
    finally:
        unmount(folder)


def can_mount() -> bool:
    """Return whether this process can mount a file system."""
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        try:
            with small_disk(pathlib.Path(name)):
                return True
        except (OSError, subprocess.CalledProcessError):
            return False


def unmount(folder: pathlib.Path) -> None:
    """Unmount a folder, also if a process that is being killed still uses it."""
    subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def mounts_below(root: pathlib.Path) -> list[str]:
    """Return the folders below `root` on which something is mounted."""
    lines = pathlib.Path("/proc/self/mounts").read_text().splitlines()
    return [line.split()[1] for line in lines if line.split()[1].startswith(f"{root}/")]


def _mount(*words: object) -> None:
    subprocess.run(["mount", *map(str, words)], check=True, capture_output=True)


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
    end_sec = time.monotonic() + NOTICED_SEC
    while subprocess.run(words, check=False, capture_output=True).returncode:
        if time.monotonic() > end_sec or not run.is_launcher_alive():
            raise Broken("the folder was never idle, and stayed writable")


def _expect_line(run: Run, words: tuple[str, ...]) -> None:
    """Raise Broken unless the error line names the folder and one of these words."""
    line = run.error()
    if str(run.place.run_dir) not in line or not any(word in line for word in words):
        raise Broken(f"the line names no folder, or none of {words}: {line[:300]}")
