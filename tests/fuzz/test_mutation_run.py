"""The harness of damaged files sees every fault that it is to see, and repeats its
cases."""

import random

import pytest

from tests.support.data_files import TEXTS
from tests.support.faulty_readers import FAULTS
from tests.support.mutated_formats import FORMATS
from tests.support.mutation_run import read_in_child
from tests.support.mutations import mutate


@pytest.mark.slow
def test_every_fault_is_seen(tmp_path):
    found = read_in_child(tmp_path, {reader.__name__: range(1) for reader in FAULTS})
    said = {reader.__name__: fault for reader, fault in FAULTS.items()}
    names = [record["format"] for record in found]
    assert names == list(said)
    for record in found:
        assert record["fault"].startswith(said[record["format"]]), record
    kept = list(tmp_path.glob("run-*/files/failed/*.bin"))
    assert len(kept) == len(found) - 1, "a crash leaves no copy"


@pytest.mark.parametrize("name", ["gin", "jsonl", "npy", "loads", "index"])
def test_a_case_is_the_same_in_every_run(name):
    whole = "\n".join(TEXTS).encode()
    form = FORMATS[name]
    first, second = (
        [mutate(whole, b"other", form.mutators, random.Random(n)) for n in range(20)]
        for _ in range(2)
    )
    assert first == second
    assert len(set(first)) > 10
