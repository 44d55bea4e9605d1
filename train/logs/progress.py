"""Show how a run goes: a screen on a terminal, a line every ten seconds elsewhere."""

import contextlib
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

from rich.console import Console

from train.logs.region import Line, Region, can_draw
from train.logs.screen import Outlook, Sight, screen_lines
from train.logs.signs import Curve, signs_for

SECONDS_BETWEEN_LINES = 10.0
NUM_RECENT = 20
"""Number of steps of whose times the screen shows the median."""


@contextlib.contextmanager
def shown(num_steps: int, *, is_plain: bool = False) -> Iterator["Display"]:
    """Yield a display of a run: a screen if standard output is a terminal that can have
    one, and lines otherwise or with `is_plain`."""
    if is_plain or not can_draw(sys.stdout):
        yield Lines(num_steps)
        return
    screen = Screen(num_steps, signs_for(sys.stdout))
    try:
        with Region(sys.stdout, screen.draw):
            yield screen
    finally:
        if screen.last_line:
            print(screen.last_line, flush=True)


class Lines:
    """The loss, throughput, device max/mean, expert max/mean and remaining time of a
    running loop, as lines of a file."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._last_line_sec = -float("inf")
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)

    def begin(self, first_step: int, outlook: Callable[[], Outlook] = Outlook) -> None:
        """Begin to count time: the next step is the one after `first_step`."""
        self._first_step, self._begun_sec = first_step, time.monotonic()

    def during(self, what: str) -> contextlib.AbstractContextManager:
        """Show nothing about a block that does something else than train."""
        return contextlib.nullcontext()

    def evaluated(self, step: int, loss: float) -> None:
        """Show nothing: the line of an evaluation is printed by `say`."""

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


class Screen:
    """The state of a run's screen. A thread of the region draws it; only the thread
    that trains changes it, and never waits for a drawing."""

    def __init__(self, num_steps: int, signs) -> None:
        self.num_steps, self._signs = num_steps, signs
        self._first_step = self._step = 0
        self._made_sec = self._begun_sec = self._read_sec = time.monotonic()
        self._record: dict | None = None
        self._evaluation: tuple[int, float] | None = None
        self._losses = Curve()
        self._recent: deque[dict] = deque(maxlen=NUM_RECENT)
        self._doing: tuple[tuple[str, float], ...] = ()
        """What is being done and since when, the innermost last."""
        self._outlook: Callable[[], Outlook] = Outlook

    def begin(self, first_step: int, outlook: Callable[[], Outlook] = Outlook) -> None:
        """Begin to count time: the next step is the one after `first_step`. The screen
        asks `outlook`, from its own thread, for the balancer's decisions."""
        self._first_step = self._step = first_step
        self._begun_sec = self._read_sec = time.monotonic()
        self._outlook = outlook

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Show what is done in a block that does something else than train."""
        before = self._doing
        self._doing = (*before, (what, time.monotonic()))
        try:
            yield
        finally:
            self._doing = before
            self._read_sec = time.monotonic()

    def evaluated(self, step: int, loss: float) -> None:
        """Show the loss of an evaluation."""
        self._evaluation = step, loss

    def update(self, record: dict) -> None:
        """Show the record of a step."""
        self._losses.append(record["loss"])
        self._recent.append(record)
        self._record, self._step = record, record["step"]
        self._read_sec = time.monotonic()

    @property
    def last_line(self) -> str:
        """Line about the last step, for what is printed after the screen; '' before the
        first."""
        if self._record is None:
            return ""
        return f"step {self._step}/{self.num_steps}  {progress_text(self._record)}"

    def say(self, line: str) -> None:
        """Print a line that stays, above the screen."""
        print(line, flush=True)

    def draw(self, width: int, height: int) -> list[Line]:
        """Return the lines of the screen for a terminal of this size."""
        return screen_lines(self.sight(), width, height, self._signs)

    def sight(self) -> Sight:
        """Return what there is to see now."""
        now_sec, recent, doing = time.monotonic(), list(self._recent), self._doing
        done = self._step - self._first_step
        eta_sec = None
        if done > 0:
            rate = (now_sec - self._begun_sec) / done
            eta_sec = rate * (self.num_steps - self._step)
        what, since_sec = doing[-1] if doing else ("", now_sec)
        return Sight(
            num_steps=self.num_steps,
            step=self._step,
            record=self._record,
            losses=self._losses.points(),
            step_sec=_median(recent, "step_msec", 1e-3),
            tok_per_sec=_median(recent, "tok_per_sec"),
            mfu=_median(recent, "mfu"),
            evaluation=self._evaluation,
            doing=what,
            doing_sec=now_sec - since_sec,
            idle_sec=now_sec - self._read_sec,
            elapsed_sec=now_sec - self._made_sec,
            eta_sec=eta_sec,
            outlook=self._outlook(),
        )


Display = Lines | Screen
"""What a running loop tells how it goes."""


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


def _median(records: list[dict], name: str, scale: float = 1.0) -> float | None:
    values = [record[name] for record in records if record.get(name) is not None]
    return scale * statistics.median(values) if values else None
