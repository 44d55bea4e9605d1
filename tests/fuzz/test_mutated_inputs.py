"""Damaged files that users give: no traceback, no hang, no write outside, no memory
beyond twice the file and 200 MiB, no code run.

The other half of the formats is in test_mutated_runs.py, so that two workers share the
time (`--dist loadfile`).
"""

import pytest

from tests.support.mutated_formats import FORMATS, INPUTS, RUN_FORMATS
from tests.support.mutation_run import require_no_faults


@pytest.mark.slow
def test_some_damaged_files_of_every_format(tmp_path):
    cases = {name: range(form.num_quick) for name, form in INPUTS.items()}
    require_no_faults(tmp_path, cases)


def test_the_long_tests_read_10_000_files():
    assert FORMATS.keys() == INPUTS.keys() | RUN_FORMATS.keys()
    assert sum(form.num_cases for form in FORMATS.values()) >= 10_000


@pytest.mark.long
@pytest.mark.parametrize("name", INPUTS)
def test_damaged_files(name, tmp_path):
    require_no_faults(tmp_path, {name: range(INPUTS[name].num_cases)})
