"""Which values lie in a device's memory when the compiled step needs most of it.

XLA writes two texts: the buffer assignment gives each value an allocation, an offset
and a size; the live ranges give the first and last place in the schedule at which the
value is needed. Values that share a place at one time, such as the carry of a loop
under its names before, in and after the loop, are one.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

ALLOCATION = re.compile(r"^allocation (\d+): size (\d+)(.*)")
VALUE = re.compile(
    r"^ value: <\d+ ([^\s{]+)(\{[\d,]*\})?(?: \(phi\))? @\d+> "
    r"\(size=(\d+),offset=(\d+)\): (\w+)\[([\d,]*)\]"
)
RANGE = re.compile(r"^    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)
COLOR = re.compile(r"\bcolor (\d+)")
PARAMETER = re.compile(r"\bparameter (\d+)")
HOST = 5
"""Color of allocations in the host's memory (XLA's Layout::kHostMemorySpace)."""


class Value(NamedTuple):
    """A value of the program, in its place."""

    name: str
    """Name of the instruction that makes it."""
    index: tuple[int, ...]
    """Position in the instruction's result, if that is a tuple."""
    num_bytes: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    first: int
    """Place in the schedule where it begins to be alive."""
    last: int

    @property
    def type(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


class Allocation(NamedTuple):
    """A part of memory that is allocated as a whole."""

    num_bytes: int
    parameter: int | None
    """Number of the argument that lies in it."""
    is_temporary: bool
    is_on_host: bool
    values: tuple[Value, ...]


class Peak(NamedTuple):
    """The moment at which the temporaries need most memory."""

    arguments: tuple[Allocation, ...]
    """Allocations of arguments; results that replace them are in the same place."""
    live: tuple[tuple[Value, ...], ...]
    """Temporaries that are alive. Each entry has one place, and all values of it."""
    temp_bytes: int
    """Bytes of the allocations of temporaries."""
    gap_bytes: int
    """Bytes of these that no value has at the peak."""
    host_bytes: int
    """Bytes allocated in the host's memory."""


def find_peak(buffer_assignment: str, live_range: str) -> Peak:
    """Return what is in memory at the peak.

    Raises ValueError for texts without allocations or live ranges: then XLA writes them
    in another form than this module reads.
    """
    allocations = read_allocations(buffer_assignment, live_range)
    on_device = [x for x in allocations if not x.is_on_host]
    temps = [x for x in on_device if x.is_temporary]
    live, occupied = [], 0
    for temp in temps:
        places, size = fullest(temp.values)
        live += places
        occupied += size
    temp_bytes = sum(x.num_bytes for x in temps)
    return Peak(
        arguments=tuple(x for x in on_device if x.parameter is not None),
        live=tuple(live),
        temp_bytes=temp_bytes,
        gap_bytes=temp_bytes - occupied,
        host_bytes=sum(x.num_bytes for x in allocations if x.is_on_host),
    )


def read_allocations(buffer_assignment: str, live_range: str) -> list[Allocation]:
    """Return the allocations with their values and these values' live ranges."""
    ranges = {
        (name, index): (int(first), int(last))
        for name, index, first, last in RANGE.findall(live_range)
    }
    allocations, values = [], []
    for line in buffer_assignment.splitlines():
        if match := ALLOCATION.match(line):
            values = []
            allocations.append((int(match[2]), match[3], values))
        elif match := VALUE.match(line):
            name, index = match[1], match[2] or "{}"
            # Values without a live range are scalars inside of kernels.
            if (name, index) in ranges:
                values.append(
                    Value(
                        name,
                        _numbers(index[1:-1]),
                        int(match[3]),
                        int(match[4]),
                        match[5],
                        _numbers(match[6]),
                        *ranges[name, index],
                    )
                )
    if not ranges or not allocations:
        raise ValueError(
            "XLA's buffer assignment or live ranges have no known line: their form has "
            "changed"
        )
    return [
        Allocation(
            num_bytes=size,
            parameter=int(match[1]) if (match := PARAMETER.search(rest)) else None,
            is_temporary="preallocated-temp" in rest,
            is_on_host=bool((color := COLOR.search(rest)) and int(color[1]) == HOST),
            values=tuple(values),
        )
        for size, rest, values in allocations
    ]


def fullest(values: Iterable[Value]) -> tuple[list[tuple[Value, ...]], int]:
    """Return the places that are taken when values take most memory, and their bytes.

    Every such moment is the start of a value. The sum of sizes, which counts shared
    places twice, bounds the bytes from above, and orders the search.
    """
    values = list(values)
    bounds = sorted(_running_sums(values), reverse=True)
    best, places = -1, []
    for bound, moment in bounds:
        if bound <= best:
            break
        taken = _places(v for v in values if v.first <= moment <= v.last)
        size = sum(new_bytes(taken))
        if size > best:
            best, places = size, taken
    return places, max(best, 0)


def _running_sums(values: list[Value]) -> Iterable[tuple[int, int]]:
    """Yield the bytes that are alive, and the moment, at the start of each value."""
    changes: dict[int, int] = {}
    for value in values:
        changes[value.first] = changes.get(value.first, 0) + value.num_bytes
        changes[value.last + 1] = changes.get(value.last + 1, 0) - value.num_bytes
    total = 0
    for moment in sorted(changes):
        total += changes[moment]
        yield total, moment


def _places(values: Iterable[Value]) -> list[tuple[Value, ...]]:
    """Return groups of values with the same offset and size, by offset; in a group, the
    one that lives longest comes first."""
    groups: dict[tuple[int, int], list[Value]] = {}
    for value in values:
        groups.setdefault((value.offset, -value.num_bytes), []).append(value)
    return [
        tuple(sorted(groups[place], key=lambda v: v.first - v.last))
        for place in sorted(groups)
    ]


def new_bytes(places: Iterable[tuple[Value, ...]]) -> list[int]:
    """Return the bytes of each place that no place before it has, in the order of
    offsets."""
    sizes, end = [], 0
    for first, *_ in places:
        stop = first.offset + first.num_bytes
        sizes.append(max(0, stop - max(end, first.offset)))
        end = max(end, stop)
    return sizes


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)
