"""Runs of several processes on this machine, under tools/launch/local.py."""

import json
import pathlib

from tests.support.run_main import ROOT, Live, command

WORKERS = ROOT / "tests" / "support" / "workers.gin"
LAUNCHER = ROOT / "tools" / "launch" / "local.py"
QUICK = ("Processes.heartbeat_sec = 10", "Processes.shutdown_sec = 20")


class LiveWorkers(Live):
    """A gang that goes on; with its launcher it is killed when the block ends."""

    def __init__(
        self, run_dir: pathlib.Path, count: int, *params: str, flags=(), of_main=()
    ):
        """`flags` are the launcher's, `of_main` those of train/main.py."""
        words = command(run_dir, *QUICK, *params, flags=of_main, gin_file=WORKERS)
        launcher = [words[0], str(LAUNCHER), "-n", str(count), *flags, "--json", "--"]
        self.start(run_dir, [*launcher, *words[1:]])

    def pids(self) -> list[int]:
        """Of the living processes, by index."""
        found = {}
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
                found[int(words["MOEJAX_PROCESS_ID"])] = int(path.parent.name)
        return [found[index] for index in sorted(found)]


def run_workers(run_dir: pathlib.Path, count: int, *params: str, flags=()):
    """Ended; its out holds what process 0 said, and its last line is the launcher's."""
    with LiveWorkers(run_dir, count, *params, flags=flags) as live:
        return live.end()


def sample_ids(run_dir: pathlib.Path) -> dict[int, list[str]]:
    """By step: the id of each row of the batch in order, from all processes' files."""
    rows: dict[int, dict[int, str]] = {}
    for path in run_dir.glob("samples-*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            of_step = rows.setdefault(record["step"], {})
            for row, name in zip(record["rows"], record["ids"], strict=True):
                assert of_step.setdefault(row, name) == name, "two ids of one row"
    for step, of_step in rows.items():
        assert sorted(of_step) == list(range(len(of_step))), f"rows of step {step}"
    return {
        step: [of_step[i] for i in sorted(of_step)] for step, of_step in rows.items()
    }
