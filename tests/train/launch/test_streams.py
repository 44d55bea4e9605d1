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


class FailingStream(io.StringIO):
    """A stream whose writes fail with an error of this number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, "refused")


def test_text_is_written_where_there_is_room():
    stream = io.StringIO()
    assert LenientStream(stream).write("text") == 4
    assert stream.getvalue() == "text"


def test_text_that_a_full_disk_does_not_take_is_lost():
    assert LenientStream(FailingStream(errno.ENOSPC)).write("text") == 4


def test_a_closed_pipe_is_an_error():
    with pytest.raises(BrokenPipeError):
        LenientStream(FailingStream(errno.EPIPE)).write("text")


def test_a_program_keeps_its_exit_code_on_a_full_disk(repo):
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-c", REFUSED]
        ended = subprocess.run(words, cwd=repo, stdout=full, stderr=full, check=False)
    assert ended.returncode == 2
