"""Test that a full disk behind a program's output costs text and nothing else."""

import errno
import io
import subprocess
import sys

import pytest

from train.launch.streams import LenientStream

REFUSED = """
from train.launch.program import guarded

with guarded(as_json=True) as ending:
    print("a line")
    raise ValueError("a wrong field")
raise SystemExit(ending.code)
"""


def test_text_that_a_full_disk_does_not_take_is_lost(monkeypatch):
    stream, fault = io.StringIO(), OSError(errno.ENOSPC, "refused")

    def refuse(text: str) -> int:
        raise fault

    assert LenientStream(stream).write("text") == 4
    assert stream.getvalue() == "text"
    monkeypatch.setattr(stream, "write", refuse)
    assert LenientStream(stream).write("more") == 4
    fault = OSError(errno.EPIPE, "refused")
    with pytest.raises(BrokenPipeError):
        LenientStream(stream).write("text")


def test_a_program_keeps_its_exit_code_on_a_full_disk(repo):
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-c", REFUSED]
        ended = subprocess.run(words, cwd=repo, stdout=full, stderr=full, check=False)
    assert ended.returncode == 2
