"""Say why a collective is exposed.

| reason | meaning |
|---|---|
| synchronous | XLA starts and ends it at once, so that nothing runs beside it |
| data | all work that is independent of it takes less time than it |
| placement | independent work stands elsewhere in the schedule and hides nothing |
| crowded | independent work hides other collectives, which run one after another |

Work is independent if it neither needs the collective's data nor gives it any, in one
run of the same computation. The exposed seconds of an asynchronous collective are
divided among the last three reasons: data has what would be exposed if all independent
work hid this collective; of the rest, placement has as much as the idle work elsewhere
could hide, and crowded what remains.
"""

import dataclasses

from tools.compiled.collectives import Collective
from tools.compiled.schedule import Flight, Piece, Timeline

REASONS = ("synchronous", "data", "placement", "crowded")


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a collective is exposed in one run, with the work around it."""

    exposed_by: dict[str, float]
    """Exposed seconds by reason, which add up to all that are exposed."""
    independent_sec: float
    """Seconds of the work of the same computation that is independent of it, wherever
    it stands. What hides collectives within that work does not count."""
    _texts: dict[str, str]

    def text(self, reason: str) -> str:
        """Return a reason as a phrase with the seconds of one run."""
        return self._texts[reason]


def find_cause(timeline: Timeline, flight: Flight) -> Cause:
    """Return why a collective of a walked schedule is exposed."""
    independent = timeline.independent(flight)
    beside = {piece.instruction.name for piece in timeline.beside(flight)}
    elsewhere = [p for p in independent if p.instruction.name not in beside]
    independent_sec = sum(piece.free_sec for piece in independent)
    exposed_by = _divide(flight, independent_sec, elsewhere)
    data = _data(timeline, flight, independent_sec)
    placement = _placement(timeline, flight, elsewhere)
    is_short = exposed_by["data"] >= exposed_by["placement"]
    texts = {
        "synchronous": "it ends before other work starts: "
        + (data if is_short else placement),
        "data": data,
        "placement": placement,
        "crowded": _crowded(timeline, flight, independent),
    }
    if not flight.collectives[0].is_async:
        exposed_by = dict.fromkeys(exposed_by, 0.0)
        exposed_by["synchronous"] = flight.seconds
    return Cause(exposed_by, independent_sec, texts)


def _divide(
    flight: Flight, independent_sec: float, elsewhere: list[Piece]
) -> dict[str, float]:
    """Return the exposed seconds of a collective by reason, as if it were
    asynchronous."""
    data_sec = max(0.0, flight.seconds - independent_sec)
    rest_sec = max(0.0, flight.remaining_sec - data_sec)
    placement_sec = min(rest_sec, sum(piece.idle_sec for piece in elsewhere))
    found = (0.0, data_sec, placement_sec, rest_sec - placement_sec)
    return dict(zip(REASONS, found, strict=True))


def _data(timeline: Timeline, flight: Flight, independent_sec: float) -> str:
    other_sec = sum(piece.free_sec for piece in timeline.pieces)
    text = (
        f"only {1e3 * independent_sec:.2f} of {_ms(other_sec)} of this "
        f"{timeline.kind}'s other work is independent of it"
    )
    if needed := timeline.needed(flight):
        text += f"; it waits for {_longest(needed)}"
    if waiting := timeline.waiting(flight):
        text += f"; {_longest(waiting)} waits for it"
    return text


def _placement(timeline: Timeline, flight: Flight, elsewhere: list[Piece]) -> str:
    idle = [piece for piece in elsewhere if piece.idle_sec > 0]
    if not idle:
        return "no independent work stands idle elsewhere"
    longest = max(idle, key=lambda p: p.seconds)
    before = (piece.instruction.name for piece in timeline.pieces[: flight.first])
    side = (
        "before its start" if longest.instruction.name in before else ("after its done")
    )
    return (
        f"{_ms(sum(piece.idle_sec for piece in idle))} of this {timeline.kind}'s work "
        f"is independent of it and hides nothing; the longest, {_name(longest)}, "
        f"stands {side}"
    )


def _crowded(timeline: Timeline, flight: Flight, independent: list[Piece]) -> str:
    taken: dict[str, float] = {}
    for piece in independent:
        for start, seconds in piece.hidden.items():
            if start != flight.start:
                taken[start] = taken.get(start, 0.0) + seconds
    if not taken:
        return "no other collective takes its work"
    total_sec = sum(piece.free_sec for piece in independent)
    start = max(taken, key=taken.__getitem__)
    name = _describe(timeline.flights[start].collectives[0])
    return (
        f"{1e3 * sum(taken.values()):.2f} of {_ms(total_sec)} of this "
        f"{timeline.kind}'s work that is independent of it hides other collectives, "
        f"most of it {name} ({_ms(taken[start])})"
    )


def _longest(pieces: list[Piece]) -> str:
    return _name(max(pieces, key=lambda p: p.seconds))


def _name(piece: Piece) -> str:
    return f"{piece.description} ({_ms(piece.seconds)})"


def _describe(collective: Collective) -> str:
    """Return a short name of a collective: its kind, phase, scope and source line."""
    where = f"{collective.phase} {collective.scope}".strip()
    return " ".join(x for x in (collective.kind, where, collective.source) if x)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
