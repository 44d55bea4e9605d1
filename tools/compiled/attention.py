"""Find the kernels of attention that a compiled step calls, and its arrays [t, t].

An array that has two dims of the window's length t is as large as a mask or the scores
of attention. A step whose attention goes on in blocks has none.
"""

import collections
from typing import NamedTuple

from tools.compiled import collectives
from tools.compiled.hlo import Array, Module
from tools.compiled.work import attention_kernel

SHORTEST = 1024
"""Shortest window in which arrays [t, t] are looked for. In shorter ones, such arrays
are small, and other dims have the same size by chance."""


class SquareArray(NamedTuple):
    """An array with two dims of the window's length."""

    bytes: int
    shape: str
    """Type and shape on one device, such as 'pred[2,1,4096,4096]'."""
    source: str
    """The line of ours that made it, or ''."""


class CompiledAttention(NamedTuple):
    """Kernels of attention in a compiled step, and its largest array [t, t]."""

    calls: dict[str, int]
    """Calls of kernels in the text, by name; one in the body of a loop counts once."""
    largest_square: SquareArray | None
    """The largest array [t, t]; None where there is none."""
    window: int
    """Length t of a window."""
    is_width: bool
    """Whether weights have a dim of size t as well, so that activations may look like
    arrays [t, t]."""

    def as_dict(self) -> dict:
        """Return plain values, ready for JSON."""
        largest = self.largest_square
        return {
            "attention_calls": self.calls,
            "largest_square_array": largest and largest._asdict(),
        }

    def lines(self) -> list[str]:
        """Return what was found as lines of text."""
        calls = ", ".join(f"{name} {count}" for name, count in self.calls.items())
        return [
            f"attention calls    {calls or 'none: attention is made of products'}",
            f"largest [t, t]     {self._square_line()}",
        ]

    def _square_line(self) -> str:
        t, found = self.window, self.largest_square
        if t < SHORTEST:
            return f"not looked for: t = {t} is less than {SHORTEST}"
        if found is None:
            return f"no array [t, t] of t = {t}"
        line = f"{found.shape}, {found.bytes / 2**20:.1f} MiB {found.source}".rstrip()
        if self.is_width:
            line += (
                f"; weights have a dim of {t} too, so it may be an activation: compile "
                "with another Data.seq_len to tell"
            )
        return line


def find_attention(module: Module, t: int, weight_shapes) -> CompiledAttention:
    """Return what a compiled step has of attention, for windows of t tokens.

    `weight_shapes` are the shapes of weights on one device. Arrays inside of fusions
    are in no memory, and do not count.
    """
    calls: collections.Counter[str] = collections.Counter()
    squares = []
    for name in collectives.count_runs(module):
        for instruction in module.computations[name]:
            if kernel := attention_kernel(instruction):
                calls[kernel] += 1
            if t >= SHORTEST and instruction.opcode not in _NOTHING_NEW:
                squares += [
                    SquareArray(a.num_bytes, _text(a), module.source(instruction))
                    for a in instruction.results
                    if a.dims.count(t) >= 2
                ]
    return CompiledAttention(
        calls=dict(sorted(calls.items())),
        largest_square=max(squares, default=None),
        window=t,
        is_width=any(t in shape for shape in weight_shapes),
    )


def _text(array: Array) -> str:
    return f"{array.dtype}[{','.join(map(str, array.dims))}]"


_NOTHING_NEW = (
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "while",
    "conditional",
    "call",
)
"""Opcodes whose results others made."""
