"""The screen of a training run: what it shows at a moment, and how that is drawn.

    step 137/480  ━━━━━━━━━───────────────────  28%  ETA 1:32  elapsed 0:48
    loss 2.911  ▇▆▅▄▄▃▃▂▂▂▁▁▁  held-out 2.9532 at step 100
    5,317 tok/s  192.6 ms/step  host 2.3 GiB
    now  training  and for 12 s compiling the layout of step 190 beside the steps
    layer 2   device max/mean 1.33  ████▎         home 1.58  expert max/mean 2.60
    step 20  swap 1.33->1.08  adopted at step 24  saves 7.8 ms/step  ..

The worst layer is the first. Where rows or columns are few, the end is left out.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from train.logs.region import Line, Piece, cells, clock, cut, flow
from train.logs.signs import Signs, bar, gauge, spark

UNEVEN, VERY_UNEVEN = 1.1, 1.5
"""Device max/mean from which a layer's bar has another colour."""
MIN_SPARK, MIN_BAR, MAX_BAR = 8, 5, 30
LATE_STEPS, LATE_SEC = 5, 5.0
"""A step that takes this many times the usual, and longer than this, is pointed out."""


@dataclasses.dataclass(frozen=True)
class Shown:
    """A decision of the balancer as it is shown: its record, and what became of it."""

    record: dict[str, Any]
    """A decision's record, as metrics.jsonl has it."""
    fate: str
    """Such as 'adoption at step 24'."""


@dataclasses.dataclass(frozen=True)
class Outlook:
    """The last decisions of a balancer, and the layout that it compiles."""

    decisions: tuple[Shown, ...] = ()
    """Oldest first."""
    compiled_for_step: int | None = None
    """First step of the layout that is being compiled beside the steps."""
    compiled_for_sec: float = 0.0
    """For how long it has been compiling."""


@dataclasses.dataclass(frozen=True)
class Sight:
    """What the screen shows of a run at a moment."""

    num_steps: int
    step: int = 0
    """The last step whose metrics were read."""
    record: dict[str, Any] | None = None
    """The record of that step; None before the first."""
    losses: Sequence[float | None] = ()
    step_sec: float | None = None
    """Usual time of a step: the median of the last ones."""
    tok_per_sec: float | None = None
    mfu: float | None = None
    """Tokens per second and MFU are medians of the last steps, too."""
    evaluation: tuple[int, float] | None = None
    """Step and loss of the last evaluation."""
    doing: str = ""
    """What the run does where it is not training."""
    doing_sec: float = 0.0
    idle_sec: float = 0.0
    """Time since the metrics of a step were read, or something else was done."""
    elapsed_sec: float = 0.0
    eta_sec: float | None = None
    outlook: Outlook = Outlook()


def screen_lines(sight: Sight, width: int, height: int, signs: Signs) -> list[Line]:
    """Return the lines of the screen for a terminal of `height` rows, of which some are
    left to printed lines."""
    num_rows = max(height - 2, 1) if height < 20 else max(height * 2 // 3, 18)
    lines = [_progress(sight, width, signs), *_loss(sight, width, signs)]
    lines += flow(_facts(sight), width, 3)
    lines += _doing(sight, width)
    left = num_rows - len(lines)
    decisions = _decisions(sight.outlook.decisions, width)
    layers = _layers(sight.record or {}, width, signs)
    num_layers = min(len(layers), max(left - len(decisions), (left + 1) // 2))
    lines += _first_layers(layers, max(num_layers, 0), width)
    lines += decisions[: max(num_rows - len(lines), 0)]
    return lines[:num_rows]


def _progress(sight: Sight, width: int, signs: Signs) -> Line:
    """Return the line of steps, a bar, and the remaining time."""
    share = min(sight.step / sight.num_steps, 1.0) if sight.num_steps else 1.0
    head = f"step {sight.step}/{sight.num_steps}"
    eta = "-" if sight.eta_sec is None else clock(sight.eta_sec)
    tail = f"{math.floor(100 * share)}%  ETA {eta}"
    if width >= 60:
        tail += f"  elapsed {clock(sight.elapsed_sec)}"
    room = width - len(head) - len(tail) - 4
    if room < MIN_BAR:
        return [(cut(f"{head}  {tail}", width), "bold")]
    done, left = gauge(share, room, signs)
    parts = [(done, "cyan"), (left, "dim")]
    return [(head + "  ", "bold"), *parts, ("  " + tail, "bold")]


def _loss(sight: Sight, width: int, signs: Signs) -> list[Line]:
    """Return the loss, its curve since the run was started, and the last evaluation, in
    one line or in two."""
    ends = []
    if sight.evaluation is not None:
        step, loss = sight.evaluation
        ends = [(f"held-out {loss:.4f} at step {step}", "")]
    if sight.record is None:
        return flow(ends, width, 1) if ends else []
    head = f"loss {sight.record['loss']:.3f}"
    room = width - len(head) - 2
    beside = room - sum(len(text) + 2 for text, _ in ends)
    is_one = beside >= MIN_SPARK or not ends
    curve = spark(sight.losses, max(beside if is_one else room, 0), signs)
    first = [(head, "bold"), (curve, "green")]
    return flow([*first, *ends], width, 1 if is_one else 2)


def _facts(sight: Sight) -> list[Piece]:
    """Return rates and memory, as far as they are known."""
    facts, record = [], sight.record or {}
    if sight.tok_per_sec:
        facts.append((f"{sight.tok_per_sec:,.0f} tok/s", ""))
    if sight.step_sec:
        facts.append((f"{1e3 * sight.step_sec:,.1f} ms/step", ""))
    if sight.mfu is not None:
        facts.append((f"MFU {sight.mfu:.1%}", ""))
    if record.get("host_memory_gib") is not None:
        facts.append((f"host {record['host_memory_gib']:.1f} GiB", ""))
    if record.get("device_memory_gib") is not None:
        text = f"device {record['device_memory_gib']:.1f} GiB"
        if record.get("peak_device_memory_gib") is not None:
            text += f", peak {record['peak_device_memory_gib']:.1f}"
        facts.append((text, ""))
    return facts


def _doing(sight: Sight, width: int) -> list[Line]:
    """Return what the run does now, and what is compiled beside it."""
    if sight.doing:
        now = (f"{sight.doing}, for {clock(sight.doing_sec)}", "yellow")
    elif sight.record is None:
        now = (f"waiting for the first step, for {clock(sight.idle_sec)}", "yellow")
    elif sight.idle_sec > max(LATE_SEC, LATE_STEPS * (sight.step_sec or 0.0)):
        text = f"training; step {sight.step + 1} has run for {clock(sight.idle_sec)}"
        now = (text, "yellow")
    else:
        now = ("training", "")
    lines = flow([("now", "dim"), now], width, 1)
    ahead = sight.outlook
    if ahead.compiled_for_step is not None:
        text = (
            f"compiling the layout of step {ahead.compiled_for_step} beside the steps, "
            f"for {clock(ahead.compiled_for_sec)}"
        )
        lines += flow([("and", "dim"), (text, "yellow")], width, 1)
    return lines


def _layers(record: dict[str, Any], width: int, signs: Signs) -> list[Line]:
    """Return a line for each layer, the worst first: its device max/mean, and a bar of
    it from 1, which is even, to 2 or to the largest one."""
    ratios = record.get("device_max_over_mean") or []
    top = max([2.0, *filter(math.isfinite, ratios)])
    digits = len(str(max(len(ratios) - 1, 0)))
    lines = []
    for layer in sorted(range(len(ratios)), key=lambda layer: -ratios[layer]):
        ratio = ratios[layer]
        ends = [
            (f"{name} {record[field][layer]:.2f}", "dim")
            for name, field in (
                ("home", "home_device_max_over_mean"),
                ("expert max/mean", "expert_max_over_mean"),
            )
            if width >= 60 and layer < len(record.get(field) or [])
        ]
        name = "device max/mean" if width >= 50 else "max/mean"
        head = f"layer {layer:<{digits}}  {name} {ratio:.2f}"
        room = width - len(head) - 2 - sum(len(text) + 2 for text, _ in ends)
        filled = bar((ratio - 1) / (top - 1), max(min(room, MAX_BAR), 0), signs)
        blank = " " * (max(min(room, MAX_BAR), 0) - len(filled)) if ends else ""
        line = [(head + "  ", ""), (filled, _colour(ratio)), (blank, "")]
        line += [("  " + text, style) for text, style in ends]
        lines.append(line if cells(line) <= width else [(cut(head, width), "")])
    return lines


def _colour(ratio: float) -> str:
    """Return the style of a layer's bar; the figure stands beside it."""
    if ratio < UNEVEN:
        return "cyan"
    return "yellow" if ratio < VERY_UNEVEN else "bold red"


def _first_layers(layers: list[Line], num_rows: int, width: int) -> list[Line]:
    """Return the first layers; the last row says how many are left out."""
    if len(layers) <= num_rows or num_rows < 3:
        return layers[:num_rows]
    num_left = len(layers) - num_rows + 1
    return [
        *layers[: num_rows - 1],
        [(cut(f"and {num_left} more even layers", width), "dim")],
    ]


def _decisions(decisions: Sequence[Shown], width: int) -> list[Line]:
    """Return the lines of the decisions, the newest first: kind, step, ratio before and
    after, what becomes of it, and why. A narrow screen has two rows for each. Of
    several in a row to keep the plan, the newest is there."""
    lines: list[Line] = []
    kinds = [shown.record["kind"] for shown in decisions]
    for shown, *both in reversed(list(zip(decisions, kinds, [*kinds[1:], ""]))):
        record = shown.record
        if both == ["keep", "keep"]:
            continue
        ratio = f"{record['device_max_over_mean_before']:.2f}"
        style = "dim"
        if record["kind"] != "keep":
            ratio += f"->{record['device_max_over_mean_after']:.2f}"
            style = "bold" if record["kind"] == "relayout" else ""
        pieces = [
            (f"step {record['step']}", "dim"),
            (f"{record['kind']} {ratio}", style),
            (shown.fate, "green" if shown.fate.startswith("adopted") else "yellow"),
            *((f"{name} {a}->{b}", "") for name, (a, b) in record["changes"].items()),
            (record["why"], "dim"),
        ]
        pieces = [piece for piece in pieces if piece[0]]
        lines += flow(pieces, width, 1 if width >= 60 else 2, indent=2)
    return lines
