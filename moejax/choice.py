"""The answer to a question that a configuration leaves open, and the reason for it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moejax.rich import shown_by


@shown_by("choice")
@dataclasses.dataclass(frozen=True)
class Choice[T]:
    """A chosen value, the reason, and what else there was."""

    value: T
    why: str
    """Reason for the choice, as one clause."""
    alternatives: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    """Every value that was compared, the chosen one among them, and what `str` says of
    it: its predicted time, or why it cannot run."""

    def lines(self, name: str) -> list[str]:
        """Return a line with the value and the reason, and one for each alternative."""
        others = [f"  {value}: {what}" for value, what in self.alternatives.items()]
        return [f"{name:<18} {self.value}: {self.why}", *others]
