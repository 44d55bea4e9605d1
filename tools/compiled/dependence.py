"""Say which instructions of a computation need a collective's data, and which it needs.

Sets of collectives are integers with a bit for each, so that one pass over a
computation answers the question for all of its collectives.
"""

import collections
from collections.abc import Sequence

from tools.compiled.hlo import Computation, Instruction


class Dependence:
    """Data dependence between the collectives of a computation and its instructions.

    Both relations hold within one run of the computation: what the next round of a
    loop needs is not known to them.
    """

    def __init__(self, computation: Computation, starts: Sequence[str]):
        """Read a scheduled computation, whose collectives have these starts."""
        self._bits = {name: 1 << number for number, name in enumerate(starts)}
        self._waits = self._find_waits(computation)
        self._gives = self._find_gives(computation)

    def waits(self, instruction: Instruction, start: str) -> bool:
        """Return whether an instruction needs the data of a collective, or stands
        behind one that does."""
        return bool(self._waits[instruction.name] & self._bits[start])

    def gives(self, instruction: Instruction, start: str) -> bool:
        """Return whether a collective needs the data of an instruction."""
        return bool(self._gives[instruction.name] & self._bits[start])

    def is_independent(self, instruction: Instruction, start: str) -> bool:
        """Return whether an instruction neither needs a collective's data nor gives it
        any."""
        return not self.waits(instruction, start) and not self.gives(instruction, start)

    def _find_waits(self, computation: Computation) -> dict[str, int]:
        """Return the collectives that each instruction waits for, in the order of the
        schedule. To be placed after a start is no dependence on its data."""
        waits: dict[str, int] = {}
        for instruction in computation:
            found = 0
            for name in instruction.operands:
                found |= waits.get(name, 0) | self._bits.get(name, 0)
            for name in instruction.control_predecessors:
                found |= waits.get(name, 0)
            waits[instruction.name] = found
        return waits

    def _find_gives(self, computation: Computation) -> dict[str, int]:
        """Return the collectives that need each instruction's data."""
        gives: dict[str, int] = collections.defaultdict(int)
        for instruction in reversed(list(computation)):
            found = gives[instruction.name] | self._bits.get(instruction.name, 0)
            for name in instruction.operands:
                gives[name] |= found
        return gives
