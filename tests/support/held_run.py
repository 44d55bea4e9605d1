"""Run train/main.py, and hold it before a step.

python -m tests.support.held_run FILE STEP [flags of train/main.py]

Before it dispatches the step, the run makes the file. It goes on once the file is gone.
"""

import pathlib
import sys
import time

from train import main


def hold_at(step: int, file: pathlib.Path) -> None:
    """Make the run wait before this step until the file is removed."""
    start = main.start

    def start_and_patch(*args):
        process = start(*args)
        _patch_dispatch(step, file)
        return process

    main.start = start_and_patch


def _patch_dispatch(step: int, file: pathlib.Path) -> None:
    from train.in_flight import InFlight  # imports jax, whose flags are set by now

    dispatch = InFlight.dispatch

    def held_dispatch(self, now, *args):
        if now == step:
            file.touch()
            while file.exists():
                time.sleep(0.01)
        return dispatch(self, now, *args)

    InFlight.dispatch = held_dispatch


if __name__ == "__main__":
    hold_at(int(sys.argv[2]), pathlib.Path(sys.argv[1]))
    sys.exit(main.end(main.main(sys.argv[3:])))
