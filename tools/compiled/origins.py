"""From a value of the compiled program to the line of code that it comes from.

Values of a loop, under their names before, in and after it, come from what the loop's
body computes for the next turn. Copies come from what they copy.
"""

import re
from typing import NamedTuple

INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)")
OPCODE = re.compile(r"(?:^|[\s)}\]])([a-z][a-z\-]*)\(")
COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(")
OPERAND = re.compile(r"%([\w.\-]+)(?:#(\d+))?")
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
FRAME = re.compile(r"stack_frame_id=(\d+)")
BODY = re.compile(r"\bbody=%([\w.\-]+)")
ROW = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$')
FIELD = re.compile(r"(\w+)=(\d+)")
OWN = re.compile(r"(?:^|/)((?:moejax|train)/.+\.py)$")
STACKS = "dynamic_update_slice"
GENERATED = re.compile(r"^[a-z\-]+\.\d+$")
"""Names that the compiler gave, such as 'broadcast.491'."""
TABLES = ("FileNames", "FileLocations", "StackFrames")
PASSED_ON = ("copy", "bitcast", "copy-start", "copy-done", "tuple", "get-tuple-element")
"""Instructions that give on what another one made."""


class Origin(NamedTuple):
    """Where a value comes from."""

    op_name: str
    """JAX's scopes and primitive, such as 'jit(f)/while/body/attention/mul', or ''."""
    source: str
    """The innermost line of ours, such as 'moejax/model/blocks.py:81', or ''."""
    stacked: str = ""
    """Where a loop writes one turn's value into an array for all turns: the op_name of
    that value, whose line `source` then is."""


class _Node(NamedTuple):
    """An instruction, as far as values are followed."""

    computation: str
    opcode: str
    operands: tuple[tuple[str, int | None], ...]
    body: str | None
    origin: Origin


class Origins:
    """The origins of all values of a program."""

    def __init__(self, text: str):
        """Read a scheduled HLO text."""
        self._nodes, self._roots, self._loops, self._users = _read(text)

    def arguments(self) -> dict[int, str]:
        """Return the name of each argument of the program, by its number."""
        return self._roots["arguments"]

    def of(self, name: str, index: tuple[int, ...]) -> Origin:
        """Return the origin of a value: the instruction's name, and the position in its
        result."""
        found = self._find(name, index[0] if index else None, set())
        if found is None:
            return Origin("", "")
        origin = self._nodes[found].origin
        if not origin.op_name.endswith(STACKS):
            return origin
        for operand, position in self._written(found):
            value = self._find(operand, position, set())
            if value and (turn := self._nodes[value].origin).source:
                return Origin(origin.op_name, turn.source, turn.op_name)
        return origin

    def _find(self, name: str, index: int | None, seen: set) -> str | None:
        """Return the name of the instruction that made a value and has an op_name."""
        node = self._nodes.get(name)
        if node is None or (name, index) in seen:
            return None
        seen.add((name, index))
        for value in self._followed(name, node, index):
            if found := self._find(*value, seen):
                return found
        if node.opcode in ("while", "parameter"):
            return None
        if node.origin.op_name and not GENERATED.match(node.origin.op_name):
            return name
        # A zero that a loop begins with has no name of ours; the loop that uses it has.
        return self._find_use(name, index, seen)

    def _find_use(self, name: str, index: int | None, seen: set) -> str | None:
        """Return the name of the instruction that makes, in a loop, the next value of
        what enters the loop through copies and tuples."""
        for user, position in self._users.get(name, ()):
            opcode = self._nodes[user].opcode
            if opcode == "while":
                found = self._find(user, index, seen)
            elif opcode in ("copy", "tuple"):
                found = self._find_use(
                    user, position if opcode == "tuple" else index, seen
                )
            else:
                continue
            if found:
                return found
        return None

    def _written(self, name: str) -> list[tuple[str, int | None]]:
        """Return the operands of an update of an array, but for that array and for
        indices. An asynchronous one has them at its start."""
        node = self._nodes[name]
        while node.opcode in ("async-done", "async-update"):
            node = self._nodes[node.operands[0][0]]
        return [
            (operand, position)
            for operand, position in node.operands
            if self._nodes[operand].opcode not in ("parameter", "constant", "copy")
        ]

    def _followed(self, name: str, node: _Node, index: int | None) -> list:
        """Return the values that a value may come from, the most telling first."""
        loop = self._loops.get(node.computation) if node.opcode == "parameter" else name
        if node.opcode == "parameter" and loop is not None:
            node = self._nodes[loop]
        if node.opcode == "while" and index is not None:
            body_root = self._nodes[self._roots[node.body]].operands
            inits = self._nodes[node.operands[0][0]].operands
            return [pair[index] for pair in (body_root, inits) if index < len(pair)]
        if node.opcode == "tuple" and index is not None:
            return [node.operands[index]] if index < len(node.operands) else []
        if node.opcode in PASSED_ON and node.operands:
            return [node.operands[0]]
        return []


def _read(text: str) -> tuple[dict, dict, dict, dict]:
    """Return the nodes by name, the roots by computation (and the names of arguments),
    the loops by body, and the users of each instruction with their operand number.

    This is as much of HLO as this module needs.
    """
    nodes: dict[str, _Node] = {}
    roots: dict = {"arguments": {}}
    loops: dict[str, str] = {}
    tables: dict[str, dict[int, str]] = {name: {} for name in TABLES}
    computation, table, is_entry = "", None, False
    lines = text.split("\n")
    frames: dict[str, int] = {}
    for line in lines:
        if line in TABLES:
            table = tables[line]
        elif table is not None and (match := ROW.match(line)):
            table[int(match[1])] = match[2] or match[3]
        elif match := COMPUTATION.match(line):
            computation, is_entry = match[1], line.startswith("ENTRY")
        elif match := INSTRUCTION.match(line):
            _add(match, computation, nodes, frames)
            if match[1]:
                roots[computation] = match[2]
            if body := nodes[match[2]].body:
                loops[body] = match[2]
            if is_entry and nodes[match[2]].opcode == "parameter":
                number = int(re.search(r"parameter\((\d+)\)", line)[1])
                roots["arguments"][number] = nodes[match[2]].origin.op_name
        else:
            table = None
    sources = _sources(tables)
    for name, frame in frames.items():
        origin = nodes[name].origin._replace(source=sources.get(frame, ""))
        nodes[name] = nodes[name]._replace(origin=origin)
    users: dict[str, list] = {}
    for name, node in nodes.items():
        for position, (operand, _) in enumerate(node.operands):
            users.setdefault(operand, []).append((name, position))
    return nodes, roots, loops, users


def _add(match, computation: str, nodes: dict, frames: dict) -> None:
    """Add the instruction of a line to the nodes, and its stack frame to the frames."""
    name, rest = match[2], match[3].partition(", backend_config=")[0]
    opcode = OPCODE.search(_without_type(rest))
    head, _, metadata = rest.partition("metadata={")
    inside = _inside(rest, f"{opcode[1]}(") if opcode else ""
    body, op_name = BODY.search(head), OP_NAME.search(metadata)
    if frame := FRAME.search(metadata):
        frames[name] = int(frame[1])
    nodes[name] = _Node(
        computation,
        opcode[1] if opcode else "",
        tuple((n, int(i) if i else None) for n, i in OPERAND.findall(inside)),
        body[1] if body else None,
        Origin(op_name[1].replace("\\'", "'") if op_name else "", ""),
    )


def _without_type(rest: str) -> str:
    """Return an instruction without the type of its result, which may be a tuple."""
    if not rest.startswith("("):
        return rest
    depth = 0
    for i, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return rest[i + 1 :]
    return rest


def _inside(rest: str, begin: str) -> str:
    """Return what stands between `begin`, which ends in a parenthesis, and the
    parenthesis that closes it."""
    start = rest.index(begin) + len(begin)
    depth = 1
    for i in range(start, len(rest)):
        depth += (rest[i] == "(") - (rest[i] == ")")
        if not depth:
            return rest[start:i]
    return rest[start:]


def _sources(tables: dict[str, dict[int, str]]) -> dict[int, str]:
    """Return each stack frame's innermost line of ours."""
    lines = {}
    for number, row in tables["FileLocations"].items():
        fields = dict(FIELD.findall(row))
        file = OWN.search(tables["FileNames"].get(int(fields["file_name_id"]), ""))
        if file and "site-packages" not in file[0]:
            lines[number] = f"{file[1]}:{fields['line']}"
    sources = {}
    for number in tables["StackFrames"]:
        frame = number
        while frame in tables["StackFrames"]:
            fields = dict(FIELD.findall(tables["StackFrames"][frame]))
            if line := lines.get(int(fields["file_location_id"])):
                sources[number] = line
                break
            # XLA prints the number of the caller's frame plus one.
            frame = int(fields["parent_frame_id"]) - 1
    return sources
