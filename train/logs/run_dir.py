"""Claim a run directory by a lock, so that one run owns it; archive it by renaming."""

import contextlib
import dataclasses
import fcntl
import io
import os
import pathlib
import socket
import sys
from collections.abc import Iterator

from train.files import path_named
from train.launch.processes import STDERR, are_several, from_first_process, is_first
from train.launch.streams import LenientStream

LOCK = ".lock"


class RunDirInUse(ValueError):
    """Raised when another process holds the lock of a run directory."""


@dataclasses.dataclass(frozen=True)
class RunDir:
    """A run directory that this run owns."""

    path: pathlib.Path
    archived: pathlib.Path | None
    """New path of the run that was here before, if `fresh` has renamed it."""
    log: pathlib.Path | None = None
    """File that the stacks of this process go to; None: to standard error."""


@contextlib.contextmanager
def claim(path: str | os.PathLike, *, fresh: bool = False) -> Iterator[RunDir]:
    """Hold the directory `path`, created if missing, until the block ends.

    `fresh` first renames a run that is there to `<name>.<k>`, where k is one more than
    the largest number taken. Raises RunDirInUse, a ValueError that names the process
    that holds the directory. The kernel frees the lock (flock) when its process ends,
    so a killed run leaves nothing behind.
    """
    path = pathlib.Path(os.path.abspath(path))
    lock = _lock(path)
    try:
        archived = None
        if fresh and any(entry.name != LOCK for entry in path.iterdir()):
            archived = _archive_name(path)
            path.rename(archived)
            os.close(lock)
            lock = None
            (archived / LOCK).unlink()
            lock = _lock(path)
        yield RunDir(path, archived)
    finally:
        if lock is not None:
            os.close(lock)


@contextlib.contextmanager
def share(path: str | os.PathLike, *, fresh: bool = False) -> Iterator[RunDir]:
    """Yield the directory that process 0 claims, for all processes of a run.

    If there are several processes, each has a file logs/process-<index>.log in it.
    Until the block ends, the stacks of a process and messages of C++ code (JAX's
    heartbeats) go there and not to the terminal, and so does what processes other than
    0 print.
    """
    import jax

    with contextlib.ExitStack() as held:

        def claimed() -> list[str | None]:
            run_dir = held.enter_context(claim(path, fresh=fresh))
            return [str(run_dir.path), run_dir.archived and str(run_dir.archived)]

        where, archived = from_first_process(claimed)
        path, log = pathlib.Path(where), None
        if are_several():
            log = path / "logs" / f"process-{jax.process_index()}.log"
            log.parent.mkdir(exist_ok=True)
            held.enter_context(_native_stderr_in(log))
        if not is_first():
            file = io.FileIO(log, "ab")
            text = io.TextIOWrapper(file, "utf-8", "replace", write_through=True)
            held.enter_context(text)
            held.callback(setattr, sys, "stdout", sys.stdout)
            sys.stdout = LenientStream(text)
        yield RunDir(path, archived and pathlib.Path(archived), log)


@contextlib.contextmanager
def _native_stderr_in(path: pathlib.Path) -> Iterator[None]:
    """Append to a file, while the block runs, what is written to descriptor 2: stacks
    by faulthandler, and messages of C and C++ code. Python's sys.stderr stays where it
    was."""
    sys.stderr.flush()
    python_stderr, terminal = sys.stderr, os.dup(STDERR)
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    text = os.fdopen(os.dup(terminal), "w", 1, errors="backslashreplace")
    sys.stderr = LenientStream(text)
    os.dup2(log, STDERR)
    os.close(log)
    try:
        yield
    finally:
        os.dup2(terminal, STDERR)
        os.close(terminal)
        sys.stderr.close()
        sys.stderr = python_stderr


def _lock(path: pathlib.Path) -> int:
    """Lock the lock file of `path` and return its descriptor. Closing the descriptor
    frees the directory."""
    while True:
        lock = _open_lock(path)
        try:
            with path_named(path / LOCK):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between open and flock another process may have archived the directory
            # with its lock file: then this is the lock of another directory.
            if _is_same_file(lock, path / LOCK):
                holder = f"pid {os.getpid()} on {socket.gethostname()}"
                with path_named(path / LOCK):
                    os.ftruncate(lock, 0)
                    os.pwrite(lock, holder.encode(), 0)
                return lock
        except BlockingIOError as fault:
            holder = os.pread(lock, 200, 0).decode(errors="replace") or "another run"
            os.close(lock)
            raise RunDirInUse(
                f"run directory {path} is in use by {holder}: wait for it to end, or "
                "name another run directory"
            ) from fault
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _open_lock(path: pathlib.Path) -> int:
    """Make the directory `path` if needed, and return its lock file's descriptor."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        return os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except (FileExistsError, NotADirectoryError) as fault:
        raise ValueError(f"run directory {path} is a file: name another") from fault
    except OSError as fault:
        raise ValueError(
            f"run directory {path} cannot be made or written: {fault.strerror}: name "
            "another"
        ) from fault


def _is_same_file(descriptor: int, path: pathlib.Path) -> bool:
    """Return whether an open file is the one that `path` names now."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _archive_name(path: pathlib.Path) -> pathlib.Path:
    """Return `<path>.<k>` with k one more than the largest number taken."""
    taken = [0]
    for entry in path.parent.iterdir():
        name, _, number = entry.name.rpartition(".")
        if name == path.name and number.isdecimal():
            taken.append(int(number))
    return path.with_name(f"{path.name}.{max(taken) + 1}")
