"""Test that tensors become parameters and parameters tensors, and that what does not
fit config.json is one line."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from moejax.config import Network
from moejax.interop import tree
from moejax.interop.architecture import CONFIG, as_architecture
from moejax.interop.families import FAMILIES
from moejax.interop.fields import make_network
from moejax.interop.published import open_model, plan_model, write_model
from moejax.interop.views import View
from tests.support.mutated_configs import GOLDEN, TINY
from tests.support.tensor_folders import BF16, E4M3, SINGLE, edit_json, write_arrays

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def random_trees(name: str, network: Network, seed: int = 0) -> list[dict]:
    """Return random parameters and biases of routers."""
    random = np.random.default_rng(seed)
    trees = []
    for leaves in tree.abstract(FAMILIES[name], network):
        trees.append(
            tree.as_tree(
                {
                    path: random.standard_normal(leaf.shape).astype(np.float32)
                    for path, leaf in leaves.items()
                }
            )
        )
    if not tree.has_bias(FAMILIES[name], network):
        trees[1] = jax.tree.map(np.zeros_like, trees[1])
    return trees


def read_all(views: dict) -> dict:
    return jax.tree.map(View.read, views, is_leaf=lambda leaf: isinstance(leaf, View))


def require_same(one: dict, other: dict) -> None:
    def same(a, b):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.tobytes() == b.tobytes()

    jax.tree.map(same, one, other)


@pytest.fixture
def mixtral(tmp_path: pathlib.Path) -> pathlib.Path:
    network = TINY["mixtral"]
    trees = random_trees("mixtral", network)
    write_model(tmp_path / "model", network, *trees, dtype="float32")
    return tmp_path / "model"


@pytest.fixture
def deepseek(tmp_path: pathlib.Path) -> pathlib.Path:
    network = TINY["deepseek_v3"]
    trees = random_trees("deepseek_v3", network)
    write_model(tmp_path / "model", network, *trees, dtype="float32")
    return tmp_path / "model"


def read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    model = open_model(folder)
    return {name: model.folder.view(name).read() for name in model.folder.arrays}


def rewrite(folder: pathlib.Path, **changes: np.ndarray | None) -> None:
    """Write the tensors of a folder again, with some changed or, if None, removed."""
    arrays = read_tensors(folder) | changes
    arrays = {name: value for name, value in arrays.items() if value is not None}
    write_arrays(folder / SINGLE, arrays)


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir()))
def test_export_and_import_of_every_family(name, tmp_path):
    """Parameters come back bit for bit, from one file and from many, in float32 and,
    rounded once, in bfloat16."""
    record = json.loads((GOLDEN / name / CONFIG).read_text())
    architecture = as_architecture(record, "")
    network = make_network(architecture.fields)
    trees = random_trees(architecture.family, network)
    options = {"record": record, "files": {"tokenizer.json": b"{}"}}
    one = write_model(tmp_path / "a", network, *trees, dtype="float32", **options)
    assert list(one.plan.files) == [SINGLE]
    model = open_model(tmp_path / "a")
    assert model.network == network
    assert model.notes == ()
    require_same(read_all(model.params), trees[0])
    require_same(read_all(model.router_bias), trees[1])
    views = model.params, model.router_bias
    many = write_model(
        tmp_path / "b", network, *views, dtype="bfloat16", max_shard_bytes=20_000,
        **options,
    )  # fmt: skip
    assert len(many.plan.files) > 2
    model = open_model(tmp_path / "b")
    assert model.architecture.dtype == "bfloat16"
    rounded = jax.tree.map(lambda x: x.astype(BF16), trees[0])
    require_same(read_all(model.params), rounded)
    require_same(read_all(model.router_bias), trees[1])  # always float32


def test_every_published_folder_is_written_as_it_is(published, tmp_path):
    folders = sorted(path.parent for path in published.glob(f"*/{SINGLE}"))
    assert len(folders) >= 14
    for folder in folders:
        for spelling in ("config.json", "config_v4.json"):
            out = tmp_path / f"{folder.name}-{spelling}"
            model = open_model(folder)
            record = json.loads((folder / spelling).read_text())
            write_model(
                out, model.network, model.params, model.router_bias,
                record=record, dtype="float32",
            )  # fmt: skip
            first = read_all(model.params), read_all(model.router_bias)
            assert (out / SINGLE).read_bytes() == (folder / SINGLE).read_bytes()
            again = open_model(out)
            require_same(read_all(again.params), first[0])
            require_same(read_all(again.router_bias), first[1])
            assert again.network == model.network
            ids = json.loads((folder / "generation_config.json").read_text())
            got = json.loads((out / "generation_config.json").read_text())
            assert got.items() <= ids.items()


def test_leaves_may_be_arrays_of_jax(mixtral, tmp_path):
    model = open_model(mixtral)
    params = jax.tree.map(jax.numpy.asarray, read_all(model.params))
    out = tmp_path / "out"
    write_model(out, model.network, params, model.router_bias, dtype="float32")
    for name in (SINGLE, CONFIG):
        assert (out / name).read_bytes() == (mixtral / name).read_bytes()


def test_what_cannot_be_written_is_one_line(mixtral, tmp_path):
    model = open_model(mixtral)
    args = model.network, model.params
    moved = jax.tree.map(
        lambda view: np.ones(view.shape, np.float32), model.router_bias,
        is_leaf=lambda leaf: isinstance(leaf, View),
    )  # fmt: skip
    bad = [
        ({"dtype": "float16"}, model.router_bias, "dtype 'float16': it must be"),
        ({}, moved, "mixtral has no correction bias of the router"),
    ]
    for options, bias, message in bad:
        with pytest.raises(ValueError, match=message):
            write_model(tmp_path / "out", *args, bias, **{"dtype": "float32"} | options)
    assert not (tmp_path / "out").exists()


W1 = "model.layers.0.block_sparse_moe.experts.1.w1.weight"


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
    rewrite(mixtral, **{name: value})
    with pytest.raises(ValueError) as error:
        open_model(mixtral)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 3}, "has no tensor 'model.layers.2.input_layernorm"),
        ({"num_hidden_layers": 1}, "a mixtral model of 1 layers and 2 experts without"),
        ({"num_local_experts": 4}, "has shape [2, 8], and config.json says [4, 8]"),
        ({"num_key_value_heads": 2}, "has shape [4, 8], and config.json says [8, 8]"),
        ({"vocab_size": 9}, "has shape [8, 8], and config.json says [9, 8]"),
        ({"num_hidden_layers": 4000, "num_local_experts": 1000}, "says [1000, 8]"),
    ],
)  # fmt: skip
def test_configurations_that_contradict_the_tensors(change, message, mixtral):
    edit_json(mixtral / CONFIG, **change)
    with pytest.raises(ValueError) as error:
        open_model(mixtral)
    assert message in str(error.value)


def test_a_tied_head_may_be_there_or_not(mixtral):
    head = np.zeros((8, 8), "f")
    edit_json(mixtral / CONFIG, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"has no tensor 'lm_head.weight'"):
        open_model(mixtral)
    edit_json(mixtral / CONFIG, tie_word_embeddings=True)
    rewrite(mixtral, **{"lm_head.weight": head})
    model = open_model(mixtral)
    (note,) = model.notes
    assert "'lm_head.weight': tie_word_embeddings is true" in note
    assert "head_vd" not in model.params
    edit_json(mixtral / CONFIG, tie_word_embeddings=False)
    model = open_model(mixtral)
    assert model.notes == ()
    assert np.array_equal(model.params["head_vd"].read(), head)


def test_layers_for_more_tokens_and_buffers_are_read_past(deepseek):
    extra = {
        "model.layers.2.eh_proj.weight": np.zeros((8, 16), "f"),
        "model.layers.2.mlp.gate.weight": np.zeros((2, 8), "f"),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(1, "f"),
    }
    arrays = read_tensors(deepseek)
    write_arrays(deepseek / SINGLE, arrays | extra)
    with pytest.raises(ValueError, match=r"has tensor 'model.layers.2.eh_proj.weight'"):
        open_model(deepseek)
    edit_json(deepseek / CONFIG, num_nextn_predict_layers=1)
    model = open_model(deepseek)
    (note,) = model.notes
    assert note.startswith("2 tensors are read past")
    assert "multi-token prediction" in note
    record = model.architecture.record
    views = model.params, model.router_bias
    export = plan_model(model.network, *views, record=record, dtype="float32")
    assert set(export.tensors) == set(arrays)
    assert json.loads(export.files[CONFIG])["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize("scale_dtype", [np.float32, BF16])
def test_fp8_blocks(scale_dtype, tmp_path):
    """Products that have weight_scale_inv are decoded, and rounded when written."""
    network = TINY["deepseek_v3"]
    network = dataclasses.replace(
        network, model=dataclasses.replace(network.model, d_model=136, d_ff=130)
    )
    trees = random_trees("deepseek_v3", network)
    folder = tmp_path / "model"
    write_model(folder, network, *trees, dtype="bfloat16")
    arrays, expected = read_tensors(folder), {}
    random = np.random.default_rng(1)
    for name, array in list(arrays.items()):
        if not name.endswith("_proj.weight"):
            continue
        rows, columns = (-(-size // 128) for size in array.shape)
        scale = random.random((rows, columns)).astype(scale_dtype)
        arrays[name] = array.astype(E4M3)
        arrays[f"{name}_scale_inv"] = scale
        whole = scale.astype("f").repeat(128, axis=0).repeat(128, axis=1)
        whole = whole[: array.shape[0], : array.shape[1]]
        expected[name] = arrays[name].astype("f") * whole
    write_arrays(folder / SINGLE, arrays)
    with pytest.raises(
        ValueError, match=r"quantization_config in config.json does not"
    ):
        open_model(folder)
    how = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    edit_json(folder / CONFIG, quantization_config=how | {"activation_scheme": "d"})
    model = open_model(folder)
    assert model.notes == ("Weights are fp8 in blocks, and are decoded as they are "
                           "read.",)  # fmt: skip
    record, views = model.architecture.record, (model.params, model.router_bias)
    out = tmp_path / "out"
    write_model(out, model.network, *views, record=record, dtype="float32")
    assert "quantization_config" not in json.loads((out / CONFIG).read_text())
    got = read_tensors(out)
    assert got.keys() == {name for name in arrays if not name.endswith("_scale_inv")}
    for name, array in got.items():
        want = expected.get(name, arrays[name]).astype("f")
        assert np.array_equal(array, want), name


def test_mxfp4_experts(tmp_path):
    """Experts of GPT-OSS as blocks [e, out, in / 32, 16] and scales."""
    record = json.loads((GOLDEN / "gpt_oss" / CONFIG).read_text())
    network = make_network(as_architecture(record, "").fields)
    folder, random = tmp_path / "model", np.random.default_rng(2)
    trees = random_trees("gpt_oss", network)
    write_model(folder, network, *trees, record=record, dtype="bfloat16")
    arrays, expected = read_tensors(folder), {}
    values = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([values, -values])
    for name in [name for name in arrays if name.endswith("_proj")]:
        e, into, out = arrays.pop(name).shape
        codes = random.integers(0, 16, (e, out, into // 32, 32), dtype=np.uint8)
        scales = random.integers(120, 135, codes.shape[:3], dtype=np.uint8)
        arrays[f"{name}_blocks"] = codes[..., ::2] | codes[..., 1::2] << 4
        arrays[f"{name}_scales"] = scales
        weights = values[codes] * np.exp2(scales.astype("f") - 127)[..., None]
        expected[name] = weights.reshape(e, out, into).swapaxes(1, 2)
    write_arrays(folder / SINGLE, arrays)
    how = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    edit_json(folder / CONFIG, quantization_config=how)
    model = open_model(folder)
    got = read_all(model.params)["cycles"]["blocks"]
    both = np.stack([expected[f"model.layers.{i}.mlp.experts.gate_up_proj"]
                     for i in (0, 1)])  # fmt: skip
    moe = got[1]["moe"]
    assert np.array_equal(moe["gate_edf"], both[..., ::2])
    assert np.array_equal(moe["up_edf"], both[..., 1::2])
    views = model.params, model.router_bias
    record = model.architecture.record
    export = plan_model(model.network, *views, record=record, dtype="float32")
    for name, want in expected.items():
        assert np.array_equal(export.value(name), want)
    edit_json(folder / CONFIG, quantization_config=None)
    with pytest.raises(ValueError, match=r"has no tensor 'model.layers.0.mlp.experts"):
        open_model(folder)


def test_the_text_part_of_a_multimodal_folder(tmp_path):
    record = json.loads((GOLDEN / "llama4_text" / CONFIG).read_text())
    network = make_network(as_architecture(record, "").fields)
    folder = tmp_path / "model"
    trees = random_trees("llama4_text", network)
    write_model(folder, network, *trees, record=record, dtype="float32")
    arrays = read_tensors(folder)
    images = ("vision_model.patch.weight", "multi_modal_projector.linear_1.weight")
    both = {f"language_model.{name}": array for name, array in arrays.items()}
    write_arrays(folder / SINGLE, both | {n: np.zeros(3, "f") for n in images})
    text = record | {"dtype": None}
    whole = {
        "model_type": "llama4", "text_config": text, "vision_config": {},
        "dtype": "float32",
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps(whole))
    model = open_model(folder)
    require_same(read_all(model.params), trees[0])
    assert len(model.notes) == 2
    assert "2 tensors are read past" in model.notes[1]
    views = model.params, model.router_bias
    out, record = tmp_path / "out", model.architecture.record
    write_model(out, model.network, *views, record=record, dtype="float32")
    again = read_tensors(out)
    assert again.keys() == arrays.keys()
    assert json.loads((out / CONFIG).read_text())["model_type"] == "llama4_text"
