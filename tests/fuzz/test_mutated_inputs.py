"""Damaged files that users give and that a run writes: no traceback, no hang, no write
outside, no memory beyond a limit, no code run."""

import pytest

from tests.support.mutated_formats import FORMATS
from tests.support.mutation_run import require_no_faults

QUICK_CASES = 3
"""Number of damaged files of each format that `make test` reads."""


@pytest.mark.slow
def test_some_damaged_files_of_every_format(tmp_path):
    require_no_faults(tmp_path, dict.fromkeys(FORMATS, range(QUICK_CASES)))


@pytest.mark.long
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files(name, tmp_path):
    require_no_faults(tmp_path, {name: range(FORMATS[name].num_cases)})
