"""From a value of the compiled program to the line of code that it comes from.

Values of a loop, under their names before, in and after it, come from what the loop's
body computes for the next turn. Copies come from what they copy.

The names are those of the program's text that XLA writes itself. In what
`as_text()` returns, the bodies of asynchronous collectives are left out.
"""

import re
from typing import NamedTuple

from tools.compiled.hlo import Array, Instruction, Module

STACKS = "dynamic_update_slice"
GENERATED = re.compile(r"^[a-z\-]+\.\d+$")
"""Names that the compiler gave, such as 'broadcast.491'."""
PASSED_ON = ("copy", "bitcast", "copy-start", "copy-done", "tuple")
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


class Origins:
    """The origins of all values of a program."""

    def __init__(self, module: Module):
        self._module = module
        self._instructions: dict[str, Instruction] = {}
        self._loops: dict[str, Instruction] = {}
        self._users: dict[str, list[tuple[Instruction, int]]] = {}
        self._parameters: dict[str, str] = {}
        for computation in module.computations.values():
            for instruction in computation:
                self._add(instruction, computation.name)

    def _add(self, instruction: Instruction, computation: str) -> None:
        """Note an instruction, whose loop it is or in, and whom it uses."""
        self._instructions[instruction.name] = instruction
        for position, operand in enumerate(instruction.operands):
            self._users.setdefault(operand, []).append((instruction, position))
        if instruction.opcode == "while":
            for body in instruction.called["body"]:
                self._loops[body] = instruction
        if instruction.parameter is not None:
            self._parameters[instruction.name] = computation

    def arguments(self) -> dict[int, str]:
        """Return the name of each argument of the program, by its number."""
        entry = self._module.computations[self._module.entry]
        return {
            i.parameter: i.op_name.replace("\\'", "'")
            for i in entry
            if i.parameter is not None
        }

    def of(self, name: str, index: tuple[int, ...]) -> Origin:
        """Return the origin of a value: the instruction's name, and the position in its
        result."""
        found = self._find(name, index[0] if index else None, set())
        if found is None:
            return Origin("", "")
        if found.op_name.endswith(STACKS):
            for operand, element in self._written(found):
                value = self._find(operand, element, set())
                source = value and self._module.source(value)
                if source:
                    return Origin(found.op_name, source, value.op_name)
        return Origin(found.op_name, self._module.source(found))

    def _find(self, name: str, index: int | None, seen: set) -> Instruction | None:
        """Return the instruction that made a value and has a name of JAX's."""
        instruction = self._instructions.get(name)
        if instruction is None or (name, index) in seen:
            return None
        seen.add((name, index))
        for value in self._followed(instruction, index):
            if found := self._find(*value, seen):
                return found
        if instruction.opcode in ("while", "parameter"):
            return None
        if instruction.op_name and not GENERATED.match(instruction.op_name):
            return instruction
        # A zero that a loop begins with has no name of ours; the loop that uses it has.
        # What the compiler added by itself, such as a conversion, has its operand's.
        return self._find_use(name, index, seen) or self._find_operand(
            instruction, seen
        )

    def _find_operand(self, instruction: Instruction, seen: set) -> Instruction | None:
        """Return the instruction that made the largest operand with an origin."""
        operands = list(zip(instruction.operands, instruction.elements))
        operands.sort(key=lambda operand: -self._array(*operand).num_bytes)
        found = (self._find(*operand, seen) for operand in operands)
        return next((instruction for instruction in found if instruction), None)

    def _find_use(self, name: str, index: int | None, seen: set) -> Instruction | None:
        """Return the instruction that makes, in a loop, the next value of what enters
        the loop through copies and tuples."""
        for user, position in self._users.get(name, ()):
            if user.opcode == "while":
                found = self._find(user.name, index, seen)
            elif user.opcode == "tuple":
                found = self._find_use(user.name, position, seen)
            elif user.opcode == "copy":
                found = self._find_use(user.name, index, seen)
            else:
                continue
            if found:
                return found
        return None

    def _array(self, name: str, element: int | None) -> Array:
        """Return the type of a value; of a tuple as a whole, that of its first part."""
        results = self._instructions[name].results
        return results[element or 0] if results else Array("token", ())

    def _written(self, update: Instruction) -> list[tuple[str, int | None]]:
        """Return the operands of an update of an array, but for that array and for
        indices. An asynchronous one has them at its start."""
        whole = update.results[0]
        while update.opcode in ("async-done", "async-update"):
            update = self._instructions[update.operands[0]]
        operands = zip(update.operands, update.elements)
        types = {operand: self._array(*operand) for operand in operands}
        return [operand for operand, x in types.items() if x.size > 1 and x != whole]

    def _followed(self, instruction: Instruction, index: int | None) -> list:
        """Return the values that a value may come from, the most telling first."""
        if instruction.opcode == "parameter":
            computation = self._parameters[instruction.name]
            instruction = self._loops.get(computation, instruction)
        if instruction.opcode == "while" and index is not None:
            (body,) = self._module.callees(instruction, "body")
            start = self._instructions[instruction.operands[0]]
            tuples = (body.root, start)
            return [_part(t, index) for t in tuples if index < len(t.operands)]
        if instruction.opcode == "tuple" and index is not None:
            return [_part(instruction, index)]
        if instruction.opcode in PASSED_ON and instruction.operands:
            return [_part(instruction, 0)]
        return []


def _part(instruction: Instruction, position: int) -> tuple[str, int | None]:
    """Return an operand as a value: the name of its instruction, and which part of
    that one's result it is."""
    return instruction.operands[position], instruction.elements[position]
