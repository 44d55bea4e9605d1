"""Run train/main.py, and kill this process in the middle of a redo, from the N-th on.

python -m tests.support.killed_in_redo N WHEN [flags of train/main.py]

WHEN is 'before' the exact step is dispatched, 'between' it and the step behind it, or
'after' both. Where all steps were settled, no step is behind.
"""

import os
import signal
import sys

from train import main
from train.in_flight import InFlight


def kill_at(number: int, when: str) -> None:
    """Make the process kill itself in a redo, from that with this number on."""
    again, settle, seen = InFlight._again, InFlight.settle, [0]

    def counted_again(self, before, state, *, is_loop_free):
        seen[0] += not seen[1:]  # the first of a redo is the exact step
        seen.append(before.step)
        is_exact = len(seen) == 2
        if seen[0] >= number and when == ("before" if is_exact else "between"):
            os.kill(os.getpid(), signal.SIGKILL)
        return again(self, before, state, is_loop_free=is_loop_free)

    def counted_settle(self, state):
        state, kept = settle(self, state)
        if seen[0] >= number and seen[1:] and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        del seen[1:]
        return state, kept

    InFlight._again, InFlight.settle = counted_again, counted_settle


if __name__ == "__main__":
    kill_at(int(sys.argv[1]), sys.argv[2])
    sys.exit(main.main(sys.argv[3:]))
