"""malloc's settings for simulated devices, which must stand when a process starts.

XLA:CPU takes its temporaries anew each step, and glibc would map and unmap them: a page
fault for every 4 KiB of every step. With huge pages, kept, a step of `tiny_cpu` took
0.7 of the processor time, in one run each (docs/log.md). What the user has set stays.
"""

import os
import sys

TUNABLES = ":".join(
    f"glibc.malloc.{name}"
    for name in (
        "hugetlb=1",
        "mmap_threshold=4000000000",
        "trim_threshold=8000000000",
        "arena_max=1",
    )
)


def restart_with_huge_pages() -> None:
    """Replace this process by itself with the settings; returns when they stand."""
    if sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = TUNABLES
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
