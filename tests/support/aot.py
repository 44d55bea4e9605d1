"""Run tools/aot.py in a process of its own: its plugin is for no other test."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOY = ROOT / "tests" / "support" / "aot_toy.gin"
LIMIT_SEC = 1200


def run_aot(*words) -> tuple[str, dict]:
    """Return what the tool prints for these words, and its record."""
    command = [sys.executable, str(ROOT / "tools" / "aot.py"), *map(str, words)]
    names = ("XLA_FLAGS", "PJRT_NPROC", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    env = {name: value for name, value in os.environ.items() if name not in names}
    ended = subprocess.run(
        [*command, "--json"],
        env=env,
        capture_output=True,
        text=True,
        timeout=LIMIT_SEC,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    text, _, last = ended.stdout.rstrip().rpartition("\n")
    return text, json.loads(last)
