"""Training runs in turns on one cluster, each stopped while it is not its turn.

    arm     ████░░░░████████░░░       a block: the steps of one run while the others
    home    ░░░░████░░░░░░░░██        are stopped (SIGSTOP, which reaches every thread)
    turns   a   h h a   a   h ..      so that slow changes of the machine hit both alike

A stopped run takes no core and sends nothing: no compilation of a relayout goes on, and
no plan is made. So what a run does beside its steps is paid for in its own blocks. A
run is stopped when the line of a block's last step is in its metrics.jsonl, which is
within POLL_SEC and the time to write it; what it has then done of the next step is
missing from its next block. Sums of blocks are exact.

The first steps of a block are slower than the others: caches are cold, and what was
stopped in the middle of a step goes on. Steady times leave these out.
"""

import dataclasses
import pathlib
import time
from collections.abc import Sequence

from tools.testbed.cluster import HeldProgram
from train.logs.record_lines import parse_line

POLL_SEC = 0.005
"""Interval at which a run's metrics.jsonl is looked at; a step takes a hundred times as
long."""


@dataclasses.dataclass(frozen=True)
class Block:
    """Consecutive steps of one run, and the wall time that they took."""

    run: str
    first_step: int
    last_step: int
    sec: float

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step + 1

    @property
    def step_sec(self) -> float:
        """Mean wall time of a step of the block, in seconds."""
        return self.sec / self.num_steps


SETTLING_STEPS = 2
"""First steps of a block that steady times leave out."""


class Metrics:
    """The records of a run's metrics.jsonl, read while the run writes them."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path, self._offset = path, 0
        self.records: list[dict] = []
        """All records so far, evaluations and decisions included."""
        self.last_step = 0
        """Number of the last step whose line is there; 0 before the first."""

    def read(self) -> None:
        """Take over the whole lines that were written since the last call."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return
        if size == self._offset:
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            if (record := parse_line(line)) is not None:
                self.records.append(record)
                if "step_msec" in record:
                    self.last_step = record["step"]


@dataclasses.dataclass
class Run:
    """A training run that takes turns with others."""

    name: str
    program: HeldProgram
    metrics: Metrics
    goal_step: int = 0
    """Step up to which the run was let go on; it may have done one more."""

    def advance(self, num_steps: int, limit_sec: float) -> Block:
        """Let the run do `num_steps` more steps, stop it when the last one is in its
        metrics, and return the block. Raises OSError if it ends, or takes longer than
        the limit."""
        self.goal_step += num_steps
        first, begin_sec = self.metrics.last_step + 1, time.monotonic()
        self.program.go_on()
        while self.metrics.last_step < self.goal_step:
            self.program.require_running()
            if time.monotonic() - begin_sec > limit_sec:
                raise OSError(
                    f"{self.name} has not done step {self.goal_step} after "
                    f"{limit_sec:g} s"
                )
            time.sleep(POLL_SEC)
            self.metrics.read()
        self.program.hold()
        sec = time.monotonic() - begin_sec
        self.metrics.read()  # a line may have come before the processes stopped
        return Block(self.name, first, self.metrics.last_step, sec)


def steady_steps(blocks: Sequence[Block]) -> list[int]:
    """Return the numbers of the steps of blocks that do not follow a switch; of all
    steps where no block is long enough."""
    steady = [
        step
        for block in blocks
        for step in range(block.first_step + SETTLING_STEPS, block.last_step + 1)
    ]
    every = [s for b in blocks for s in range(b.first_step, b.last_step + 1)]
    return steady or every


def order(num_runs: int, num_blocks: int) -> list[int]:
    """Return whose turn each block is, by the number of the run, with `num_blocks` of
    each.

    Every second round is reversed (0 1 2 2 1 0 0 1 2 ..), so that no run has the later
    part of all rounds.
    """
    forth = list(range(num_runs))
    rounds = forth, forth[::-1]
    return [index for number in range(num_blocks) for index in rounds[number % 2]]


def take_turns(
    runs: Sequence[Run], block_steps: int, num_blocks: int, limit_sec: float
) -> list[Block]:
    """Let runs, which are stopped, do their blocks in turns, and return them in the
    order in which they ran."""
    turns = order(len(runs), num_blocks)
    return [runs[index].advance(block_steps, limit_sec) for index in turns]
