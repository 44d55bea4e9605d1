"""Estimate which share of the collectives' time is hidden by other work.

XLA's text is a schedule: between the start and the done of a collective stands what the
device computes meanwhile. Seconds are estimates by stated rates. Collectives run one
after another in the order of their starts, beside one stream of other work, so a second
of work hides a second of one collective at most. Work counts as hiding only where it
neither needs the collective's data nor gives it any.
"""

import collections
import dataclasses

from moejax.perf.rates import Rates
from tools.compiled import collectives
from tools.compiled.collectives import Collective
from tools.compiled.hlo import Computation, Instruction, Module
from tools.compiled.work import HOPPER_ATTENTION, Estimator, Work

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Exposure:
    """A collective with its estimated seconds, all of one run."""

    collective: Collective
    seconds: float
    hidden_sec: float
    beside: dict[str, float]
    """Seconds of the work that hides it or could, by what it is, the longest first."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a compiled step exchanges, hides and computes again."""

    rates: Rates
    exposures: list[Exposure]
    work: Work
    """Of a whole step on one device."""
    compute_sec: float
    """Estimated seconds of all work on one device, without collectives."""
    num_remat_ops: int
    """Instructions that jax.checkpoint computes again, in the schedules' text."""
    num_xla_remat_ops: int
    """Instructions that XLA computes again to save memory."""

    @property
    def collective_sec(self) -> float:
        """Estimated seconds of all collectives of a step, hidden or not."""
        return sum(e.seconds * e.collective.runs for e in self.exposures)

    @property
    def exchange_hidden_share(self) -> float | None:
        """Share of the row exchanges' seconds that other work hides; None without row
        exchanges."""
        return _hidden_share([e for e in self.exposures if e.collective.is_exchange])

    @property
    def collective_hidden_share(self) -> float | None:
        """Share of all collectives' seconds that other work hides; None without any."""
        return _hidden_share(self.exposures)

    @property
    def sync_collective_sec(self) -> float:
        """Estimated seconds of the collectives during which nothing else may run."""
        return sum(
            e.seconds * e.collective.runs
            for e in self.exposures
            if not e.collective.is_async
        )

    @property
    def largest_float32_collective_bytes(self) -> int:
        """Bytes of the largest float32 array in a collective that is no
        reduce-scatter."""
        return self._largest_float32(lambda kind: kind != "reduce-scatter")

    @property
    def largest_float32_reduce_scatter_bytes(self) -> int:
        """Bytes of the largest float32 array in a reduce-scatter, before it."""
        return self._largest_float32(lambda kind: kind == "reduce-scatter")

    @property
    def remat_collectives(self) -> list[str]:
        """Names of the collectives that run again in the backward pass, those that XLA
        repeats included."""
        return [e.collective.name for e in self.exposures if e.collective.is_remat]

    @property
    def xla_remat_collectives(self) -> list[str]:
        """Names of the collectives that XLA repeats because memory is short."""
        return [e.collective.name for e in self.exposures if e.collective.is_xla_remat]

    def _largest_float32(self, is_meant) -> int:
        return max(
            (
                part.num_bytes
                for e in self.exposures
                for part in e.collective.parts
                if is_meant(e.collective.kind) and part.dtype == "f32"
            ),
            default=0,
        )

    def rows(self) -> list[dict]:
        """Return one record of plain values for each distinct collective, the longest
        exposed first. Collectives are one where kind, arrays, axes, source, scope and
        phase agree."""
        groups: dict[tuple, list[Exposure]] = collections.defaultdict(list)
        for e in self.exposures:
            c = e.collective
            key = c.kind, c.parts, c.axes, c.is_async, c.source, c.scope, c.phase
            groups[key].append(e)
        rows = [_row(group) for group in groups.values()]
        return sorted(rows, key=lambda row: -row["exposed_sec"])

    def as_dict(self) -> dict:
        """Return all results as plain values, ready for JSON."""
        return {
            "exchange_hidden_share": self.exchange_hidden_share,
            "collective_hidden_share": self.collective_hidden_share,
            "largest_float32_collective_bytes": self.largest_float32_collective_bytes,
            "largest_float32_reduce_scatter_bytes": (
                self.largest_float32_reduce_scatter_bytes
            ),
            "num_remat_ops": self.num_remat_ops,
            "num_xla_remat_ops": self.num_xla_remat_ops,
            "remat_collectives": self.remat_collectives,
            "xla_remat_collectives": self.xla_remat_collectives,
            "collective_sec": self.collective_sec,
            "sync_collective_sec": self.sync_collective_sec,
            "compute_sec": self.compute_sec,
            **self.work._asdict(),
            "rates": dataclasses.asdict(self.rates),
            "collectives": self.rows(),
        }

    def totals(self) -> list[str]:
        """Return the results that concern all collectives, as lines of text."""
        work = self.work
        product_flops = work.dense_flops + work.attention_flops
        product_flops += work.grouped_flops * self.rates.filled_rows
        return [
            f"hidden: {percent(self.exchange_hidden_share)} of row exchanges, "
            f"{percent(self.collective_hidden_share)} of all collectives' "
            f"{1e3 * self.collective_sec:.1f} ms ({1e3 * self.sync_collective_sec:.1f} "
            f"ms synchronous), beside {1e3 * self.compute_sec:.1f} ms of other work "
            f"({product_flops / 1e12:.1f} TFLOP in products)",
            "largest float32 array: "
            f"{self.largest_float32_collective_bytes / _MIB:.2f} MiB in a collective, "
            f"{self.largest_float32_reduce_scatter_bytes / _MIB:.2f} MiB in a "
            "reduce-scatter",
            f"computed again: {self.num_remat_ops} instructions by jax.checkpoint, "
            f"{self.num_xla_remat_ops} by XLA; of them collectives: "
            f"{len(self.remat_collectives)}, {len(self.xla_remat_collectives)} by XLA",
        ]


def summary(
    module: Module,
    mesh_shape: dict[str, int],
    devices_per_node: int,
    rates: Rates,
) -> Summary:
    """Return what a compiled step exchanges, hides and computes again.

    `mesh_shape` has the size of each axis, the slowest first; devices are numbered in
    this order, and each `devices_per_node` of them in a row are a node. Raises
    ValueError where the mesh is no whole number of nodes.
    """
    num_devices = 1
    for size in mesh_shape.values():
        num_devices *= size
    if num_devices % min(devices_per_node, num_devices):
        raise ValueError(
            f"a mesh of {num_devices} devices {mesh_shape} is no whole number of nodes "
            f"of {devices_per_node}"
        )
    found = collectives.find(module, mesh_shape, rates.unknown_trip_count)
    schedule = _Schedule(module, found, devices_per_node, rates)
    entry = schedule.run(module.computations[module.entry])
    runs = collectives.count_runs(module, rates.unknown_trip_count)
    scheduled = [
        instruction
        for name in runs
        for instruction in module.computations[name]
        if instruction.opcode not in _NOT_COUNTED
    ]
    return Summary(
        rates=rates,
        exposures=schedule.exposures(),
        work=entry.work,
        compute_sec=entry.seconds,
        num_remat_ops=sum("rematted_computation" in i.op_name for i in scheduled),
        num_xla_remat_ops=sum(collectives.is_xla_remat(i) for i in scheduled),
    )


@dataclasses.dataclass(frozen=True)
class _Span:
    """One run of an instruction or of a whole computation."""

    seconds: float = 0.0
    hiding_sec: float = 0.0
    """Part of `seconds` that hides collectives inside it."""
    work: Work = Work()

    def __add__(self, other: "_Span") -> "_Span":
        return _Span(
            self.seconds + other.seconds,
            self.hiding_sec + other.hiding_sec,
            self.work + other.work,
        )

    def times(self, count: int) -> "_Span":
        return _Span(
            count * self.seconds, count * self.hiding_sec, self.work.times(count)
        )


@dataclasses.dataclass
class _Flight:
    """A collective between its start and its done."""

    collectives: list[Collective]
    """One, or several that one start wraps."""
    done: str | None
    seconds: float
    remaining_sec: float
    needed: set[str]
    """Instructions of which it needs data."""
    tainted: set[str]
    """Instructions that need its data, and the start."""
    beside: dict[str, float] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(float)
    )

    def is_independent(self, instruction: Instruction) -> bool:
        """Return whether an instruction neither needs this collective's data nor gives
        it any. Call it for all instructions in the order of the schedule."""
        waits = not self.tainted.isdisjoint(instruction.operands) or any(
            name in self.tainted and name != self.collectives[0].name
            for name in instruction.control_predecessors
        )
        if waits:
            self.tainted.add(instruction.name)
        return not waits and instruction.name not in self.needed


class _Schedule:
    """Walks through the schedules of a module, each once."""

    def __init__(
        self,
        module: Module,
        found: list[Collective],
        devices_per_node: int,
        rates: Rates,
    ):
        self.module, self.rates = module, rates
        self.devices_per_node = devices_per_node
        self.estimator = Estimator(module)
        self.found = found
        self.by_start: dict[tuple[str, str], list[Collective]] = {}
        for collective in found:
            key = collective.computation, collective.name
            self.by_start.setdefault(key, []).append(collective)
        self.spans: dict[str, _Span] = {}
        self.flights: dict[tuple[str, str], _Flight] = {}

    def run(self, computation: Computation) -> _Span:
        """Return one run of a computation; its collectives are in `flights` then."""
        if computation.name in self.spans:
            return self.spans[computation.name]
        total, in_flight = _Span(), []
        for instruction in computation:
            key = computation.name, instruction.name
            if key in self.by_start:
                flight = self._start(computation, instruction, self.by_start[key])
                self.flights[key] = flight
                # Earlier ones may give it data or wait for it.
                for other in in_flight:
                    other.is_independent(instruction)
                if flight.collectives[0].is_async:
                    in_flight.append(flight)
                continue
            in_flight = [f for f in in_flight if f.done != instruction.name]
            span = self._span(computation, instruction)
            free_sec = span.seconds - span.hiding_sec
            hiding_sec = 0.0
            for flight in in_flight:
                if not flight.is_independent(instruction) or not span.seconds:
                    continue
                flight.beside[_describe(self.module, instruction)] += span.seconds
                used = min(free_sec - hiding_sec, flight.remaining_sec)
                flight.remaining_sec -= used
                hiding_sec += used
            total += dataclasses.replace(span, hiding_sec=span.hiding_sec + hiding_sec)
        self.spans[computation.name] = total
        return total

    def exposures(self) -> list[Exposure]:
        """Return all collectives with their seconds; those of one start share what is
        hidden in proportion."""
        results = []
        for collective in self.found:
            seconds = collective.seconds(self.devices_per_node, self.rates)
            key = collective.computation, collective.name
            flight = self.flights[key]
            share = 0.0
            if flight.seconds:
                share = 1 - flight.remaining_sec / flight.seconds
            beside = sorted(flight.beside.items(), key=lambda item: -item[1])
            results.append(Exposure(collective, seconds, share * seconds, dict(beside)))
        return results

    def _start(
        self,
        computation: Computation,
        instruction: Instruction,
        members: list[Collective],
    ) -> _Flight:
        seconds = sum(c.seconds(self.devices_per_node, self.rates) for c in members)
        needed: set[str] = set()
        pending = list(instruction.operands)
        while pending:
            name = pending.pop()
            if name not in needed:
                needed.add(name)
                pending += computation.instructions[name].operands
        done = collectives.find_done(computation, instruction)
        return _Flight(members, done, seconds, seconds, needed, {instruction.name})

    def _span(self, computation: Computation, instruction: Instruction) -> _Span:
        """Return one run of an instruction that is no collective."""
        if instruction.opcode == "while":
            trips = instruction.trip_count
            trips = self.rates.unknown_trip_count if trips is None else trips
            parts = self.module.callees(instruction, "body", "condition")
            return sum(map(self.run, parts), _Span()).times(trips)
        if instruction.opcode in ("conditional", "call"):
            branches = map(self.run, self.module.callees(instruction))
            # Where documents are many, attention by cuDNN goes on in blocks: the other
            # branch, whose loops of unknown length would count too little.
            return max(branches, key=lambda s: (s.work.attention_flops > 0, s.seconds))
        work = self.estimator.work(computation, instruction)
        return _Span(work.seconds(self.rates), 0.0, work)


def _describe(module: Module, instruction: Instruction) -> str:
    """Return a short name of an instruction: what it is, and its source line."""
    name = instruction.op_name.rsplit("/", 1)[-1] or instruction.opcode
    for kernel in _KERNELS:
        if kernel in instruction.op_name or kernel in instruction.name:
            name = kernel
    source = module.source(instruction)
    return f"{name} {source}".strip()


def _hidden_share(exposures: list[Exposure]) -> float | None:
    seconds = sum(e.seconds * e.collective.runs for e in exposures)
    hidden = sum(e.hidden_sec * e.collective.runs for e in exposures)
    return hidden / seconds if seconds else None


def _row(group: list[Exposure]) -> dict:
    """Return the record of collectives that are alike."""
    first = group[0].collective
    beside: dict[str, float] = collections.defaultdict(float)
    for e in group:
        for name, seconds in e.beside.items():
            beside[name] += seconds * e.collective.runs
    seconds = sum(e.seconds * e.collective.runs for e in group)
    hidden = sum(e.hidden_sec * e.collective.runs for e in group)
    return {
        "kind": first.kind,
        "parts": [dataclasses.asdict(part) for part in first.parts],
        "dtypes": first.dtypes,
        "num_bytes": first.num_bytes,
        "axes": list(first.axes),
        "runs": sum(e.collective.runs for e in group),
        "is_async": first.is_async,
        "is_ours": first.is_ours,
        "is_exchange": any(e.collective.is_exchange for e in group),
        "is_remat": first.is_remat,
        "phase": first.phase,
        "scope": first.scope,
        "source": first.source,
        "seconds": seconds,
        "exposed_sec": seconds - hidden,
        "hidden_share": _hidden_share(group),
        "beside": dict(sorted(beside.items(), key=lambda item: -item[1])[:3]),
        "names": [e.collective.name for e in group],
    }


def percent(share: float | None) -> str:
    """Return a share as text; '-' where there is nothing to share."""
    return "-" if share is None else f"{100 * share:.1f} %"


_KERNELS = (
    "grouped_rows",
    "grouped_matrices",
    "dot_product_attention",
    *HOPPER_ATTENTION,
)
"""Kernels that are called by their own names."""
_NOT_COUNTED = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
