"""Read the lines of metrics.jsonl into curves, tables of loads and decisions.

Letters in names: n steps, c numbers of a step, b bins of steps.
"""

import dataclasses
from collections.abc import Iterable

import numpy as np

from moejax.perf.traffic import over_mean
from tools.run_page.curves import CURVES, LAYER_CURVES, PARTS, layers_of, numbers_of
from tools.run_page.plain import (
    Binned,
    as_number,
    binned,
    encoded,
    evenly,
    left_out,
    plain,
    short,
    short_list,
    thinning_note,
)
from train.logs.record_lines import MAX_STEP, kind_of, parse_line

TABLES = {"load": ("tokens_le", "num_experts"), "rows": ("rows_lw", "num_devices")}
"""Field of each table that the page shows, and the name of its number of columns."""
NUM_BESIDE, MIN_BESIDE = 20, 5
"""Number of steps before and after an adoption whose times are compared, and how many
there must be."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds on the sizes of the parts of the page's data."""

    num_bins: int = 2000
    num_evals: int = 2000
    num_decisions: int = 1000
    num_goodput: int = 500
    layer_curve_bytes: int = 1_200_000
    load_bytes: int = 2_600_000
    rows_bytes: int = 400_000
    plan_bytes: int = 600_000


@dataclasses.dataclass(slots=True)
class Step:
    """Numbers and tables of one step's line."""

    step: int
    number_c: np.ndarray
    """Numbers of CURVES, then of PARTS."""
    layers: dict[str, np.ndarray]
    """Numbers by layer of LAYER_CURVES."""
    tables: dict[str, np.ndarray | None]
    """Tables by name in TABLES, as bytes; None is a damaged one."""
    step_msec: float
    waited_sec: float | None
    """Seconds for which a change held up the run, waiting for its compilation and being
    put in place; None where none was adopted."""


class Metrics:
    """Steps, evaluations and decisions of a run's metrics.jsonl."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.num_bad = 0
        """Damaged lines, and steps out of order."""
        self.evals: dict[int, float] = {}
        self.decisions: list[dict] = []
        self.steps: list[Step] = []
        for line in lines:
            record = parse_line(line)
            kind = "damaged" if record is None else kind_of(record)
            if kind == "loss" and record["step"] > self.last_step:
                self.steps.append(_step(record))
            elif kind == "eval_loss":
                self.evals[record["step"]] = as_number(record["eval_loss"])
            elif kind == "decision" and (decision := _decision(record)):
                self.decisions.append(decision)
            elif kind:
                self.num_bad += 1

    @property
    def last_step(self) -> int:
        """Last step that was read, 0 before the first."""
        return self.steps[-1].step if self.steps else 0

    def data(self, limits: Limits) -> tuple[dict, list[str]]:
        """Return the parts of the page's data that come from metrics.jsonl, and a note
        about each thing that was left out."""
        evals = sorted(step for step in self.evals if step <= self.last_step)
        evals = evenly(evals, limits.num_evals)
        decisions = self.decisions
        if len(decisions) > limits.num_decisions:
            decisions = [d for d in decisions if d["kind"] != "keep"] or decisions
            decisions = evenly(decisions, limits.num_decisions)
        tables = {
            "load": self._tables("load", limits.load_bytes),
            "rows": self._tables("rows", limits.rows_bytes),
        }
        what = "damaged line or step out of order"
        notes = (
            [f"metrics.jsonl: {left_out(self.num_bad, what)}"] if self.num_bad else []
        )
        for _, table_notes in tables.values():
            notes += table_notes
        notes += thinning_note("decisions", len(decisions), len(self.decisions))
        return {
            "step": self.last_step,
            **self._curves(limits.num_bins),
            "layer_curves": self._layer_curves(limits),
            "evals": {
                "step": evals,
                "loss": [short(self.evals[step]) for step in evals],
            },
            **{name: table for name, (table, _) in tables.items()},
            "decisions": self._with_outcomes(decisions),
        }, notes

    def _curves(self, num_bins: int) -> dict:
        """Return the curves that any step has a value of, and the modelled parts."""
        if not self.steps:
            parts = {name: [] for name in ("step", *PARTS)}
            return {"every_steps": 1, "curves": {}, "parts_msec": parts}
        width = -(-len(self.steps) // num_bins)
        bins = binned(np.stack([step.number_c for step in self.steps]), width)
        step_b = self._step_b(width)
        curves = {}
        for index, curve in enumerate(CURVES):
            if not (has_b := bins.has[:, index]).any():
                continue
            names = ("min", "mean", "max") if width > 1 else ("mean",)
            curves[curve.name] = {
                "unit": curve.unit,
                "label": curve.label,
                "step": step_b[has_b].tolist(),
            } | {n: short_list(getattr(bins, n)[has_b, index]) for n in names}
        parts = {"step": step_b[has_b := bins.has[:, len(CURVES)]].tolist()}
        for index, name in enumerate(PARTS, len(CURVES)):
            parts[name] = short_list(bins.mean[has_b, index])
        return {"every_steps": width, "curves": curves, "parts_msec": parts}

    def _step_b(self, width: int) -> np.ndarray:
        """Return the middle of the steps of each bin."""
        step_n = np.array([[step.step] for step in self.steps], np.float64)
        return np.rint(binned(step_n, width).mean[:, 0]).astype(np.int64)

    def _layer_curves(self, limits: Limits) -> dict:
        """Return means by bin and layer of the figures by layer that the run has."""
        curves = {}
        for name in LAYER_CURVES:
            sizes = [x.layers[name].size for x in self.steps if name in x.layers]
            if not sizes or not sizes[-1]:
                continue
            missing_l = np.full(sizes[-1], np.nan)
            rows = [step.layers.get(name, missing_l) for step in self.steps]
            rows = [row if row.size == sizes[-1] else missing_l for row in rows]
            most = limits.layer_curve_bytes // (2 * len(LAYER_CURVES) * sizes[-1])
            width = -(-len(rows) // max(1, min(most, limits.num_bins)))
            bins: Binned = binned(np.stack(rows), width)
            has_b = bins.has.any(axis=1)
            curves[name] = {
                "step": self._step_b(width)[has_b].tolist(),
                "layers": sizes[-1],
                "mean_b64": encoded(np.clip(bins.mean[has_b], -65504, 65504), "<f2"),
            }
        return curves

    def _tables(self, name: str, max_bytes: int) -> tuple[dict | None, list[str]]:
        """Return the tables of a field that have the shape of the last one, None
        without one, and notes."""
        field, columns = TABLES[name]
        having = [step for step in self.steps if name in step.tables]
        whole = [(x.step, x.tables[name]) for x in having if x.tables[name] is not None]
        num_bad = len(having) - len(whole)
        notes = [f"{field}: {left_out(num_bad, 'damaged table')}"] if num_bad else []
        if not whole:
            return None, notes
        last_lx = whole[-1][1]
        equal = [(step, lx) for step, lx in whole if lx.shape == last_lx.shape]
        shown = evenly(equal, max_bytes // last_lx.size)
        notes += thinning_note(f"{field}, tables", len(shown), len(whole))
        return {
            "step": [step for step, _ in shown],
            "num_layers": last_lx.shape[0],
            columns: last_lx.shape[1],
            "log2_b64": encoded(np.stack([table_lx for _, table_lx in shown]), "u1"),
        }, notes

    def _with_outcomes(self, decisions: list[dict]) -> list[dict]:
        """Return decisions, each with whether it was adopted, what that changed and
        took, and the decision that took its place. Of two decisions for a step the
        later one counts."""
        waited = {x.step: x.waited_sec for x in self.steps if x.waited_sec is not None}
        changes = {d["adopt_step"]: d for d in self.decisions if d["kind"] != "keep"}
        last = {d["adopt_step"]: d for d in self.decisions}
        adopted = sorted(changes.keys() & waited.keys())
        step_n = np.array([step.step for step in self.steps])
        msec_n = np.array([step.step_msec for step in self.steps])
        outcomes = []
        for decision in decisions:
            step = decision["adopt_step"]
            is_adopted = step in adopted and changes[step] is decision
            later = last[step]
            outcome = {
                "adopted": is_adopted,
                "gain_msec_measured": None,
                "gain_msec_spread": None,
                "waited_sec": None,
                "replaced_by": None
                if later is decision
                else {
                    "kind": later["kind"],
                    "step": later.get("step", later["collected_step"]),
                },
            }
            if is_adopted:
                gain, spread = _gain_msec(step, adopted, step_n, msec_n)
                outcome["gain_msec_measured"] = gain
                outcome["gain_msec_spread"] = spread
                outcome["waited_sec"] = short(waited[step])
            outcomes.append(decision | outcome)
        return outcomes


def _step(record: dict) -> Step:
    waits = [as_number(record.get(n, 0)) for n in ("adopt_wait_msec", "adopt_msec")]
    return Step(
        step=record["step"],
        number_c=numbers_of(record),
        layers={n: layers_of(record[n]) for n in LAYER_CURVES if n in record},
        tables={
            name: _log2_bytes(record[field])
            for name, (field, _) in TABLES.items()
            if field in record
        },
        step_msec=as_number(record.get("step_msec")),
        waited_sec=sum(waits) / 1000 if "adopt_msec" in record else None,
    )


def _decision(record: dict) -> dict | None:
    """Return the decision of a line; None if it is damaged."""
    decision = record["decision"]
    if not isinstance(decision, dict) or not isinstance(decision.get("kind"), str):
        return None
    step = decision.get("adopt_step")
    if type(step) is not int or abs(step) >= MAX_STEP:
        return None
    own = {"kind": plain(decision["kind"]), "adopt_step": step}
    return plain(decision) | own | {"collected_step": record["step"]}


def _log2_bytes(table) -> np.ndarray | None:
    """Return loads over the mean of each layer as bytes, [l, x]: 32 times the logarithm
    to the base 2, plus 128; 0 is no load. None if the value is no table of loads."""
    try:
        load_lx = np.asarray(table, np.float32)
    except (ValueError, TypeError, OverflowError):
        return None
    is_table = load_lx.ndim == 2 and load_lx.size and np.isfinite(load_lx).all()
    if not is_table or (load_lx < 0).any():
        return None
    ratio_lx = over_mean(load_lx)
    is_none_lx = ratio_lx == 0
    log2_lx = np.log2(np.where(is_none_lx, 1, ratio_lx))
    byte_lx = np.clip(np.rint(128 + 32 * log2_lx), 1, 255)
    return np.where(is_none_lx, 0, byte_lx).astype(np.uint8)


def _gain_msec(
    step: int, adopted: list[int], step_n: np.ndarray, msec_n: np.ndarray
) -> tuple[float | None, float | None]:
    """Return the median time of the NUM_BESIDE steps before an adoption minus that of
    those after it, up to the adoptions beside it, and half the width of its interval
    of 95 % confidence; None, None where there are too few. The step that adopts counts
    on neither side.

    The interval of a median of n numbers is 1.57 interquartile ranges over sqrt(n) to
    each side (McGill, Tukey and Larsen, Variations of Box Plots, 1978).
    """
    low = max((other for other in adopted if other < step), default=-1)
    high = min((other for other in adopted if other > step), default=MAX_STEP)
    medians, spreads = [], []
    for begin, end in (
        (max(low + 1, step - NUM_BESIDE), step),
        (step + 1, min(high, step + 1 + NUM_BESIDE)),
    ):
        first, last = np.searchsorted(step_n, [begin, end])
        msecs = msec_n[first:last]
        msecs = msecs[np.isfinite(msecs)]
        if len(msecs) < MIN_BESIDE:
            return None, None
        low_msec, median_msec, high_msec = np.percentile(msecs, (25, 50, 75))
        medians.append(median_msec)
        spreads.append(1.57 * (high_msec - low_msec) / np.sqrt(len(msecs)))
    spread = float(np.hypot(*spreads))
    return short(float(medians[0] - medians[1])), short(spread)
