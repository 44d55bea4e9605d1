"""Types of a stage: its Settings and Task, which it is given, and its Result."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from train.files import write_whole
from train.messages import one_line

DRY_KIND = "interpreted H100"
"""Kind of device of a dry run: the name of a Hopper GPU, so that kernels are chosen as
there, and that of no real one, so that no other run reads its choices."""
DRY_SECOND = ("forward", "wgrad")
"""Passes whose second forms a dry run checks, in turns alone: to the interpreter, other
forms are no other program, or need groups that are aligned."""
LINE = 200
"""Largest number of characters of a stage's line."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a bring-up, which every stage reads."""

    out: str
    """Folder of the results, which come back from the machine."""
    work: str
    """Folder of caches, corpora and runs, which stay there."""
    is_dry: bool
    """Whether stages run on the CPU, at toy size."""
    device_kind: str
    """Kind of the devices, by which the file of choices is named."""
    num_devices: int
    is_hopper: bool
    gin_files: tuple[str, ...]
    """Configurations whose shapes are tuned, and whose first one is trained."""
    memory_bytes: int | None = None
    """Bytes of a device that JAX may use; None where it does not say."""
    corpus: str = ""
    """Prepared corpus to train on; '': random words are written."""
    is_small: bool = False
    """Whether each kernel is checked on one small case, as under a sanitizer."""
    plants: tuple[str, ...] = ()
    """Faults to plant: 'wrong:KERNEL', 'wrong:KERNEL/second' or 'hang:STAGE'."""

    @classmethod
    def load(cls, path: pathlib.Path) -> "Settings":
        values = json.loads(path.read_text())
        tuples = ("gin_files", "plants")
        return cls(**values | {name: tuple(values[name]) for name in tuples})

    def save(self, path: pathlib.Path) -> None:
        write_whole(path, json.dumps(dataclasses.asdict(self), indent=1))

    @property
    def platform(self) -> str:
        """Platform of the devices in the flags of programs: 'cpu' or 'gpu'."""
        return "cpu" if self.is_dry else "gpu"


class Result(NamedTuple):
    """Result of a stage."""

    state: str
    """One of record.STATES."""
    why: str
    """The main figures, or what is wrong, as one line."""
    figures: dict[str, Any]


class NotHere(Exception):
    """Raised by a stage that this machine cannot run; the message says why."""


@dataclasses.dataclass
class Task:
    """A stage at work: its settings, its deadline, and the file of what it has found
    so far, which outlives it if it is killed."""

    settings: Settings
    path: pathlib.Path
    """File of the figures so far."""
    end_sec: float
    """Value of time.monotonic() after which the stage is killed."""
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def left_sec(self) -> float:
        """Seconds until the stage is killed."""
        return self.end_sec - time.monotonic()

    def note(self, doing: str, **figures: Any) -> None:
        """Store what is known so far, and what is done next."""
        self.figures |= figures
        write_whole(self.path, json.dumps({"doing": doing, "figures": self.figures}))

    def finish(self, work: Callable[["Task"], Result]) -> Result:
        """Do the work of a stage, and store its result. An error is a failure with one
        line; the traceback goes to the log."""
        try:
            result = work(self)
        except NotHere as why:
            result = Result("not_here", one_line(why, LINE), self.figures)
        except Exception as error:
            import traceback

            traceback.print_exc()
            text = f"{type(error).__name__}: {one_line(error, LINE)}"
            result = Result("failed", text, self.figures)
        write_whole(self.path, json.dumps(result._asdict()))
        return result


class Stage(NamedTuple):
    """One stage of a bring-up."""

    name: str
    what: str
    """What it does, as one clause."""
    work: Callable[[Task], Result]
    need_sec: float
    """Seconds that it takes at least: with less time it is left for the next call."""
    limit_sec: float
    """Seconds after which it is killed at the latest."""
    needs: tuple[str, ...] = ()
    """Modules that it imports beside jax and numpy."""
    needs_hopper: bool = False
    """Whether it is about our kernels alone."""
    after: tuple[str, ...] = ()
    """Stages that must have ended before it begins."""
