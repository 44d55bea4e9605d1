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
    """Name of the check, such as 'wgrad (hopper, bfloat16 2048x1024 rows 128+0)'."""
    avoided_by: str
    """Binding with which a run does not use it, such as "Dispatch.kernels = 'plain'";
    '' if there is none."""
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
    """Further facts about the difference."""

    @property
    def is_right(self) -> bool:
        """Whether the error is allowed."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        """Return the difference and how to avoid it, as clauses."""
        names = ", ".join(map(str, self.devices[:MAX_DEVICES]))
        more = ", .." if len(self.devices) > MAX_DEVICES else ""
        return (
            f"{self.name}: error {self.error:.3g}, allowed {self.allowed:.3g}, on "
            f"device {names}{more} (process {self.process})"
            f"{self.detail and f': {self.detail}'}: "
            f"{self.avoided_by or 'no option'} avoids it"
        )

    def record(self) -> dict:
        """Return the outcome for a JSON object, in which a number is finite."""
        fields = dataclasses.asdict(self) | {"is_right": self.is_right}
        return fields | {"error": self.error if math.isfinite(self.error) else None}


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
    error, and all devices on which it is wrong. All processes have the same checks in
    the same order."""
    merged = []
    for same in zip(*map(from_text, texts), strict=True):
        worst = max(same, key=lambda outcome: outcome.error)
        devices = sorted({device for each in same for device in each.devices})
        merged.append(dataclasses.replace(worst, devices=tuple(devices)))
    return to_text(merged)
