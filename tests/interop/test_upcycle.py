"""A dense model made into experts computes what it computed, tensor by tensor."""

import json

import numpy as np
import pytest

from moejax.interop.export import write_model
from moejax.interop.published import open_model
from moejax.interop.tree import as_leaves
from moejax.interop.upcycle import Upcycling, upcycle
from moejax.interop.write import plan_folder, write_folder
from tests.support.close import assert_close
from tools import hf

D, F, LAYERS, HEADS, KV, VOCAB = 16, 24, 2, 4, 2, 32
SIZES = {
    "vocab_size": VOCAB, "hidden_size": D, "intermediate_size": F,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "float32",
}  # fmt: skip
FAMILIES = {
    "llama": ("mixtral", {"attention_bias": False, "mlp_bias": False}),
    "mistral": ("mixtral", {"sliding_window": None}),
    "qwen2": ("qwen2_moe", {"use_sliding_window": False}),
    "qwen3": ("qwen3_moe", {"head_dim": 8, "attention_bias": False}),
}
"""The family that a dense one becomes, and the keys of its config.json."""


def write_dense(folder, name: str, **changes):
    """Write a random dense model of a family; return its folder."""
    record = SIZES | {"model_type": name} | FAMILIES[name][1] | changes
    head = record.get("head_dim", D // HEADS)
    shapes = {"model.embed_tokens.weight": (VOCAB, D), "model.norm.weight": (D,)}
    shapes["lm_head.weight"] = (VOCAB, D)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for part, heads in (("q", HEADS), ("k", KV), ("v", KV)):
            shapes[f"{at}self_attn.{part}_proj.weight"] = (heads * head, D)
            if name == "qwen2":
                shapes[f"{at}self_attn.{part}_proj.bias"] = (heads * head,)
            if name == "qwen3" and part != "v":
                shapes[f"{at}self_attn.{part}_norm.weight"] = (head,)
        shapes[f"{at}self_attn.o_proj.weight"] = (D, HEADS * head)
        for part in ("gate", "up"):
            shapes[f"{at}mlp.{part}_proj.weight"] = (F, D)
        shapes[f"{at}mlp.down_proj.weight"] = (D, F)
        for part in ("input", "post_attention"):
            shapes[f"{at}{part}_layernorm.weight"] = (D,)
    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    specs = {n: (np.dtype(np.float32), s) for n, s in shapes.items()}
    plan = plan_folder(specs, max_shard_bytes=10**9)
    files = {"config.json": json.dumps(record).encode()}
    write_folder(folder, plan, arrays.__getitem__, files)
    return folder, arrays


def dense_mlp(arrays, layer: int, x_nd: np.ndarray) -> np.ndarray:
    """Return what the dense model's MLP makes of tokens."""
    gate_fd, up_fd, down_df = (
        arrays[f"model.layers.{layer}.mlp.{part}_proj.weight"].astype(np.float64)
        for part in ("gate", "up", "down")
    )
    return swiglu(x_nd, gate_fd.T, up_fd.T) @ down_df.T


def swiglu(x_nd, gate_df, up_df) -> np.ndarray:
    gate_nf = x_nd @ gate_df
    return gate_nf / (1 + np.exp(-gate_nf)) * (x_nd @ up_df)


def moe_mlp(leaves, layer: int, top_k: int, x_nd: np.ndarray) -> np.ndarray:
    """Return what the experts make of tokens, by the definition: gates are the softmax
    of the chosen scores."""
    moe = {
        name: leaves[f"cycles.blocks.0.moe.{name}"].read()[layer].astype(np.float64)
        for name in ("router_de", "gate_edf", "up_edf", "down_efd")
    }
    score_ne = x_nd @ moe["router_de"]
    y_nd = np.zeros_like(x_nd)
    for n, score_e in enumerate(score_ne):
        chosen_k = np.argsort(-score_e, kind="stable")[:top_k]
        gate_k = np.exp(score_e[chosen_k] - score_e.max())
        for gate, e in zip(gate_k / gate_k.sum(), chosen_k):
            weights = moe["gate_edf"][e], moe["up_edf"][e]
            y_nd[n] += (
                gate * (swiglu(x_nd[n : n + 1], *weights) @ moe["down_efd"][e])[0]
            )
    return y_nd


@pytest.mark.parametrize("granularity", [1, 2, 4, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_compute_what_the_mlp_computed(tmp_path, name, granularity):
    """Attention, norms and embeddings are bits of the dense folder. Weights of the
    experts are too where the granularity is a power of two, up to its factors."""
    folder, arrays = write_dense(tmp_path / "dense", name)
    model = upcycle(folder, Upcycling(4, 2, granularity))
    assert model.family == FAMILIES[name][0]
    moe = model.network.moe
    assert (moe.num_experts, moe.top_k) == (4 * granularity, 2 * granularity)
    assert moe.d_expert == F // granularity
    x_nd = np.random.default_rng(1).standard_normal((16, D))
    leaves = as_leaves(model.params)
    for layer in range(LAYERS):
        y_nd = moe_mlp(leaves, layer, moe.top_k, x_nd)
        assert_close(y_nd, dense_mlp(arrays, layer, x_nd), dtype=np.float32)
    write_model(
        tmp_path / "moe", model.network, model.params, model.router_bias,
        record=model.record, dtype=model.dtype,
    )  # fmt: skip
    written = open_model(tmp_path / "moe")
    assert written.architecture.family == model.family
    kept = [n for n in arrays if ".mlp." not in n]
    assert len(kept) >= 3 + LAYERS * 6
    for tensor in kept:
        same = written.folder.view(tensor).read()
        np.testing.assert_array_equal(same, arrays[tensor])


def test_experts_are_chosen_in_whole_groups_and_evenly(tmp_path):
    folder, _ = write_dense(tmp_path / "dense", "llama")
    leaves = as_leaves(upcycle(folder, Upcycling(4, 1, 3)).params)
    router_de = leaves["cycles.blocks.0.moe.router_de"].read()[0]
    groups = router_de.reshape(D, 4, 3)
    np.testing.assert_array_equal(groups, np.repeat(groups[..., :1], 3, axis=2))
    x_nd = np.random.default_rng(2).standard_normal((4000, D))
    chosen = np.bincount((x_nd @ groups[..., 0]).argmax(axis=1), minlength=4)
    assert chosen.min() > 400


def test_noise_draws_its_share_of_hidden_units_anew(tmp_path):
    """The same units in the three matrices of an expert, others in another expert, and
    the same again for the same seed."""
    folder, arrays = write_dense(tmp_path / "dense", "llama")

    def matrices(seed: int) -> list[np.ndarray]:
        leaves = as_leaves(
            upcycle(folder, Upcycling(2, 1, noise=0.25, seed=seed)).params
        )
        names = "gate_edf", "up_edf", "down_efd"
        gate, up, down = (leaves[f"cycles.blocks.0.moe.{n}"].read()[1] for n in names)
        return [gate.transpose(0, 2, 1), up.transpose(0, 2, 1), down]

    found = matrices(0)
    at = "model.layers.1.mlp."
    whole = [arrays[f"{at}{part}_proj.weight"] for part in ("gate", "up", "down")]
    changed = [
        (new_efd != old_fd).any(axis=2)
        for new_efd, old_fd in zip(found, (*whole[:2], whole[2].T))
    ]
    assert (changed[0].sum(axis=1) == F // 4).all()
    np.testing.assert_array_equal(changed[0], changed[1])
    np.testing.assert_array_equal(changed[0], changed[2])
    assert (changed[0][0] != changed[0][1]).any()
    for again, before in zip(matrices(0), found):
        np.testing.assert_array_equal(again, before)
    assert (matrices(1)[0] != found[0]).any()


@pytest.mark.parametrize(
    ("name", "changes", "words", "line"),
    [
        ("llama", {"model_type": "mixtral"}, (), "has experts already"),
        ("llama", {"model_type": "gpt2"}, (), "is not supported: give a dense model"),
        ("llama", {}, ("--granularity=5",), "must be a multiple of 5 pieces"),
        ("llama", {}, ("--top_k=9",), "top_k=9 must be from 1 to 8"),
        ("llama", {}, ("--experts=0",), "experts=0 must be at least 1"),
        ("llama", {}, ("--noise=1.5",), "noise=1.5 must be from 0 to 1"),
        ("llama", {"mlp_bias": True}, (), "mlp_bias"),
        ("mistral", {"sliding_window": 32}, (), "sliding_window"),
        ("qwen3", {"intermediate_size": 25}, (), "has shape"),
    ],
)
def test_bad_input_is_one_line(tmp_path, capfd, name, changes, words, line):
    folder, _ = write_dense(tmp_path / "dense", name, **changes)
    out = tmp_path / "moe"
    assert hf.main(["upcycle", str(folder), "--out", str(out), *words]) == 2
    err = capfd.readouterr().err
    assert line in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_the_command_writes_a_folder_that_opens(tmp_path, capfd):
    folder, _ = write_dense(tmp_path / "dense", "qwen3")
    out = tmp_path / "moe"
    words = ["upcycle", str(folder), "--experts=4", "--top_k=1", "--out", str(out)]
    assert hf.main([*words, "--json"]) == 0
    record = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (record["family"], record["num_experts"]) == ("qwen3_moe", 4)
    assert hf.main(["check", str(out)]) == 0
    assert hf.main(words) == 2  # the folder is there
    assert "exist" in capfd.readouterr().err
