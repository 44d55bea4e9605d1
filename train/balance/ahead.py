"""The compiled steps of a layout, and those of another one, which are compiled while
the current steps run."""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from moejax.axes import everywhere
from train.launch.program import COMPILES_AHEAD
from train.messages import one_line
from train.step.compiled import require_room


@dataclasses.dataclass(frozen=True)
class Steps:
    """Train step and evaluation step, compiled for one layout. Both are exact."""

    train: Any
    evaluate: Any
    loop_free: Any = None
    """The train step without later rounds. None: a step is never run again."""

    def run(
        self, step: int, state, placement, windows, *, is_loop_free: bool = False
    ) -> tuple[Any, Any]:
        """Dispatch the train step number `step`, from 1; return state and metrics."""
        if self.loop_free is None:
            return self.train(state, placement, windows)
        program = self.loop_free if is_loop_free else self.train
        mesh = jax.tree.leaves(placement)[0].sharding.mesh
        with jax.transfer_guard("allow"):  # the guard takes it for an implicit transfer
            num_updates = everywhere(np.int32(step - 1), mesh)
        return program(state, placement, windows, num_updates)

    def require_room(self) -> None:
        """Raise ValueError if a train step needs more memory than a device here has."""
        for program in (self.train, self.loop_free):
            if program is not None:
                require_room(program)


class Ahead:
    """Steps of another layout, compiled in a thread of their own."""

    def __init__(self, make: Callable[[], Steps]) -> None:
        self._steps: Steps | None = None
        self._fault = ""
        self.begun_sec = time.monotonic()
        """Value of time.monotonic() when the compilation began."""
        self._thread = threading.Thread(
            target=self._run, args=(make,), name=COMPILES_AHEAD, daemon=True
        )
        self._thread.start()

    def _run(self, make) -> None:
        try:
            steps = make()
            steps.require_room()
        except Exception as fault:
            self._fault = f"{type(fault).__name__}: {one_line(fault)}"
        else:
            self._steps = steps

    @property
    def is_done(self) -> bool:
        """Whether the compilation has ended."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the compilation has ended."""
        self._thread.join()

    def result(self) -> tuple[Steps | None, str]:
        """Wait for the compilation. Return the steps and '', or None and the error."""
        self.wait()
        return self._steps, self._fault
