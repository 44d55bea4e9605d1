"""Test whole folders with what published ones have beside plain weights: FP8 and MXFP4
tensors, and layers for multi-token prediction."""

import json
import math
import re

import jax
import numpy as np
import pytest

from moejax.interop import fields, tree
from moejax.interop.families import FAMILIES
from moejax.interop.folder import TensorFolder
from moejax.interop.published import open_model, plan_model, read_architecture
from tests.support.block_formats import decode_fp8, decode_mxfp4
from tests.support.golden_hf import ROOT
from tests.support.run_main import ROOT as REPO
from tests.support.tensor_folders import BF16, E4M3, SINGLE, write_arrays, write_raw
from tools import hf

FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
"""quantization_config of DeepSeek-V3 and Kimi-K2, as published."""
MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip
"""quantization_config of GPT-OSS, as published."""
WIDTHS = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank",
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim", "head_dim",
    "v_head_dim",
)  # fmt: skip
KEPT_WHOLE = r"(embed_tokens|lm_head|norm|gate)\.weight$|bias$|eh_proj|shared_head"
"""Tensors that FP8 checkpoints hold as bfloat16 or float32."""


def read_folder(name: str):
    """Return the config.json in the published spelling, and the tensors."""
    config = json.loads((ROOT / name / "config_v4.json").read_text())
    folder = TensorFolder(ROOT / name)
    return config, {key: folder.view(key).read() for key in folder.arrays}


def write(folder, config, tensors, **changes):
    """Write a folder of a model, and return it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | changes))
    write_arrays(folder / SINGLE, tensors)
    return folder


def read_params(folder):
    """Return all parameters, the routers' biases and the notes of a folder."""
    model = open_model(folder)
    trees = (model.params, model.router_bias)
    return jax.tree.map(lambda view: view.read(dtype=np.float32), trees), (model.notes)


def check_same_params(folder, plain) -> tuple[str, ...]:
    """Raise AssertionError unless two folders have equal parameters; return the notes
    of the first."""
    (params, notes), (expected, _) = read_params(folder), read_params(plain)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    return notes


def make_fp8(rng, shape):
    """Return random codes and scales, and their weights by definition."""
    codes = rng.choice(np.delete(np.arange(256), [127, 255]), shape).astype(np.uint8)
    blocks = [-(-size // 128) for size in shape]
    scale = (2.0 ** rng.uniform(-12, -4, blocks)).astype(np.float32)
    return codes.view(E4M3), scale, decode_fp8(codes, scale)


def in_fp8(rng, tensors):
    """Return tensors of a DeepSeek-V3 folder with FP8 weights, and the same decoded."""
    quantized, plain = {}, {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or re.search(KEPT_WHOLE, name):
            kept = tensor if "correction_bias" in name else tensor.astype(BF16)
            quantized[name] = plain[name] = kept
            continue
        codes, scale, plain[name] = make_fp8(rng, tensor.shape)
        quantized |= {name: codes, f"{name}_scale_inv": scale}
    return quantized, plain


def widened(config, tensors, times: int):
    """Return the configuration and random tensors of a model with wider parts."""
    rng = np.random.default_rng(0)
    config = config | {key: times * config[key] for key in WIDTHS}
    wide = {}
    for name, tensor in tensors.items():
        shape = [times * size for size in tensor.shape]
        if re.search(r"(embed_tokens|lm_head|mlp\.gate)\.|correction_bias", name):
            shape[0] = tensor.shape[0]  # tokens or experts
        wide[name] = rng.standard_normal(shape).astype(np.float32)
    return config, wide


@pytest.mark.parametrize("times", [1, 6])
def test_fp8_weights_are_codes_times_scales_of_blocks(times, tmp_path):
    """All blocks of the tiny model are partial. In the one that is six times as wide
    tensors have up to three blocks, and the last one is partial: blocks have 128 rows,
    where transformers 5.23 divides the rows evenly among the scales."""
    config, tensors = widened(*read_folder("deepseek_v3"), times)
    quantized, plain = in_fp8(np.random.default_rng(1), tensors)
    assert sum(name.endswith("scale_inv") for name in quantized) == 72
    folder = write(tmp_path / "fp8", config, quantized, quantization_config=FP8)
    check_same_params(folder, write(tmp_path / "plain", config, plain))


def test_mxfp4_experts_are_codes_times_scales_of_groups(tmp_path):
    """gate_up_proj_blocks [e, 2f, d/32, 16] holds gate and up in turns, and
    down_proj_blocks [e, d, f/32, 16] the transpose of our down_efd."""
    config, tensors = read_folder("gpt_oss")
    quantized, plain, expected = in_mxfp4(np.random.default_rng(2), tensors)
    folder = write(tmp_path / "mxfp4", config, quantized, quantization_config=MXFP4)
    check_same_params(folder, write(tmp_path / "plain", config, plain))
    (params, _), _ = read_params(folder)
    moe = params["cycles"]["blocks"][1]["moe"]
    for layer, (into_ehd, out_edf) in enumerate(expected):
        gate_efd, up_efd = into_ehd[:, ::2], into_ehd[:, 1::2]
        for ours, by_definition in (
            ("gate_edf", gate_efd), ("up_edf", up_efd), ("down_efd", out_edf),
        ):  # fmt: skip
            turned = by_definition.swapaxes(1, 2)
            np.testing.assert_array_equal(moe[ours][layer], turned)


def in_mxfp4(rng, tensors):
    """Return tensors of a GPT-OSS folder with MXFP4 experts, the same decoded, and what
    the definition says for each layer: [e, 2f, d] and [e, d, f]."""
    quantized, plain, layers = {}, {}, {}
    for name, tensor in tensors.items():
        quantized[name] = plain[name] = tensor.astype(BF16)
        if not name.endswith("_proj"):
            continue
        e, into, out = tensor.shape
        blocks = rng.integers(0, 256, (e, out, into // 32, 16), np.uint8)
        scales = rng.integers(115, 135, (e, out, into // 32), np.uint8)
        del quantized[name]
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        decoded = decode_mxfp4(blocks, scales)
        plain[name] = np.ascontiguousarray(decoded.swapaxes(1, 2))
        layers.setdefault(name.split(".")[2], {})[name.split(".")[-1]] = decoded
    expected = [(each["gate_up_proj"], each["down_proj"]) for each in layers.values()]
    return quantized, plain, expected


def with_extra_layer(config, tensors):
    """Return the tensors with a layer for multi-token prediction after the last one, as
    DeepSeek-V3 and GLM-4.5 publish it."""
    number, d, v = config["num_hidden_layers"], config["hidden_size"], 128
    last, at = f"model.layers.{number - 1}.", f"model.layers.{number}."
    extra = {
        name.replace(last, at): tensor
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    shapes = {
        "enorm.weight": (d,), "hnorm.weight": (d,), "eh_proj.weight": (d, 2 * d),
        "embed_tokens.weight": (v, d), "shared_head.norm.weight": (d,),
        "shared_head.head.weight": (v, d),
    }  # fmt: skip
    rng = np.random.default_rng(3)
    for name, shape in shapes.items():
        extra[at + name] = rng.standard_normal(shape).astype(np.float32)
    return tensors | extra


@pytest.mark.parametrize(
    ("name", "is_fp8"),
    [("deepseek_v3", False), ("deepseek_v3", True), ("glm4_moe", False)],
)
def test_layers_for_multi_token_prediction_are_read_past(name, is_fp8, tmp_path):
    config, tensors = read_folder(name)
    assert config["num_nextn_predict_layers"] == 1
    changes = {}
    if is_fp8:
        tensors, _ = in_fp8(np.random.default_rng(4), tensors)
        changes["quantization_config"] = FP8
    plain = write(tmp_path / "plain", config, tensors, **changes)
    extended = with_extra_layer(config, tensors)
    folder = write(tmp_path / "extended", config, extended, **changes)
    notes = check_same_params(folder, plain)
    assert any("multi-token prediction" in note for note in notes), notes


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek_v3", {"quant_method": None}),
        ("deepseek_v3", {"fmt": "e5m2"}),
        ("gpt_oss", {"quant_method": "awq"}),
        ("gpt_oss", {"group_size": 16}),
    ],
    ids=str,
)
def test_another_quantisation_is_refused_in_one_line(name, changes, tmp_path):
    config, tensors = read_folder(name)
    good = MXFP4 if name == "gpt_oss" else FP8
    folder = write(
        tmp_path / "folder", config, tensors, quantization_config=good | changes
    )
    with pytest.raises(ValueError, match="quantization_config") as error:
        open_model(folder)
    key = next(iter(changes))
    assert key in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("scale", r"down_proj\.weight.*scale_inv"),
        ("config", r"quantization_config"),
    ],
)
def test_codes_without_their_scales_are_refused_in_one_line(lost, message, tmp_path):
    """Neither without one scale, nor without the word of config.json, are codes read as
    weights."""
    config, tensors = read_folder("deepseek_v3")
    quantized, _ = in_fp8(np.random.default_rng(5), tensors)
    changes = {"quantization_config": FP8}
    if lost == "config":
        changes = {}
    else:
        del quantized["model.layers.0.mlp.down_proj.weight_scale_inv"]
    folder = write(tmp_path / "folder", config, quantized, **changes)
    with pytest.raises(ValueError, match=message) as error:
        open_model(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("mlp.experts.gate_up_proj_scales", (8, 64, 1), np.uint8),
        ("mlp.experts.gate_up_proj_blocks", (8, 64, 2, 8), np.uint8),
        ("mlp.experts.down_proj_scales", (8, 64, 1), np.float32),
    ],
)
def test_mxfp4_tensors_of_another_shape_are_refused(name, shape, dtype, tmp_path):
    config, tensors = read_folder("gpt_oss")
    quantized, _, _ = in_mxfp4(np.random.default_rng(6), tensors)
    quantized[f"model.layers.1.{name}"] = np.zeros(shape, dtype)
    folder = write(tmp_path / "folder", config, quantized, quantization_config=MXFP4)
    with pytest.raises(ValueError, match=re.escape(name)) as error:
        open_model(folder)
    assert "\n" not in str(error.value)


def test_mxfp4_needs_whole_groups(tmp_path):
    """A config.json whose width is no multiple of 32 is refused, also where blocks
    hold as many groups, rounded up."""
    config, tensors = read_folder("gpt_oss")
    quantized, _, _ = in_mxfp4(np.random.default_rng(6), tensors)
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        for name, rows in (("gate_up_proj", 96), ("down_proj", 64)):
            quantized[f"{at}{name}_blocks"] = np.zeros((8, rows, 2, 16), np.uint8)
            quantized[f"{at}{name}_scales"] = np.zeros((8, rows, 2), np.uint8)
        quantized[at + "gate_up_proj_bias"] = np.zeros((8, 96), np.float32)
    changes = {"quantization_config": MXFP4, "intermediate_size": 48}
    folder = write(tmp_path / "folder", config, quantized, **changes)
    with pytest.raises(ValueError, match=r"groups of 32.*48 inputs") as error:
        open_model(folder)
    assert "\n" not in str(error.value)


def test_a_check_decodes_before_it_looks(tmp_path, capfd):
    """The scale 255 makes a group NaN (Microscaling Formats 1.0, section 5.4.1)."""
    config, tensors = read_folder("gpt_oss")
    quantized, _, _ = in_mxfp4(np.random.default_rng(6), tensors)
    folder = write(tmp_path / "good", config, quantized, quantization_config=MXFP4)
    assert hf.main(["check", str(folder)]) == 0
    quantized["model.layers.1.mlp.experts.down_proj_scales"][3, 5, 0] = 255
    folder = write(tmp_path / "bad", config, quantized, quantization_config=MXFP4)
    assert hf.main(["check", str(folder)]) == 2
    assert "down_proj' has 32 values that are not finite" in capfd.readouterr().err


def sizes_on_disk(name: str):
    """Return dtype and shape of each tensor of a published model, whose config.json is
    in tests/golden/published, quantised as that says, and the parts of config.json."""
    source = REPO / "tests" / "golden" / "published" / name
    architecture = read_architecture(source)
    network = fields.make_network(architecture.fields)
    trees = tree.abstract(FAMILIES[architecture.family], network)
    export = plan_model(
        network, *map(tree.as_tree, trees), dtype="bfloat16", record=architecture.record
    )
    sizes = {}
    for key, view in export.tensors.items():
        e, rest = view.shape[0], view.shape[1:]
        if architecture.quantization == "mxfp4" and key.endswith("_proj"):
            into, out = rest
            sizes[f"{key}_blocks"] = "U8", (e, out, into // 32, 16)
            sizes[f"{key}_scales"] = "U8", (e, out, into // 32)
        elif architecture.quantization == "fp8" and not re.search(KEPT_WHOLE, key):
            sizes[key] = "F8_E4M3", view.shape
            blocks = tuple(-(-size // 128) for size in view.shape)
            sizes[f"{key}_scale_inv"] = "F32", blocks
        else:
            sizes[key] = (
                "F32" if key.endswith("correction_bias") else "BF16",
                view.shape,
            )
    return source / "config.json", sizes


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "num_tensors", "num_bytes"),
    [
        ("gpt_oss_120b", 687, 65_248_815_744),  # published: 60.8 GiB
        ("deepseek_v3", 90_427, 673_150_611_808),
    ],
)
def test_a_folder_of_the_full_size_opens(name, num_tensors, num_bytes, tmp_path):
    """The file is sparse: it has a header and nothing else."""
    config, sizes = sizes_on_disk(name)
    widths, header, stop = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}, {}, 0
    for key, (dtype, shape) in sizes.items():
        start, stop = stop, stop + widths[dtype] * math.prod(shape)
        header[key] = {
            "dtype": dtype, "shape": list(shape), "data_offsets": [start, stop],
        }  # fmt: skip
    assert (len(sizes), stop) == (num_tensors, num_bytes)
    write_raw(tmp_path / SINGLE, header)
    with (tmp_path / SINGLE).open("r+b") as file:
        file.truncate((tmp_path / SINGLE).stat().st_size + stop)
    (tmp_path / "config.json").write_bytes(config.read_bytes())
    model = open_model(tmp_path)
    for leaf in jax.tree.leaves((model.params, model.router_bias)):
        corner = tuple(slice(size - 1, size) for size in leaf.shape)
        assert not leaf.read(corner).any()
    assert model.folder.bytes_read < 2**20
