"""Test the memory in the record of a step."""

import mmap
import types

from train.logs.memory import GIB, memory_fields


def device(used_gib: float | None, peak_gib: float = 0.0):
    """Return a stand-in for a device of a backend that counts its memory or not."""
    stats = None
    if used_gib is not None:
        stats = {"bytes_in_use": int(used_gib * GIB)}
        stats["peak_bytes_in_use"] = int(peak_gib * GIB)
    return types.SimpleNamespace(memory_stats=lambda: stats)


def test_the_fullest_device_counts():
    fields = memory_fields([device(1.5, 2.5), device(1.25, 3.0)])
    assert fields["device_memory_gib"] == 1.5
    assert fields["peak_device_memory_gib"] == 3.0
    without = memory_fields([device(None)])
    assert without["device_memory_gib"] is without["peak_device_memory_gib"] is None


def test_host_memory_grows_with_what_is_written():
    before = memory_fields([])["host_memory_gib"]
    block = mmap.mmap(-1, 2**26)  # 64 MiB that no allocator has in reserve
    for _ in range(64):
        block.write(b"x" * 2**20)
    grown_mib = 1024 * (memory_fields([])["host_memory_gib"] - before)
    assert 50 < grown_mib < 100
    block.close()
