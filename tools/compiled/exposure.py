"""Estimate which share of the collectives' time is hidden by other work.

XLA's text is a schedule, which tools/compiled/schedule.py walks through. Seconds are
estimates by stated rates.
"""

import collections
import dataclasses
from collections.abc import Iterable

from moejax.perf.rates import Rates
from tools.compiled import collectives
from tools.compiled.collectives import Collective
from tools.compiled.schedule import Piece, Schedule
from tools.compiled.work import Work

_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Exposure:
    """A collective with its estimated seconds, all of one run."""

    collective: Collective
    seconds: float
    hidden_sec: float
    beside: tuple[Piece, ...]
    """The work between start and done that is independent of it."""

    @property
    def beside_sec(self) -> dict[str, float]:
        """Seconds of the work that hides it or could, by what it is and its source
        line, the longest first."""
        return _longest_first((p.description, p.seconds) for p in self.beside)


@dataclasses.dataclass(frozen=True)
class Summary:
    """Collectives of a compiled step, other work, and what is computed again."""

    rates: Rates
    exposures: list[Exposure]
    work: Work
    """Work of a whole step on one device."""
    compute_sec: float
    """Estimated seconds of all work on one device, without collectives."""
    num_remat_ops: int
    """Instructions that jax.checkpoint computes again, in the schedules' text."""
    num_xla_remat_ops: int
    """Instructions that XLA computes again to save memory."""
    num_host_waits: int
    """Loops of unknown length in a step, at each of which the host waits."""

    @property
    def collective_sec(self) -> float:
        """Estimated seconds of all collectives of a step, hidden or not."""
        return sum(e.seconds * e.collective.runs for e in self.exposures)

    @property
    def step_sec(self) -> float:
        """Estimated seconds of a step: other work, and what of the collectives it does
        not hide."""
        hidden = sum(e.hidden_sec * e.collective.runs for e in self.exposures)
        return self.compute_sec + self.collective_sec - hidden

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
            "num_host_waits": self.num_host_waits,
            "remat_collectives": self.remat_collectives,
            "xla_remat_collectives": self.xla_remat_collectives,
            "collective_sec": self.collective_sec,
            "sync_collective_sec": self.sync_collective_sec,
            "compute_sec": self.compute_sec,
            "step_sec": self.step_sec,
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
            f"step: {1e3 * self.step_sec:.1f} ms by these rates, of which "
            f"{1e3 * self.compute_sec:.1f} ms of work beside collectives",
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
            f"host waits: {self.num_host_waits} in a step, at conditionals and loops "
            "of unknown length",
        ]


def summary(schedule: Schedule) -> Summary:
    """Return the collectives of a compiled step, their hidden shares, its other work,
    and what it computes again."""
    module, rates = schedule.module, schedule.rates
    runs = collectives.count_runs(module, rates.unknown_trip_count)
    scheduled = [
        instruction
        for name in runs
        for instruction in module.computations[name]
        if instruction.opcode not in _NOT_COUNTED
    ]
    return Summary(
        rates=rates,
        exposures=_exposures(schedule),
        work=schedule.entry.work,
        compute_sec=schedule.entry.seconds,
        num_remat_ops=sum("rematted_computation" in i.op_name for i in scheduled),
        num_xla_remat_ops=sum(collectives.is_xla_remat(i) for i in scheduled),
        num_host_waits=collectives.num_host_waits(module),
    )


def _exposures(schedule: Schedule) -> list[Exposure]:
    """Return all collectives with their seconds; those of one start share what is
    hidden in proportion."""
    exposures = []
    for collective in schedule.found:
        timeline = schedule.timelines[collective.computation]
        flight = timeline.flights[collective.name]
        seconds = collective.seconds(schedule.devices_per_node, schedule.rates)
        share = seconds / flight.seconds if flight.seconds else 0.0
        exposures.append(
            Exposure(
                collective=collective,
                seconds=seconds,
                hidden_sec=share * flight.hidden_sec,
                beside=tuple(timeline.beside(flight)),
            )
        )
    return exposures


def _hidden_share(exposures: list[Exposure]) -> float | None:
    seconds = sum(e.seconds * e.collective.runs for e in exposures)
    hidden = sum(e.hidden_sec * e.collective.runs for e in exposures)
    return hidden / seconds if seconds else None


def _row(group: list[Exposure]) -> dict:
    """Return the record of collectives that are alike."""
    first = group[0].collective
    seconds = sum(e.seconds * e.collective.runs for e in group)
    hidden = sum(e.hidden_sec * e.collective.runs for e in group)
    beside = _longest_first(
        (name, sec * e.collective.runs)
        for e in group
        for name, sec in e.beside_sec.items()
    )
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
        "beside": dict(list(beside.items())[:3]),
        "names": [e.collective.name for e in group],
    }


def _longest_first(items: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the sums of the seconds of each name, the longest first."""
    sums: dict[str, float] = collections.defaultdict(float)
    for name, seconds in items:
        sums[name] += seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def percent(share: float | None) -> str:
    """Return a share as text; '-' where there is nothing to share."""
    return "-" if share is None else f"{100 * share:.1f} %"


_NOT_COUNTED = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
