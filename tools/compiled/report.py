"""The report of a compiled step: one record, and its tables as text."""

import dataclasses
from typing import NamedTuple

from moejax.perf.target import Target
from tools.compiled.attention import CompiledAttention
from tools.compiled.compile import CompiledStep
from tools.compiled.exposure import Summary, percent
from tools.compiled.memory import GIB, KINDS, Memory
from train.launch.program import gpu_memory_fraction, usable_bytes
from train.step.gpu_options import options_line

SCHEDULER_SHARE, SCHEDULER_SLACK = 0.8, 0.95
"""XLA's scheduler lets the temporaries of a step have this share of the target's
memory, less the arguments, times this factor (GetSchedulerMemoryLimit in
xla/service/gpu/gpu_hlo_schedule.cc, and xla_gpu_memory_limit_slop_factor)."""
MANY = 0.5
"""Share of the collectives' time from which synchronous ones are warned of."""
NEAR = 0.95
"""Share of the scheduler's limit from which a step counts as near it."""


class Table(NamedTuple):
    """A table of the report."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Report(NamedTuple):
    """All that the tool says about a compiled step."""

    record: dict
    """What --json prints."""
    lines: tuple[str, ...]
    """What was compiled, for which target, at which rates."""
    tables: tuple[Table, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    """What XLA said, and what was not covered."""


def make_report(
    step: CompiledStep,
    held: Memory,
    travels: Summary,
    attention: CompiledAttention,
    target: Target,
) -> Report:
    """Return the report of a compiled step, its memory, its collectives and its
    attention."""
    usable = usable_bytes(target.memory_bytes)
    warnings = tuple(_warnings(step, travels, target, usable))
    found = travels.as_dict() | attention.as_dict()
    record = {
        "target": target.name,
        "mesh": dataclasses.asdict(step.run.cfg.mesh),
        "peak_gib": held.peak_bytes / GIB,
        "usable_gib": usable / GIB,
        "fits": held.peak_bytes <= usable,
        "memory_gib": {kind: size / GIB for kind, size in held.bytes_by_kind.items()},
        "gap_gib": held.gap_bytes / GIB,
        "host_gib": held.host_bytes / GIB,
        "largest_buffers": [
            {
                "kind": buffer.kind,
                "gib": buffer.num_bytes / GIB,
                "type": buffer.type,
                "source": buffer.source,
                "what": buffer.what,
            }
            for buffer in held.largest
        ],
        "kernels": {name: k._asdict() for name, k in step.run.kernels.items()},
        "trace_sec": step.trace_sec,
        "lower_sec": step.lower_sec,
        "compile_sec": step.compile_sec,
        "warnings": list(warnings),
        "notes": list(step.notes),
    } | found
    tables = (
        memory_table(held),
        largest_table(held),
        travel_table(travels),
    )
    lines = tuple(_lines(step, target, travels, attention))
    return Report(record, lines, tables, warnings, step.notes)


def _lines(
    step: CompiledStep,
    target: Target,
    travels: Summary,
    attention: CompiledAttention,
) -> list[str]:
    return [
        f"target             {target.name}, {target.memory_bytes / GIB:.1f} GiB",
        f"mesh               {step.run.cfg.mesh}",
        *step.run.lines(),
        options_line("gpu"),
        travels.rates.line(),
        *travels.totals(),
        *attention.lines(),
        f"compiled           traced in {step.trace_sec:.1f} s, lowered in "
        f"{step.lower_sec:.1f} s, compiled in {step.compile_sec:.1f} s",
    ]


def _warnings(
    step: CompiledStep, travels: Summary, target: Target, usable: int
) -> list[str]:
    """Return in plain words what is wrong with the step."""
    warnings = []
    if step.peak_bytes > usable:
        warnings.append(
            f"does not fit: the step needs {step.peak_bytes / GIB:.1f} GiB, and a run "
            f"may use {usable / GIB:.1f} GiB ({gpu_memory_fraction():.0%} of the "
            f"target's {target.memory_bytes / GIB:.1f} GiB)"
        )
    arguments = step.peak_bytes - step.temp_bytes
    limit = SCHEDULER_SLACK * (SCHEDULER_SHARE * target.memory_bytes - arguments)
    if step.temp_bytes > NEAR * limit:
        warnings.append(
            "near the limit: XLA may make collectives synchronous, so that nothing "
            f"runs beside them; temporaries take {step.temp_bytes / GIB:.1f} GiB, and "
            f"its scheduler plans with {max(limit, 0) / GIB:.1f} GiB"
        )
    if travels.sync_collective_sec > MANY * travels.collective_sec:
        share = travels.sync_collective_sec / travels.collective_sec
        warnings.append(
            f"{share:.0%} of the collectives' time is synchronous: nothing runs beside "
            "them"
        )
    if names := travels.xla_remat_collectives:
        warnings.append(
            "memory is short: XLA repeats collectives in the backward pass, "
            f"{', '.join(names)}"
        )
    return warnings


def memory_table(held: Memory) -> Table:
    """Return the table of the peak's kinds, which add up to it."""
    rows = [
        (kind, f"{size / GIB:.3f}", f"{size / held.peak_bytes:.1%}", KINDS[kind])
        for kind, size in held.bytes_by_kind.items()
    ]
    gap = f"of the temporaries, gaps between buffers {held.gap_bytes / GIB:.3f} GiB"
    host = f"; in the host's memory {held.host_bytes / GIB:.2f} GiB"
    rows.append(
        (
            "peak",
            f"{held.peak_bytes / GIB:.3f}",
            "100.0%",
            gap + (host if held.host_bytes else ""),
        )
    )
    title = "memory of one device at the peak of the step"
    return Table(title, ("kind", "GiB", "share", "what"), tuple(rows))


def largest_table(held: Memory) -> Table:
    """Return the table of the largest buffers at the peak."""
    rows = [
        (f"{b.num_bytes / GIB:.3f}", b.kind, b.type, b.source or "-", b.what)
        for b in held.largest
    ]
    title = f"the {len(rows)} largest buffers at the peak"
    return Table(title, ("GiB", "kind", "array", "source", "what"), tuple(rows))


def travel_table(travels: Summary) -> Table:
    """Return the table of the distinct collectives, the longest exposed first."""
    rows = [
        (
            f"{1e3 * row['exposed_sec']:.2f}",
            f"{1e3 * row['seconds']:.2f}",
            _hidden(row),
            _kind(row),
            row["dtypes"],
            f"{row['num_bytes'] / 2**20:.2f}",
            " ".join(row["axes"]),
            str(row["runs"]),
            _where(row),
            row["source"] or "-",
            next(iter(row["beside"]), "-"),
        )
        for row in travels.rows()
    ]
    columns = (
        "exposed ms", "ms", "hidden", "collective", "dtype", "MiB", "axes", "runs",
        "where", "source", "longest beside it",
    )  # fmt: skip
    return Table("collectives in a step", columns, tuple(rows))


def _kind(row: dict) -> str:
    """Return the kind of a collective, and whether the partitioner made it."""
    return row["kind"] + ("" if row["is_ours"] else " (partitioner)")


def _where(row: dict) -> str:
    """Return the phase and the scope of a collective."""
    return f"{row['phase']} {row['scope']}".strip()


def _hidden(row: dict) -> str:
    """Return the hidden share of a collective; '-' for one that does not run."""
    if row["runs"] and not row["is_async"]:
        return "synchronous"
    return percent(row["hidden_share"])


def text(report: Report) -> str:
    """Return the report as text for a terminal."""
    parts = ["\n".join(report.lines)]
    parts += [_text_of(table) for table in report.tables]
    said = [f"warning: {line}" for line in report.warnings]
    parts.append("\n".join([*said, *report.notes]))
    return "\n\n".join(parts)


def _text_of(table: Table) -> str:
    """Return a table as text, numbers flush right."""
    if not table.rows:
        return f"{table.title}\nnone"
    cells = [table.columns, *table.rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    is_number = [
        all(cell[:1].isdigit() for cell in column) for column in zip(*table.rows)
    ]
    lines = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, is_number)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([table.title, *lines])
