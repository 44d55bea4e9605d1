"""A predicted time as a sum of named terms: what schedules and domains are chosen by.

    Term         so many collectives, or so much computing, and their seconds
    Prediction   the terms of one candidate

Collectives are serial: a prediction is the plain sum of its terms. What is hidden under
something else is a term below zero.
"""

import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping

from moejax.perf.calibration import Calibration, find_line

ROUNDING = 1e-9
"""Sums of the same seconds in another order are equal to this part of them."""


@dataclasses.dataclass(frozen=True)
class Term:
    """`bytes` leave one device in all `count` of them together, and `sec` is theirs
    together."""

    name: str
    count: int
    bytes: float
    sec: float


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Of one layer and step."""

    terms: tuple[Term, ...]

    @property
    def sec(self) -> float:
        return sum(term.sec for term in self.terms)

    def total_bytes(self, collective: str) -> float:
        """What leaves one device in all collectives of this kind; '' is every kind."""
        return sum(t.bytes for t in self.terms if t.name.startswith(collective))

    def total_sec(self, collective: str) -> float:
        """Of all terms whose names begin so."""
        return sum(t.sec for t in self.terms if t.name.startswith(collective))

    def table(self) -> str:
        """A line for each term: name and count, megabytes, milliseconds."""
        rows = [(f"{t.name} x{t.count}", t.bytes, t.sec) for t in self.terms]
        rows.append(("sum", self.total_bytes(""), self.sec))
        return "\n".join(
            f"{name:44s}{1e-6 * size:12.3f} MB{1e3 * sec:12.3f} ms"
            for name, size, sec in rows
        )


def make_prediction(*terms: Term) -> Prediction:
    """Of those that happen."""
    return Prediction(tuple(term for term in terms if term.count))


def collective_term(
    calibration: Calibration,
    collective: str,
    group: Mapping[str, int],
    leaving_bytes: float,
    count: int = 1,
    cargo: str = "",
) -> Term:
    """`count` collectives, in each of which `leaving_bytes` leave a device, over the
    mesh axes of the group: {axis: devices}.

    Parts of an axis ("tensor_inner") are on the line of the whole axis, several axes on
    that of `find_line`. A group of one device costs nothing: no term, a count of 0.
    """
    several = tuple([axis for axis, size in group.items() if size > 1])
    if not several:
        return Term(collective, 0, 0.0, 0.0)
    line = find_line(calibration, collective, _whole(several))
    sec = line["latency_sec"] + leaving_bytes / line["bytes_per_sec"]
    name = f"{collective} {'_'.join(several)} {cargo}".rstrip()
    return Term(name, count, count * leaving_bytes, count * sec)


def split_term(term: Term, parts: int) -> Term:
    """Of one of so many that a term is for together."""
    return dataclasses.replace(term, bytes=term.bytes / parts, sec=term.sec / parts)


@functools.cache
def _whole(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The mesh axes that these are, or are parts of."""
    return tuple(dict.fromkeys(axis.partition("_")[0] for axis in axes))


def parted(axis: str, size: int, inner: int) -> tuple[dict[str, int], dict[str, int]]:
    """The outer and the inner part of a mesh axis whose inner part has so many devices,
    each {name: devices}; a part that is the whole axis keeps its name.

    >>> parted("tensor", 4, 2)
    ({'tensor_outer': 2}, {'tensor_inner': 2})
    """
    if inner == 1:
        return {axis: size}, {}
    if inner == size:
        return {}, {axis: size}
    return {f"{axis}_outer": size // inner}, {f"{axis}_inner": inner}


def num_devices(group: Mapping[str, int]) -> int:
    return math.prod(group.values())


def first_fastest[Name: Hashable](predictions: Mapping[Name, Prediction]) -> Name:
    """The earliest of those that take the least time."""
    least = min(prediction.sec for prediction in predictions.values())
    return next(
        name for name, p in predictions.items() if p.sec <= least * (1 + ROUNDING)
    )


def tables(predictions: Mapping[Hashable, Prediction]) -> str:
    """Every candidate's terms, fastest first."""
    ordered = sorted(predictions.items(), key=lambda pair: pair[1].sec)
    return "\n\n".join(f"{name}\n{p.table()}" for name, p in ordered)


def why[Name: Hashable](
    chosen: Name, predictions: Mapping[Name, Prediction], usual: Name
) -> str:
    """In a line: how long the chosen one takes, beside the usual one (or, if that is
    it, the next best), and the collective that makes the difference."""
    least = predictions[chosen]
    said = f"{chosen}: {1e3 * least.sec:.4g} ms a layer"
    others = {name: p for name, p in predictions.items() if name != chosen}
    if not others:
        return f"{said}, and no other can run"
    other = usual if usual in others else first_fastest(others)
    more = predictions[other]
    kinds = sorted({t.name.split()[0] for p in (least, more) for t in p.terms})
    saved_sec = {kind: more.total_sec(kind) - least.total_sec(kind) for kind in kinds}
    kind = max(saved_sec, key=saved_sec.get)
    amounts = [f"{1e3 * p.total_sec(kind):.4g} ms" for p in (least, more)]
    if more.total_bytes(kind):
        amounts = [
            f"{amount} for {1e-6 * p.total_bytes(kind):.4g} MB"
            for amount, p in zip(amounts, (least, more))
        ]
    return (
        f"{said}, {least.sec / more.sec:.2f} of {other} ({1e3 * more.sec:.4g} ms): "
        f"{kind} {' instead of '.join(amounts)}"
    )
