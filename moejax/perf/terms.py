"""Predicted times as sums of named terms, by which schedules and domains are chosen.

    Term         a number of collectives or computations, and their seconds
    Prediction   the terms of one candidate

Collectives are serial, so that a prediction is the plain sum of its terms. Time that is
hidden under other work is a term below zero.
"""

import dataclasses
import math
from collections.abc import Hashable, Iterable, Mapping

from moejax.choice import Choice
from moejax.perf.calibration import Calibration, find_line
from moejax.rich import shown_by

ROUNDING = 1e-9
"""Relative difference up to which two times count as equal: the order of a sum changes
its last bits."""


@dataclasses.dataclass(frozen=True)
class Term:
    """Predicted time of a number of equal collectives or computations."""

    name: str
    count: int
    """Number of the collectives or computations; 0 where there is none."""
    bytes: float
    """Bytes that leave one device in all of them together."""
    sec: float
    """Seconds of all of them together."""


@shown_by("prediction")
@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted time of one layer under one candidate, in a step or a micro-batch."""

    terms: tuple[Term, ...]

    @property
    def sec(self) -> float:
        """Seconds of all terms together."""
        return sum(term.sec for term in self.terms)

    def total_bytes(self, collective: str) -> float:
        """Return the bytes that leave one device in all terms whose names begin with
        `collective`; '' is every term."""
        return sum(t.bytes for t in self.terms if t.name.startswith(collective))

    def along(self, axis: str) -> float:
        """Return the seconds of all collectives along a mesh axis or a part of it."""
        return sum(
            t.sec for t in self.terms if axis in t.name.replace("_", " ").split()
        )

    def total_sec(self, collective: str) -> float:
        """Return the seconds of all terms whose names begin with `collective`."""
        return sum(t.sec for t in self.terms if t.name.startswith(collective))

    def __str__(self) -> str:
        terms = " + ".join(f"{1e3 * t.sec:.3g} {t.name}" for t in self.terms)
        return f"modelled {1e3 * self.sec:.3g} ms = {terms}"

    def table(self) -> str:
        """Return a line for each term: name and count, megabytes, milliseconds."""
        rows = [(f"{t.name} x{t.count}", t.bytes, t.sec) for t in self.terms]
        rows.append(("sum", self.total_bytes(""), self.sec))
        return "\n".join(
            f"{name:44s}{1e-6 * size:12.3f} MB{1e3 * sec:12.3f} ms"
            for name, size, sec in rows
        )


def make_prediction(*terms: Term) -> Prediction:
    """Return the prediction of these terms, without those whose count is 0."""
    return Prediction(tuple(term for term in terms if term.count))


def collective_term(
    calibration: Calibration,
    collective: str,
    group: Mapping[str, int],
    leaving_bytes: float,
    count: int = 1,
    cargo: str = "",
) -> Term:
    """Return the predicted time and bytes of `count` collectives over a group of
    devices, in each of which `leaving_bytes` leave a device.

    `group` is {mesh axis: number of devices}. A part of an axis ("tensor_inner") has
    the line of the whole axis, and several axes have the line that `find_line` returns.
    The term of a group of one device has a count of 0. `cargo` is appended to the name.
    """
    several = tuple([axis for axis, size in group.items() if size > 1])
    if not several:
        return Term(collective, 0, 0.0, 0.0)
    line = find_line(calibration, collective, whole_axes(several))
    sec = line["latency_sec"] + leaving_bytes / line["bytes_per_sec"]
    name = f"{collective} {'_'.join(several)} {cargo}".rstrip()
    return Term(name, count, count * leaving_bytes, count * sec)


def whole_axes(axes: Iterable[str]) -> tuple[str, ...]:
    """Return the whole mesh axes that these axes, or parts of axes, belong to."""
    return tuple(dict.fromkeys(axis.partition("_")[0] for axis in axes))


def split_axis(
    axis: str, size: int, inner: int
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the outer and the inner part of a mesh axis, each as {name: devices}.

    The inner part has `inner` devices. A part that is the whole axis keeps its name,
    and a part of one device is left out.

    >>> split_axis("tensor", 4, 2)
    ({'tensor_outer': 2}, {'tensor_inner': 2})
    """
    if inner == 1:
        return {axis: size}, {}
    if inner == size:
        return {}, {axis: size}
    return {f"{axis}_outer": size // inner}, {f"{axis}_inner": inner}


def num_devices(group: Mapping[str, int]) -> int:
    """Return the number of devices of a group, {axis: devices}."""
    return math.prod(group.values())


def first_fastest[Name: Hashable](predictions: Mapping[Name, Prediction]) -> Name:
    """Return the first of the candidates that take the least time."""
    min_sec = min(prediction.sec for prediction in predictions.values())
    return next(
        name for name, p in predictions.items() if p.sec <= min_sec * (1 + ROUNDING)
    )


def tables(predictions: Mapping[Hashable, Prediction]) -> str:
    """Return a table of each candidate's terms, fastest first."""
    ordered = sorted(predictions.items(), key=lambda pair: pair[1].sec)
    return "\n\n".join(f"{name}\n{p.table()}" for name, p in ordered)


def fastest[Name: Hashable](
    predictions: Mapping[Name, Prediction], usual: Name
) -> Choice[Name]:
    """Return the choice of the first of the fastest candidates, compared with the
    `usual` one."""
    chosen = first_fastest(predictions)
    return Choice(chosen, _why(chosen, predictions, usual), predictions)


def _why[Name: Hashable](
    chosen: Name, predictions: Mapping[Name, Prediction], usual: Name
) -> str:
    """Return the reason for a choice, in a line.

    It has the time of the chosen candidate and that of the `usual` one, or of the next
    best one where the usual one is chosen, and the kind of term that differs most.
    """
    best = predictions[chosen]
    time = f"{1e3 * best.sec:.4g} ms a layer, modelled"
    others = {name: p for name, p in predictions.items() if name != chosen}
    if not others:
        return f"{time}, and no other can run"
    other = usual if usual in others else first_fastest(others)
    slower = predictions[other]
    kinds = sorted({t.name.split()[0] for p in (best, slower) for t in p.terms})
    saved_sec = {kind: slower.total_sec(kind) - best.total_sec(kind) for kind in kinds}
    kind = max(saved_sec, key=saved_sec.get)
    amounts = [f"{1e3 * p.total_sec(kind):.4g} ms" for p in (best, slower)]
    if slower.total_bytes(kind):
        amounts = [
            f"{amount} for {1e-6 * p.total_bytes(kind):.4g} MB"
            for amount, p in zip(amounts, (best, slower))
        ]
    return (
        f"{time}, {best.sec / slower.sec:.2f} of {other} ({1e3 * slower.sec:.4g} ms): "
        f"{kind} {' instead of '.join(amounts)}"
    )
