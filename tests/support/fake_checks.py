"""Stand in for tools/stages/kernel_checks.py: of the kernels, one is wrong, one crashes
and one hangs.

    python -m tests.support.fake_checks SETTINGS.json FINDINGS.jsonl wgrad/first ..
"""

import json
import os
import pathlib
import signal
import sys
import threading

WRONG, CRASHES, HANGS = "dgrad/first", "wgrad/first", "permute/first"


def main() -> None:
    _, findings, *units = sys.argv[1:]
    with pathlib.Path(findings).open("a") as file:
        for unit in units:
            file.write(json.dumps({"unit": unit, "is_over": False}) + "\n")
            file.flush()
            if unit == CRASHES:
                os.kill(os.getpid(), signal.SIGSEGV)
            if unit == HANGS:
                threading.Event().wait()
            why = "error 0.3, at most 0.01" if unit == WRONG else ""
            cases = 0 if unit.endswith("second") else 4
            line = {"unit": unit, "is_over": True, "why": why, "num_cases": cases}
            file.write(json.dumps(line | {"max_error": 0.001, "sec": 0.1}) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
