"""Toys with the structure of the GPU configurations and of published families, compiled
for H100s that are not here; and the bad inputs of tools/aot.py."""

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
SLACK = 256 * 256 / GIB
"""XLA pads each array to 256 bytes at most."""
YARN = (
    "Rope.scaling = 'yarn'", "Rope.factor = 8.0", "Model.qk_norm = 'none'",
    "Rope.original_max_position_embeddings = 64",
)  # fmt: skip
GPT_OSS = (
    *YARN, "Router.bias = True", "Moe.expert_bias = True",
    "Moe.activation = 'clamped_swiglu'", "Attention.layers = ('sliding', 'full')",
    "Attention.sliding_window = 64", "Attention.bias = 'all'",
    "Attention.sinks = True", "Rope.truncate = False", "Model.head_dim = 64",
    "Model.num_heads = 8", "Model.num_kv_heads = 2",
)  # fmt: skip
DEEPSEEK = (
    *YARN, "Router.kind = 'sigmoid'", "Router.bias_rate = 0.001",
    "Router.num_groups = 4", "Router.top_groups = 2", "Model.num_layers = 3",
    "Model.first_k_dense = 1", "Model.d_ff = 512", "Mla.kv_lora_rank = 128",
    "Mla.q_lora_rank = 192", "Mla.qk_nope_head_dim = 64",
    "Mla.qk_rope_head_dim = 32", "Mla.v_head_dim = 64", "Rope.mscale = 1.0",
    "Rope.mscale_all_dim = 1.0", "Moe.num_shared_experts = 1",
)  # fmt: skip


def compile_toy(*params: str) -> tuple[str, dict]:
    """Compile the toy with bindings, and return the text and the record."""
    words = [f"--gin_param={param}" for param in params]
    return run_aot(f"--gin_file={TOY}", *TARGET, *words)


def require_predicted(record: dict, predicted_gib: dict[str, float]) -> None:
    """Assert that masters and moments are the arrays that the dry run counts, and that
    the peak is within a third of its prediction."""
    for kind in ("masters", "moments"):
        size = predicted_gib[kind]
        assert record["memory_gib"][kind] == pytest.approx(size, abs=SLACK)
    total = sum(predicted_gib.values())
    assert record["peak_gib"] == pytest.approx(total, rel=1 / 3)


def predict(params, target) -> dict[str, float]:
    """Return the memory that the dry run of the toy predicts, in GiB."""
    memory = dry_run(gin_reader.load([TOY], params), target)["memory"]
    return {kind: size / GIB for kind, size in memory.items()}


@pytest.fixture(scope="module")
def toy() -> tuple[str, dict]:
    """The text and the record of the toy."""
    return compile_toy()


@pytest.mark.slow
@pytest.mark.aot
def test_kinds_of_memory_add_up_to_the_peak_and_have_sources(toy):
    _, record = toy
    by_kind = record["memory_gib"]
    assert list(by_kind) == list(KINDS)
    assert sum(by_kind.values()) == pytest.approx(record["peak_gib"])
    assert all(size > 0 for size in by_kind.values())
    assert by_kind["temporaries"] < 0.05 * record["peak_gib"]
    assert record["fits"]
    assert not record["warnings"]
    assert record["predicted_gib"] == predict([], load("h100"))
    require_predicted(record, record["predicted_gib"])
    largest = record["largest_buffers"]
    assert len(largest) == NUM_LARGEST
    sizes = [buffer["gib"] for buffer in largest]
    assert sizes == sorted(sizes, reverse=True)
    for buffer in largest:
        is_argument = buffer["kind"] in ("masters", "moments")
        assert buffer["source"].startswith(("moejax/", "train/")) != is_argument, buffer


@pytest.mark.slow
@pytest.mark.aot
def test_row_exchanges_are_found_and_no_large_float32_travels(toy):
    """Two layers send rows and bring them home, forward and backward, in two
    micro-batches; gradients alone travel in float32, as reduce-scatters."""
    _, record = toy
    rows = record["collectives"]
    exchanges = [row for row in rows if row["is_exchange"]]
    assert exchanges
    assert all(row["kind"] == "all-to-all" and row["is_ours"] for row in exchanges)
    assert 0 <= record["exchange_hidden_share"] <= 1
    for row in rows:
        for part in row["parts"]:
            if part["dtype"] == "f32" and row["kind"] != "reduce-scatter":
                assert part["num_bytes"] <= 2**20, row


@pytest.mark.slow
@pytest.mark.aot
def test_kernels_are_those_of_the_target_and_speed_follows_from_the_seconds(toy):
    """MFU counts the FLOPs of a useful step, against the peak of eight H100s."""
    text, record = toy
    assert record["kernels"]["grouped_dot"][0] == "hopper"
    assert record["attention_calls"]
    for name in record["attention_calls"]:
        assert name in text
    assert record["step_sec"] >= record["compute_sec"] > 0
    assert record["tok_per_sec"] == pytest.approx(32 * 256 / record["step_sec"])
    flops = flops_per_token(gin_reader.load([TOY]).network).train * 32 * 256 / 8
    assert record["mfu"] == pytest.approx(flops / record["step_sec"] / 989e12)


@pytest.mark.long
@pytest.mark.aot
@pytest.mark.parametrize(("overflow", "num_waits"), [("redo", 0), ("rounds", 8)])
def test_the_host_waits_at_no_loop_of_a_step_without_later_rounds(overflow, num_waits):
    """With later rounds it waits forward and backward, in two layers of two
    micro-batches. Attention waits by itself, but for 'reference'."""
    params = ["Dispatch.buffer_factor = 1.5", f"Dispatch.overflow = '{overflow}'"]
    _, record = compile_toy(*params, "Model.attention = 'reference'")
    assert record["num_host_waits"] == num_waits
    assert not record["attention_calls"]


@pytest.mark.long
@pytest.mark.aot
@pytest.mark.parametrize(
    ("params", "said"),
    [
        (GPT_OSS, "; no kernel fuses SwiGLU with Moe.expert_bias"),
        (DEEPSEEK, "attention blocked (cuDNN declines: "),
    ],
    ids=["gpt_oss", "deepseek"],
)
def test_the_options_of_published_families_compile(params, said):
    text, record = compile_toy(*params)
    assert record["kernels"]["grouped_dot"][0] == "hopper"
    assert said in text
    require_predicted(record, predict(params, None))


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        (["--target=h101"], ["no target 'h101': give b200, h100, h200"]),
        (["--devices=4"], ["--devices", "--nodes"]),
        (["--nodes=2"], ["--devices", "--nodes"]),
        (["--nodes=0"], ["--devices=8 and --nodes=0 must be 1 or more"]),
        (["--target={tmp}/mine.toml"], ["no field 'l2_bytes'"]),
        (["--keep={tmp}"], ["not empty"]),
        (["--keep={tmp}/mine.toml"], ["not a folder"]),
    ],
)
def test_bad_input_is_one_line(capsys, tmp_path, monkeypatch, words, rules):
    monkeypatch.setattr(wheels, "put_on_path", lambda: None)
    lines = (FOLDER / "h100.toml").read_text().splitlines()
    mine = "\n".join(x for x in lines if not x.startswith("l2_bytes"))
    (tmp_path / "mine.toml").write_text(mine)
    line = refused(capsys, *(word.format(tmp=tmp_path) for word in words))
    assert all(rule in line for rule in rules)


def test_wheels_that_are_missing_or_of_another_version(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "FOLDER", tmp_path)
    assert "make aot-wheels" in refused(capsys, *TARGET)
    (tmp_path / "jax_plugins" / "xla_cuda13").mkdir(parents=True)
    (tmp_path / "jax_cuda13_plugin-0.1.2.dist-info").mkdir()
    assert "is 0.1.2, and JAX" in refused(capsys, *TARGET)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "90")
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION='90' must be" in refused(capsys, *TARGET)


def refused(capsys, *words) -> str:
    """Return the line with which the tool refuses its words."""
    assert aot.main([f"--gin_file={TOY}", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line
