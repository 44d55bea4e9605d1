"""Test that tensors and config.json must agree, in one line where they do not, and that
published forms are read: quantised, with layers for multi-token prediction, with a part
for images."""

import json
import math
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from moejax.interop import fields, tree
from moejax.interop.architecture import CONFIG
from moejax.interop.families import FAMILIES
from moejax.interop.folder import TensorFolder
from moejax.interop.published import (
    open_model,
    plan_model,
    read_architecture,
    write_model,
)
from tests.support.block_formats import decode_fp8, decode_mxfp4
from tests.support.golden_hf import ROOT
from tests.support.run_main import ROOT as REPO
from tests.support.tensor_folders import (
    BF16,
    E4M3,
    SINGLE,
    edit_json,
    write_arrays,
    write_raw,
    write_tiny,
)
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
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
W1 = "model.layers.0.block_sparse_moe.experts.1.w1.weight"


def read_folder(name: str):
    """Return the config.json in the published spelling, and the tensors."""
    config = json.loads((ROOT / name / "config_v4.json").read_text())
    return config, dict(TensorFolder(ROOT / name).arrays)


def write(folder, config, tensors, **changes):
    """Write a folder of a model, and return it."""
    folder.mkdir()
    (folder / CONFIG).write_text(json.dumps(config | changes))
    write_arrays(folder / SINGLE, tensors)
    return folder


def read_params(folder) -> tuple[dict, dict]:
    """Return all parameters, and the routers' biases."""
    model = open_model(folder)
    trees = model.params, model.router_bias
    return jax.tree.map(lambda view: view.read(dtype=np.float32), trees)


def check_same_params(folder, plain) -> None:
    both = map(read_params, (folder, plain))
    jax.tree.map(np.testing.assert_array_equal, *both)


def refuse(folder, message: str) -> None:
    """Require that a folder is refused in one line."""
    with pytest.raises(ValueError, match=message) as error:
        open_model(folder)
    assert "\n" not in str(error.value)


@pytest.fixture
def mixtral(tmp_path):
    return write_tiny(tmp_path / "model", "mixtral")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (W1, None, f"has no tensor '{W1}'"),
        (W1, np.zeros((4, 9), "f"), "has shape [4, 9], and config.json says [4, 8]"),
        (W1, np.zeros((4, 8), np.int8), "is int8, which is no dtype of weights"),
        (W1, np.zeros((4, 8), E4M3), "quantization_config in config.json does not say"),
        ("model.layers.2.input_layernorm.weight", np.zeros(8, "f"), "of 2 layers"),
        (W1.replace(".1.", ".2."), np.zeros((4, 8), "f"), "a mixtral model of 2"),
        ("vision_model.a", np.zeros(2, "f"), "has tensor 'vision_model.a', and config"),
        (BIAS, np.zeros(2, "f"), "they belong to different models"),
    ],
)  # fmt: skip
def test_tensors_that_contradict_the_configuration(name, value, message, mixtral):
    arrays = dict(TensorFolder(mixtral).arrays) | {name: value}
    arrays = {name: value for name, value in arrays.items() if value is not None}
    (mixtral / SINGLE).unlink()
    write_arrays(mixtral / SINGLE, arrays)
    refuse(mixtral, re.escape(message))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, "has no tensor 'model.layers.2.input_layernorm"),
        ({"num_hidden_layers": 1}, "a mixtral model of 1 layers and 2 experts without"),
        ({"num_local_experts": 4}, "has shape [2, 8], and config.json says [4, 8]"),
        ({"num_key_value_heads": 2}, "has shape [4, 8], and config.json says [8, 8]"),
        ({"vocab_size": 9}, "has shape [8, 8], and config.json says [9, 8]"),
        ({"num_hidden_layers": 4000, "num_local_experts": 1000}, "says [1000, 8]"),
        ({"tie_word_embeddings": False}, "has no tensor 'lm_head.weight'"),
    ],
)  # fmt: skip
def test_configurations_that_contradict_the_tensors(change, message, mixtral):
    edit_json(mixtral / CONFIG, **change)
    refuse(mixtral, re.escape(message))


def test_a_head_beside_a_tied_embedding_is_read_past(mixtral):
    arrays = dict(TensorFolder(mixtral).arrays)
    (mixtral / SINGLE).unlink()
    write_arrays(mixtral / SINGLE, arrays | {"lm_head.weight": np.ones((8, 8), "f")})
    (note,) = open_model(mixtral).notes
    assert "'lm_head.weight': tie_word_embeddings is true" in note
    edit_json(mixtral / CONFIG, tie_word_embeddings=False)
    model = open_model(mixtral)
    assert model.notes == ()
    assert model.params["head_vd"].read().all()


def test_what_cannot_be_written_is_one_line(mixtral, tmp_path):
    model = open_model(mixtral)
    moved = {"cycles": {"blocks": {0: {"moe": {"bias_e": np.ones((2, 2), "f")}}}}}
    for bias, dtype, message in (
        (model.router_bias, "float16", "dtype 'float16': it must be"),
        (moved, "float32", "mixtral has no correction bias of the router"),
    ):
        with pytest.raises(ValueError, match=message):
            write_model(
                tmp_path / "out", model.network, model.params, bias, dtype=dtype
            )
    assert not (tmp_path / "out").exists()


def test_leaves_may_be_arrays_of_jax(mixtral, tmp_path):
    model = open_model(mixtral)
    params = jax.tree.map(lambda view: jax.numpy.asarray(view.read()), model.params)
    out = tmp_path / "out"
    write_model(out, model.network, params, model.router_bias, dtype="float32")
    for name in (SINGLE, CONFIG):
        assert (out / name).read_bytes() == (mixtral / name).read_bytes()


def in_fp8(rng, tensors):
    """Return tensors of a DeepSeek-V3 folder with FP8 weights, and the same decoded.
    Some scales are bfloat16, as Qwen3 has them."""
    quantized, plain = {}, {}
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or re.search(KEPT_WHOLE, name):
            kept = tensor if "correction_bias" in name else tensor.astype(BF16)
            quantized[name] = plain[name] = kept
            continue
        # No code is NaN.
        codes = rng.choice(np.delete(np.arange(256), [127, 255]), tensor.shape)
        blocks = [-(-size // 128) for size in tensor.shape]
        scale = (2.0 ** rng.uniform(-12, -4, blocks)).astype(np.float32)
        if name.endswith("o_proj.weight"):
            scale = scale.astype(BF16)
        codes = codes.astype(np.uint8)
        plain[name] = decode_fp8(codes, scale.astype(np.float32))
        quantized |= {name: codes.view(E4M3), f"{name}_scale_inv": scale}
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


def test_fp8_weights_are_codes_times_scales_of_blocks(tmp_path):
    """Tensors have up to three blocks, and the last one is partial: blocks have 128
    rows, where transformers 5.23 divides the rows evenly among the scales."""
    config, tensors = widened(*read_folder("deepseek_v3"), times=6)
    quantized, plain = in_fp8(np.random.default_rng(1), tensors)
    assert sum(name.endswith("scale_inv") for name in quantized) == 72
    folder = write(tmp_path / "fp8", config, quantized, quantization_config=FP8)
    check_same_params(folder, write(tmp_path / "plain", config, plain))
    (note,) = open_model(folder).notes
    assert note.startswith("Weights are fp8 in blocks, and are decoded")
    model = open_model(folder)
    export = plan_model(
        model.network, model.params, model.router_bias, dtype="float32",
        record=model.architecture.record,
    )  # fmt: skip
    assert "quantization_config" not in json.loads(export.files[CONFIG])
    for name, array in plain.items():
        np.testing.assert_array_equal(export.value(name), array.astype(np.float32))


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


def test_mxfp4_experts_are_codes_times_scales_of_groups(tmp_path, capfd):
    """gate_up_proj_blocks [e, 2f, d/32, 16] holds gate and up in turns, and
    down_proj_blocks [e, d, f/32, 16] the transpose of our down_efd. Scale 255 makes a
    group NaN (Microscaling Formats 1.0, section 5.4.1), which a check finds."""
    config, tensors = read_folder("gpt_oss")
    quantized, plain, expected = in_mxfp4(np.random.default_rng(2), tensors)
    folder = write(tmp_path / "mxfp4", config, quantized, quantization_config=MXFP4)
    check_same_params(folder, write(tmp_path / "plain", config, plain))
    params, _ = read_params(folder)
    moe = params["cycles"]["blocks"][1]["moe"]
    for layer, (into_ehd, out_edf) in enumerate(expected):
        gate_efd, up_efd = into_ehd[:, ::2], into_ehd[:, 1::2]
        for ours, by_definition in (
            ("gate_edf", gate_efd), ("up_edf", up_efd), ("down_efd", out_edf),
        ):  # fmt: skip
            turned = by_definition.swapaxes(1, 2)
            np.testing.assert_array_equal(moe[ours][layer], turned)
    assert hf.main(["check", str(folder)]) == 0
    scales = quantized["model.layers.1.mlp.experts.down_proj_scales"].copy()
    scales[3, 5, 0] = 255
    quantized["model.layers.1.mlp.experts.down_proj_scales"] = scales
    bad = write(tmp_path / "bad", config, quantized, quantization_config=MXFP4)
    assert hf.main(["check", str(bad)]) == 2
    assert "down_proj' has 32 values that are not finite" in capfd.readouterr().err


DOWN = "model.layers.1.mlp.experts.down_proj"
GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"
DENSE = "model.layers.0.mlp.down_proj.weight"
WRONG_CODES = {
    "fp8: no scale": ("deepseek_v3", {f"{DENSE}_scale_inv": None}, {}, "scale_inv"),
    "fp8: not said": ("deepseek_v3", {}, {"quantization_config": None},
                      "quantization_config"),
    "fp8: scales": ("deepseek_v3", {f"{DENSE}_scale_inv": np.ones((2, 1), "f")}, {},
                    "quantisation in config.json is another one"),
    "mxfp4: scales": ("gpt_oss", {f"{GATE_UP}_scales": np.zeros((8, 64, 1), "u1")}, {},
                      "gate_up_proj_scales"),
    "mxfp4: blocks": ("gpt_oss", {f"{GATE_UP}_blocks": np.zeros((8, 64, 2, 8), "u1")},
                      {}, "gate_up_proj_blocks"),
    "mxfp4: dtype": ("gpt_oss", {f"{DOWN}_scales": np.zeros((8, 64, 1), "f")}, {},
                     "down_proj_scales"),
    "mxfp4: not said": ("gpt_oss", {}, {"quantization_config": None}, "has no tensor"),
    "mxfp4: groups": ("gpt_oss", {}, {"intermediate_size": 48}, "shape|groups of 32"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_CODES)
def test_codes_that_do_not_fit_are_refused(case, tmp_path):
    """No code is read as a weight without its scales and the word of config.json."""
    name, arrays, changes, message = WRONG_CODES[case]
    config, tensors = read_folder(name)
    rng = np.random.default_rng(5)
    quantized = (in_fp8 if name == "deepseek_v3" else in_mxfp4)(rng, tensors)[0]
    quantized = {k: v for k, v in (quantized | arrays).items() if v is not None}
    how = {"quantization_config": FP8 if name == "deepseek_v3" else MXFP4} | changes
    refuse(write(tmp_path / "folder", config, quantized, **how), message)


@pytest.mark.parametrize(
    ("name", "is_fp8"), [("deepseek_v3", True), ("glm4_moe", False)]
)
def test_layers_for_multi_token_prediction_are_read_past(name, is_fp8, tmp_path):
    """DeepSeek-V3 and GLM-4.5 publish such a layer after the last one."""
    config, tensors = read_folder(name)
    number, d, v = config["num_hidden_layers"], config["hidden_size"], 128
    last, at = f"model.layers.{number - 1}.", f"model.layers.{number}."
    shapes = {
        "enorm.weight": (d,), "eh_proj.weight": (d, 2 * d),
        "embed_tokens.weight": (v, d), "shared_head.norm.weight": (d,),
        "shared_head.head.weight": (v, d),
    }  # fmt: skip
    extra = {k.replace(last, at): x for k, x in tensors.items() if k.startswith(last)}
    extra |= {at + key: np.zeros(shape, "f") for key, shape in shapes.items()}
    changes = {"num_nextn_predict_layers": 1}
    if is_fp8:
        tensors, _ = in_fp8(np.random.default_rng(4), tensors)
        extra, _ = in_fp8(np.random.default_rng(5), extra)
        changes["quantization_config"] = FP8
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(1, "f")
    plain = write(tmp_path / "plain", config, tensors, **changes)
    folder = write(tmp_path / "extended", config, tensors | extra, **changes)
    check_same_params(folder, plain)
    notes = set(open_model(folder).notes) - set(open_model(plain).notes)
    assert ["multi-token prediction" in note for note in notes] == [True]
    edit_json(folder / CONFIG, num_nextn_predict_layers=0)
    refuse(folder, "they belong to different models")


def test_the_text_part_of_a_multimodal_folder(tmp_path):
    text, tensors = read_folder("llama4_text")
    images = ("vision_model.patch.weight", "multi_modal_projector.linear_1.weight")
    both = {f"language_model.{name}": array for name, array in tensors.items()}
    whole = {
        "model_type": "llama4", "text_config": text, "vision_config": {"hidden": 3},
        "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080,
        "tie_word_embeddings": False,
    }  # fmt: skip
    arrays = both | {name: np.zeros(3, "f") for name in images}
    folder = write(tmp_path / "folder", whole, arrays)
    check_same_params(folder, ROOT / "llama4_text")
    model = open_model(folder)
    assert "vision part is not imported" in model.notes[0]
    assert "2 tensors are read past" in model.notes[1]
    out, record = tmp_path / "out", model.architecture.record
    trees = model.params, model.router_bias
    write_model(out, model.network, *trees, record=record, dtype="float32")
    assert json.loads((out / CONFIG).read_text())["model_type"] == "llama4_text"
    assert (out / SINGLE).read_bytes() == (ROOT / "llama4_text" / SINGLE).read_bytes()
    for change, message in (
        ({"text_config": None}, "text_config is missing|text_config=null is missing"),
        ({"image_gate": 3}, "image_gate=3 is unknown"),
    ):
        edit_json(folder / CONFIG, **whole | change)
        refuse(folder, message)


def sizes_on_disk(name: str):
    """Return dtype and shape of each tensor of a published model of GPT-OSS, whose
    config.json is in tests/golden/published, and the path of config.json."""
    source = REPO / "tests" / "golden" / "published" / name
    architecture = read_architecture(source)
    network = fields.make_network(architecture.fields)
    trees = tree.abstract(FAMILIES[architecture.family], network)
    export = plan_model(
        network, *map(tree.as_tree, trees), dtype="bfloat16", record=architecture.record
    )
    sizes = {}
    for key, view in export.tensors.items():
        if key.endswith("_proj"):
            e, into, out = view.shape
            sizes[f"{key}_blocks"] = "U8", (e, out, into // 32, 16)
            sizes[f"{key}_scales"] = "U8", (e, out, into // 32)
        else:
            sizes[key] = "BF16", view.shape
    return source / CONFIG, sizes


def test_a_folder_of_the_full_size_opens(tmp_path):
    """The file is sparse: it has a header and nothing else."""
    config, sizes = sizes_on_disk("gpt_oss_120b")
    widths, header, stop = {"U8": 1, "BF16": 2}, {}, 0
    for key, (dtype, shape) in sizes.items():
        start, stop = stop, stop + widths[dtype] * math.prod(shape)
        header[key] = {
            "dtype": dtype, "shape": list(shape), "data_offsets": [start, stop],
        }  # fmt: skip
    assert (len(sizes), stop) == (687, 65_248_815_744), "published: 60.8 GiB"
    write_raw(tmp_path / SINGLE, header)
    with (tmp_path / SINGLE).open("r+b") as file:
        file.truncate((tmp_path / SINGLE).stat().st_size + stop)
    (tmp_path / CONFIG).write_bytes(config.read_bytes())
    model = open_model(tmp_path)
    for leaf in jax.tree.leaves((model.params, model.router_bias)):
        corner = tuple(slice(size - 1, size) for size in leaf.shape)
        assert not leaf.read(corner).any()
    assert model.folder.bytes_read < 2**20


def test_the_examples_of_the_page_run(published, repo, tmp_path, monkeypatch):
    page = (repo / "docs" / "interop.md").read_text()
    models, read, written = re.findall(
        r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE
    )
    names: dict = {}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "olmoe").symlink_to(published / "olmoe")
    exec(compile(models, "interop.md", "exec"), names)
    assert names["written"].plan.num_bytes == 67072
    exec(compile(read, "interop.md", "exec"), names)
    want = load_file(published / "olmoe" / SINGLE)
    one = want["model.layers.1.mlp.experts.7.gate_proj.weight"]
    assert np.array_equal(np.asarray(names["arrays"]["gate_ledf"])[1, 7], one.T)
    exec(compile(written, "interop.md", "exec"), names)
    assert load_file(tmp_path / "out" / SINGLE)["lm_head.weight"].sum() == 128 * 64
