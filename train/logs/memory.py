"""Memory in use: that of this process, and that of its fullest device."""

import os
from collections.abc import Sequence

import jax

GIB = 2**30
STATM = "/proc/self/statm"
"""File in which Linux counts the pages of a process: the second is those in memory."""


def memory_fields(devices: Sequence[jax.Device]) -> dict[str, float | None]:
    """Return the fields of a step's record that are about memory, in GiB: that of this
    process, and of the fullest of its devices now and at most so far.

    A figure that the system or the backend does not have is None, as for CPUs.
    """
    stats = [found for device in devices if (found := device.memory_stats())]
    return {
        "host_memory_gib": _host_gib(),
        "device_memory_gib": _fullest_gib(stats, "bytes_in_use"),
        "peak_device_memory_gib": _fullest_gib(stats, "peak_bytes_in_use"),
    }


def _host_gib() -> float | None:
    """Return the memory of this process that is resident; None without /proc."""
    try:
        file = os.open(STATM, os.O_RDONLY)
    except OSError:
        return None
    try:
        num_pages = int(os.read(file, 200).split()[1])
    finally:
        os.close(file)
    return _gib(num_pages * os.sysconf("SC_PAGESIZE"))


def _fullest_gib(stats: list[dict], name: str) -> float | None:
    """Return the largest value of a figure over devices; None if none has it."""
    values = [found[name] for found in stats if name in found]
    return _gib(max(values)) if values else None


def _gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 4)
