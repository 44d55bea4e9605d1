"""Make the planner's process slow, in a Python that finds this folder in PYTHONPATH:
each decision takes MOEJAX_SLOW_PLAN_SEC longer."""

import os
import sys
import time

if "train.balance.planner_main" in sys.orig_argv:
    from moejax.balance import controller

    decide = controller.decide

    def slow_decide(*args):
        time.sleep(float(os.environ["MOEJAX_SLOW_PLAN_SEC"]))
        return decide(*args)

    controller.decide = slow_decide
