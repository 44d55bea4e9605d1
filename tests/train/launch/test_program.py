"""Test that a program ends with its own exit code, whatever threads it leaves."""

import os
import subprocess
import sys

import pytest

from moejax.config import Config
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
sys.exit(end({code}))
"""
LIMIT_SEC = 120


@pytest.mark.parametrize("code", [0, 3])
def test_a_thread_that_waits_for_ever_does_not_keep_a_program(repo, code):
    words = [sys.executable, "-c", WITH_A_THREAD.format(code=code)]
    ended = subprocess.run(
        words, cwd=repo, capture_output=True, check=False, timeout=LIMIT_SEC
    )
    assert ended.returncode == code
    assert ended.stdout == b"a last line\n"


@pytest.mark.parametrize("own", [None, "0.5"])
def test_the_share_of_gpu_memory_is_set_unless_the_user_has(own, monkeypatch):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.setattr(os, "environ", {} if own is None else {name: own})
    set_up_backend(Config())
    assert os.environ[name] == (own or str(GPU_MEMORY_FRACTION))


@pytest.mark.parametrize(
    ("text", "share"), [("", GPU_MEMORY_FRACTION), ("0.5", 0.5), ("1", 1.0)]
)
def test_the_share_of_memory_that_a_run_may_use(monkeypatch, text, share):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", text)
    assert gpu_memory_fraction() == share
