"""Show how a run goes: a bar on a terminal, a line every ten seconds elsewhere."""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def elapsed_shown(what: str) -> Iterator[None]:
    """Show on a terminal, while the block runs, what is going on and for how long.

    The sign vanishes when the block ends. Elsewhere, as in a log file, nothing is
    written.
    """
    console = _make_console()
    if not console.is_terminal:
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


class Bar:
    """The loss, throughput, device max/mean, expert max/mean and remaining time of a
    running loop; use as a context."""

    def __init__(self, num_steps: int, first_step: int):
        self.num_steps, self.first_step = num_steps, first_step
        self.started_sec, self.last_line_sec = time.monotonic(), -float("inf")
        self.console = _make_console()
        self.progress = None
        if self.console.is_terminal:
            self.progress = _BarAboveText(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=24),
                TextColumn("ETA"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.progress.add_task(
                "", total=num_steps, completed=first_step
            )

    def __enter__(self) -> "Bar":
        if self.progress:
            self.progress.start()
        return self

    def __exit__(self, *_) -> None:
        if self.progress:
            self.progress.stop()

    def update(self, record: dict) -> None:
        """Show the record of a step. Without a terminal the first and the last step get
        a line, and others when the last line is SECONDS_BETWEEN_LINES old."""
        text = progress_text(record)
        if self.progress:
            self.progress.text = text
            self.progress.update(self.task, completed=record["step"])
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


class _BarAboveText(Progress):
    """A progress bar with a line of text below; each fits into 80 columns."""

    text = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield Text(self.text)


def progress_text(record: dict) -> str:
    """Return a step's loss, throughput and ratios in one line.

    Both ratios are of the worst layer. The device ratio comes first, because a step
    takes as long as its fullest device. A router can keep the expert ratio high while
    the balancer keeps the device ratio low.
    """
    return (
        f"loss {record['loss']:.3f}  {record['tok_per_sec']:,.0f} tok/s  "
        f"device max/mean {max(record['device_max_over_mean']):.2f}  "
        f"expert max/mean {max(record['expert_max_over_mean']):.2f}"
    )


def _make_console() -> Console:
    """Return a console on sys.stdout that breaks and colors no lines."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)
