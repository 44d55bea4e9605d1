"""Read the machine code of a Hopper kernel: its loops over stages, and what they cost.

nvdisasm prints one instruction a line, and Mosaic GPU the control bits before it:

    .L_x_16:
       -:-:-:-:04        /*21f0*/                   UIADD3 UR17, UR8, UR6, URZ
       1:-:-:Y:05        /*22a0*/              @!P1 BRA `(.L_x_14)

The last of the control bits is the number of cycles until the next instruction of the
warp may issue. Their sum over a loop is the least time in which a warp that never waits
for data issues one stage.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MULTIPLY = ("HGMMA", "QGMMA")
"""Products of a warpgroup: 2-byte values, 8-bit values."""
LOAD = ("UTMALDG",)
"""Copy from global to shared memory by TMA."""
STORE = ("UTMASTG", "UBLKCP")
"""Copy from shared to global memory by TMA, tiled or of bytes in a row."""
BARRIER = ("BAR",)
"""Barrier of all threads of a warpgroup, or of a block."""
FENCE = ("FENCE", "MEMBAR")
ARRIVE, WAIT = ("SYNCS.ARRIVE",), ("SYNCS.PHASECHK",)
"""Signal to a barrier in shared memory, and a wait for one."""
SPECIAL = ("MUFU",)
"""Exponential, reciprocal and others of the special function unit."""
SPILL = ("STL", "LDL")
PLAIN_STORE = ("STS", "STSM")
"""Stores of registers to shared memory."""

_LINE = re.compile(
    r"^\s+(?:\S+:(?P<stall>\d+)\s+)?/\*(?P<address>[0-9a-f]{4,})\*/\s+"
    r"(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][\w.]*)(?P<rest>.*)"
)
_REGISTER = re.compile(r"\bR(\d+)\b")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")


class Instruction(NamedTuple):
    """One instruction of a kernel."""

    opcode: str
    """Name with its modifiers, such as HGMMA.64x256x16.F32.BF16."""
    stall_cycles: int
    """Cycles until the next instruction of the warp may issue; 0 where the text has no
    control bits."""
    target: int | None
    """Number of the instruction that a branch goes to; None for others."""
    may_continue: bool
    """Whether the next instruction may follow: not after an unconditional branch."""

    def is_one_of(self, names: Sequence[str]) -> bool:
        """Return whether the opcode is one of `names`, or one with modifiers."""
        return any(self.opcode == n or self.opcode.startswith(n + ".") for n in names)


class Loop(NamedTuple):
    """Costs of one stage: the longest way through the body of a loop once."""

    instructions: int
    issue_cycles: int
    """Least cycles in which one warp issues the stage."""
    products: int
    """HGMMAs, or QGMMAs, of a warpgroup."""
    loads: int
    """Copies by TMA."""
    barriers: int
    """Barriers of the threads of a warpgroup."""
    fences: int
    arrives: int
    waits: int
    spills: int
    """Loads and stores of spilled registers."""


class Kernel(NamedTuple):
    """Counts of a whole kernel, and its loops over stages."""

    instructions: int
    registers: int
    """Highest register that an instruction names, plus one: what a thread of the
    computing warpgroups needs, which is more than it has at the launch."""
    barriers: int
    fences: int
    specials: int
    """Exponentials and reciprocals: what the epilogue's formulas cost."""
    stores: int
    """Copies to the result by TMA, in all ways that the epilogue may take."""
    spills: int
    """Loads and stores of spilled registers."""
    computing: Loop | None
    """Loop that multiplies; None in a kernel without products in a loop."""
    copying: Loop | None
    """Loop that copies operands by TMA; None in a kernel without one."""


def read(text: str) -> Kernel:
    """Return the counts of a kernel's machine code. Raises ValueError where it has no
    instructions."""
    code = instructions(text)
    if not code:
        raise ValueError(
            f"no instruction is in the machine code: its text changed, {text[:200]!r}"
        )
    while len(code) > 1 and code[-1].opcode == "NOP":  # padding after the last branch
        code.pop()
    return Kernel(
        instructions=len(code),
        registers=1 + max((int(n) for n in _REGISTER.findall(text)), default=-1),
        barriers=_count(code, BARRIER),
        fences=_count(code, FENCE),
        specials=_count(code, SPECIAL),
        stores=_count(code, STORE),
        spills=_count(code, SPILL),
        computing=find_loop(code, MULTIPLY, without=()),
        copying=find_loop(code, LOAD, without=MULTIPLY),
    )


def instructions(text: str) -> list[Instruction]:
    """Return the instructions of a kernel in the order of their addresses."""
    labels, found = {}, []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(found)
        elif match := _LINE.match(line):
            found.append((match, "@" in line.partition(match["opcode"])[0]))
    return [
        Instruction(
            opcode=match["opcode"],
            stall_cycles=int(match["stall"] or 0),
            target=_target(match, labels),
            may_continue=is_conditional or match["opcode"] not in ("BRA", "EXIT"),
        )
        for match, is_conditional in found
    ]


def find_loop(
    code: Sequence[Instruction], names: Sequence[str], without: Sequence[str]
) -> Loop | None:
    """Return the shortest loop whose stage has an instruction of `names` and none of
    `without`; None if there is none.

    A wait that the compiler has put behind the kernel jumps back over many
    instructions, and is no loop: its way back begins at another place.
    """
    loops = [
        (end - begin, begin, end)
        for end, instruction in enumerate(code)
        if (begin := instruction.target) is not None
        and begin <= end
        and _count(code[begin : end + 1], names)
        and not _count(code[begin : end + 1], without)
    ]
    for _, begin, end in sorted(loops):
        body = [code[i] for i in stage(code, begin, end)]
        if _count(body, names):
            return _costs(body)
    return None


def stage(code: Sequence[Instruction], begin: int, end: int) -> list[int]:
    """Return the numbers of the instructions of one stage: the longest way from `begin`
    to the branch `end` that stores no registers to shared memory, if there is one; an
    empty list if no way leads there.

    Where a loop has a way around a part that few stages need, as the steps of wgrad
    that blank rows of other groups do, that part writes to shared memory. Inner loops,
    which wait for a barrier, are passed once.
    """
    best: dict[int, tuple[tuple[int, int], list[int]]] = {begin: ((0, 1), [begin])}
    for i in range(begin, end):
        if i not in best:
            continue
        (stores, length), way = best.pop(i)
        instruction = code[i]
        ways = [i + 1] if instruction.may_continue else []
        if instruction.target is not None and i < instruction.target <= end:
            ways.append(instruction.target)
        for following in ways:
            is_store = code[following].is_one_of(PLAIN_STORE)
            value = stores - is_store, length + 1
            if following not in best or value > best[following][0]:
                best[following] = value, [*way, following]
    return best[end][1] if end in best else []


def _costs(body: Iterable[Instruction]) -> Loop:
    body = list(body)
    return Loop(
        instructions=len(body),
        issue_cycles=sum(instruction.stall_cycles for instruction in body),
        products=_count(body, MULTIPLY),
        loads=_count(body, LOAD),
        barriers=_count(body, BARRIER),
        fences=_count(body, FENCE),
        arrives=_count(body, ARRIVE),
        waits=_count(body, WAIT),
        spills=_count(body, SPILL),
    )


def _count(code: Iterable[Instruction], names: Sequence[str]) -> int:
    return sum(instruction.is_one_of(names) for instruction in code)


def _target(match: re.Match, labels: dict[str, int]) -> int | None:
    """Return the number of the instruction that a branch goes to."""
    if not match["opcode"].startswith("BRA"):
        return None
    target = _TARGET.search(match["rest"])
    return labels[target[1]] if target else None
