"""Test that no damage to a run's files keeps its page from being made."""

import random
import warnings

import pytest

from tests.support.mutations import BYTES, JSON, JSON_LINES, mutate
from tests.support.page_contract import require_contract
from tests.support.run_folders import finish, make_folder
from tools.run_page.read import RunReader, page_data
from tools.run_page.read_metrics import Limits

NAMES = (
    "metrics.jsonl", "metrics.jsonl", "plans.jsonl", "goodput.jsonl", "attempts.jsonl",
    "summary.json", "config.gin", ".lock",
)  # fmt: skip
MUTATORS = {"jsonl": JSON_LINES, "json": JSON}
SMALL = Limits(num_bins=8, load_bytes=100, rows_bytes=50, num_goodput=3)


@pytest.mark.parametrize(
    ("first", "count"), [(0, 60), pytest.param(60, 2000, marks=pytest.mark.long)]
)
def test_every_damaged_folder_has_a_page(tmp_path, first, count):
    folder = make_folder(tmp_path / "run")
    finish(folder)
    whole = {name: (folder / name).read_bytes() for name in NAMES}
    for seed in range(first, first + count):
        rng = random.Random(seed)
        name = rng.choice(NAMES)
        mutators = MUTATORS.get(name.rpartition(".")[2], BYTES)
        how, damaged = mutate(whole[name], whole[rng.choice(NAMES)], mutators, rng)
        (folder / name).write_bytes(damaged)
        try:
            with warnings.catch_warnings(action="error"):
                require_contract(page_data(RunReader(folder, SMALL)))
        except Exception as error:
            error.add_note(f"seed {seed}: {how} of {name}")
            raise
        (folder / name).write_bytes(whole[name])
