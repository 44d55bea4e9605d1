"""The type of a fault: its name, its promise, and the function that puts it into a run.

A fault that disturbs a `running` run does everything in its function: it waits for
nothing before, since the scenario has chosen the moment, and it raises Broken when the
promise is not kept. A fault that damages files of a `resting` run may return Damage,
which is looked at once the run has been started again.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Literal

from tools.faults.run import Run

GOES_ON, REFUSES_OR_GOES_ON = "goes on", "refuses or goes on"


@dataclasses.dataclass(frozen=True)
class Damage:
    """Damaged files of a resting run, and what the next start has to do about them."""

    answer: Literal["goes on", "refuses or goes on"]
    """Whether the run may also end with 2 and one line. The damage is then healed."""
    named: tuple[str, ...]
    """Words of which the line of a refusal has one, such as the file's name."""
    heal: Callable[[], None] = lambda: None
    check: Callable[[str], None] = lambda text: None
    """Raises Broken unless the text of the next start, which has reached a step, says
    what it has to say."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    promise: str
    state: Literal["running", "resting"]
    act: Callable[[Run, random.Random], Damage | None]
    may_be_early: bool = False
    """Whether it may also hit a run that has not done its first step."""
    min_processes: int = 1
    needs: Literal["", "mount", "small disk"] = ""
    """What only root can give: mounts, or a run directory on a small file system."""
