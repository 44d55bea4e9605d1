"""The balancer's record in a checkpoint: what is in use and waits, and the planner."""

import dataclasses
import json

from moejax.balance import adoptions
from moejax.balance.adoptions import Adoptions
from moejax.balance.planning import Snapshot, Task

FORMAT = 3
"""Number of the format of a record, which rises when its fields change."""


@dataclasses.dataclass(frozen=True)
class BalanceRecord:
    """State of the balancer of a run after a step."""

    now: Adoptions
    first_step: int | None
    """First step that this balancer has observed; None before it."""
    task: Task
    """What the planner knew of the run. A run that goes on has its own."""
    planner: str
    """JSON of the planner's Snapshot."""

    def to_json(self) -> str:
        """Return JSON from which `from_json` restores the record bit for bit."""
        return json.dumps(
            {
                "format": FORMAT,
                "adoptions": adoptions.to_json(self.now),
                "first_step": self.first_step,
                "task": self.task.to_json(),
                "planner": self.planner,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "BalanceRecord | None":
        """Return the record that `to_json` wrote; None if it has another FORMAT."""
        record = json.loads(text)
        if record.get("format") != FORMAT:
            return None
        return cls(
            Adoptions(**adoptions.fields(record["adoptions"])),
            record["first_step"],
            Task.from_json(record["task"]),
            record["planner"],
        )

    def settled(self) -> "BalanceRecord":
        """Return the record after the planner has taken all events. Two equal runs have
        it in common, however far their planners were when they were saved."""
        snapshot = Snapshot.from_json(self.planner).settled(self.task)
        return dataclasses.replace(self, planner=snapshot.to_json())
