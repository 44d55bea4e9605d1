"""Test a checkpoint of 2 GiB in four files: memory, bytes of each process, speed."""

import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support import large_folder
from tools.launch.workers import free_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAX_ABOVE_MIB = 300


@pytest.fixture
def folder(tmp_path) -> Iterator[pathlib.Path]:
    """A folder with 2 GiB, which is removed at the end."""
    large_folder.build(tmp_path / "model")
    yield tmp_path / "model"
    shutil.rmtree(tmp_path / "model")


@pytest.mark.long
def test_a_large_checkpoint_is_read_by_share(folder):
    for count in (1, 2):
        port = free_port()
        command = [sys.executable, "-m", "tests.support.large_folder", str(folder)]
        processes = [
            subprocess.Popen(
                [*command, str(count), str(index), str(port)],
                cwd=ROOT, stdout=subprocess.PIPE, text=True,
            )
            for index in range(count)
        ]  # fmt: skip
        results = []
        for process in processes:
            out, _ = process.communicate(timeout=500)
            assert process.returncode == 0, out
            results.append(json.loads(out.splitlines()[-1]))
        print(count, *results, sep="\n")
        for result in results:
            assert result["bytes_read"] == result["bytes_held"]
            assert result["above_mib"] < MAX_ABOVE_MIB
        # The norms and what has too few rows to split are read by each process.
        total = sum(result["bytes_read"] for result in results)
        assert 0 <= total - large_folder.num_bytes() < count * 2**20
