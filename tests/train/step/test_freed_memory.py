"""Test that memory which a process has freed goes back to the system."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROGRAM = """
import ctypes, pathlib
from train.step.freed_memory import return_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]

def resident_mib():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4 / 1024

blocks = [libc.malloc(64_000) for _ in range(3200)]  # too small for maps of their own
for block in blocks:
    ctypes.memset(block, 1, 64_000)
keep = libc.malloc(64_000)  # above the others, so that free returns nothing
for block in blocks:
    libc.free(block)
before = resident_mib()
return_freed_memory()
print(before - resident_mib())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone keeps and returns it")
def test_freed_memory_is_returned():
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) > 150, "195 MiB were freed"
