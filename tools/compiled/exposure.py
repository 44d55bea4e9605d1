"""Estimate the seconds of a compiled step, and the share of its collectives' time that
other work hides.

XLA's text is a schedule. Between the start and the done of a collective stands what the
device computes meanwhile; what needs the collective's data stands behind the done.
Collectives run one after another in the order of their starts, beside one stream of
other work, so a second of work hides a second of one collective at most. Seconds are
estimates by stated rates.
"""

import collections
import dataclasses
import math
from collections.abc import Callable

from moejax.perf.rates import Rates
from tools.compiled.collectives import (
    Collective,
    count_runs,
    find,
    find_done,
    is_xla_remat,
    num_host_waits,
)
from tools.compiled.hlo import Computation, Instruction, Module
from tools.compiled.work import Estimator, Work, attention_kernel


@dataclasses.dataclass(frozen=True)
class Exposure:
    """A collective with its estimated seconds in a step, all of its runs together."""

    collective: Collective
    seconds: float
    exposed_sec: float
    """Seconds that no other work hides."""


@dataclasses.dataclass(frozen=True)
class Summary:
    """Collectives of a compiled step and its other work."""

    rates: Rates
    exposures: list[Exposure]
    work: Work
    """Work of a whole step on one device."""
    compute_sec: float
    """Estimated seconds of all work on one device, without collectives."""
    num_host_waits: int
    """Conditionals and loops of unknown length in a step; the host waits at each."""
    num_xla_remat_ops: int
    """Instructions that XLA computes again because memory is short."""
    attention_calls: dict[str, int]
    """Calls of cuDNN's attention in the program's text, by XLA's names. One in the body
    of a loop counts once."""

    @property
    def collective_sec(self) -> float:
        """Estimated seconds of all collectives of a step, hidden or not."""
        return sum(e.seconds for e in self.exposures)

    @property
    def sync_collective_sec(self) -> float:
        """Estimated seconds of the collectives during which nothing else may run."""
        return sum(e.seconds for e in self.exposures if not e.collective.is_async)

    @property
    def step_sec(self) -> float:
        """Estimated seconds of a step: other work, and what of the collectives it does
        not hide."""
        return self.compute_sec + sum(e.exposed_sec for e in self.exposures)

    @property
    def product_flops(self) -> float:
        """FLOPs of all products of a step on one device, repeated ones included, of
        rows that hold tokens."""
        grouped = self.work.grouped_flops * self.rates.filled_rows
        return self.work.dense_flops + self.work.attention_flops + grouped

    @property
    def exchange_hidden_share(self) -> float | None:
        """Share of the row exchanges' seconds that other work hides; None without row
        exchanges."""
        return _hidden_share([e for e in self.exposures if e.collective.is_exchange])

    @property
    def collective_hidden_share(self) -> float | None:
        """Share of all collectives' seconds that other work hides; None without any."""
        return _hidden_share(self.exposures)

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
            "step_sec": self.step_sec,
            "compute_sec": self.compute_sec,
            "collective_sec": self.collective_sec,
            "sync_collective_sec": self.sync_collective_sec,
            "exchange_hidden_share": self.exchange_hidden_share,
            "collective_hidden_share": self.collective_hidden_share,
            "num_host_waits": self.num_host_waits,
            "num_xla_remat_ops": self.num_xla_remat_ops,
            "attention_calls": self.attention_calls,
            "product_flops": self.product_flops,
            **self.work._asdict(),
            "rates": dataclasses.asdict(self.rates),
            "collectives": self.rows(),
        }


def summary(
    module: Module, mesh_shape: dict[str, int], devices_per_node: int, rates: Rates
) -> Summary:
    """Return the collectives of a compiled step, their hidden shares, and its other
    work.

    `mesh_shape` has the size of each axis, the slowest first; devices are numbered in
    this order, and each `devices_per_node` of them in a row are a node. Raises
    ValueError where the mesh is no whole number of nodes.
    """
    num_devices = math.prod(mesh_shape.values())
    if num_devices % min(devices_per_node, num_devices):
        raise ValueError(
            f"a mesh of {num_devices} devices {mesh_shape} is no whole number of nodes "
            f"of {devices_per_node}"
        )
    found = find(module, mesh_shape, rates.unknown_trip_count)
    schedule = _Schedule(
        module, found, rates, lambda c: c.seconds(devices_per_node, rates)
    )
    whole = schedule.run(module.computations[module.entry])
    scheduled = [
        instruction
        for name in count_runs(module, rates.unknown_trip_count)
        for instruction in module.computations[name]
    ]
    kernels = collections.Counter(filter(None, map(attention_kernel, scheduled)))
    return Summary(
        rates=rates,
        exposures=schedule.exposures(),
        work=whole.work,
        compute_sec=whole.seconds,
        num_host_waits=num_host_waits(module),
        num_xla_remat_ops=sum(
            is_xla_remat(i) and i.opcode not in _NOT_COUNTED for i in scheduled
        ),
        attention_calls=dict(sorted(kernels.items())),
    )


@dataclasses.dataclass(frozen=True)
class _Span:
    """One run of an instruction or of a whole computation."""

    seconds: float = 0.0
    """Seconds of its work, without collectives."""
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
        """Return `count` runs."""
        return _Span(
            count * self.seconds, count * self.hiding_sec, self.work.times(count)
        )


class _Schedule:
    """The schedules of a module, each walked through once."""

    def __init__(
        self,
        module: Module,
        found: list[Collective],
        rates: Rates,
        seconds_of: Callable[[Collective], float],
    ):
        self._module, self._rates, self._seconds_of = module, rates, seconds_of
        self._estimator = Estimator(module)
        self._spans: dict[str, _Span] = {}
        self._starts: dict[tuple[str, str], list[Collective]] = {}
        """Collectives that start together, by computation and name of the start."""
        self._exposed_sec: dict[tuple[str, str], float] = {}
        """Seconds of each start that nothing hides, in one run."""
        for collective in found:
            key = collective.computation, collective.name
            self._starts.setdefault(key, []).append(collective)

    def run(self, computation: Computation) -> _Span:
        """Return one run of a computation, and note which collectives it hides."""
        if computation.name in self._spans:
            return self._spans[computation.name]
        total = _Span()
        in_flight: dict[tuple[str, str], str | None] = {}  # the done of each start
        for instruction in computation:
            key = computation.name, instruction.name
            if members := self._starts.get(key):
                self._exposed_sec[key] = sum(map(self._seconds_of, members))
                if members[0].is_async:
                    in_flight[key] = find_done(computation, instruction)
                continue
            in_flight = {s: d for s, d in in_flight.items() if d != instruction.name}
            span = self._span(computation, instruction)
            idle_sec = span.seconds - span.hiding_sec
            for start in in_flight:
                used_sec = min(idle_sec, self._exposed_sec[start])
                self._exposed_sec[start] -= used_sec
                idle_sec -= used_sec
            total += dataclasses.replace(span, hiding_sec=span.seconds - idle_sec)
        self._spans[computation.name] = total
        return total

    def exposures(self) -> list[Exposure]:
        """Return all collectives with their seconds, after `run`. Those of one start
        share what is exposed in proportion."""
        exposures = []
        for key, members in self._starts.items():
            total = sum(map(self._seconds_of, members))
            share = self._exposed_sec[key] / total if total else 0.0
            for c in members:
                seconds = c.runs * self._seconds_of(c)
                exposures.append(Exposure(c, seconds, share * seconds))
        return exposures

    def _span(self, computation: Computation, instruction: Instruction) -> _Span:
        """Return one run of an instruction that is no collective."""
        if instruction.opcode == "while":
            trips = instruction.trip_count
            trips = self._rates.unknown_trip_count if trips is None else trips
            parts = self._module.callees(instruction, "body", "condition")
            return sum(map(self.run, parts), _Span()).times(trips)
        if instruction.opcode in ("conditional", "call"):
            branches = map(self.run, self._module.callees(instruction))
            # Where documents are many, attention by cuDNN goes on in blocks: the other
            # branch, whose loops of unknown length would count too little.
            return max(branches, key=lambda s: (s.work.attention_flops > 0, s.seconds))
        work = self._estimator.work(computation, instruction)
        return _Span(work.seconds(self._rates), 0.0, work)


def _hidden_share(exposures: list[Exposure]) -> float | None:
    seconds = sum(e.seconds for e in exposures)
    return 1 - sum(e.exposed_sec for e in exposures) / seconds if seconds else None


def _row(group: list[Exposure]) -> dict:
    """Return the record of collectives that are alike."""
    first = group[0].collective
    return {
        "kind": first.kind,
        "parts": [dataclasses.asdict(part) for part in first.parts],
        "num_bytes": first.num_bytes,
        "axes": list(first.axes),
        "runs": sum(e.collective.runs for e in group),
        "is_async": first.is_async,
        "is_ours": first.is_ours,
        "is_exchange": any(e.collective.is_exchange for e in group),
        "phase": first.phase,
        "scope": first.scope,
        "source": first.source,
        "seconds": sum(e.seconds for e in group),
        "exposed_sec": sum(e.exposed_sec for e in group),
        "hidden_share": _hidden_share(group),
    }


_NOT_COUNTED = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
