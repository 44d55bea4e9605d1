"""Output of several processes on one terminal, line by line: lines are never mixed."""

import contextlib
import os
import signal
import subprocess
import threading
from typing import IO

MAX_LINE_BYTES = 1 << 20
"""Maximum length of a line in bytes. A longer line is broken."""
NOISE = (b"[Gloo] Rank ", b"Expected number of connected peer ranks")
"""Parts of lines that are dropped. Gloo prints one with both on stdout for every group
of devices, in every process. Several threads print at once, so a line may hold the end
of another one alone."""
_TERMINAL = threading.Lock()


def say(event: str) -> None:
    """Print an event of the launcher itself on stderr.

    The function never raises: what the launcher does with its processes matters more
    than a line that stderr does not take.
    """
    with contextlib.suppress(OSError):
        _write(2, f"launch_local: {event}\n".encode())


def pass_on(process: subprocess.Popen, index: int) -> list[threading.Thread]:
    """Start and return threads that copy what a process prints to our own stdout and
    stderr, until its pipes are closed.

    Lines of process 0 stay as they are. Lines of process 3 begin with '[3] '.
    """
    prefix = f"[{index}] ".encode() if index else b""
    pipes = [(process.stdout, 1), (process.stderr, 2)]
    threads = [
        threading.Thread(target=_pass_on, args=(pipe, to, prefix), daemon=True)
        for pipe, to in pipes
        if pipe is not None
    ]
    for thread in threads:
        thread.start()
    return threads


def is_noise(line: bytes) -> bool:
    """Return whether a line is a message of Gloo that tells people nothing."""
    return any(part in line for part in NOISE)


def _pass_on(pipe: IO[bytes], to: int, prefix: bytes) -> None:
    """Copy the lines of `pipe` to the file descriptor `to`, each after `prefix`.

    The pipe is read to its end even when nobody reads our own output, since the process
    would block otherwise. A line that a full disk or a lost terminal does not take is
    lost, which is reported once.
    """
    has_reader, is_lossy = True, False
    with pipe:
        while line := pipe.readline(MAX_LINE_BYTES):
            if not has_reader or is_noise(line):
                continue
            try:
                _write(to, prefix + line + (b"" if line.endswith(b"\n") else b"\n"))
            except BrokenPipeError:
                has_reader = False
                os.kill(os.getpid(), signal.SIGTERM)  # the same as a request to stop
            except OSError as error:
                if not is_lossy:
                    say(f"output of the processes is lost: {error.strerror}")
                is_lossy = True


def _write(to: int, text: bytes) -> None:
    with _TERMINAL:
        while text:
            text = text[os.write(to, text) :]
