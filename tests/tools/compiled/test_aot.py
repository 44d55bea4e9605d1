"""A toy with the structure of the GPU configurations, compiled for H100s that are not
here; and the bad inputs of tools/aot.py."""

import pytest

from moejax.model.flops import flops_per_token
from moejax.perf.target import FOLDER, load
from tests.support.aot import TOY, run_aot
from tools import aot
from tools.compiled import wheels
from tools.compiled.memory import KINDS, NUM_LARGEST
from train.config import gin_reader
from train.dry_run import dry_run

GIB = 2**30
TARGET = ["--target=h100", "--devices=8"]


@pytest.fixture(scope="module")
def toy() -> tuple[str, dict]:
    """The text and the record of the toy."""
    return run_aot(f"--gin_file={TOY}", *TARGET)


@pytest.mark.slow
@pytest.mark.aot
def test_kinds_of_memory_add_up_to_the_peak(toy):
    _, record = toy
    by_kind = record["memory_gib"]
    assert list(by_kind) == list(KINDS)
    assert sum(by_kind.values()) == pytest.approx(record["peak_gib"])
    assert all(size > 0 for size in by_kind.values())
    assert record["fits"]
    assert not record["warnings"]


@pytest.mark.slow
@pytest.mark.aot
def test_the_prediction_beside_the_peak_is_that_of_the_dry_run(toy):
    """Masters and moments are the same arrays. XLA pads each to 256 bytes at most."""
    _, record = toy
    predicted = dry_run(gin_reader.load([TOY]), load("h100"))["memory"]
    assert record["predicted_gib"] == {k: size / GIB for k, size in predicted.items()}
    slack = 64 * 256 / GIB
    for kind in ("masters", "moments"):
        size = record["predicted_gib"][kind]
        assert record["memory_gib"][kind] == pytest.approx(size, abs=slack)


@pytest.mark.slow
@pytest.mark.aot
def test_little_of_the_peak_has_no_kind_and_no_source(toy):
    _, record = toy
    assert record["memory_gib"]["temporaries"] < 0.05 * record["peak_gib"]
    largest = record["largest_buffers"]
    assert len(largest) == NUM_LARGEST
    sizes = [buffer["gib"] for buffer in largest]
    assert sizes == sorted(sizes, reverse=True)
    for buffer in largest:
        is_argument = buffer["kind"] in ("masters", "moments")
        assert buffer["source"].startswith(("moejax/", "train/")) != is_argument, buffer


@pytest.mark.slow
@pytest.mark.aot
def test_kernels_are_those_of_the_target(toy):
    text, record = toy
    assert record["kernels"]["grouped_dot"][0] == "hopper"
    assert "grouped_dot        hopper: NVIDIA H100" in text
    assert record["attention_calls"]
    for name in record["attention_calls"]:
        assert name in text


@pytest.mark.slow
@pytest.mark.aot
def test_row_exchanges_are_found_and_no_large_float32_travels(toy):
    """Two layers send rows and bring them home, forward and backward, in two
    micro-batches; gradients alone travel in float32, as reduce-scatters."""
    text, record = toy
    rows = record["collectives"]
    exchanges = [row for row in rows if row["is_exchange"]]
    assert exchanges
    assert all(row["kind"] == "all-to-all" and row["is_ours"] for row in exchanges)
    assert 0 <= record["exchange_hidden_share"] <= 1
    for row in rows:
        for part in row["parts"]:
            if part["dtype"] == "f32" and row["kind"] != "reduce-scatter":
                assert part["num_bytes"] <= 2**20, row
    assert "all-to-all" in text


@pytest.mark.slow
@pytest.mark.aot
def test_speed_follows_from_the_estimated_seconds(toy):
    """MFU counts the FLOPs of a useful step, against the peak of eight H100s."""
    _, record = toy
    assert record["step_sec"] >= record["compute_sec"] > 0
    assert record["tok_per_sec"] == pytest.approx(32 * 256 / record["step_sec"])
    flops = flops_per_token(gin_reader.load([TOY]).network).train * 32 * 256 / 8
    assert record["mfu"] == pytest.approx(flops / record["step_sec"] / 989e12)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.aot
@pytest.mark.parametrize(("overflow", "num_waits"), [("redo", 0), ("rounds", 8)])
def test_the_host_waits_at_no_loop_of_a_step_without_later_rounds(overflow, num_waits):
    """With later rounds it waits forward and backward, in two layers of two
    micro-batches. Attention waits by itself, but for 'reference'."""
    params = ["Dispatch.buffer_factor = 1.5", f"Dispatch.overflow = '{overflow}'"]
    params += ["Model.attention = 'reference'"]
    words = [f"--gin_param={param}" for param in params]
    _, record = run_aot(f"--gin_file={TOY}", *TARGET, *words)
    assert record["num_host_waits"] == num_waits
    assert not record["attention_calls"]


def refused(capsys, *words) -> str:
    """Return the line with which the tool refuses its words."""
    assert aot.main([f"--gin_file={TOY}", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_an_unknown_target(capsys):
    line = refused(capsys, "--target=h101")
    assert line.startswith("error: no target 'h101': give b200, h100, h200")


@pytest.mark.parametrize("words", [("--devices=4",), ("--nodes=2",), ("--nodes=0",)])
def test_devices_that_are_not_the_mesh(capsys, words):
    line = refused(capsys, *words)
    assert "--devices" in line
    assert "--nodes" in line


def test_a_target_file_with_a_missing_field(capsys, tmp_path):
    path = tmp_path / "mine.toml"
    lines = (FOLDER / "h100.toml").read_text().splitlines()
    path.write_text("\n".join(x for x in lines if not x.startswith("l2_bytes")))
    assert refused(capsys, f"--target={path}").endswith("no field 'l2_bytes'")


def test_missing_wheels(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "FOLDER", tmp_path / "none")
    assert "make aot-wheels" in refused(capsys, *TARGET)


def test_wheels_of_another_version(capsys, tmp_path, monkeypatch):
    (tmp_path / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
    (tmp_path / "jax_cuda13_plugin-0.1.2.dist-info").mkdir()
    monkeypatch.setattr(wheels, "FOLDER", tmp_path)
    assert "is 0.1.2, and JAX" in refused(capsys, *TARGET)


def test_a_wrong_memory_fraction(capsys, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "90")
    line = refused(capsys, *TARGET)
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION='90' must be a number above 0" in line


def test_what_xla_wrote_is_kept_in_an_empty_folder_alone(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(wheels, "put_on_path", lambda: None)
    assert "not empty" in refused(capsys, *TARGET, f"--keep={tmp_path}")
    assert "not a folder" in refused(capsys, *TARGET, f"--keep={tmp_path / 'file'}")
