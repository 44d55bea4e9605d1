"""Read the text of a compiled program: optimised, scheduled HLO.

`read` takes what `jax.stages.Compiled.as_text()` returns. A step of a real
configuration has 15 MB in 18,000 lines, most of it the kernels' modules inside
`backend_config`, which are cut off before a line is parsed.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple


class Array(NamedTuple):
    """Type and dimensions of an array."""

    dtype: str
    """XLA's name, such as 'bf16' or 'f8e4m3fn'."""
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        return -(-self.size * _num_bits(self.dtype) // 8)


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    """Arrays of the result; those of nested tuples in one row."""
    operands: tuple[str, ...]
    """Names of instructions of the same computation."""
    elements: tuple[int | None, ...]
    """For each operand that XLA's own files write as '%x#2', which part of that
    instruction's result it is; None for the whole."""
    attributes: str
    """Text between the operands and the metadata."""
    op_name: str
    """Path of scopes and primitives that JAX gave, or ''."""
    frame: int
    """Number of its stack frame in the module's tables, or 0."""
    config: str
    """Text of backend_config, or ''."""
    is_root: bool
    parameter: int | None
    """Index of a parameter; None for all other instructions."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the result, all its arrays together."""
        return sum(array.num_bytes for array in self.results)

    @property
    def called(self) -> dict[str, list[str]]:
        """Names of the computations that it calls, by attribute: 'calls', 'to_apply',
        'body', 'condition', 'branch_computations' and so on."""
        calls: dict[str, list[str]] = {}
        for role, names in _CALLED.findall(self.attributes):
            calls[role] = _NAME.findall(names)
        return calls

    @property
    def trip_count(self) -> int | None:
        """How often a while loop runs, or None where the compiler does not know."""
        match = _TRIPS.search(self.config)
        return int(match[1]) if match else None


@dataclasses.dataclass(frozen=True, slots=True)
class Computation:
    """Instructions in the order of the schedule."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(i for i in self.instructions.values() if i.is_root)

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    entry: str
    computations: dict[str, Computation]
    sources: dict[int, str]
    """Own source line of each stack frame: 'moejax/model/blocks.py:81'. Frames without
    one are absent."""

    def source(self, instruction: Instruction) -> str:
        """Return 'path:line' of the innermost line of moejax/ or train/ from which an
        instruction was made, or '' where none is known."""
        return self.sources.get(instruction.frame, "")

    def callees(self, instruction: Instruction, *roles: str) -> list[Computation]:
        """Return the computations that an instruction calls, in these roles or in
        all."""
        return [
            self.computations[name]
            for role, names in instruction.called.items()
            for name in names
            if not roles or role in roles
        ]


def read(text: str) -> Module:
    """Return the module of a scheduled HLO text.

    Raises ValueError for a text that is no HLO module, and for a module without a
    schedule: the order of its instructions would mean nothing.
    """
    lines = iter(text.split("\n"))
    head = next(lines, "")
    if not head.startswith("HloModule "):
        raise ValueError(f"not the text of an HLO module: it begins with {head[:40]!r}")
    if "is_scheduled=true" not in head:
        raise ValueError(
            "the HLO module has no schedule: give the text of the compiled program, "
            "not of the lowered one"
        )
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {}
    entry, table = "", {}
    instructions: dict[str, Instruction] = {}
    for line in lines:
        if line.startswith(" "):
            instruction = _read_instruction(line)
            if instruction:
                instructions[instruction.name] = instruction
        elif match := _COMPUTATION.match(line):
            name, instructions = match[2], {}
            computations[name] = Computation(name, instructions)
            entry = name if match[1] else entry
        elif line in _TABLES:
            table = tables.setdefault(line, {})
        elif line[:1].isdigit():
            number, _, row = line.partition(" ")
            table[int(number)] = row
    if not entry:
        raise ValueError("the HLO module has no ENTRY computation: the text is cut off")
    return Module(entry, computations, _own_lines(tables))


def _read_instruction(line: str) -> Instruction | None:
    """Return the instruction of a line, or None for a line that has none."""
    head = _HEAD.match(line)
    # The type stands before the opcode. Its own parentheses never follow a blank and a
    # lower-case word: they open a tuple or belong to a layout, as in {1,0:T(8,128)}.
    opcode = head and _OPCODE.search(line, head.end() - 1)
    if not opcode:
        return None
    end = _closing(line, opcode.end())
    is_leaf = opcode[1] in ("parameter", "constant")
    inside = line[opcode.end() : end]
    operands = [] if is_leaf else _OPERAND.findall(inside)
    attributes, _, config = line[end + 1 :].partition(", backend_config=")
    attributes, _, metadata = attributes.partition(", metadata=")
    op_name, frame = _OP_NAME.search(metadata), _FRAME.search(metadata)
    return Instruction(
        name=head[2],
        opcode=opcode[1],
        results=_arrays(line[head.end() : opcode.start()]),
        operands=tuple(name for name, _ in operands),
        elements=tuple(int(number) if number else None for _, number in operands),
        attributes=attributes,
        op_name=op_name[1] if op_name else "",
        frame=int(frame[1]) if frame else 0,
        config=config,
        is_root=bool(head[1]),
        parameter=int(inside) if opcode[1] == "parameter" else None,
    )


def _closing(line: str, start: int) -> int:
    """Return where the parenthesis closes that was opened before `start`."""
    end = line.find(")", start)
    if end >= 0 and line.find("(", start, end) < 0:
        return end
    depth = 1
    for match in _PARENTHESIS.finditer(line, start):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.start()
    raise ValueError(f"the HLO module is cut off: {line[:80].strip()!r} has no end")


@functools.cache
def _arrays(text: str) -> tuple[Array, ...]:
    """Return the arrays of a type such as '(f32[2,3]{1,0}, s32[])'."""
    return tuple(
        Array(dtype, tuple(int(n) for n in dims.replace("<=", "").split(",") if n))
        for dtype, dims in _ARRAY.findall(text)
    )


@functools.cache
def _num_bits(dtype: str) -> int:
    """Return the bits of an element: the first number in the name of its type."""
    if dtype == "pred":
        return 8
    match = re.search(r"\d+", dtype)
    return int(match[0]) if match else 0  # token[] and opaque[] have no number


def _own_lines(tables: dict[str, dict[int, str]]) -> dict[int, str]:
    """Return each stack frame's innermost line in moejax/ or train/."""
    files, locations, frames = (
        tables.get(name, {}) for name in ("FileNames", "FileLocations", "StackFrames")
    )
    own_files = {}
    for number, name in files.items():
        match = _OWN_FILE.search(name)
        if match and "site-packages" not in match[1]:
            own_files[number] = match[1]
    own_locations = {}
    for number, row in locations.items():
        fields = _fields(row)
        file = own_files.get(fields["file_name_id"])
        if file:
            own_locations[number] = f"{file}:{fields['line']}"
    rows = {number: _fields(row) for number, row in frames.items()}
    own_frames = {}
    for number in rows:
        frame = number
        while frame in rows:
            location = own_locations.get(rows[frame]["file_location_id"])
            if location:
                own_frames[number] = location
                break
            # XLA prints a parent's number plus one: 1 where there is no caller.
            frame = rows[frame]["parent_frame_id"] - 1
    return own_frames


def _fields(row: str) -> dict[str, int]:
    """Return the fields of a row such as '{file_name_id=1 line=31}'."""
    return {name: int(value) for name, value in _FIELD.findall(row)}


_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_HEAD = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_PARENTHESIS = re.compile(r"[()]")
_NAME = re.compile(r"%([\w.\-]+)")
_OPERAND = re.compile(r"%([\w.\-]+)(?:#(\d+))?")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|"
    r"branch_computations|called_computations)=(%[\w.\-]+|\{[^}]*\})"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d+)")
_FIELD = re.compile(r"(\w+)=(-?\d+)")
_OWN_FILE = re.compile(r".*[/\"]((?:moejax|train)/.*\.py)\"")
