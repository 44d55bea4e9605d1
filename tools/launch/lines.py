"""Whole lines of several processes on one terminal, never mixed within a line."""

import contextlib
import os
import signal
import subprocess
import threading
from typing import IO

LONGEST_LINE = 1 << 20
"""Bytes; a longer line is broken."""
NOISE = b"[Gloo] Rank "
"""Gloo prints such a line on stdout for every group of devices, in every process."""
_TERMINAL = threading.Lock()


def say(event: str) -> None:
    """An event of the launcher itself, on stderr; lost where that takes nothing.

    It never raises: what the launcher does with its processes matters more.
    """
    with contextlib.suppress(OSError):
        _write(2, f"launch_local: {event}\n".encode())


def pass_on(process: subprocess.Popen, index: int) -> list[threading.Thread]:
    """Threads that pass on what it prints, until its pipes are closed.

    Lines of process 0 stay as they are, those of process 3 begin with '[3] '.
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


def _pass_on(pipe: IO[bytes], to: int, prefix: bytes) -> None:
    """Reads to the end even when nobody reads us: else the process would block.

    A line that a full disk or a lost terminal does not take is lost, and said once.
    """
    is_heard, is_lossy = True, False
    with pipe:
        while line := pipe.readline(LONGEST_LINE):
            if not is_heard or line.startswith(NOISE):
                continue
            try:
                _write(to, prefix + line + (b"" if line.endswith(b"\n") else b"\n"))
            except BrokenPipeError:
                is_heard = False
                os.kill(os.getpid(), signal.SIGTERM)  # as if asked to stop
            except OSError as error:
                if not is_lossy:
                    say(f"lines of the processes are lost: {error.strerror}")
                is_lossy = True


def _write(to: int, text: bytes) -> None:
    with _TERMINAL:
        while text:
            text = text[os.write(to, text) :]
