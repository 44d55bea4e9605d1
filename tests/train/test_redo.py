"""A run whose steps run again where an exchange overflows, with swaps and saves.
test_resume.py kills it.

A hot expert changes every ten steps, and rows of a pair of devices fit until then and
again after a swap.
"""

from unittest import mock

import pytest

from tests.support.run_main import checkpoint_record, metric_lines
from tests.support.watched_run import run_here, watched
from tests.support.workers import sample_ids
from train.in_flight import InFlight

NUM_STEPS, SAVED_EVERY = 45, 6
REDO = (
    "Dispatch.overflow = 'redo'",
    "Dispatch.buffer_factor = 1.5",
    "Data.log_samples = True",
    f"Train.num_steps = {NUM_STEPS}",
    f"Checkpoint.every_steps = {SAVED_EVERY}",
    "Checkpoint.keep_last = 20",
    "Train.check_replicas_every_steps = 4",
)


@pytest.mark.slow
@pytest.mark.long  # two programs of each step
def test_bits_are_those_of_a_run_that_knows_which_steps_overflow(tmp_path):
    with watched() as house:
        redo = run_here(house, tmp_path / "redo", *REDO)
        redone = {step for step, line in redo.steps.items() if line["redone"]}
        assert redone == {s for s, x in redo.steps.items() if max(x["rounds"]) > 1}
        assert redone == {s for s, x in redo.steps.items() if not x["loop_free"]}
        assert 20 <= len(redone) < NUM_STEPS, "after swaps all rows fit"
        assert {step + 1 for step in redone} & set(redo.adopted), "a swap after a redo"
        assert any(step % SAVED_EVERY == 0 for step in redone), "a save of one"

        def runs_loop_free(self, step):
            return step not in redone

        with mock.patch.object(InFlight, "_runs_loop_free", runs_loop_free):
            known = run_here(house, tmp_path / "known", *REDO)
    assert not any(line["redone"] for line in known.steps.values())
    for saved in (*range(SAVED_EVERY, NUM_STEPS, SAVED_EVERY), NUM_STEPS):
        records = [checkpoint_record(x.run_dir, saved) for x in (known, redo)]
        assert records[0]["arrays"] == records[1]["arrays"]
    for name in ("plan", "balance"):
        assert records[0]["meta"][name] == records[1]["meta"][name]
    lines, expected = (
        [line | {"redone": None} for line in metric_lines(x.run_dir)]
        for x in (known, redo)
    )
    assert lines == expected
    ids = sample_ids(redo.run_dir)
    assert ids == sample_ids(known.run_dir)
    assert sorted(ids) == list(range(1, NUM_STEPS + 1))
