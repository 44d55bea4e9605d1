"""The outcome of a check, and how those of several processes become one."""

import dataclasses
import json
import math
from collections.abc import Sequence

MAX_DEVICES = 16
"""Number of devices of one check that a line names at most."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Largest error of one check on the devices of one process, or of all."""

    name: str
    """What was checked, such as 'wgrad of into (hopper)'."""
    subject: str
    """What can be replaced if it is wrong: a kernel of moejax.kernels.quarantine, an
    option such as 'Dispatch.transport', or '' for neither."""
    error: float
    """Largest error: of a kernel relative to the largest expected value, of a
    collective the number of wrong values. Infinite for NaN and where nothing came
    out."""
    allowed: float
    """Largest error that is right."""
    devices: tuple[int, ...] = ()
    """Numbers (jax.Device.id) of the devices on which it is wrong."""
    process: int = 0
    """Process with the largest error."""
    detail: str = ""
    """What else is known of the difference."""

    @property
    def is_right(self) -> bool:
        """Whether the error is allowed."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        """Return the difference, as a clause."""
        error = f"error {self.error:.3g}, allowed {self.allowed:.3g}"
        names = ", ".join(map(str, self.devices[:MAX_DEVICES]))
        more = ", .." if len(self.devices) > MAX_DEVICES else ""
        where = f", on device {names}{more} (process {self.process})"
        return f"{self.name}: {error}{where if self.devices else ''}{self._end}"

    @property
    def _end(self) -> str:
        return f": {self.detail}" if self.detail else ""

    def record(self) -> dict:
        """Return the outcome for a JSON object, in which a number is finite."""
        fields = dataclasses.asdict(self) | {"is_right": self.is_right}
        is_finite = math.isfinite(self.error)
        return fields | {"error": self.error if is_finite else None}


def to_text(outcomes: Sequence[Outcome]) -> str:
    """Return outcomes as a text that `from_text` reads."""
    return json.dumps([dataclasses.asdict(outcome) for outcome in outcomes])


def from_text(text: str) -> list[Outcome]:
    """Return the outcomes of a text."""
    return [
        Outcome(**fields | {"devices": tuple(fields["devices"])})
        for fields in json.loads(text)
    ]


def merge(texts: Sequence[str]) -> str:
    """Return the outcomes of all processes as one text: for each check the largest
    error, and all devices on which it is wrong."""
    by_name: dict[str, list[Outcome]] = {}
    for text in texts:
        for outcome in from_text(text):
            by_name.setdefault(outcome.name, []).append(outcome)
    return to_text([_worst(outcomes) for outcomes in by_name.values()])


def _worst(outcomes: Sequence[Outcome]) -> Outcome:
    worst = max(outcomes, key=lambda outcome: outcome.error)
    devices = sorted({device for each in outcomes for device in each.devices})
    return dataclasses.replace(worst, devices=tuple(devices))
