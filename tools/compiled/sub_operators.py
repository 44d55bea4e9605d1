"""Say under which part of a block expert weights and their gradients travel.

Pro-Prophet (arXiv 2411.10003, Alg. 2) cuts the copies of the next block's experts in
two sub-operators, of which one travels under the experts of the block at work and one
under the rest of it, and the sums of the copies' gradients in the same way. Here each
collective of the store is such a sub-operator. The parts of a block:

    experts     the experts' products and what stands beside them in their scope
    attention   attention, its projections included
    rest        everything else: router, norms, rows put in order, residuals
"""

import collections
import dataclasses

from tools.compiled.collectives import Collective, scopes
from tools.compiled.exposure import Exposure
from tools.compiled.hlo import Instruction, Module
from tools.compiled.schedule import Schedule

PARTS = ("experts", "attention", "rest")
WEIGHTS, GRADIENTS = "weights", "gradients"
SLOTS, REFETCH = "slots", "refetch"
"""Named scopes of what makes slots, and of what the backward pass fetches again
(moejax/model/ahead.py)."""
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class SubOperator:
    """A collective of expert weights or of their gradients, with seconds of one run."""

    name: str
    what: str
    """'weights' or 'gradients'."""
    phase: str
    """'forward', 'backward' or 'remat' (Collective.phase)."""
    computation: str
    num_bytes: int
    runs: int
    seconds: float
    beside_sec: dict[str, float]
    """Seconds of independent work between its start and its done, by part of the block
    (PARTS)."""
    hidden_sec: dict[str, float]
    """Its own seconds that this work hides, by part of the block."""

    @property
    def exposed_sec(self) -> float:
        """Seconds that no work hides."""
        return self.seconds - sum(self.hidden_sec.values())

    def as_dict(self) -> dict:
        """Return all fields and the exposed seconds, ready for JSON."""
        return dataclasses.asdict(self) | {"exposed_sec": self.exposed_sec}


def find(schedule: Schedule, exposures: list[Exposure]) -> list[SubOperator]:
    """Return the collectives of expert weights and their gradients, those that run most
    often first, else in the order of the schedule.

    Several collectives under one start share what hides it in proportion.
    """
    found = [
        _sub_operator(schedule.module, e, _share(schedule, e))
        for e in exposures
        if e.collective.is_ours and SLOTS in scopes(e.collective.op_name)
    ]
    return sorted(found, key=lambda each: -each.runs)


def lines(found: list[SubOperator]) -> list[str]:
    """Return a line for the weights, and one for the gradients, of each loop: their
    bytes and seconds, and what hides them."""
    groups: dict[tuple, list[SubOperator]] = collections.defaultdict(list)
    for each in found:
        groups[each.computation, each.phase, each.what].append(each)
    return [_line(group) for group in groups.values()]


def part_of_block(module: Module, instruction: Instruction) -> str:
    """Return the part of a block that an instruction computes, one of PARTS.

    XLA drops the name of a fusion whose instructions have several: then the part is
    that of most instructions inside that have one.
    """
    found = _part(instruction)
    is_fusion = instruction.opcode.removesuffix("-start") == "fusion"
    if instruction.op_name or not is_fusion:
        return found or "rest"
    inside = (i for called in module.callees(instruction) for i in called)
    counts = collections.Counter(filter(None, map(_part, inside)))
    return counts.most_common(1)[0][0] if counts else "rest"


def _part(instruction: Instruction) -> str | None:
    """Return the innermost part of a block in the name of an instruction, or None."""
    named = reversed(scopes(instruction.op_name))
    return next((scope for scope in named if scope in PARTS), None)


def _sub_operator(module: Module, e: Exposure, share: float) -> SubOperator:
    c = e.collective
    beside, hidden = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
    for piece in e.beside:
        part = part_of_block(module, piece.instruction)
        beside[part] += piece.seconds
        hidden[part] += share * piece.hidden.get(c.name, 0.0)
    what, phase = _what(c), c.phase
    sizes = c.num_bytes, c.runs, e.seconds
    return SubOperator(c.name, what, phase, c.computation, *sizes, beside, hidden)


def _share(schedule: Schedule, e: Exposure) -> float:
    """Return the share of a collective in the seconds of its start."""
    flight = schedule.timelines[e.collective.computation].flights[e.collective.name]
    return e.seconds / flight.seconds if flight.seconds else 0.0


def _what(collective: Collective) -> str:
    is_gradient = collective.phase == "backward"
    is_gradient = is_gradient and REFETCH not in scopes(collective.op_name)
    return GRADIENTS if is_gradient else WEIGHTS


def _line(group: list[SubOperator]) -> str:
    first, count = group[0], len(group)
    hidden = [
        f"{1e3 * sum(each.hidden_sec[part] for each in group):.3f} under {part}"
        for part in PARTS
    ]
    return (
        f"{first.what} {first.phase}, {first.runs} runs: "
        f"{sum(each.num_bytes for each in group) / _MIB:.1f} MiB in {count} "
        f"collective{'s' * (count > 1)}, "
        f"{1e3 * sum(each.seconds for each in group):.3f} ms of which "
        f"{', '.join(hidden)}, {1e3 * sum(each.exposed_sec for each in group):.3f} "
        "exposed"
    )
