"""The report of a compiled step: its record for scripts, and its text for people."""

import dataclasses
from typing import Any

from moejax.perf.target import Target
from tools.compiled.compile import CompiledStep
from tools.compiled.exposure import Summary
from tools.compiled.memory import GIB, KINDS, Memory
from train.launch.program import gpu_memory_fraction, usable_bytes
from train.logs.peak import speed
from train.step.gpu_options import options_line

SCHEDULER_SHARE, SCHEDULER_SLACK = 0.8, 0.95
"""XLA's scheduler lets the temporaries of a step have this share of the target's
memory, less the arguments, times this factor (GetSchedulerMemoryLimit in
xla/service/gpu/gpu_hlo_schedule.cc, and xla_gpu_memory_limit_slop_factor)."""
MANY = 0.5
"""Share of the collectives' time from which synchronous ones are warned of."""
NEAR = 0.95
"""Share of the scheduler's limit from which a step counts as near it."""


def make_record(
    step: CompiledStep, held: Memory, travels: Summary, target: Target
) -> dict[str, Any]:
    """Return all that is known of a compiled step as plain values, ready for JSON."""
    usable = usable_bytes(target.memory_bytes)
    return {
        "target": target.name,
        "mesh": dataclasses.asdict(step.run.cfg.mesh),
        "fits": held.peak_bytes <= usable,
        "usable_gib": usable / GIB,
        "peak_gib": held.peak_bytes / GIB,
        "memory_gib": {kind: size / GIB for kind, size in held.bytes_by_kind.items()},
        "gap_gib": held.gap_bytes / GIB,
        "host_gib": held.host_bytes / GIB,
        "predicted_gib": {k: size / GIB for k, size in step.predicted_bytes.items()},
        "workspace_gib": step.workspace_bytes / GIB,
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
        "kernels": {k: [c.value, c.why] for k, c in step.run.kernels.items()},
        **travels.as_dict(),
        **speed(step.run.cfg, travels.step_sec, target.name),
        "compile_sec": step.compile_sec,
        "warnings": _warnings(step, travels, target, usable),
    }


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
    if travels.num_xla_remat_ops:
        warnings.append(
            f"memory is short: XLA computes {travels.num_xla_remat_ops} instructions "
            "again"
        )
    return warnings


def text(step: CompiledStep, travels: Summary, target: Target, record: dict) -> str:
    """Return the report for a terminal: lines, tables, and warnings."""
    calls = ", ".join(f"{k} {n}" for k, n in travels.attention_calls.items())
    exposed_sec = travels.step_sec - travels.compute_sec
    verdict = "fits" if record["fits"] else "does not fit"
    lines = [
        f"target             {target.name}, {target.memory_bytes / GIB:.1f} GiB",
        f"mesh               {step.run.cfg.mesh}",
        *step.run.lines(),
        f"attention calls    {calls or 'none: attention is made of products'}",
        options_line("gpu"),
        travels.rates.line(),
        f"memory: {verdict}: {record['peak_gib']:.1f} GiB at the peak, of "
        f"{record['usable_gib']:.1f} that a run may use{_not_counted(step)}",
        f"step: {1e3 * travels.step_sec:.1f} ms by these rates, of which "
        f"{1e3 * exposed_sec:.1f} ms are collectives that nothing hides: "
        f"{record['tok_per_sec']:,.0f} tokens/s, MFU {percent(record['mfu'])}, "
        f"{travels.product_flops / 1e12:.1f} TFLOP in products",
        f"hidden: {percent(travels.exchange_hidden_share)} of row exchanges, "
        f"{percent(travels.collective_hidden_share)} of all collectives' "
        f"{1e3 * travels.collective_sec:.1f} ms "
        f"({1e3 * travels.sync_collective_sec:.1f} ms synchronous)",
        f"host waits: {travels.num_host_waits} in a step, at conditionals and loops of "
        "unknown length",
        f"compiled in {step.compile_sec:.1f} s, without autotuning of products",
    ]
    parts = ["\n".join(filter(None, lines))]
    parts += [memory_table(record), largest_table(record), travel_table(record)]
    if record["warnings"]:
        parts.append("\n".join(f"warning: {line}" for line in record["warnings"]))
    return "\n\n".join(parts)


def _not_counted(step: CompiledStep) -> str:
    """Return what the peak lacks, as the end of a line."""
    if not step.workspace_bytes:
        return ""
    return (
        f"; not counted is the workspace of cuDNN's attention, "
        f"{step.workspace_bytes / GIB:.2f} GiB, which the predicted activations have"
    )


def memory_table(record: dict) -> str:
    """Return the table of the peak's kinds, which add up to it, beside what `--dry_run`
    predicts."""
    predicted, peak = record["predicted_gib"], record["peak_gib"]
    rows = [
        (
            kind,
            f"{size:.3f}",
            f"{predicted[kind]:.3f}" if kind in predicted else "-",
            what,
        )
        for (kind, size), what in zip(record["memory_gib"].items(), KINDS.values())
    ]
    gap = f"of the temporaries, gaps between buffers {record['gap_gib']:.3f} GiB"
    if record["host_gib"]:
        gap += f"; in the host's memory {record['host_gib']:.2f} GiB"
    rows.append(("peak", f"{peak:.3f}", f"{sum(predicted.values()):.3f}", gap))
    title = "memory of one device at the peak of the step"
    return table(title, ("kind", "GiB", "predicted", "what"), rows)


def largest_table(record: dict) -> str:
    """Return the table of the largest buffers at the peak."""
    rows = [
        (f"{b['gib']:.3f}", b["kind"], b["type"], b["source"] or "-", b["what"])
        for b in record["largest_buffers"]
    ]
    title = f"the {len(rows)} largest buffers at the peak"
    return table(title, ("GiB", "kind", "array", "source", "what"), rows)


def travel_table(record: dict) -> str:
    """Return the table of the distinct collectives, the longest exposed first."""
    rows = [
        (
            f"{1e3 * row['exposed_sec']:.2f}",
            f"{1e3 * row['seconds']:.2f}",
            _hidden(row),
            row["kind"] + ("" if row["is_ours"] else " (partitioner)"),
            "+".join(dict.fromkeys(part["dtype"] for part in row["parts"])),
            f"{row['num_bytes'] / 2**20:.2f}",
            " ".join(row["axes"]),
            str(row["runs"]),
            f"{row['phase']} {row['scope']}".strip(),
            row["source"] or "-",
        )
        for row in record["collectives"]
    ]
    columns = (
        "exposed ms", "ms", "hidden", "collective", "dtype", "MiB", "axes", "runs",
        "where", "source",
    )  # fmt: skip
    return table("collectives in a step", columns, rows)


def _hidden(row: dict) -> str:
    """Return the hidden share of a collective; '-' for one that does not run."""
    if row["runs"] and not row["is_async"]:
        return "synchronous"
    return percent(row["hidden_share"])


def table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a table as text, numbers flush right."""
    if not rows:
        return f"{title}\nnone"
    cells = [columns, *rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    is_number = [all(cell[:1].isdigit() for cell in column) for column in zip(*rows)]
    lines = [
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, is_number)
        ).rstrip()
        for row in cells
    ]
    return "\n".join([title, *lines])


def percent(share: float | None) -> str:
    """Return a share as text; '-' where there is nothing to share."""
    return "-" if share is None else f"{100 * share:.1f} %"
