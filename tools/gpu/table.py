"""The table of tools/gpu_report.py: what each part found, beside what was predicted and
what others reach. It imports the standard library alone."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

GIB = 2**30
MAX_LINE = 160
"""Largest number of characters of a line of the table."""
FOR_GPUS = ("hopper", "cudnn")
"""Implementations whose kernels run on a GPU alone."""

Found = Mapping[str, list[dict[str, Any]]]
"""Records by part."""
States = Mapping[str, Mapping[str, Any]]
"""State, seconds and reason by part."""


class Row(NamedTuple):
    """A row of the table."""

    part: str
    what: str
    value: str
    """What was measured."""
    beside: str
    """What it stands beside: predictions, peers or reasons."""


def rows(
    found: Found,
    states: States,
    predicted: Mapping[str, Any],
    all_kernels: Iterable[str],
) -> list[Row]:
    """Return the table. `predicted` are the predictions for this kind of device."""
    lines = {
        "machine": lambda own: machine(own[-1], predicted),
        "kernels": lambda own: kernels(own, all_kernels),
        "olmoe": products,
        "qwen3": products,
        "train": lambda own: train(longest(own), predicted),
        "trainer": lambda own: trainer(own[-1]),
        "layer": lambda own: layer(own[-1]),
        "tuning": tuning,
    }
    table = []
    for part, own in states.items():
        sec = f"{own['sec']:.0f} s" if own["sec"] else ""
        table.append(Row(part, own["state"], sec, own["why"]))
        if found[part]:
            table += [Row(part, *cells) for cells in lines[part](found[part])]
    return table


def draw(table: list[Row]) -> str:
    """Return the table as text."""
    widths = [max(len(cell) for cell in column) for column in zip(*table)]
    lines = []
    for row in table:
        part, what, value = (
            cell.rjust(width) if number == 2 else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row[:3], widths))
        )
        lines.append(f"{part}  {what}  {value}  {row.beside}".rstrip()[:MAX_LINE])
    return "\n".join(lines) + "\n"


def wrong(found: Found, states: States) -> list[str]:
    """Return a line for everything that is wrong: parts that failed, kernels that are
    not right, implementations and tiles that failed, losses that are not finite."""
    lines = [
        f"{part}: {own['why']}"
        for part, own in states.items()
        if own["state"] == "failed"
    ]
    lines += [
        _fault(own) for own in last_lines(found.get("kernels", [])) if _is_wrong(own)
    ]
    lines += [
        f"{part}: {own['pass']} {own['impl']}: {own['failed']}"
        for part in ("olmoe", "qwen3")
        for own in found.get(part, [])
        if "failed" in own
    ]
    for own in found.get("tuning", []):
        lines += [f"tuning: {bucket}: {why}" for bucket, why in own["failed"].items()]
    lines += [
        f"trainer: {own['attention']}, {own['run']}: {own['failed']}"
        for record in found.get("trainer", [])[-1:]
        for own in record["runs"]
        if own["failed"]
    ]
    losses = longest(found.get("train", [])).get("losses", [])
    if not all(map(math.isfinite, losses)):
        lines.append("train: a loss is not finite")
    return lines


def broken_kernels(lines: list[dict]) -> set[str]:
    """Return the kernels for GPUs that have a case that is not right."""
    return {
        own["kernel"]
        for own in last_lines(lines)
        if _is_wrong(own) and own["implementation"] in FOR_GPUS
    }


def last_lines(lines: list[dict]) -> list[dict]:
    """Return the last line of each case."""
    return list({own["id"]: own for own in lines}.values())


def _is_wrong(line: dict) -> bool:
    return line["state"] != "right"


def _fault(line: dict) -> str:
    """Return what is wrong with a case, in one line."""
    error = "" if line["error"] is None else f"error {line['error']:.2g} "
    return (
        f"{line['kernel']} {line['implementation']}, {line['state']}: "
        f"{line['case']}: {error}(at most {line['tolerance']:.2g}) {line['why']}"
    ).rstrip()


Cells = tuple[str, str, str]
"""What, value and beside of a row."""


def machine(own: dict, predicted: Mapping[str, Any]) -> Iterator[Cells]:
    """Yield the device and its rates, beside those that targets state."""
    stated, versions = predicted.get("stated", {}), own["versions"]
    about = ", ".join(f"{name} {value}" for name, value in own["nvidia_smi"].items())
    jax = f"jax {versions['jax']}, commit {own['commit']}"
    yield "device", str(own["num_devices"]), f"{own['kind']}, {jax}, {about}"
    for name, unit in (("dense_tflops", "TFLOP/s"), ("copy_tb_per_sec", "TB/s")):
        beside = f"stated {stated[name]:.3g}" if name in stated else ""
        yield f"{name.partition('_')[0]} {unit}", f"{own[name]:.3g}", beside


def kernels(lines: list[dict], all_kernels: Iterable[str]) -> Iterator[Cells]:
    """Yield how many cases of each kernel are right, and the first that is not; last,
    the kernels of which no case is known."""
    by_kernel: dict[str, list[dict]] = {}
    for own in last_lines(lines):
        name = f"{own['kernel']} {own['implementation']}"
        by_kernel.setdefault(name, []).append(own)
    for name, cases in by_kernel.items():
        bad = [own for own in cases if _is_wrong(own)]
        sec = max((own["compile_sec"] or 0.0 for own in cases), default=0.0)
        beside = _fault(bad[0]) if bad else f"right; compiled in {sec:.1f} s at most"
        yield name, f"{len(cases) - len(bad)} of {len(cases)}", beside
    known = {own["kernel"] for own in lines}
    if unknown := [name for name in all_kernels if name not in known]:
        yield "no case known of", str(len(unknown)), ", ".join(unknown)


def products(found: list[dict]) -> Iterator[Cells]:
    """Yield the rate of each implementation of each pass, beside one dense product of
    equal FLOPs."""
    for own in found:
        what = f"{own['pass']} {own['impl']}, TFLOP/s"
        if own["msec"] is None:
            yield what, "-", own.get("failed") or own.get("declined", "")
            continue
        share = own.get("share_of_dense")
        beside = [f"{own['msec']:.3f} ms"]
        beside += [f"{share:.0%} of dense"] if share else []
        beside += [f"error {own['error']:.1e}"] if own.get("error") else []
        yield what, f"{own['tflops']:.3g}", ", ".join(beside)


def longest(found: list[dict]) -> dict:
    """Return the record of the run of most steps, the last one of several."""
    return max(found[::-1], key=lambda own: len(own.get("losses", [])), default={})


def train(own: dict, predicted: Mapping[str, Any]) -> Iterator[Cells]:
    """Yield speeds, memory, seconds of compilation and losses, beside what was
    predicted for as many layers."""
    is_same = predicted.get("num_layers") == own["num_layers"]
    aot = predicted.get("aot", {}) if is_same else {}
    beside = "" if is_same or not predicted else "predictions are for another number"
    yield "layers", str(own["num_layers"]), beside
    if "losses" in own:
        stated = f"aot at stated rates {aot['tok_per_sec']:,.0f}" if aot else ""
        yield "tokens/s", f"{own['tok_per_sec']:,.0f}", stated
        stated = f"aot {aot['step_msec']:.1f}" if aot else ""
        yield "step, ms", f"{own['step_msec']:.1f}", stated
        stated = f"aot {aot['mfu']:.1%}" if aot else ""
        yield "MFU", f"{own['mfu']:.1%}" if own["mfu"] else "-", stated
        losses = own["losses"]
        yield "loss", f"{losses[-1]:.3f}", f"{losses[0]:.3f} {len(losses)} steps before"
    dry_run = f"dry run {own['predicted_bytes'] / GIB:.2f}"
    if "compiled_bytes" in own:
        stated = f"aot {aot['peak_gib']:.2f}, {dry_run}" if aot else dry_run
        yield "compiled, GiB", f"{own['compiled_bytes'] / GIB:.2f}", stated
        if own.get("peak_bytes"):
            yield "peak, GiB", f"{own['peak_bytes'] / GIB:.2f}", stated
        stated = f"aot {aot['compile_sec']:.0f}, on a CPU" if aot else ""
        yield "compile, s", f"{sum(own['compile_sec'].values()):.1f}", stated
        for name, (implementation, why) in own["kernels"].items():
            yield name, implementation, why


def trainer(own: dict) -> Iterator[Cells]:
    """Yield each run of train/main.py, and whether its parameters are those of the
    whole run with the same attention."""
    whole = {run["attention"]: run for run in own["runs"] if run["run"] == "whole"}
    for run in own["runs"]:
        what = f"{run['attention']}, {run['run']}, {run['steps']} steps, s"
        beside = run["failed"] or f"digest {run['digest']}"
        other = whole.get(run["attention"])
        is_whole = other not in (None, run) and run["steps"] == other["steps"]
        if is_whole and not run["failed"]:
            is_equal = run["digest"] == other["digest"]
            beside += (
                ", equal to the whole run" if is_equal else ", NOT the whole run's"
            )
        yield what, f"{run['sec']:.0f}", beside


def layer(own: dict) -> Iterator[Cells]:
    """Yield the time of the layer and of its baselines."""
    for row in own["rows"]:
        what = f"{row['impl']} {row['pass']}, ms"
        if row["msec"] is None:
            yield what, "-", row["failed"]
            continue
        beside = []
        if (to_moejax := row["ratio_to_moejax"]) is not None:
            beside.append(f"{to_moejax:.2f} of moejax")
        if (share := row["share_of_dense_rate"]) is not None:
            beside.append(f"{share:.0%} of the dense rate")
        yield what, f"{row['msec']:.2f}", ", ".join(beside)


def tuning(found: list[dict]) -> Iterator[Cells]:
    """Yield the fastest tiles of each product beside the default ones."""
    for own in found:
        for row in own["measured"]:
            tiles = " ".join(f"{name}={value}" for name, value in row["tiles"].items())
            beside = f"default tiles {row['rule_msec']:.3f}; {tiles}"
            yield f"{row['bucket']}, ms", f"{row['msec']:.3f}", beside
