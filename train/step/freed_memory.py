"""Give the memory that a compilation has freed back to the system.

XLA's compiler frees hundreds of MiB that glibc keeps for the process. With many
processes on one machine that is memory which the others lack.
"""

import ctypes
import sys


def return_freed_memory() -> None:
    """Let glibc return its free memory to the system. Elsewhere nothing is done."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
