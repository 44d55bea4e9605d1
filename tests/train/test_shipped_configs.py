"""Test every shipped configuration: the dry run reports its sizes, and it trains at toy
width."""

import resource

import pytest

from tests.support.run_main import ROOT, metric_lines, run
from train.config import gin_reader
from train.dry_run import dry_run
from train.main import find_target

CONFIGS = ROOT / "configs"
PUBLISHED = {
    "olmoe_1b_7b": (6_919_161_856, 1.3),
    "qwen3_30b_a3b": (30_532_122_624, 3.4),
    "mixtral_8x7b": (46_702_792_704, 12.9),
}
"""Parameters of the published models, and billions of those that serve one token.
Qwen's 3.35 is rounded to 3.4 here; its card cuts it to 3.3."""
NAMES = sorted(path.stem for path in CONFIGS.glob("*.gin"))

TOY_WIDTH = [
    "Mesh.data = 2",
    "Mesh.expert = 2",
    "Train.num_simulated_devices = 4",
    "Model.vocab_size = 256",
    "Model.d_model = 32",
    "Model.num_layers = 2",
    "Model.num_heads = 4",
    "Model.num_kv_heads = 2",
    "Model.head_dim = 8",
    "Moe.num_experts = 16",
    "Moe.d_expert = 16",
    "Data.seq_len = 32",
    "Train.batch_size = 16",
    "Train.accumulate_steps = 2",
    "Train.eval_batches = 1",
    "Train.num_steps = 2",
]


def test_these_are_all():
    small = ["finetune_cpu", "tiny_cpu", "long_cpu", "skewed_cpu"]
    assert sorted([*PUBLISHED, *small, "race_cpu"]) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_dry_run(name, capsys):
    cfg = gin_reader.load([CONFIGS / f"{name}.gin"])
    record = dry_run(cfg, find_target(cfg, None))
    shown = capsys.readouterr().out
    params = record["params"]
    if name in PUBLISHED:
        active = round(params["active"] / 1e9, 1)
        assert (params["total"], active) == PUBLISHED[name]
    memory, masters = record["memory"], record["memory"]["masters"]
    # There are float32 master parameters and two moments; moments also hold counters.
    assert 2 * masters <= memory["moments"] < 2 * masters + 64
    assert 12 * params["total"] <= record["checkpoint_bytes"] < 12.001 * params["total"]
    if name in PUBLISHED:
        assert record["fit"]["fits"]
        assert sum(memory.values()) < record["fit"]["usable_bytes"] < 80e9
    assert record["flops_per_token"]["train"] > 6 * 0.8 * params["active"]
    for word in ("parameters", "memory per device", "FLOPs per token", record["plan"]):
        assert word in shown


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED)
def test_trains_at_toy_width(name, tmp_path):
    """The configuration trains on four simulated devices, with its own features and
    small sizes."""
    gin_file = CONFIGS / f"{name}.gin"
    ended = run(tmp_path / "run", *TOY_WIDTH, gin_file=gin_file)
    assert (ended.code, ended.err) == (0, "")
    assert "Model.compute_dtype = 'bfloat16'\n" in ended.out
    lines = [x for x in metric_lines(tmp_path / "run") if "loss" in x]
    assert [x["step"] for x in lines] == [1, 2]
    # The loss of an untrained model is about ln 256 = 5.55.
    assert all(5 < x["loss"] < 6 and x["grad_norm"] > 0 for x in lines)
    assert not any(x["skipped"] or x["dropped"] for x in lines)


@pytest.mark.long
def test_32k_tokens_train_in_6_gib(tmp_path):
    """Scores of a window would be 4 GiB in each of two heads, for the forward pass
    alone."""
    settings = ["Train.num_steps = 2", "Train.eval_every_steps = 2"]
    gin_file = CONFIGS / "long_cpu.gin"
    ended = run(tmp_path / "run", *settings, gin_file=gin_file)
    assert (ended.code, ended.err) == (0, "")
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert peak_kib < 6 * 2**20, "the largest of all processes that this one started"
