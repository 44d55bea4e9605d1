"""Test that one damaged line of a file of records costs that line and no other."""

import array
import itertools
import json
import os
import random
import tracemalloc

import pytest

from moejax.config import Balance, Config
from tests.support.metrics_lines import DECISIONS, balanced_lines
from tools.run_page.read import read_run
from tools.show_plan import read_metrics
from tools.testbed.run import step_records
from train.logs import record_lines
from train.logs.balance_summary import summarise_balance
from train.logs.record_lines import cut_back, read_records
from train.logs.records import MetricsLog

LAST = 20
BAD_LINES = {
    "not JSON": b'{"step": 7, "lo#s": 2.0\n',
    "not an object": b"[7]\n",
    "no step": b'{"loss": 2.0}\n',
    "it holds NUL bytes": b"\0" * 30 + b"\n",
    "step 92 is out of order": b'{"step": 92, "loss": 2.0}\n',
    "step 1 is out of order": b'{"step": 1, "loss": 2.0}\n',
}
ODD_VALUES = (
    None, True, -1, "x", [], {}, [None], [["x"]], {"kind": "swap"}, 10**400,
    float("nan"), float("inf"), [10**400], [[10**400]], {"kind": [1], "adopt_step": 2},
    {"kind": "swap", "adopt_step": "4", "changes": [1]},
)  # fmt: skip


def good_line(step: int) -> bytes:
    return json.dumps({"step": step, "loss": 1.0 / step}).encode() + b"\n"


def write_damaged(path, bad: bytes, place: int = 7) -> None:
    """Write the lines of LAST steps, with `bad` in place of one of them."""
    lines = [good_line(step) for step in range(1, LAST + 1)]
    lines[place - 1] = bad
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("bad", BAD_LINES.items(), ids=BAD_LINES)
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples-0.jsonl"])
def test_a_damaged_line_is_set_aside_and_later_lines_stay(tmp_path, name, bad):
    (why, line), messages = bad, []
    path = tmp_path / name
    write_damaged(path, line)
    with MetricsLog(path, say=messages.append) as log:
        log.cut_back(LAST)
        log.append({"step": LAST + 1, "loss": 0.0})
    steps = [record["step"] for record in read_records(path)]
    assert steps == [step for step in range(1, LAST + 2) if step != 7]
    assert (tmp_path / f"{name}.damaged").read_bytes() == line
    (message,) = messages
    assert f"line 7: {why}" in message
    assert str(path) in message


def test_a_wrong_step_between_lines_of_one_step_costs_no_other(tmp_path):
    """A step, a decision with a wrong step, and an evaluation of the same step."""
    path, messages = tmp_path / "metrics.jsonl", []
    lines = [*map(good_line, (1, 2, 9, 2, 3)), good_line(4)]
    path.write_bytes(b"".join(lines))
    cut_back(path, LAST, messages.append)
    assert path.read_bytes() == b"".join(lines[:2] + lines[3:])
    assert "METRICS DAMAGED: 1 lines" in messages[0]


def test_a_longest_sequence_in_order_is_kept():
    """Compare its numbers of lines and of different steps with those of all others."""
    rng = random.Random(0)
    for _ in range(300):
        steps = [rng.randrange(5) for _ in range(rng.randrange(8))]
        is_kept = record_lines._longest_in_order(array.array("q", steps))
        kept = list(itertools.compress(steps, is_kept))
        assert kept == sorted(kept)
        best = max(
            (len(subset), len(set(subset)))
            for count in range(len(steps) + 1)
            for subset in itertools.combinations(steps, count)
            if list(subset) == sorted(subset)
        )
        assert (len(kept), len(set(kept))) == best


def test_the_damaged_lines_of_two_resumes_are_all_kept(tmp_path):
    path, messages = tmp_path / "metrics.jsonl", []
    for _ in range(2):
        write_damaged(path, BAD_LINES["no step"])
        cut_back(path, LAST, messages.append)
    aside = tmp_path / "metrics.jsonl.damaged"
    assert aside.read_bytes() == 2 * BAD_LINES["no step"]


def test_many_damaged_lines_are_one_message(tmp_path):
    path, messages = tmp_path / "metrics.jsonl", []
    path.write_bytes(b"".join(good_line(k) + b"#\n" for k in range(1, 1000)))
    assert cut_back(path, 500, messages.append)["step"] == 500
    (message,) = messages
    assert len(message) < 500
    assert "and 994 more" in message


def test_a_torn_last_line_is_cut_and_said(tmp_path):
    path, messages = tmp_path / "metrics.jsonl", []
    path.write_bytes(good_line(1) + b'{"step": 2, "lo')
    assert cut_back(path, 9, messages.append)["step"] == 1
    assert path.read_bytes() == good_line(1)
    assert "torn after 15 bytes" in messages[0]
    assert not (tmp_path / "metrics.jsonl.damaged").exists()


def test_a_whole_file_is_not_rewritten(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(map(good_line, range(1, 9))))
    before = path.stat().st_ino
    assert cut_back(path, 5, pytest.fail)["step"] == 5
    assert path.stat().st_ino == before
    assert [record["step"] for record in read_records(path)] == [1, 2, 3, 4, 5]


def test_without_room_damaged_lines_stay_and_later_ones_go(tmp_path, monkeypatch):
    path, messages = tmp_path / "metrics.jsonl", []
    write_damaged(path, BAD_LINES["not JSON"])

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record_lines.os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        cut_back(path, 9, messages.append)  # the cut itself cannot be synced either
    assert "stay in it" in messages[0]
    assert [record["step"] for record in read_records(path)] == [1, 2, 3, 4, 5, 6, 8, 9]
    assert [entry.name for entry in tmp_path.glob("*.tmp")] == []


def test_random_flips_cost_their_lines_alone(tmp_path):
    """All untouched lines of 300 files stay, in which up to four bytes were flipped."""
    rng, path = random.Random(0), tmp_path / "metrics.jsonl"
    lines = []
    for step in range(1, LAST + 1):
        lines.append(good_line(step))
        if step % 2 == 0:
            lines.append(b'{"step": %d, "eval_loss": 1.5}\n' % step)
    whole = b"".join(lines)
    for _ in range(300):
        text, touched = bytearray(whole), set()
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(text))
            text[place] ^= 1 << rng.randrange(8)
            index = whole.count(b"\n", 0, place)
            touched |= {index, index + (whole[place] == ord("\n"))}
        path.write_bytes(text)
        (tmp_path / "metrics.jsonl.damaged").unlink(missing_ok=True)
        cut_back(path, LAST, lambda line: None)
        kept = set(path.read_bytes().splitlines(keepends=True))
        assert kept.issuperset(x for i, x in enumerate(lines) if i not in touched)


def test_memory_is_bounded(tmp_path):
    """A file of 24 MB with one long damaged line is mended in 2 MB. Other threads of
    the tests allocate too meanwhile: 3 MB were seen."""
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        for step in range(1, 6001):
            record = {"step": step, "plan": "0" * 4000}
            file.write(json.dumps(record).encode() + b"\n")
            if step == 1000:
                file.write(b'{"step": 1#' + b"0" * 10**6 + b"\n")
    tracemalloc.start()
    cut_back(path, 6000, lambda line: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert os.path.getsize(path) > 24e6
    assert peak < 12e6


@pytest.mark.parametrize("value", ODD_VALUES, ids=str)
def test_readers_take_any_value(tmp_path, value):
    """A line that is JSON but holds anything gives no traceback."""
    lines = balanced_lines(40, DECISIONS)
    fields = {name for line in lines for name in json.loads(line)} - {"step"}
    fields |= {"home_device_max_over_mean", "modelled_saving_msec"}
    fields |= {"home_std_over_std", "dropped_share"}
    odd = [json.dumps({"step": 41, field: value}) for field in sorted(fields)]
    odd.append(json.dumps({"step": 41, **dict.fromkeys(fields, value)}))
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join([*lines, *odd, "[1]", "{", "[" * 10**5, '"x"']) + "\n")
    summary = summarise_balance(path, Config(balance=Balance(policy="eplb")))
    json.dumps(summary, allow_nan=False)
    assert (summary["num_swaps"], summary["num_relayouts"]) == (1, 1)
    assert len(step_records(tmp_path)) >= 40
    step, tokens_le, _ = read_metrics(path)
    assert (step, tokens_le.shape) == (40, (3, 8))
    read_run(tmp_path)
