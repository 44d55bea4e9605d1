"""The time that a save takes, and the time that a stopped run needs.

A run that is told to stop first waits for the save in flight, if there is one, and then
saves its last state. Both are checkpoints of the same size. The rate is that of the
last save, which the next checkpoint's record holds, or that of a probe.
"""

import contextlib
import math
import os
import pathlib
import time

from train.checkpoint.orbax_quirks import UNFINISHED

LARGE_BYTES = 2**30
"""Size of a checkpoint from which on its save takes long enough to speak of it."""
PROBE_BYTES = 2**28
SPARE_SEC = 60
"""Time for what a stopped run does beside saving: its step, an evaluation, the end."""
NOTABLE_SEC = 30
"""Saves that take less, as expected and as measured, are not spoken of."""
MAX_RATIO = 2.0
"""Ratio between the measured time of a save and the expected one, or its inverse, from
which on the time is said again."""


def stop_sec(num_bytes: int, bytes_per_sec: float) -> int:
    """Return the seconds to leave a run between the signal to stop and its end.

    They are two saves and SPARE_SEC, rounded up to tens.
    """
    return 10 * math.ceil((2 * num_bytes / bytes_per_sec + SPARE_SEC) / 10)


def needs_saying(num_bytes: int, expected: float | None, measured: float) -> bool:
    """Return whether a save's measured rate tells the user something new.

    Rates are in bytes per second; without an expected one the save was to take no time.
    """
    expected_sec = num_bytes / expected if expected else 0.0
    measured_sec = num_bytes / measured
    longer, shorter = max(expected_sec, measured_sec), min(expected_sec, measured_sec)
    return longer >= NOTABLE_SEC and longer > MAX_RATIO * shorter


def describe(num_bytes: int, bytes_per_sec: float, verb: str, source: str) -> str:
    """Return the line that tells the time of a save and of a stop.

    `verb` is 'takes about' or 'took', and `source` says where the rate is from.
    """
    sec, stop = num_bytes / bytes_per_sec, stop_sec(num_bytes, bytes_per_sec)
    return (
        f"a checkpoint has {num_bytes / 1e9:.3g} GB and {verb} {sec:.0f} s at "
        f"{bytes_per_sec / 1e9:.2g} GB/s ({source}): give a stopped run at least "
        f"{stop} s (SLURM: --signal=TERM@{stop}; tools/launch/local.py: "
        f"--grace_sec={stop})"
    )


def probe(folder: pathlib.Path, num_bytes: int = PROBE_BYTES) -> float | None:
    """Return the bytes per second of one file written to `folder` and synced, or None
    if it cannot be written. The file is removed; that of a killed run is removed as an
    unfinished save."""
    path, block = folder / f"probe{UNFINISHED}", os.urandom(2**22)
    start_sec = time.monotonic()
    try:
        with path.open("wb") as file:
            for _ in range(-(-num_bytes // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return None
    finally:
        with contextlib.suppress(OSError):  # a file system without writes
            path.unlink(missing_ok=True)
    return num_bytes / (time.monotonic() - start_sec)
