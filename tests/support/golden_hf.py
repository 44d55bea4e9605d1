"""Tiny published architectures with what transformers computes, as models of ours.

../shared/data/hf has a folder for each, and a README.md about them. `case` puts the
weights of a folder into our parameters by hand.
"""

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax.config import (
    Attention,
    Config,
    Data,
    Dispatch,
    Mla,
    Model,
    Moe,
    Rope,
    Router,
    Train,
)
from tests.support.plain_model import network

ROOT = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data" / "hf"
NUM_EXPERTS = (
    "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts",
)  # fmt: skip
B, T = 2, 32
"""Rows and tokens of the stored inputs."""


class Case(NamedTuple):
    """A folder as one of our models."""

    cfg: Config
    params: dict
    bias: dict
    """The router's biases."""
    expected: dict[str, np.ndarray]
    """expected.npz of the folder."""


@functools.cache
def case(name: str) -> Case:
    """Return the case of a folder."""
    config = json.loads((ROOT / name / "config.json").read_text())
    tensors = read_safetensors(ROOT / name / "model.safetensors")
    expected = dict(np.load(ROOT / name / "expected.npz"))
    cfg = make_config(config)
    params = _params(config, cfg, tensors)
    _check_shapes(network(cfg).params, params)
    return Case(cfg, params, _router_bias(cfg, tensors), expected)


def as_published(name: str, tree: dict) -> dict[str, np.ndarray]:
    """Return arrays like our parameters, such as their gradients, under the names and
    in the shapes of the folder's file. It leaves out correction biases."""
    config = json.loads((ROOT / name / "config.json").read_text())
    tensors = read_safetensors(ROOT / name / "model.safetensors")
    ends = np.cumsum([tensor.size for tensor in tensors.values()])
    numbers = {
        key: np.arange(end - tensor.size, end).reshape(tensor.shape)
        for end, (key, tensor) in zip(ends, tensors.items())
    }
    places = _params(config, make_config(config), numbers)
    flat = np.full(ends[-1], np.nan)
    for place, leaf in zip(jax.tree.leaves(places), jax.tree.leaves(tree), strict=True):
        flat[place] = leaf
    arrays = {key: flat[number] for key, number in numbers.items()}
    return {key: array for key, array in arrays.items() if not np.isnan(array).any()}


def _params(config, cfg: Config, tensors) -> dict:
    """Return the tensors of a file as our parameters."""
    layers = [_layer(config, cfg, tensors, i) for i in range(cfg.model.num_layers)]
    params = {
        "embed_vd": tensors["model.embed_tokens.weight"],
        "norm": {"scale_d": tensors["model.norm.weight"]},
        **stack(cfg, layers),
    }
    if not cfg.model.tie_embeddings:
        params["head_vd"] = tensors["lm_head.weight"]
    return params


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the float32 arrays of a file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[8 + size :][slice(*entry["data_offsets"])], "<f4")
        .reshape(entry["shape"])
        .copy()
        for name, entry in header.items()
    }


def make_config(config: dict[str, Any]) -> Config:
    """Return our configuration of a config.json as transformers 5 writes it."""
    kind, heads = config["model_type"], config["num_attention_heads"]
    rope = dict(config["rope_parameters"])
    given = {"rope_theta": rope.pop("rope_theta")}
    scaling = rope.pop("rope_type")
    if scaling != "default":
        rope["scaling"] = scaling
    given["head_dim"] = config.get("head_dim") or config["hidden_size"] // heads
    experts = next(config[name] for name in NUM_EXPERTS if name in config)
    d_expert = config.get("moe_intermediate_size") or config["intermediate_size"]
    top_k = config.get("num_experts_per_tok") or config["moe_k"]
    moe = {"num_experts": experts, "d_expert": d_expert, "top_k": top_k}
    own = OWN[kind](config)
    return Config(
        model=Model(
            vocab_size=config["vocab_size"],
            d_model=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=config["num_key_value_heads"],
            d_ff=config.get("intermediate_size_mlp", config["intermediate_size"]),
            norm_eps=config["rms_norm_eps"],
            tie_embeddings=config["tie_word_embeddings"],
            compute_dtype="float32",
            **(given | own.get("model", {})),
        ),
        attention=Attention(**own.get("attention", {})),
        rope=Rope(**rope),
        mla=Mla(**own.get("mla", {})),
        moe=Moe(**(moe | own.get("moe", {}))),
        router=Router(**own.get("router", {})),
        dispatch=Dispatch(rows_per_peer=B * T * top_k),
        data=Data(seq_len=T),
        train=Train(batch_size=B, loss_chunk=T),
    )


def _olmoe(config):
    return {
        "model": {"qk_norm": "full"},
        "attention": {"clip_qkv": config["clip_qkv"]},
        "router": {"normalise_gates": config["norm_topk_prob"]},
    }


def _ernie(config):
    return {
        "model": {"first_k_dense": config["moe_layer_start_index"]},
        "moe": {"num_shared_experts": config["moe_num_shared_experts"]},
    }


def _granite(config):
    names = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    return {
        "model": {name: config[name] for name in names},
        "attention": {"scale": config["attention_multiplier"]},
    }


def _glm(config):
    return {
        "model": {"first_k_dense": config["first_k_dense_replace"], "qk_norm": "head"},
        "attention": {"bias": "qkv"},
        "moe": {"num_shared_experts": config["n_shared_experts"]},
        "router": _deepseek_router(config),
    }


def _deepseek_router(config):
    return {
        "kind": "softmax" if config["model_type"] == "deepseek_v2" else "sigmoid",
        "normalise_gates": config["norm_topk_prob"],
        "gate_scale": config["routed_scaling_factor"],
        "num_groups": config["n_group"],
        "top_groups": config["topk_group"],
    }


def _deepseek(config):
    names = ("kv_lora_rank", "q_lora_rank", "v_head_dim")
    names += ("qk_nope_head_dim", "qk_rope_head_dim")
    return {
        "model": {"first_k_dense": config["first_k_dense_replace"]},
        "mla": {name: config[name] for name in names},
        "moe": {"num_shared_experts": config["n_shared_experts"]},
        "router": _deepseek_router(config),
    }


def _qwen2(config):
    return {
        "attention": {"bias": "qkv"},
        "moe": {
            "num_shared_experts": 1,
            "d_shared": config["shared_expert_intermediate_size"],
            "shared_gate": True,
        },
        "router": {"normalise_gates": config["norm_topk_prob"]},
    }


def _gpt_oss(config):
    kinds = {"sliding_attention": "sliding", "full_attention": "full"}
    return {
        "attention": {
            "layers": tuple(kinds[kind] for kind in config["layer_types"]),
            "sliding_window": config["sliding_window"],
            "bias": "all",
            "sinks": True,
        },
        "moe": {
            "activation": "clamped_swiglu",
            "swiglu_limit": config["swiglu_limit"],
            "swiglu_alpha": config["swiglu_alpha"],
            "expert_bias": True,
        },
        "router": {"bias": True},
    }


def _llama4(config):
    kinds = {"chunked_attention": "chunked", "full_attention": "nope"}
    layers = range(config["num_hidden_layers"])
    return {
        "model": {
            "layers": tuple(
                "moe" if i in config["moe_layers"] else "dense" for i in layers
            ),
        },
        "attention": {
            "layers": tuple(kinds[kind] for kind in config["layer_types"]),
            "chunk_size": config["attention_chunk_size"],
            "temperature_scale": config["attn_scale"],
            "temperature_floor": config["floor_scale"],
            "l2_norm": config["use_qk_norm"],
        },
        "moe": {"num_shared_experts": 1},
        "router": {"kind": "sigmoid", "normalise_gates": False, "gate_input": True},
    }


OWN: dict[str, Callable[[dict], dict[str, dict]]] = {
    "mixtral": lambda config: {},
    "olmoe": _olmoe,
    "qwen3_moe": lambda config: {"model": {"qk_norm": "head"}},
    "ernie4_5_moe": _ernie,
    "granitemoe": _granite,
    "glm4_moe": _glm,
    "qwen2_moe": _qwen2,
    "gpt_oss": _gpt_oss,
    "llama4_text": _llama4,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}
"""Fields of our configuration that an architecture adds, by part."""

INTERLEAVED = ("ernie4_5_moe", "deepseek_v2", "deepseek_v3", "llama4_text")
"""Architectures whose RoPE rotates neighbours: pair j is elements 2j and 2j + 1."""


def stack(cfg: Config, layers: list[dict]) -> dict:
    """Return the parameters of layers as the Transformer holds them."""

    def stacked(trees):
        return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)

    start, size = cfg.model.first_k_dense, len(cfg.network.cycle)
    prefix = {"prefix": stacked(layers[:start])} if start else {}
    moe = stacked([layer.pop("moe") for layer in layers if "moe" in layer])
    blocks = {i: stacked(layers[start + i :: size]) for i in range(size)}
    last = max(i for i, kind in enumerate(cfg.network.cycle) if kind.is_moe)
    blocks[last]["moe"] = moe
    return prefix | {"cycles": {"blocks": blocks}}


def _layer(config, cfg: Config, tensors, index: int) -> dict:
    """Return the parameters of one layer."""
    at = f"model.layers.{index}."
    own = {
        name.removeprefix(at): value
        for name, value in tensors.items()
        if name.startswith(at)
    }
    layer = {
        "attention_norm": {"scale_d": own["input_layernorm.weight"]},
        "ff_norm": {"scale_d": own["post_attention_layernorm.weight"]},
        "attention": _attention(config, cfg, own),
    }
    if (router := _find(own, "gate", "router", "router.layer")) is None:
        return layer | {"dense": _swiglu(own, "")}
    layer["moe"] = {"router_de": router.T, **_experts(cfg, own)}
    if "mlp.router.bias" in own:
        layer["moe"]["logit_bias_e"] = own["mlp.router.bias"]
    for shared in ("shared_experts.", "shared_expert."):
        if _find(own, shared + "up_proj") is not None:
            layer["dense"] = _swiglu(own, shared)
    if (gate_1d := _find(own, "shared_expert_gate")) is not None:
        layer["shared_gate_d"] = gate_1d[0]
    return layer


def _find(own, *names: str) -> np.ndarray | None:
    """Return the weight of the first of these modules of the feed-forward part."""
    parts = ("mlp.", "block_sparse_moe.", "feed_forward.")
    keys = [f"{part}{name}.weight" for part in parts for name in names]
    return next((own[key] for key in keys if key in own), None)


def _swiglu(own, at: str) -> dict:
    names = {"gate_df": "gate_proj", "up_df": "up_proj", "down_fd": "down_proj"}
    return {ours: _find(own, at + name).T for ours, name in names.items()}


def _experts(cfg: Config, own) -> dict:
    """Return the experts of one layer."""
    for at in ("mlp.experts.", "feed_forward.experts."):
        if at + "gate_up_proj" in own:
            return _fused_experts(own, at)
    if (into_ehd := own.get("block_sparse_moe.input_linear.weight")) is not None:
        gate_efd, up_efd = np.split(into_ehd, 2, axis=1)
        down_edf = own["block_sparse_moe.output_linear.weight"]
    else:
        at, names = "mlp.experts.{}.{}.weight", ("gate_proj", "up_proj", "down_proj")
        if at.format(0, names[0]) not in own:
            at, names = "block_sparse_moe.experts.{}.{}.weight", ("w1", "w3", "w2")
        gate_efd, up_efd, down_edf = (
            np.stack([own[at.format(e, name)] for e in range(cfg.moe.num_experts)])
            for name in names
        )
    arrays = {"gate_edf": gate_efd, "up_edf": up_efd, "down_efd": down_edf}
    return {name: array.swapaxes(1, 2) for name, array in arrays.items()}


def _fused_experts(own, at: str) -> dict:
    """Return the experts of one layer of GPT-OSS, where gate and up are interleaved and
    there are biases, or of Llama-4, where up follows gate."""
    into_edh, down_efd = own[at + "gate_up_proj"], own[at + "down_proj"]
    if at + "down_proj_bias" not in own:
        gate_edf, up_edf = np.split(into_edh, 2, axis=2)
        return {"gate_edf": gate_edf, "up_edf": up_edf, "down_efd": down_efd}
    bias_eh = own[at + "gate_up_proj_bias"]
    return {
        "gate_edf": into_edh[..., ::2],
        "up_edf": into_edh[..., 1::2],
        "down_efd": down_efd,
        "gate_bias_ef": bias_eh[:, ::2],
        "up_bias_ef": bias_eh[:, 1::2],
        "down_bias_ew": own[at + "down_proj_bias"],
    }


def _attention(config, cfg: Config, own) -> dict:
    """Return the parameters of attention of one layer."""
    is_interleaved = config["model_type"] in INTERLEAVED
    if cfg.network.is_latent:
        return _latent_attention(cfg.mla, own)

    def rows(name, is_rotated):
        value = own[f"self_attn.{name}"]
        if is_interleaved and is_rotated:
            by_head = value.reshape(-1, cfg.model.head_dim, *value.shape[1:])
            value = half_split(by_head).reshape(value.shape)
        return value

    attention = {
        "q_dhi": rows("q_proj.weight", True).T,
        "k_dgi": rows("k_proj.weight", True).T,
        "v_dgi": rows("v_proj.weight", False).T,
        "out_hid": own["self_attn.o_proj.weight"].T,
    }
    for ours, name in (("q_norm", "q_norm"), ("k_norm", "k_norm")):
        if f"self_attn.{name}.weight" in own:
            attention[ours] = {"scale_d": own[f"self_attn.{name}.weight"]}
    for ours, name in (
        ("q_bias_hi", "q_proj.bias"),
        ("k_bias_gi", "k_proj.bias"),
        ("v_bias_gi", "v_proj.bias"),
        ("out_bias_d", "o_proj.bias"),
        ("sinks_h", "sinks"),
    ):
        if f"self_attn.{name}" in own:
            attention[ours] = own[f"self_attn.{name}"]
    return attention


def _latent_attention(mla: Mla, own) -> dict:
    """Return the parameters of latent attention of one layer."""

    def matrix(name):
        return own[f"self_attn.{name}.weight"]

    def turned(value, head_dim):
        by_head = value.reshape(-1, head_dim, value.shape[1])
        parts = np.split(by_head, [head_dim - mla.qk_rope_head_dim], axis=1)
        return np.concatenate([parts[0], half_split(parts[1])], 1).reshape(value.shape)

    query_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    latent_cd, rope_id = np.split(matrix("kv_a_proj_with_mqa"), [mla.kv_lora_rank])
    attention = {
        "kv_a_dc": latent_cd.T,
        "kv_a_norm": {"scale_d": matrix("kv_a_layernorm")},
        "k_rope_di": turned(rope_id, mla.qk_rope_head_dim).T,
        "kv_b_chj": matrix("kv_b_proj").T,
        "out_hjd": matrix("o_proj").T,
    }
    if mla.q_lora_rank is None:
        return attention | {"q_dhi": turned(matrix("q_proj"), query_dim).T}
    return attention | {
        "q_a_dr": matrix("q_a_proj").T,
        "q_a_norm": {"scale_d": matrix("q_a_layernorm")},
        "q_b_rhi": turned(matrix("q_b_proj"), query_dim).T,
    }


def half_split(value: np.ndarray) -> np.ndarray:
    """Return rows [heads, i, ..] whose pairs (2j, 2j + 1) become (j, j + i/2)."""
    return np.concatenate([value[:, ::2], value[:, 1::2]], axis=1)


def _router_bias(cfg: Config, tensors) -> dict:
    """Return the tree of the router's biases: those of the checkpoint, or zeros."""
    zeros = network(cfg).bias
    found = [
        tensors[name].reshape(-1)
        for name in sorted(tensors)
        if name.endswith("e_score_correction_bias")
    ]
    if not found:
        return zeros
    return jax.tree.map(lambda leaf: np.stack(found).reshape(leaf.shape), zeros)


def _check_shapes(ours, params) -> None:
    expected, actual = (jax.tree.map(np.shape, tree) for tree in (ours, params))
    assert expected == actual, f"parameters differ:\n{expected}\n{actual}"
