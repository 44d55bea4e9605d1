"""The collectives of the shipped step equal a golden file."""

import json

import pytest

from tests.support.census import census
from train.config import gin_reader


@pytest.mark.slow
@pytest.mark.long  # test_traced_steps.py and test_dense_weights.py hold small steps
def test_collectives_of_the_main_job(repo):
    """An accidental all-gather fails this test.

    `python -m tests.support.census` prints a new golden file. Review it before it
    replaces the old one.
    """
    golden = json.loads((repo / "tests/golden/census_tiny_cpu.json").read_text())
    assert census(gin_reader.load([repo / "configs/tiny_cpu.gin"])) == golden
