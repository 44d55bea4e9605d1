"""A run directory with one owner at a time: claimed by a lock, archived by renaming."""

import contextlib
import dataclasses
import fcntl
import io
import os
import pathlib
import socket
import sys
from collections.abc import Iterator

from train.launch.processes import from_first_process, is_first
from train.launch.program import say_loudly

LOCK = ".lock"


class RunDirInUse(ValueError):
    """Another process holds the lock of this run directory."""


@dataclasses.dataclass(frozen=True)
class RunDir:
    path: pathlib.Path
    archived: pathlib.Path | None
    """Where the run that was here before has gone, when `fresh` moved it."""


@contextlib.contextmanager
def claim(path: str | os.PathLike, *, fresh: bool = False) -> Iterator[RunDir]:
    """Hold the directory `path`, created if missing, until the block ends.

    `fresh` first renames a run that is there to `<name>.<k>`, k one above all taken.
    Raises RunDirInUse, a ValueError, naming the process that holds it. The lock is the
    kernel's (flock): it goes with the process, so a killed run leaves nothing behind.
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

    Those after the first print to logs/process-<index>.log in it from here on.
    """
    import jax

    with contextlib.ExitStack() as held:

        def claimed() -> list[str | None]:
            run_dir = held.enter_context(claim(path, fresh=fresh))
            return [str(run_dir.path), run_dir.archived and str(run_dir.archived)]

        where, archived = from_first_process(claimed)
        run_dir = RunDir(pathlib.Path(where), archived and pathlib.Path(archived))
        if not is_first():
            log = run_dir.path / "logs" / f"process-{jax.process_index()}.log"
            sys.stdout = held.enter_context(_Log(log))
            held.callback(setattr, sys, "stdout", sys.__stdout__)
        yield run_dir


class _Log(io.TextIOBase):
    """Text at the end of a file. A full disk costs text, said once, and not the run."""

    def __init__(self, path: pathlib.Path) -> None:
        path.parent.mkdir(exist_ok=True)
        self._path, self._is_failing = path, False
        self._file = io.FileIO(path, "ab")

    def write(self, text: str) -> int:
        try:
            self._file.write(text.encode(errors="replace"))
            self._is_failing = False
        except OSError as fault:
            if not self._is_failing:
                say_loudly(f"LOG NOT WRITTEN: {fault}: {self._path}; the run goes on")
            self._is_failing = True
        return len(text)

    def close(self) -> None:
        self._file.close()
        super().close()


def _lock(path: pathlib.Path) -> int:
    """Return the descriptor of the locked lock file of `path`; closing it frees the
    directory."""
    while True:
        lock = _open_lock(path)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between open and flock the directory may have been archived with its
            # lock file: then this is the lock of another directory.
            if _is_same_file(lock, path / LOCK):
                holder = f"pid {os.getpid()} on {socket.gethostname()}"
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
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _archive_name(path: pathlib.Path) -> pathlib.Path:
    taken = [0]
    for entry in path.parent.iterdir():
        name, _, number = entry.name.rpartition(".")
        if name == path.name and number.isdecimal():
            taken.append(int(number))
    return path.with_name(f"{path.name}.{max(taken) + 1}")


def write_whole(path: pathlib.Path, text: str) -> None:
    """Replace a file by `text` at once. A full disk leaves the file that was there, and
    nothing of the new one."""
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.write_text(text)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
