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
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

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
    amount = (MofNCompleteColumn(), TextColumn(unit))
    if unit == BYTES:
        amount = (DownloadColumn(), TransferSpeedColumn())
    console = Console(file=sys.stderr, highlight=False)
    progress = _Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        *amount,
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_interactive,
    )
    task = progress.add_task(what, total=total, text="")
    progress.counter, progress.poll = Counter(progress, task), poll
    with progress:
        yield progress.counter


class Counter:
    """The amount of work that is done."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
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
        if self.poll is not None:
            self.counter.set(done=self.poll())
        return super().get_renderables()
