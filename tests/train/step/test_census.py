"""The collectives of the shipped step equal a golden file."""

import json

import pytest

from tools.compiled.census import census, compiled_census
from train.config import gin_reader


@pytest.mark.slow
def test_collectives_of_the_main_job(repo):
    """An accidental all-gather fails this test.

    `python tools/aot.py --gin_file=configs/tiny_cpu.gin --census --json` prints a new
    golden file. Review it before it replaces the old one.
    """
    golden = json.loads((repo / "tests/golden/census_tiny_cpu.json").read_text())
    assert census(gin_reader.load([repo / "configs/tiny_cpu.gin"])) == golden


def test_census_tells_ours_from_the_partitioners():
    text = """
      %a = f32[8] all-gather-start(%x), metadata={op_name="jit(f)/shard_map/all_gather"}
      %b = f32[8] all-reduce(%y), metadata={op_name="jit(f)/dot_general"}
      %c = f32[8] add(%a, %b), metadata={op_name="jit(f)/all-reduce"}
    """
    expected = {"ours": {"all-gather": 1}, "partitioner": {"all-reduce": 1}}
    assert compiled_census(text) == expected
