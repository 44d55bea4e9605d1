"""Find the collectives of a compiled program."""

import collections
import dataclasses
import math
import re

from moejax.perf.rates import Rates
from tools.compiled.groups import axes_of, device_groups
from tools.compiled.hlo import Array, Computation, Instruction, Module

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "recv",
    "reduce-scatter",
    "send",
)


@dataclasses.dataclass(frozen=True)
class Part:
    """One array that a collective moves; a combined collective has several."""

    dtype: str
    num_bytes: int
    """Bytes on one device where the array is whole: before a reduce-scatter, after
    every other collective."""


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective of a compiled program."""

    name: str
    """Name of the instruction: of the start, where it is asynchronous."""
    kind: str
    """One of KINDS."""
    parts: tuple[Part, ...]
    groups: list[list[int]]
    axes: tuple[str, ...]
    """Axes of the mesh that it spans."""
    computation: str
    runs: int
    """Number of runs in a step: the product of the trip counts around it."""
    is_async: bool
    is_ours: bool
    """Whether it was written in a shard_map; if not, the partitioner made it."""
    is_exchange: bool
    """Whether it carries rows to or from the experts of an MoE layer."""
    is_remat: bool
    """Whether it runs again in the backward pass, by jax.checkpoint or by XLA."""
    source: str
    op_name: str

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    @property
    def phase(self) -> str:
        """'forward', 'backward', 'remat' (computed again), or '' outside the loss."""
        if self.is_remat:
            return "remat"
        if "transpose(" in self.op_name:
            return "backward"
        return "forward" if "jvp(" in self.op_name else ""

    @property
    def scope(self) -> str:
        """Innermost named scope, such as 'dispatch', or ''."""
        *path, _ = self.op_name.split("/")
        found = [match[1] for part in path if (match := _SCOPE.fullmatch(part))]
        return next((s for s in reversed(found) if s not in _NO_SCOPES), "")

    def seconds(self, devices_per_node: int, rates: Rates) -> float:
        """Return the seconds of one run by the rates of the links, all its bytes on the
        way, both links at the same time.

        A device's bytes for a group of n devices on k nodes, B bytes where whole: (n -
        1) / n B for all-gather, reduce-scatter and all-to-all, twice that for
        all-reduce. Across nodes, each device's card carries (n - n / k) / n B of an
        all-to-all; of the others, whose bytes cross once for each node, it carries that
        divided by n / k, as the cards of a node share the work.
        """
        if self.kind == "send":  # its recv, on the same devices, has the time
            return 0.0
        group = max(self.groups, key=len)
        size = len(group)
        num_bytes = self.num_bytes
        if self.kind == "ragged-all-to-all":
            num_bytes *= rates.filled_rows
        num_nodes = max(
            len({device // devices_per_node for device in members})
            for members in self.groups
        )
        if self.kind in ("collective-permute", "recv", "collective-broadcast"):
            rate = rates.nvlink_bytes_per_sec
            rate = rates.infiniband_bytes_per_sec if num_nodes > 1 else rate
            return num_bytes / rate
        num_bytes *= 2 if self.kind == "all-reduce" else 1
        per_node = size / num_nodes
        inside = num_bytes * (size - 1) / size
        across = num_bytes * (num_nodes - 1) / num_nodes
        if self.kind in ("all-to-all", "ragged-all-to-all"):
            inside = num_bytes * (per_node - 1) / size
        else:
            across /= per_node
        return max(
            inside / rates.nvlink_bytes_per_sec * (per_node > 1),
            across / rates.infiniband_bytes_per_sec,
        )


def count_runs(module: Module, unknown_trip_count: int = 0) -> dict[str, int]:
    """Return how often each computation of the program runs in one call, by name.

    Only computations that are schedules of their own are in it: the entry, the bodies
    of loops, and the branches of conditionals, each of which counts as often as its
    conditional. A loop whose trip count the compiler does not know runs
    `unknown_trip_count` times.
    """
    runs: dict[str, int] = collections.defaultdict(int)

    def visit(computation: Computation, times: int) -> None:
        runs[computation.name] += times
        for instruction in computation:
            if instruction.opcode == "while":
                trips = instruction.trip_count
                trips = unknown_trip_count if trips is None else trips
                for body in module.callees(instruction, "body", "condition"):
                    visit(body, times * trips)
            elif instruction.opcode in ("conditional", "call"):
                for branch in module.callees(instruction):
                    visit(branch, times)

    visit(module.computations[module.entry], 1)
    return dict(runs)


def num_host_waits(module: Module) -> int:
    """Return how often a step comes to a conditional, or to a loop whose trip count the
    compiler does not know. The host waits there until the devices have the predicate.

    What is within such a loop, or in a branch, is not in it.
    """

    def visit(computation: Computation) -> int:
        waits = 0
        for instruction in computation:
            opcode, trips = instruction.opcode, 1
            if opcode == "while":
                trips = instruction.trip_count
            if opcode == "conditional" or trips is None:
                waits += 1
            elif opcode in ("while", "call"):
                roles = ("body", "condition") if opcode == "while" else ()
                waits += trips * sum(map(visit, module.callees(instruction, *roles)))
        return waits

    return visit(module.computations[module.entry])


def find(
    module: Module, mesh_shape: dict[str, int], unknown_trip_count: int = 0
) -> list[Collective]:
    """Return the collectives of a program, in the order of its text.

    `mesh_shape` has the size of each axis of the mesh, the slowest first. A start that
    wraps several collectives gives one entry for each, all with the start's name.
    """
    num_devices = math.prod(mesh_shape.values())
    found = []
    runs = count_runs(module, unknown_trip_count)
    for computation in module.computations.values():
        if computation.name not in runs:
            continue
        for instruction in computation:
            for inner, operands in _collectives(module, computation, instruction):
                groups = device_groups(inner, num_devices)
                op_name = inner.op_name or instruction.op_name
                is_ours = "shard_map" in op_name
                kind = inner.opcode.removesuffix("-start")
                found.append(
                    Collective(
                        name=instruction.name,
                        kind=kind,
                        parts=_parts(kind, operands, _results(computation, inner)),
                        groups=groups,
                        axes=axes_of(groups, mesh_shape),
                        computation=computation.name,
                        runs=runs[computation.name],
                        is_async=is_start(instruction)
                        and '"is_sync":true' not in instruction.config,
                        is_ours=is_ours,
                        is_exchange=is_ours
                        and kind in ("all-to-all", "ragged-all-to-all")
                        and bool(_EXCHANGE.search(op_name)),
                        is_remat="rematted_computation" in op_name
                        or is_xla_remat(inner)
                        or is_xla_remat(instruction),
                        source=_source(module, computation, instruction),
                        op_name=op_name,
                    )
                )
    return found


def is_start(instruction: Instruction) -> bool:
    """Return whether an instruction begins what another one ends."""
    return instruction.opcode.endswith("-start") or instruction.opcode in (
        "send",
        "recv",
    )


def is_xla_remat(instruction: Instruction) -> bool:
    """Return whether XLA's own pass made a copy of an instruction to save memory."""
    return bool(_XLA_REMAT.search(instruction.name))


def find_done(computation: Computation, start: Instruction) -> str | None:
    """Return the name of the instruction that awaits a start, or None where another
    iteration of the loop does."""
    pending = {start.name}
    for instruction in computation:
        if not pending.isdisjoint(instruction.operands):
            if instruction.opcode.endswith("-done"):
                return instruction.name
            if instruction.opcode.endswith("-update"):
                pending.add(instruction.name)
    return None


def _collectives(
    module: Module, computation: Computation, instruction: Instruction
) -> list[tuple[Instruction, list[Instruction]]]:
    """Return the collectives that an instruction is or starts, each with its
    operands."""
    if instruction.opcode.removesuffix("-start") in KINDS:
        inner = [(instruction, computation)]
    elif is_start(instruction) or instruction.opcode == "fusion":
        inner = [
            (candidate, called)
            for called in module.callees(instruction)
            for candidate in called
            if candidate.opcode in KINDS
        ]
    else:
        inner = []
    return [
        (found, [where.instructions[name] for name in found.operands])
        for found, where in inner
    ]


def _source(module: Module, computation: Computation, first: Instruction) -> str:
    """Return the source line of an instruction, or of the first one with a line that
    uses its value. The partitioner's own instructions have none."""
    reached = {first.name}
    if module.source(first):
        return module.source(first)
    for instruction in computation:
        if not reached.isdisjoint(instruction.operands):
            if module.source(instruction):
                return module.source(instruction)
            reached.add(instruction.name)
    return ""


def _results(computation: Computation, instruction: Instruction) -> tuple[Array, ...]:
    """Return the arrays that a collective makes: those of its done, where it is a
    start, whose own type repeats the operands."""
    if not is_start(instruction):
        return instruction.results
    done = find_done(computation, instruction)
    if done:
        return computation.instructions[done].results
    # The type is (operands, results, contexts), with as many results as operands.
    count = len(instruction.operands)
    return instruction.results[count : 2 * count] or instruction.results


def _parts(
    kind: str, operands: list[Instruction], results: tuple[Array, ...]
) -> tuple[Part, ...]:
    if kind in ("reduce-scatter", "send"):
        results = tuple(array for operand in operands for array in operand.results)
    elif kind == "ragged-all-to-all":
        results = results[:1]
    return tuple(Part(a.dtype, a.num_bytes) for a in results if a.dtype != "token")


_SCOPE = re.compile(r"(?:(?:jvp|transpose|vmap)\()*(\w+)\)*")
_NO_SCOPES = (
    "body",
    "checkpoint",
    "closed_call",
    "cond",
    "eval_jaxpr",
    "rematted_computation",
    "shard_map",
    "while",
)
_EXCHANGE = re.compile(r"\b(dispatch|combine)\b")
_XLA_REMAT = re.compile(r"\.remat\d*(\.|$)")
