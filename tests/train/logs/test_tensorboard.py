"""Test the events that a run writes for TensorBoard."""

import io
import math
import resource

import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto.event_pb2 import SessionLog

from tests.support.close import assert_close
from tests.support.event_files import read_events, read_file, shown_steps
from train.logs.heat_map import heat_map
from train.logs.scalars import scalars
from train.logs.track import to_tensorboard
from train.logs.track.to_tensorboard import TensorBoard

RECORD = {
    "step": 7,
    "loss": 1.5,
    "balance_loss": [1.0, 2.0],
    "sequence_balance_loss": [],
    "lr": 1e-3,
    "expert_max_over_mean": [1.25, 3.0],
    "device_max_over_mean": [1.5, 1.125],
    "device_max_over_bound": [1.25, 1.0],
    "plan": "a09e",
    "adopt_msec": 0.5,
    "plan_wait_msec": 0.25,
    "rows_lw": np.array([[1, 3], [9, 7]]),
    "rounds": [1, 4],
    "dropped": 0,
    "skipped": True,
    "mfu": None,
    "router_entropy": [1.0, 2.0],
    "dead_experts": [0, 3],
    "data_wait_msec": 0.25,
    "tokens_le": [[1, 3], [2, 2]],
}


def test_events_hold_the_numbers_of_the_record(tmp_path):
    board = TensorBoard(tmp_path, "Moe.top_k = 2\n", 0)
    board.append({n: x for n, x in RECORD.items() if n != "tokens_le"})
    board.append({"step": 7, "eval_loss": 2.5})
    board.close()
    version, start, config, numbers, evaluation = read_events(tmp_path)
    assert version.file_version == "brain.Event:2"
    assert (start.session_log.status, start.step) == (SessionLog.START, 1)
    text = config.summary.value[0]
    assert text.tag.startswith("config")
    assert text.tensor.string_val[0] == b"    Moe.top_k = 2"
    assert numbers.step == evaluation.step == 7
    values = {value.tag: value.simple_value for value in numbers.summary.value}
    expected = {
        "loss/train": 1.5,
        "loss/balance": 1.5,
        "optimizer/lr": 1e-3,
        "optimizer/skipped": 1.0,
        "load/expert_max_over_mean": 3.0,
        "load/device_max_over_mean": 1.5,
        "load/device_max_over_bound": 1.25,
        "balance/adopt_msec": 0.5,
        "balance/plan_wait_msec": 0.25,
        "load_by_layer/00_expert_max_over_mean": 1.25,
        "load_by_layer/01_expert_max_over_mean": 3.0,
        "exchange/rounds": 4.0,
        "exchange/dropped": 0.0,
        "router/entropy": 1.5,
        "router/dead_experts": 3.0,
        "other/data_wait_msec": 0.25,
    }
    assert_close(values, expected, dtype=np.float32)
    assert dict(scalars({"step": 7, "eval_loss": 2.5})) == {"loss/held_out": 2.5}


def test_decision_is_an_event_of_its_step(tmp_path):
    decision = {
        "kind": "swap", "step": 7, "adopt_step": 11, "policy": "eplb", "why": "pays",
        "device_max_over_mean_before": 1.5, "device_max_over_mean_after": 1.25,
        "num_moves": 3, "modelled_gain_sec": 0.5,
        "modelled_cost_sec": 2.0, "changes": {},
    }  # fmt: skip
    board = TensorBoard(tmp_path, "", 0)
    board.append({"step": 7, "decision": decision})
    board.append({"step": 9, "decision": decision | {"kind": "keep", "num_moves": 0}})
    board.close()
    swap, keep = read_events(tmp_path)[-2:]
    assert (swap.step, keep.step) == (7, 9)
    assert {value.tag: value.simple_value for value in swap.summary.value} == {
        "balance/device_max_over_mean_before": 1.5,
        "balance/device_max_over_mean_after": 1.25,
        "balance/num_moves": 3.0,
        "balance/modelled_gain_msec": 500.0,
        "balance/modelled_cost_msec": 2000.0,
    }
    assert [value.tag for value in keep.summary.value] == [
        "balance/device_max_over_mean_before",
        "balance/device_max_over_mean_after",
    ]


def test_values_that_are_not_finite_are_written(tmp_path):
    board = TensorBoard(tmp_path, "", 0)
    board.append({"step": 1, "loss": math.nan, "grad_norm": math.inf})
    board.close()
    loss, norm = read_events(tmp_path)[-1].summary.value
    assert math.isnan(loss.simple_value)
    assert norm.simple_value == math.inf


def load(step: int, every_steps: int) -> dict:
    """Return the field with the load of a step at which a picture is due, or none."""
    is_due = step % every_steps == 0
    return {"tokens_le": np.array([[1, 3], [2, 2]])} if is_due else {"tokens_le": None}


def test_resumed_run_shows_each_step_once(tmp_path, monkeypatch):
    """A run that was killed and resumed twice shows each step once.

    It is killed after step 9, resumed from 6, killed after 8 and resumed from 7. The
    clock stands still, and then goes back.
    """
    for first, last, now in ((1, 9, 2e9), (7, 8, 2e9), (8, 12, 1e9)):
        monkeypatch.setattr(to_tensorboard.time, "time", lambda now=now: now)
        board = TensorBoard(tmp_path, "a = 1", first - 1)
        for step in range(first, last + 1):
            board.append(RECORD | {"step": step} | load(step, 2))
        board.close()
    steps = shown_steps(tmp_path)
    assert steps["loss/train"] == list(range(1, 13))
    assert steps["load/over_mean"] == list(range(2, 13, 2))


def test_heat_map_is_that_of_the_step(tmp_path):
    board = TensorBoard(tmp_path, "", 0)
    tokens_le = np.array([[4, 4, 4], [0, 3, 9]])
    board.append(RECORD | {"step": 9, "tokens_le": None})
    board.append(RECORD | {"step": 10, "tokens_le": tokens_le})
    board.close()
    values = [event.summary.value for event in read_events(tmp_path)]
    (shown,) = [
        value[0].image for value in values if value and value[0].HasField("image")
    ]
    picture = Image.open(io.BytesIO(shown.encoded_image_string))
    assert np.array_equal(np.asarray(picture), heat_map(tokens_le))


@pytest.fixture
def full_disk():
    """Return a function that lets no file of this process grow beyond a size, as a full
    disk would; without a size every file may grow again."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(num_bytes: int | None = None) -> None:
        soft = before[0] if num_bytes is None else num_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, before[1]))

    yield limit
    limit()


def append_all(board: TensorBoard, steps) -> list[int]:
    """Append and flush records of these steps; return the steps that failed."""
    failed = []
    for step in steps:
        try:
            board.append(RECORD | {"step": step, "tokens_le": None})
            board.flush()
        except OSError:
            failed.append(step)
    return failed


def test_a_full_disk_costs_events_and_tears_none_that_come_after(tmp_path, full_disk):
    """The disk is full in the middle of an event. Later ones are in another file, and a
    reader gets to them."""
    board = TensorBoard(tmp_path, "a = 1", 0)
    assert append_all(board, range(1, 4)) == []
    (first,) = tmp_path.iterdir()
    full_disk(first.stat().st_size + 9)
    assert append_all(board, [4]) == [4]
    assert len(read_file(first)) == 6, "the 7th is torn"
    full_disk(0)
    assert append_all(board, [5, 6]) == [5, 6]
    full_disk()
    assert append_all(board, [7, 8]) == []
    board.close()
    assert shown_steps(tmp_path)["loss/train"] == [1, 2, 3, 7, 8]


def test_what_begins_a_file_comes_once_there_is_room(tmp_path, full_disk):
    """Events of an earlier attempt are forgotten, and the configuration is shown, also
    if the disk was full at the start."""
    board = TensorBoard(tmp_path, "a = 1", 0)
    assert append_all(board, range(1, 6)) == []
    board.close()
    board = TensorBoard(tmp_path, "b = 2", 3)
    full_disk(0)
    assert append_all(board, [4, 5]) == [4, 5]
    full_disk()
    assert append_all(board, [6, 7]) == []
    board.close()
    assert shown_steps(tmp_path)["loss/train"] == [1, 2, 3, 6, 7]
    texts = [
        value.tensor.string_val[0]
        for event in read_events(tmp_path)
        for value in event.summary.value
        if value.tag.startswith("config")
    ]
    assert texts == [b"    a = 1", b"    b = 2"]


def test_a_folder_that_cannot_be_made_is_an_error_of_the_system(tmp_path):
    (tmp_path / "file").touch()
    board = TensorBoard(tmp_path / "file" / "board", "", 2)
    assert append_all(board, [3, 4]) == [3, 4]
    board.close()
