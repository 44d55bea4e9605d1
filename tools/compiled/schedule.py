"""Walk through the schedule of a compiled program: what hides which collective.

Between the start and the done of a collective stands what the device computes
meanwhile. Collectives run one after another in the order of their starts, beside one
stream of other work, so a second of work hides a second of one collective at most. Work
counts as hiding only where it neither needs the collective's data nor gives it any.
"""

import dataclasses
import math

from moejax.perf.rates import Rates
from tools.compiled import collectives
from tools.compiled.collectives import Collective
from tools.compiled.dependence import Dependence
from tools.compiled.hlo import Computation, Instruction, Module
from tools.compiled.work import Estimator, Work


@dataclasses.dataclass(frozen=True)
class Piece:
    """One instruction of a schedule that takes time, and which collectives it hides."""

    instruction: Instruction
    description: str
    """A short name of what it is, and its source line."""
    seconds: float
    free_sec: float
    """Part of `seconds` that hides no collective inside the instruction."""
    hidden: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds that it hides of each collective beside it, by the name of the start."""

    @property
    def idle_sec(self) -> float:
        """Seconds in which no collective runs beside it."""
        return self.free_sec - sum(self.hidden.values())


@dataclasses.dataclass
class Flight:
    """A collective between its start and its done."""

    collectives: list[Collective]
    """One, or several that one start wraps."""
    done: str | None
    seconds: float
    remaining_sec: float
    first: int
    """Index of the first piece behind its start, in the computation's pieces."""
    last: int | None = None
    """Index behind the last piece before its done; None where its done stands in
    another round of the loop."""

    @property
    def start(self) -> str:
        """Name of the instruction that starts it."""
        return self.collectives[0].name

    @property
    def hidden_sec(self) -> float:
        """Seconds that other work hides."""
        return self.seconds - self.remaining_sec


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The schedule of one computation: its pieces of work and its collectives."""

    kind: str
    """'step' for the program's entry, 'loop' for the body or the condition of a loop,
    'branch' for the others."""
    dependence: Dependence
    pieces: list[Piece] = dataclasses.field(default_factory=list)
    flights: dict[str, Flight] = dataclasses.field(default_factory=dict)
    """By the names of their starts."""

    def beside(self, flight: Flight) -> list[Piece]:
        """Return the work between start and done that is independent of the
        collective."""
        if not flight.collectives[0].is_async:
            return []
        pieces = self.pieces[flight.first : flight.last]
        return [p for p in pieces if self._is_independent(p, flight)]

    def _is_independent(self, piece: Piece, flight: Flight) -> bool:
        return self.dependence.is_independent(piece.instruction, flight.start)


@dataclasses.dataclass(frozen=True)
class Span:
    """One run of an instruction or of a whole computation."""

    seconds: float = 0.0
    hiding_sec: float = 0.0
    """Part of `seconds` that hides collectives inside it."""
    work: Work = Work()

    def __add__(self, other: "Span") -> "Span":
        return Span(
            self.seconds + other.seconds,
            self.hiding_sec + other.hiding_sec,
            self.work + other.work,
        )

    def times(self, count: int) -> "Span":
        """Return `count` runs."""
        return Span(
            count * self.seconds,
            count * self.hiding_sec,
            self.work.times(count),
        )


class Schedule:
    """The schedules of a module, each walked through once."""

    def __init__(
        self,
        module: Module,
        mesh_shape: dict[str, int],
        devices_per_node: int,
        rates: Rates,
    ):
        """Walk through all computations of a compiled step.

        `mesh_shape` has the size of each axis, the slowest first; devices are numbered
        in this order, and each `devices_per_node` of them in a row are a node. Raises
        ValueError where the mesh is no whole number of nodes.
        """
        num_devices = math.prod(mesh_shape.values())
        if num_devices % min(devices_per_node, num_devices):
            raise ValueError(
                f"a mesh of {num_devices} devices {mesh_shape} is no whole number of "
                f"nodes of {devices_per_node}"
            )
        found = collectives.find(module, mesh_shape, rates.unknown_trip_count)
        self.module, self.found, self.rates = module, found, rates
        self.devices_per_node = devices_per_node
        self.estimator = Estimator(module)
        self.seconds: dict[str, float] = {}
        """Of one run of each instruction, by name. The start of a collective has those
        of its whole flight."""
        self.by_start: dict[str, dict[str, list[Collective]]] = {}
        for collective in found:
            starts = self.by_start.setdefault(collective.computation, {})
            starts.setdefault(collective.name, []).append(collective)
        self.spans: dict[str, Span] = {}
        self.timelines: dict[str, Timeline] = {}
        """Of each computation with collectives, by name."""
        self.entry = self._run(module.computations[module.entry], "step")
        """One run of the whole program."""

    def _run(self, computation: Computation, kind: str) -> Span:
        """Return one run of a computation, and keep its timeline."""
        if computation.name in self.spans:
            return self.spans[computation.name]
        starts = self.by_start.get(computation.name, {})
        timeline = Timeline(kind, Dependence(computation, list(starts)))
        total, in_flight = Span(), []
        for instruction in computation:
            if members := starts.get(instruction.name):
                flight = self._start(computation, instruction, members, timeline)
                self.seconds[instruction.name] = flight.seconds
                if members[0].is_async:
                    in_flight.append(flight)
                continue
            for flight in in_flight:
                if flight.done == instruction.name:
                    flight.last = len(timeline.pieces)
            in_flight = [f for f in in_flight if f.done != instruction.name]
            span = self._span(computation, instruction)
            self.seconds[instruction.name] = span.seconds
            if span.seconds:
                piece = self._piece(instruction, span)
                _hide(piece, in_flight, timeline.dependence)
                timeline.pieces.append(piece)
                hiding_sec = span.seconds - piece.idle_sec
                span = dataclasses.replace(span, hiding_sec=hiding_sec)
            total += span
        self.spans[computation.name] = total
        if starts:
            self.timelines[computation.name] = timeline
        return total

    def _start(
        self,
        computation: Computation,
        instruction: Instruction,
        members: list[Collective],
        timeline: Timeline,
    ) -> Flight:
        seconds = sum(c.seconds(self.devices_per_node, self.rates) for c in members)
        done = collectives.find_done(computation, instruction)
        flight = Flight(members, done, seconds, seconds, len(timeline.pieces))
        timeline.flights[instruction.name] = flight
        return flight

    def _piece(self, instruction: Instruction, span: Span) -> Piece:
        free_sec = span.seconds - span.hiding_sec
        description = _describe(self.module, instruction)
        return Piece(instruction, description, span.seconds, free_sec)

    def _span(self, computation: Computation, instruction: Instruction) -> Span:
        """Return one run of an instruction that is no collective."""
        if instruction.opcode == "while":
            trips = instruction.trip_count
            trips = self.rates.unknown_trip_count if trips is None else trips
            parts = self.module.callees(instruction, "body", "condition")
            spans = [self._run(part, "loop") for part in parts]
            return sum(spans, Span()).times(trips)
        if instruction.opcode in ("conditional", "call"):
            branches = [
                self._run(branch, "branch")
                for branch in self.module.callees(instruction)
            ]
            # Where documents are many, attention by cuDNN goes on in blocks: the other
            # branch, whose loops of unknown length would count too little.
            return max(branches, key=lambda s: (s.work.attention_flops > 0, s.seconds))
        work = self.estimator.work(computation, instruction)
        return Span(work.seconds(self.rates), 0.0, work)


def _hide(piece: Piece, in_flight: list[Flight], dependence: Dependence) -> None:
    """Let a piece of work hide the collectives beside it, in the order of their
    starts."""
    for flight in in_flight:
        if dependence.is_independent(piece.instruction, flight.start):
            used = min(piece.idle_sec, flight.remaining_sec)
            if used > 0:
                flight.remaining_sec -= used
                piece.hidden[flight.start] = used


def _describe(module: Module, instruction: Instruction) -> str:
    """Return a short name of an instruction: what it is, and its source line."""
    name = _operation(instruction)
    source = module.source(instruction)
    return f"{name} {source}".strip()


def _operation(instruction: Instruction) -> str:
    """Return the name of a kernel, of JAX's primitive, or of XLA's opcode."""
    for kernel in _KERNELS:
        if kernel in instruction.op_name or kernel in instruction.name:
            return kernel
    return instruction.op_name.rsplit("/", 1)[-1] or instruction.opcode


_KERNELS = ("grouped_rows", "grouped_matrices", "dot_product_attention")
"""Kernels that are called by their own names."""
