"""Test the comparison of measured and modelled times of several runs."""

import json

import numpy as np
import pytest

from tools import predictions, rank_runs


def write_run(folder, measured, modelled, **extra) -> str:
    """Write a run whose steps, from 6 on, have these milliseconds; return its name."""
    folder.mkdir()
    records = [{"step": s, "step_msec": 9e3, "modelled_step_msec": 1} for s in (1, 5)]
    for step, (real, model) in enumerate(zip(measured, modelled, strict=True), 6):
        records.append({"step": step, "step_msec": real, "modelled_step_msec": model})
    last = {"step": 99, "step_msec": 8e3, "modelled_step_msec": 2}
    records += [last | {"adopt_msec": 3.0}, last | {"redone": True}]
    records += [{"step": 99, "eval_loss": 2.0}, {"step": 99, "decision": {}}]
    path = folder / "metrics.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n")
    return str(folder)


def ranked(capsys, *words) -> dict:
    """Return the record that the tool writes for these arguments."""
    assert rank_runs.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_bias_correlation_and_order(tmp_path, capsys):
    """Runs of 10, 20 and 30 ms, of which the model puts the last before the second."""
    measured = np.array([9.0, 10, 11, 10, 14])
    names = [
        write_run(tmp_path / "a", measured, 0.5 * measured),
        write_run(tmp_path / "b", 10 + measured, 40 - measured),
        write_run(tmp_path / "c", 20 + measured, np.full(5, 25.0)),
    ]
    record = ranked(capsys, *reversed(names))
    assert record["by_step_msec"] == names
    assert record["by_modelled_step_msec"] == [names[0], names[2], names[1]]
    assert (record["num_pairs"], record["num_pairs_in_order"]) == (3, 2)
    a, b, c = (record["runs"][name] for name in names)
    assert [x["num_steps"] for x in (a, b, c)] == [5, 5, 5]
    assert (a["step_msec"], a["modelled_step_msec"]) == (10.0, 5.0)
    assert a["bias"] == pytest.approx(-0.5)
    assert b["bias"] == pytest.approx(0.5)
    assert a["correlation"] == pytest.approx(1.0)
    assert b["rank_correlation"] == pytest.approx(-1.0)
    assert c["correlation"] is c["rank_correlation"] is None


def test_equal_values_share_a_rank():
    assert predictions.ranks(np.array([3.0, 1, 3, 2])).tolist() == [2.5, 0, 2.5, 1]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["nowhere"], "nowhere has no metrics.jsonl"),
        (["{run}", "--skip", "99"], "no step after step 99"),
        (["{run}", "{run}"], "named twice"),
    ],
)
def test_bad_input_is_one_line(words, problem, tmp_path, capsys):
    run = write_run(tmp_path / "a", [1.0], [1.0])
    assert rank_runs.main([word.format(run=run) for word in words]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert error.count("\n") == 1
