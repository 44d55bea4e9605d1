"""Show how a run goes: a bar on a terminal, a line every ten seconds elsewhere."""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

SECONDS_BETWEEN_LINES = 10.0


@contextlib.contextmanager
def shown(num_steps: int, *, is_plain: bool = False) -> Iterator["Display"]:
    """Yield a display of a run: a bar if standard output is a terminal, and lines
    otherwise or with `is_plain`."""
    console = Console(file=sys.stdout, highlight=False, soft_wrap=True, emoji=False)
    if is_plain or not console.is_interactive:
        yield Lines(num_steps, console)
        return
    bar = Bar(num_steps, console)
    try:
        with bar.progress:
            yield bar
    finally:
        if bar.last_line:
            print(bar.last_line, flush=True)


class Lines:
    """The loss, throughput, device max/mean, expert max/mean and remaining time of a
    running loop, as lines of a file."""

    def __init__(self, num_steps: int, console: Console) -> None:
        self.num_steps, self._console = num_steps, console
        self._last_line_sec = -float("inf")

    def begin(self, first_step: int) -> None:
        """Begin to count time: the next step is the one after `first_step`."""
        self._first_step, self._begun_sec = first_step, time.monotonic()

    def during(self, what: str) -> contextlib.AbstractContextManager:
        """Show nothing about a block that does something else than train."""
        return contextlib.nullcontext()

    def update(self, record: dict) -> None:
        """Show the record of a step. The first and the last step get a line, and others
        when the last line is SECONDS_BETWEEN_LINES old."""
        now_sec, step = time.monotonic(), record["step"]
        is_last = step == self.num_steps
        if now_sec - self._last_line_sec < SECONDS_BETWEEN_LINES and not is_last:
            return
        self._last_line_sec = now_sec
        rate = (now_sec - self._begun_sec) / max(step - self._first_step, 1)
        eta_sec = rate * (self.num_steps - step)
        text = progress_text(record)
        self.say(f"step {step}/{self.num_steps}  {text}  ETA {eta_sec:.0f} s")

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, markup=False)
        sys.stdout.flush()


class Bar:
    """The same as a bar at the bottom of a terminal, with what is done beside training.
    What is printed meanwhile stays above it."""

    def __init__(self, num_steps: int, console: Console) -> None:
        self.num_steps = num_steps
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=20),
            TextColumn("{task.description}", markup=False),
            TimeRemainingColumn(),
            TextColumn("{task.fields[doing]}", markup=False),
            console=console,
            transient=True,
        )
        self._task = self.progress.add_task("", total=num_steps, doing="", start=False)
        self._doing: tuple[str, ...] = ()
        self.last_line = ""
        """Line about the last step, for what is printed after the bar; '' before the
        first."""

    def begin(self, first_step: int) -> None:
        """Begin to count time: the next step is the one after `first_step`."""
        self.progress.update(self._task, completed=first_step)
        self.progress.start_task(self._task)

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Show what is done in a block that does something else than train."""
        self._show_doing((*self._doing, what))
        try:
            yield
        finally:
            self._show_doing(self._doing[:-1])

    def _show_doing(self, doing: tuple[str, ...]) -> None:
        self._doing = doing
        self.progress.update(self._task, doing=doing[-1] if doing else "")

    def update(self, record: dict) -> None:
        """Show the record of a step."""
        step, text = record["step"], progress_text(record)
        self.last_line = f"step {step}/{self.num_steps}  {text}"
        self.progress.update(self._task, completed=step, description=text)

    def say(self, line: str) -> None:
        """Print a line that stays, above the bar."""
        self.progress.console.print(line, markup=False)


Display = Lines | Bar
"""Display of a running loop: lines, or a bar."""


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
