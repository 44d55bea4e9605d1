"""Show on standard error how far a long piece of work is: a bar, a rate, the time left.

with counted("plans", "samples", total=600) as counter:
    for sample in samples:
        ..
        counter.advance()
"""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.filesize import decimal
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

BYTES = "B"


@contextlib.contextmanager
def counted(
    what: str,
    unit: str,
    total: float | None = None,
    poll: Callable[[], float] | None = None,
) -> Iterator["Counter"]:
    """Yield the counter of a piece of work, which is shown until the block ends if
    standard error is a terminal.

    `poll`, if given, returns the amount done; it is called in a thread. Without `total`
    there is no time that is left. What is printed meanwhile stays above.
    """
    progress = _Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        _Amount(unit),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        console=Console(file=sys.stderr, highlight=False),
        transient=True,
        disable=not Console(file=sys.stderr).is_interactive,
    )
    counter = Counter(progress, progress.add_task(what, total=total, text=""))
    progress.poll, progress.counter = poll, counter
    with progress:
        yield counter


class Counter:
    """The amount of work that is done."""

    def __init__(self, progress: Progress, task) -> None:
        self._progress, self._task = progress, task

    def advance(self, number: float = 1) -> None:
        """Add to what is done."""
        self._progress.advance(self._task, number)

    def set(
        self,
        done: float | None = None,
        total: float | None = None,
        text: str | None = None,
    ) -> None:
        """Set what is done, of how much, or a text that is shown beside; None leaves a
        value as it is."""
        fields = {} if text is None else {"text": text}
        self._progress.update(self._task, completed=done, total=total, **fields)


class _Progress(Progress):
    """A progress bar that asks for the amount done before each drawing."""

    poll: Callable[[], float] | None = None
    counter: Counter | None = None

    def get_renderables(self):
        if self.poll is not None and self.counter is not None:
            self.counter.set(done=self.poll())
        return super().get_renderables()


class _Amount(ProgressColumn):
    """How much is done, of how much, and the rate."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        of = "" if task.total is None else f" of {self._text(task.total)}"
        rate = f", {self._text(task.speed)}/s" if task.speed else ""
        return Text(f"{self._text(task.completed)}{of}{rate}")

    def _text(self, number: float) -> str:
        if self._unit == BYTES:
            return decimal(int(number))
        return f"{number:,.3g} {self._unit}"
