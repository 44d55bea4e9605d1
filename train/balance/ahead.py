"""Steps of another layout, compiled in a thread while the current steps run."""

import threading
import time
from collections.abc import Callable

from train.launch.program import COMPILES_AHEAD
from train.messages import one_line
from train.step.compiled import Steps


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
