"""Processes that meet as those of a run do, and exchange numbers until they are told to
end: a program for tests, and what starts it.

    python tests/support/meeting.py FOLDER

Each process writes FOLDER/met-<index> with its coordinator's address when the first
numbers have gone round, and ends well once FOLDER/stop exists.
"""

import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "tools" / "launch" / "local.py"
LIMIT_SEC = 120


class Meeting:
    """Two processes of a launcher that are running and have met.

    It is a context manager, and kills the launcher and with it the processes at the end
    of the block.
    """

    def __init__(self, folder: pathlib.Path, *prefix: str):
        """`prefix` are words before the command of the launcher."""
        self.folder = folder
        words = [sys.executable, str(LAUNCHER), "-n", "2", "--max_restarts=0", "--json"]
        words += ["--", str(pathlib.Path(__file__)), str(folder)]
        environ = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        del environ["XLA_FLAGS"]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*prefix, *words], env=environ, stdout=pipe, stderr=pipe, text=True
        )

    def __enter__(self) -> "Meeting":
        end_sec = time.monotonic() + LIMIT_SEC
        self.pids = []
        for index in range(2):
            path = self.folder / f"met-{index}"
            while not (path.exists() and path.read_text().endswith("\n")):
                assert self.process.poll() is None, self.process.communicate()
                assert time.monotonic() < end_sec, f"process {index} never met"
                time.sleep(0.01)
            self.coordinator, pid = path.read_text().split()
            self.pids.append(int(pid))
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> tuple[int, str, dict]:
        """Ask the processes to end, and return the exit code, what was printed, and the
        launcher's record."""
        (self.folder / "stop").touch()
        out, err = self.process.communicate(timeout=LIMIT_SEC)
        return self.process.returncode, out + err, json.loads(out.splitlines()[-1])


def meet(folder: pathlib.Path) -> None:
    """Join the run that the environment names, and exchange numbers."""
    from jax.experimental import multihost_utils

    from moejax.config import Config
    from train.launch import coordinator
    from train.launch.processes import any_process, join

    join(Config())
    index, count, is_over = coordinator.own_index(), coordinator.count(), False
    while not is_over:
        indices = multihost_utils.process_allgather(np.int32(index))
        assert indices.tolist() == list(range(count))
        met = folder / f"met-{index}"
        if not met.exists():
            met.write_text(f"{os.environ['MOEJAX_COORDINATOR']} {os.getpid()}\n")
        is_over = any_process((folder / "stop").exists())
        time.sleep(0.02)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    meet(pathlib.Path(sys.argv[1]))
