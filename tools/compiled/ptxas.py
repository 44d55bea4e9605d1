"""Read what ptxas says of one kernel: registers, spills, and its own remarks.

ptxas info    : (C7519) warpgroup.arrive is injected in around line 725 by compiler ..
ptxas info    : Function properties for grouped_rows_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""

import re
from typing import NamedTuple

SERIALISED, NO_MAX_REGISTERS = "C7510", "C7508"
"""Codes of two warnings: WGMMAs are serialised, which makes each wait for the one
before; and setmaxnreg is ignored, so that registers are not handed over."""

_SPILLS = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_USED = re.compile(r"Used (\d+) registers, used (\d+) barriers")
_CODE = re.compile(r"\((C\d{4})\)")


class Registers(NamedTuple):
    """Registers of a kernel, as ptxas reports them."""

    registers: int
    """Registers per thread at the launch. Kernels that hand registers over with
    setmaxnreg begin with those of all threads divided evenly."""
    barriers: int
    """Named barriers that are reserved."""
    stack_bytes: int
    """Bytes of local memory per thread, spills included."""
    spill_store_bytes: int
    spill_load_bytes: int
    codes: tuple[str, ...]
    """Codes of ptxas's remarks, such as C7510, each once."""

    @property
    def is_serialised(self) -> bool:
        """Whether WGMMAs wait for each other."""
        return SERIALISED in self.codes

    @property
    def keeps_max_registers(self) -> bool:
        """Whether registers are handed over between warpgroups, where the kernel asks
        for it."""
        return NO_MAX_REGISTERS not in self.codes


def read(text: str) -> Registers:
    """Return what ptxas says of a kernel. Raises ValueError where the text is not that
    of one kernel."""
    spills, used = _SPILLS.findall(text), _USED.findall(text)
    if len(spills) != 1 or len(used) != 1:
        raise ValueError(
            f"ptxas must report the registers of one kernel, and reports {len(used)}: "
            f"its text has changed, {text[:200]!r}"
        )
    codes = tuple(sorted(set(_CODE.findall(text))))
    return Registers(*map(int, used[0]), *map(int, spills[0]), codes)
