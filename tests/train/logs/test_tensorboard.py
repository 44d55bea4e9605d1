"""Test the events that a run writes for TensorBoard."""

import io
import math
import struct

import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto.event_pb2 import Event, SessionLog

from tests.support.close import assert_close
from train.logs import tensorboard
from train.logs.tensorboard import COLORS, TensorBoard, color, heat_map, scalars

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
    "rows_lw": np.array([[1, 3], [9, 7]]),
    "rounds": [1, 4],
    "dropped": 0,
    "skipped": True,
    "mfu": None,
    "data_wait_msec": 0.25,
    "tokens_le": [[1, 3], [2, 2]],
}


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of RFC 3720, appendix B.4, computed bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    """Return the masked checksum that event files use."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_events(folder) -> list[Event]:
    """Return all events as TensorBoard reads them, and check lengths and checksums.

    Files are read in the order of their names.
    """
    events = []
    for path in sorted(folder.iterdir()):
        data = io.BytesIO(path.read_bytes())
        while head := data.read(12):
            length, crc = struct.unpack("<QI", head)
            payload = data.read(length)
            assert (crc, len(payload)) == (masked(head[:8]), length)
            assert data.read(4) == struct.pack("<I", masked(payload))
            events.append(Event.FromString(payload))
    return events


def shown_steps(folder) -> dict[str, list[int]]:
    """Return the steps that TensorBoard shows for each tag, without those that a later
    session replaces."""
    steps = {}
    for event in read_events(folder):
        if event.session_log.status == SessionLog.START:
            for kept in steps.values():
                kept[:] = [step for step in kept if step < event.step]
        for value in event.summary.value:
            steps.setdefault(value.tag, []).append(event.step)
    return steps


def test_events_hold_the_numbers_of_the_record(tmp_path):
    board = TensorBoard(tmp_path, "Moe.top_k = 2\n", 0)
    board.append(RECORD)
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
        "load_by_layer/00_expert_max_over_mean": 1.25,
        "load_by_layer/01_expert_max_over_mean": 3.0,
        "exchange/rounds": 4.0,
        "exchange/dropped": 0.0,
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


def test_resumed_run_shows_each_step_once(tmp_path, monkeypatch):
    """A run that was killed and resumed twice shows each step once.

    It is killed after step 9, resumed from 6, killed after 8 and resumed from 7. The
    clock stands still, and then goes back.
    """
    for first, last, now in ((1, 9, 2e9), (7, 8, 2e9), (8, 12, 1e9)):
        monkeypatch.setattr(tensorboard.time, "time", lambda now=now: now)
        board = TensorBoard(tmp_path, "a = 1", first - 1, heat_every_steps=2)
        for step in range(first, last + 1):
            board.append(RECORD | {"step": step})
        board.close()
    steps = shown_steps(tmp_path)
    assert steps["loss/train"] == list(range(1, 13))
    assert steps["load/over_mean"] == list(range(2, 13, 2))


def test_heat_map_is_that_of_the_step(tmp_path):
    board = TensorBoard(tmp_path, "", 0, heat_every_steps=5)
    tokens_le = np.array([[4, 4, 4], [0, 3, 9]])
    for step in range(1, 11):
        board.append(RECORD | {"step": step}, tokens_le * (step == 10))
    board.close()
    values = [event.summary.value for event in read_events(tmp_path)]
    images = [
        value[0].image for value in values if value and value[0].HasField("image")
    ]
    assert len(images) == 2
    picture = Image.open(io.BytesIO(images[-1].encoded_image_string))
    assert np.array_equal(np.asarray(picture), heat_map(tokens_le))


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (3, 16), (94, 128), (4, 2048)])
def test_cells_of_the_heat_map_are_layers_and_experts(shape):
    rng = np.random.default_rng(0)
    tokens_le = rng.integers(0, 100, shape)
    map_hwc = heat_map(tokens_le)
    side = map_hwc.shape[0] // shape[0]
    assert side >= 4
    assert map_hwc.shape == (side * shape[0], side * shape[1], 3)
    assert map_hwc.dtype == np.uint8
    for layer, expert in zip(*(rng.integers(0, size, 5) for size in shape)):
        ratio = tokens_le[layer, expert] / tokens_le[layer].mean()
        cell = map_hwc[layer * side :, expert * side :][:side, :side].reshape(-1, 3)
        assert len(np.unique(cell, axis=0)) == 1
        assert np.array_equal(cell[0], color(np.log2(max(ratio, 0.25))))


def test_even_is_neutral_and_colors_run_one_way():
    neutral = COLORS[len(COLORS) // 2]
    assert tuple(heat_map(np.full((1, 4), 7))[0, 0]) == neutral
    assert tuple(heat_map(np.zeros((1, 4)))[0, 0]) == neutral
    assert tuple(color(np.array(-9.0))) == COLORS[0]
    assert tuple(color(np.array(9.0))) == COLORS[-1]
    red, _, blue = np.moveaxis(color(np.linspace(-2, 2, 101)).astype(int), -1, 0)
    assert (np.diff(red[:51]) >= 0).all()
    assert (np.diff(blue[50:]) <= 0).all()


def test_full_disk_costs_events_and_not_the_run(monkeypatch):
    messages = []
    monkeypatch.setattr(
        tensorboard, "_new_file", lambda folder: io.FileIO("/dev/full", "w")
    )
    board = TensorBoard("anywhere", "a = 1", 2, say=messages.append)
    for step in range(3, 6):
        board.append(RECORD | {"step": step})
    assert len(messages) == 1
    assert "TENSORBOARD EVENTS NOT WRITTEN from step 3 on: " in messages[0]
    assert "No space left" in messages[0]


def test_folder_that_cannot_be_made_costs_events_and_not_the_run(tmp_path):
    (tmp_path / "file").touch()
    messages = []
    board = TensorBoard(tmp_path / "file" / "board", "", 2, say=messages.append)
    board.append(RECORD)
    board.close()
    assert len(messages) == 1
    assert "NOT WRITTEN from step 3 on" in messages[0]


def test_event_that_fits_in_part_is_taken_back(tmp_path, monkeypatch):
    messages = []
    board = TensorBoard(tmp_path, "", 0, say=messages.append)
    whole = board._file

    class Short:
        write = staticmethod(lambda framed: whole.write(framed[:9]))
        fileno, truncate = whole.fileno, whole.truncate

    for step in range(1, 6):
        monkeypatch.setattr(board, "_file", Short if step in (2, 3) else whole)
        board.append(RECORD | {"step": step})
    board.close()
    assert shown_steps(tmp_path)["loss/train"] == [1, 4, 5]
    assert len(messages) == 2
    assert "written again, without 2" in messages[1]
