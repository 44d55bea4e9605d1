"""Damaged files of all formats that programs read: no traceback, no hang, no write
outside, no memory beyond twice the file and 200 MiB, no code run."""

import json

import pytest

from tests.support.mutated_formats import FORMATS
from tests.support.mutation_run import read_in_child

NUM_CASES = sum(form.num_cases for form in FORMATS.values())


def require_none(faults: list[dict]) -> None:
    """Raise AssertionError with the first faults, and the paths of their inputs."""
    lines = [json.dumps(fault, ensure_ascii=False) for fault in faults[:5]]
    assert not faults, f"{len(faults)} files: " + "\n".join(lines)


@pytest.mark.slow
def test_some_damaged_files_of_every_format(tmp_path):
    cases = {name: range(form.num_quick) for name, form in FORMATS.items()}
    require_none(read_in_child(tmp_path, cases))


def test_the_long_test_reads_10_000_files():
    assert NUM_CASES >= 10_000


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files(name, tmp_path):
    require_none(read_in_child(tmp_path, {name: range(FORMATS[name].num_cases)}))
