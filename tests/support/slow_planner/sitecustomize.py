"""Hold plans of the planner's process, in a Python that finds this folder in
PYTHONPATH: the decision for a step waits while MOEJAX_HELD_PLANS has a file of that
name."""

import os
import pathlib
import sys
import time

if "train.balance.planner_main" in sys.orig_argv:
    from moejax.balance import controller

    decide, held = controller.decide, pathlib.Path(os.environ["MOEJAX_HELD_PLANS"])

    def held_decide(settings, cost, state, step):
        while (held / str(step)).exists():
            time.sleep(0.01)
        return decide(settings, cost, state, step)

    controller.decide = held_decide
