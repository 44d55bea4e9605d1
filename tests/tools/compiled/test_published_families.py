"""Toys with the options of published families, compiled for H100s that are not here."""

import pytest

from tests.support.aot import TOY, run_aot
from train.config import gin_reader
from train.dry_run import dry_run

GIB = 2**30
YARN = (
    "Rope.scaling = 'yarn'", "Rope.factor = 8.0", "Model.qk_norm = 'none'",
    "Rope.original_max_position_embeddings = 64",
)  # fmt: skip
FAMILIES = {
    "gpt_oss": (
        *YARN, "Router.bias = True", "Moe.expert_bias = True",
        "Moe.activation = 'clamped_swiglu'", "Attention.layers = ('sliding', 'full')",
        "Attention.sliding_window = 64", "Attention.bias = 'all'",
        "Attention.sinks = True", "Rope.truncate = False", "Model.head_dim = 64",
        "Model.num_heads = 8", "Model.num_kv_heads = 2",
    ),
    "deepseek": (
        *YARN, "Router.kind = 'sigmoid'", "Router.bias_rate = 0.001",
        "Router.num_groups = 4", "Router.top_groups = 2", "Model.num_layers = 3",
        "Model.first_k_dense = 1", "Model.d_ff = 512", "Mla.kv_lora_rank = 128",
        "Mla.q_lora_rank = 192", "Mla.qk_nope_head_dim = 64",
        "Mla.qk_rope_head_dim = 32", "Mla.v_head_dim = 64", "Rope.mscale = 1.0",
        "Rope.mscale_all_dim = 1.0", "Moe.num_shared_experts = 1",
    ),
}  # fmt: skip
SAYS = {
    "gpt_oss": "; no kernel fuses SwiGLU with Moe.expert_bias",
    "deepseek": "attention blocked (cuDNN declines: ",
}
"""What the line of kernels says of each family."""


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.aot
@pytest.mark.parametrize("family", FAMILIES)
def test_the_step_compiles_and_has_the_predicted_memory(family):
    """Masters and moments are those that the dry run counts, and the whole peak is
    within a third of its prediction."""
    words = [f"--gin_param={param}" for param in FAMILIES[family]]
    text, record = run_aot(f"--gin_file={TOY}", "--target=h100", "--devices=8", *words)
    assert record["kernels"]["grouped_dot"]["implementation"] == "hopper"
    assert SAYS[family] in text
    assert record["fits"]
    predicted = dry_run(gin_reader.load([TOY], FAMILIES[family]), None)["memory"]
    for kind in ("masters", "moments"):
        size = predicted[kind] / GIB
        slack = 256 * 256 / GIB  # XLA pads each array to 256 bytes at most
        assert record["memory_gib"][kind] == pytest.approx(size, abs=slack)
    total = sum(predicted.values()) / GIB
    assert record["peak_gib"] == pytest.approx(total, rel=1 / 3)
