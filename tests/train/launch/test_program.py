"""Test that a program ends with its own exit code, whatever threads it leaves."""

import os
import subprocess
import sys

import pytest

from moejax.config import Config, Train
from moejax.plan.layout import Topology
from train.launch import program
from train.launch.program import (
    GPU_MEMORY_FRACTION,
    gpu_memory_fraction,
    set_up_backend,
)

WITH_A_THREAD = """
import sys, threading
from train.launch.program import end

wait = threading.Event().wait
threading.Thread(target=wait, args=(60,)).start()
print("a last line")
sys.exit(end(3))
"""
LIMIT_SEC = 120


def test_a_thread_that_waits_for_ever_does_not_keep_a_program(repo):
    words = [sys.executable, "-c", WITH_A_THREAD]
    ended = subprocess.run(
        words, cwd=repo, capture_output=True, check=False, timeout=LIMIT_SEC
    )
    assert ended.returncode == 3
    assert ended.stdout == b"a last line\n"


@pytest.mark.parametrize("own", [None, "0.5"])
def test_the_share_of_gpu_memory_is_set_unless_the_user_has(own, monkeypatch):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.setattr(os, "environ", {} if own is None else {name: own})
    set_up_backend(Config())
    assert os.environ[name] == (own or str(GPU_MEMORY_FRACTION))


def test_a_mesh_that_processes_cannot_share_is_refused(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(program, "join", lambda cfg: None)
    monkeypatch.setattr(program.coordinator, "count", lambda: 3)
    cfg = Config(
        mesh=Topology(expert=8), train=Train(batch_size=8, num_simulated_devices=8)
    )
    with pytest.raises(ValueError, match="=8 cannot be shared by 3 processes: give a"):
        program.start(cfg)


def test_the_share_of_memory_that_a_run_may_use(monkeypatch):
    for text, share in (("", GPU_MEMORY_FRACTION), ("0.5", 0.5), ("1", 1.0)):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", text)
        assert gpu_memory_fraction() == share
    for text in ("0", "1.01", "half"):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", text)
        with pytest.raises(ValueError, match="must be a number above 0, at most 1"):
            gpu_memory_fraction()
