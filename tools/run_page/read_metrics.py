"""Read the lines of metrics.jsonl into curves, tables of loads and decisions.

Most of a long log is tables of loads and figures by layer. They are cut out of a line
before it is parsed, unless they are shown: then 100,000 steps of 64 layers and 256
experts are read in less than a minute.
"""

import array
import dataclasses
import functools
import json
import re
from typing import Any

import numpy as np

from tools.run_page.curves import (
    CURVES,
    LAYER_CURVES,
    PARTS,
    UNSHOWN,
    numbers_of,
)
from tools.run_page.plain import (
    as_number,
    encoded,
    left_out,
    plain,
    short,
    short_list,
    table_over_mean,
)
from tools.run_page.thin import Binned, Bins, Thinned
from train.logs.record_lines import MAX_STEP, kind_of, parse_line

TABLES = {"load": "tokens_le", "rows": "rows_lw"}
"""Fields of the tables that the page shows, by their names in its data."""
MAX_EVALS = 2000
MAX_DECISIONS = 1000
"""Largest number of decisions of the page; those to keep are dropped first."""
NUM_BESIDE, MIN_BESIDE = 20, 5
"""Number of steps before and after an adoption whose times are compared, and how many
there must be."""
_STEP = re.compile(rb'\{"step": (\d{1,16}), "loss": ')


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds on the sizes of a run's parts in the page's data."""

    num_bins: int = 2000
    load_bytes: int = 2_600_000
    rows_bytes: int = 400_000
    layer_curve_bytes: int = 1_200_000
    plan_bytes: int = 600_000
    num_goodput: int = 500


@dataclasses.dataclass(frozen=True)
class Frame:
    """A table of a step, a byte a number."""

    step: int
    byte_lx: np.ndarray


class Metrics:
    """What the lines of a run's metrics.jsonl say, line by line."""

    def __init__(self, limits: Limits) -> None:
        self.num_bad = 0
        """Damaged lines, and steps out of order."""
        self.evals: dict[int, float] = {}
        self.decisions: list[dict] = []
        self._limits = limits
        self._bins = Bins(len(CURVES) + len(PARTS), limits.num_bins)
        self._layer_bins: Bins | None = None
        self._num_layers = 0
        self._steps, self._step_msecs = array.array("q"), array.array("d")
        self._adopted: dict[int, float] = {}
        """Seconds that the run waited at each step that adopted a change."""
        self._held: tuple[dict, dict[str, Any]] | None = None
        self._tables = {
            "load": Thinned(limits.load_bytes, lambda frame: frame.byte_lx.size),
            "rows": Thinned(limits.rows_bytes, lambda frame: frame.byte_lx.size),
        }

    @property
    def last_step(self) -> int:
        """Last step that was read, 0 before the first."""
        return self._steps[-1] if self._steps else 0

    @property
    def num_steps(self) -> int:
        """Number of steps that were read."""
        return len(self._steps)

    def take(self, line: bytes) -> None:
        """Take the next line of the file."""
        tables = {}
        if _STEP.match(line):
            line, tables = _without_tables(line)
        record = parse_line(line)
        if not isinstance(record, dict):
            self.num_bad += 1
            return
        kind = kind_of(record)
        if kind == "loss":
            tables |= {n: record[n] for n in TABLES.values() if n in record}
            self._take_step(record, tables)
        elif kind == "eval_loss":
            self.evals[record["step"]] = as_number(record["eval_loss"])
        elif kind == "decision":
            self._take_decision(record["step"], record["decision"])

    def _take_step(self, record: dict, tables: dict) -> None:
        """Take a step that follows the last one. A step further on is held back until
        the next line confirms it: a damaged number would make room for steps that no
        run has done."""
        step = record["step"]
        if self._held is not None:
            held, self._held = self._held, None
            if held[0]["step"] < step:
                self._put(*held)
            else:
                self.num_bad += 1
        if step <= self.last_step:
            self.num_bad += 1
        elif step == self.last_step + 1:
            self._put(record, tables)
        else:
            self._held = record, tables

    def _put(self, record: dict, tables: dict) -> None:
        step = record["step"]
        numbers, has, lists = numbers_of(record)
        self._steps.append(step)
        self._step_msecs.append(as_number(record.get("step_msec")))
        if "adopt_msec" in record:
            msecs = [
                as_number(record.get(n, 0)) for n in ("adopt_wait_msec", "adopt_msec")
            ]
            self._adopted[step] = sum(msecs) / 1000
        self._bins.take(step, numbers, has)
        self._put_layers(step, lists)
        for name, field in TABLES.items():
            if field in tables:
                make = functools.partial(_frame, step, tables[field])
                self._tables[name].take(make)

    def _put_layers(self, step: int, lists: dict[str, np.ndarray]) -> None:
        """Put figures by layer into their bins. The first step decides the number of
        layers."""
        if self._layer_bins is None:
            self._num_layers = max((x.size for x in lists.values()), default=0)
            if not self._num_layers:
                return
            num_numbers = len(LAYER_CURVES) * self._num_layers
            most = self._limits.layer_curve_bytes // (2 * num_numbers)
            num_bins = max(2, min(most, self._limits.num_bins) // 2 * 2)
            self._layer_bins = Bins(num_numbers, num_bins)
        missing_l = np.full(self._num_layers, np.nan)
        rows = [lists.get(name, missing_l) for name in LAYER_CURVES]
        rows = [row if row.size == self._num_layers else missing_l for row in rows]
        has = np.repeat([name in lists for name in LAYER_CURVES], self._num_layers)
        self._layer_bins.take(step, np.concatenate(rows), has)

    def _take_decision(self, step: int, decision) -> None:
        is_whole = (
            isinstance(decision, dict)
            and isinstance(decision.get("kind"), str)
            and type(adopt_step := decision.get("adopt_step")) is int
            and abs(adopt_step) < MAX_STEP
        )
        if not is_whole:
            self.num_bad += 1
            return
        own = {"kind": plain(decision["kind"]), "adopt_step": adopt_step}
        self.decisions.append(plain(decision) | own | {"collected_step": step})

    def data(self) -> dict:
        """Return the parts of the page's data that come from metrics.jsonl."""
        binned = self._bins.binned()
        evals = sorted(step for step in self.evals if step <= self.last_step)
        evals = _every(evals, MAX_EVALS)
        return {
            "step": self.last_step,
            "every_steps": binned.width,
            "curves": _curves(binned),
            "layer_curves": self._layer_curves(),
            "evals": {
                "step": evals,
                "loss": [short(self.evals[step]) for step in evals],
            },
            "parts_msec": _parts(binned),
            "load": self._frames("load", "num_experts"),
            "rows": self._frames("rows", "num_devices"),
            "decisions": self._decisions(),
        }

    def notes(self) -> list[str]:
        """Return a line about each thing that was left out."""
        notes = []
        if self.num_bad:
            one, several = (
                f"damaged {line} or {step} out of order"
                for line, step in (("line", "step"), ("lines", "steps"))
            )
            notes.append(f"metrics.jsonl: {left_out(self.num_bad, one, several)}")
        for name, field in TABLES.items():
            table = self._tables[name]
            num_shown = len(table.items())
            if table.num_bad:
                notes.append(f"{field}: {left_out(table.num_bad, 'damaged table')}")
            if num_shown < table.num_taken - table.num_bad:
                notes.append(
                    f"{field}: {num_shown} of {table.num_taken} tables are shown, at "
                    "even distances"
                )
        if (num_shown := len(self._decisions())) < len(self.decisions):
            notes.append(
                f"{num_shown} of {len(self.decisions)} decisions are shown, at even "
                "distances"
            )
        return notes

    def _layer_curves(self) -> dict:
        """Return means by bin and layer, of the figures that the run has."""
        if self._layer_bins is None:
            return {}
        binned = self._layer_bins.binned()
        curves = {}
        for index, name in enumerate(LAYER_CURVES):
            part = slice(index * self._num_layers, (index + 1) * self._num_layers)
            has_b = binned.has_bc[:, part].any(axis=1)
            if has_b.any():
                mean_bl = np.clip(binned.mean_bc[has_b, part], -65504, 65504)
                curves[name] = {
                    "step": binned.step_b[has_b].tolist(),
                    "layers": self._num_layers,
                    "mean_b64": encoded(mean_bl, "<f2"),
                }
        return curves

    def _frames(self, name: str, columns: str) -> dict | None:
        """Return the tables of a field that have the shape of the last one; None
        without one."""
        frames = self._tables[name].items()
        frames = [f for f in frames if f.byte_lx.shape == frames[-1].byte_lx.shape]
        if not frames:
            return None
        num_layers, num_columns = frames[-1].byte_lx.shape
        return {
            "step": [frame.step for frame in frames],
            "num_layers": num_layers,
            columns: num_columns,
            "log2_b64": encoded(np.stack([f.byte_lx for f in frames]), "u1"),
        }

    def _decisions(self) -> list[dict]:
        """Return the decisions, each with whether it was adopted, what that changed and
        took, and the decision that took its place. Of too many, every second or third,
        .. is kept."""
        changes = {d["adopt_step"]: d for d in self.decisions if d["kind"] != "keep"}
        last = {d["adopt_step"]: d for d in self.decisions}
        adopted = {step for step in self._adopted if step in changes}
        kept = self.decisions
        if len(kept) > MAX_DECISIONS:
            kept = [d for d in kept if d["kind"] != "keep"] or kept
            kept = _every(kept, MAX_DECISIONS)
        edges = sorted(adopted)
        return [
            decision
            | {
                # Of two decisions for a step the later one counts.
                "adopted": (is_adopted := changes.get(step) is decision
                            and step in adopted),
                "gain_msec_measured": self._gain(step, edges) if is_adopted else None,
                "waited_sec": short(self._adopted[step]) if is_adopted else None,
                "replaced_by": None if last[step] is decision else _place(last[step]),
            }
            for decision in kept
            for step in [decision["adopt_step"]]
        ]  # fmt: skip

    def _gain(self, step: int, edges: list[int]) -> float | None:
        """Return the median time of the NUM_BESIDE steps before an adoption minus that
        of those after it, up to the adoptions beside it; None where there are too few.
        The step that adopts counts on neither side."""
        low = max((edge for edge in edges if edge < step), default=-1)
        high = min((edge for edge in edges if edge > step), default=2**62)
        before = self._times(max(low + 1, step - NUM_BESIDE), step)
        after = self._times(step + 1, min(high, step + 1 + NUM_BESIDE))
        if min(len(before), len(after)) < MIN_BESIDE:
            return None
        return short(float(np.median(before) - np.median(after)))

    def _times(self, begin: int, end: int) -> np.ndarray:
        """Return the finite times of the steps from `begin` to before `end`."""
        step_n = np.frombuffer(self._steps, np.int64)
        first, last = np.searchsorted(step_n, [begin, end])
        msec_n = np.frombuffer(self._step_msecs, np.float64)[first:last]
        return msec_n[np.isfinite(msec_n)]


def _place(decision: dict) -> dict:
    """Return the kind of a decision, and the step after which it was taken."""
    step = decision.get("step", decision["collected_step"])
    return {"kind": decision["kind"], "step": step}


def _every(items: list, most: int) -> list:
    """Return every n-th item up to the last, for the least n that leaves `most`."""
    stride = -(-len(items) // most) or 1
    return items[(len(items) - 1) % stride :: stride]


def _curves(binned: Binned) -> dict:
    """Return the curves that any step has a value of."""
    curves = {}
    for index, curve in enumerate(CURVES):
        has_b = binned.has_bc[:, index]
        if not has_b.any():
            continue
        curves[curve.name] = {
            "unit": curve.unit,
            "label": curve.label,
            "step": binned.step_b[has_b].tolist(),
            "mean": short_list(binned.mean_bc[has_b, index]),
        }
        if binned.width > 1:
            curves[curve.name] |= {
                "min": short_list(binned.min_bc[has_b, index]),
                "max": short_list(binned.max_bc[has_b, index]),
            }
    return curves


def _parts(binned: Binned) -> dict:
    """Return the modelled parts of steps; empty lists where no step has them."""
    first = len(CURVES)
    has_b = binned.has_bc[:, first]
    return {"step": binned.step_b[has_b].tolist()} | {
        name: short_list(binned.mean_bc[has_b, first + index])
        for index, name in enumerate(PARTS)
    }


def _without_tables(line: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Return a step's line without its tables and lists that are not shown, and the
    text of each table. What is not as a run writes it stays in the line."""
    tables = {}
    for name in TABLES.values():
        begin = b'"%b": [[' % name.encode()
        start = line.find(begin)
        end = line.find(b"]]", start) + 2
        if start >= 0 and end >= 2 and b'"' not in line[start + len(begin) : end]:
            tables[name] = line[start + len(begin) - 2 : end]
            line = b'%b"": 0%b' % (line[:start], line[end:])
    for name in UNSHOWN:
        begin = b'"%b": [' % name
        start = line.find(begin)
        end = line.find(b"]", start) + 1
        if start >= 0 and end and line.find(b'"', start + len(begin), end) < 0:
            line = b'%b"": 0%b' % (line[:start], line[end:])
    return line, tables


def _frame(step: int, table: bytes | list) -> Frame | None:
    """Return a table of loads over the mean of each layer as bytes: 32 times the
    logarithm to the base 2, plus 128; 0 is no load. None if it is no such table."""
    try:
        numbers = json.loads(table) if isinstance(table, bytes) else table
    except (ValueError, RecursionError):
        return None
    ratio_lx = table_over_mean(numbers)
    if ratio_lx is None or (ratio_lx < 0).any():
        return None
    is_none_lx = ratio_lx == 0
    log2_lx = np.log2(np.where(is_none_lx, 1, ratio_lx))
    byte_lx = np.clip(np.rint(128 + 32 * log2_lx), 1, 255).astype(np.uint8)
    return Frame(step, np.where(is_none_lx, np.uint8(0), byte_lx))
