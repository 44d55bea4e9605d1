"""Run one stage of a bring-up in this process. tools/bringup.py starts it.

python -m tools.stages.run STAGE SETTINGS.json RESULT.json LIMIT_SEC
"""

import pathlib
import sys
import threading
import time

from tools.stages.runner import begin_process
from tools.stages.stage import Settings, Task
from tools.stages.table import BY_NAME


def main() -> int:
    name, settings_path, result_path, limit_sec = sys.argv[1:]
    settings = Settings.load(pathlib.Path(settings_path))
    begin_process()
    if f"hang:{name}" in settings.plants:
        print(f"{name} hangs, as planted", flush=True)
        threading.Event().wait()
    end_sec = time.monotonic() + float(limit_sec)
    task = Task(settings, pathlib.Path(result_path), end_sec)
    task.note("its beginning")
    task.finish(BY_NAME[name].work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
