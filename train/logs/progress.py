"""Show how a run goes: a bar on a terminal, a line now and then elsewhere."""

import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

SECONDS_BETWEEN_LINES = 10.0


class Bar:
    """Loss, throughput, load max/mean and ETA of a running loop; use as a context."""

    def __init__(self, num_steps: int, first_step: int):
        self.num_steps, self.first_step = num_steps, first_step
        self.started_sec = self.last_line_sec = time.monotonic()
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.progress = None
        if self.console.is_terminal:
            self.progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}"),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.progress.add_task(
                "", total=num_steps, completed=first_step, text=""
            )

    def __enter__(self) -> "Bar":
        if self.progress:
            self.progress.start()
        return self

    def __exit__(self, *_) -> None:
        if self.progress:
            self.progress.stop()

    def update(self, record: dict) -> None:
        text = (
            f"loss {record['loss']:.3f}  {record['tok_per_sec']:,.0f} tok/s  "
            f"load max/mean {max(record['load_max_over_mean']):.2f}"
        )
        if self.progress:
            self.progress.update(self.task, completed=record["step"], text=text)
            return
        now_sec = time.monotonic()
        is_last = record["step"] == self.num_steps
        if now_sec - self.last_line_sec >= SECONDS_BETWEEN_LINES or is_last:
            self.last_line_sec = now_sec
            done = record["step"] - self.first_step
            rate = (now_sec - self.started_sec) / max(done, 1)
            eta_sec = rate * (self.num_steps - record["step"])
            self.say(
                f"step {record['step']}/{self.num_steps}  {text}  ETA {eta_sec:.0f} s"
            )

    def say(self, line: str) -> None:
        """Print a line that stays, above the bar."""
        self.console.print(line, markup=False)
        sys.stdout.flush()
