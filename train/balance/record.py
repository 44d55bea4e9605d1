"""The balancer's record in a checkpoint: what is in use and waits, and the planner."""

import dataclasses
import json

from moejax.balance import codec
from moejax.balance.adoptions import Adoptions
from moejax.balance.planning import Snapshot, Task

FORMAT = 6
"""Number of the format of a record, which rises when its fields change."""


@dataclasses.dataclass(frozen=True)
class BalanceRecord:
    """State of the balancer of a run after a step."""

    now: Adoptions
    first_step: int | None
    """First step that this balancer has observed; None before it."""
    task: Task
    """Task of the planner when the record was made; a resumed run makes its own."""
    planner: Snapshot

    def to_json(self) -> str:
        """Return JSON from which `from_json` restores the record bit for bit."""
        values = self.now, self.first_step, self.task, self.planner
        return json.dumps({"format": FORMAT, "values": codec.dumps(values)})

    @classmethod
    def from_json(cls, text: str) -> "BalanceRecord | None":
        """Return the record that `to_json` wrote; None if it has another FORMAT."""
        record = json.loads(text)
        if record.get("format") != FORMAT:
            return None
        return cls(*codec.loads(record["values"]))

    def settled(self) -> "BalanceRecord":
        """Return the record after the planner has taken all events. Two equal runs have
        it in common, however far their planners were when they were saved."""
        return dataclasses.replace(self, planner=self.planner.settled(self.task))
