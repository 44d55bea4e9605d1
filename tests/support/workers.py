"""Run several processes on this machine with tools/launch/local.py."""

import json
import pathlib
import subprocess

import numpy as np

from tests.support.close import assert_close
from tests.support.run_main import (
    LIMIT_SEC,
    ROOT,
    Ended,
    Live,
    command,
    environment,
    metric_lines,
)
from tools.launch.workers import free_port
from train.launch.cluster import COORDINATOR, NUM_PROCESSES, PROCESS_ID

WORKERS = ROOT / "tests" / "support" / "workers.gin"
LAUNCHER = ROOT / "tools" / "launch" / "local.py"


class LiveWorkers(Live):
    """A launcher and its workers that are running.

    It is a context manager, and kills the launcher and with it the workers at the end
    of the block.
    """

    def __init__(
        self,
        run_dir: pathlib.Path,
        count: int,
        *params: str,
        flags=(),
        of_main=(),
        prefix=(),
        gin_file=WORKERS,
    ):
        """Start `count` workers. `flags` are flags of the launcher, `of_main` flags of
        train/main.py, `prefix` words before the launcher's command."""
        words = command(run_dir, *params, flags=of_main, gin_file=gin_file)
        launcher = [words[0], str(LAUNCHER), "-n", str(count), *flags, "--json", "--"]
        self.start(run_dir, [*prefix, *launcher, *words[1:]])

    def pids(self) -> list[int]:
        """Return the ids of the living workers, in the order of their indices."""
        pid_by_index = {}
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            try:
                words = dict(
                    w.split("=", 1) for w in path.read_text().split("\0") if "=" in w
                )
                parent = int(
                    path.with_name("stat").read_text().split(") ")[1].split()[1]
                )
            except (OSError, ValueError):
                continue
            if parent == self.process.pid and "MOEJAX_PROCESS_ID" in words:
                pid_by_index[int(words["MOEJAX_PROCESS_ID"])] = int(path.parent.name)
        return [pid_by_index[index] for index in sorted(pid_by_index)]


def run_workers(
    run_dir: pathlib.Path, count: int, *params: str, flags=(), gin_file=WORKERS
):
    """Run workers to their end, and return exit code and text.

    The text holds the lines of process 0; its last line is the launcher's.
    """
    with LiveWorkers(run_dir, count, *params, flags=flags, gin_file=gin_file) as live:
        return live.end()


def sample_ids(run_dir: pathlib.Path) -> dict[int, list[str]]:
    """Return the ids of the rows of each step's batch in order, from the files of all
    processes."""
    rows: dict[int, dict[int, str]] = {}
    for path in run_dir.glob("samples-*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            id_by_row = rows.setdefault(record["step"], {})
            for row, name in zip(record["rows"], record["ids"], strict=True):
                assert id_by_row.setdefault(row, name) == name, "two ids of one row"
    for step, id_by_row in rows.items():
        assert sorted(id_by_row) == list(range(len(id_by_row))), f"rows of step {step}"
    return {step: [ids[i] for i in sorted(ids)] for step, ids in rows.items()}


def assert_same_training(run_dir: pathlib.Path, alone: pathlib.Path) -> None:
    """Assert that a run has the losses and the samples of the run of one process, and
    each step once."""
    losses, expected = (
        {x["step"]: x["loss"] for x in metric_lines(path) if "loss" in x}
        for path in (run_dir, alone)
    )
    assert_close(
        np.float32([losses[step] for step in sorted(losses)]),
        np.float32([expected[step] for step in sorted(expected)]),
        factor=0.1,
        reason="one in a million: only the order of sums between devices differs",
    )
    ids = sample_ids(run_dir)
    assert ids == sample_ids(alone)
    assert sorted(ids) == sorted(losses) == list(range(1, len(expected) + 1))


def run_apart(
    run_dir: pathlib.Path, words_by_process, envs=None, folders=None, before=()
):
    """Run one process of train/main.py for each entry of `words_by_process`, which
    holds its bindings, without a launcher; return how each ended.

    `envs` and `folders` give variables and working directories of the processes,
    `before` a program and its arguments that run train/main.py.
    """
    port, count = free_port(), len(words_by_process)
    processes = []
    for index, params in enumerate(words_by_process):
        place = {COORDINATOR: f"127.0.0.1:{port}", NUM_PROCESSES: str(count)}
        place |= {PROCESS_ID: str(index)}
        words = command(run_dir, *params, gin_file=WORKERS)
        processes.append(
            subprocess.Popen(
                [words[0], *before, *words[1:]],
                env=environment() | place | (envs[index] if envs else {}),
                cwd=folders[index] if folders else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        texts = [process.communicate(timeout=LIMIT_SEC) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [Ended(p.returncode, *text) for p, text in zip(processes, texts)]
