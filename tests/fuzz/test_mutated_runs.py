"""Damaged files that a run writes and caches, and sizes that it computes: no traceback,
no hang, no write outside, no memory beyond twice the file and 200 MiB, no code run."""

import pytest

from tests.support.mutated_formats import RUN_FORMATS
from tests.support.mutation_run import require_no_faults


@pytest.mark.slow
def test_some_damaged_files_of_every_format(tmp_path):
    cases = {name: range(form.num_quick) for name, form in RUN_FORMATS.items()}
    require_no_faults(tmp_path, cases)


@pytest.mark.long
@pytest.mark.parametrize("name", RUN_FORMATS)
def test_damaged_files(name, tmp_path):
    require_no_faults(tmp_path, {name: range(RUN_FORMATS[name].num_cases)})
