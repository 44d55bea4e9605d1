"""Test each family against its config.json in both spellings: fields, parameters, what
is written, and what is refused in one line."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from moejax import axes
from moejax.config import Mla, Model, Moe, Network, Router
from moejax.interop import fields, tree
from moejax.interop.architecture import CONFIG, as_architecture
from moejax.interop.export import make_config
from moejax.interop.families import FAMILIES
from moejax.interop.published import open_model, read_architecture, write_model
from moejax.model.transformer import Transformer
from moejax.moe.layer import RouterBias
from moejax.plan.layout import Topology
from tests.support.golden_hf import ROOT as GOLDEN
from tests.support.golden_hf import read_all
from tests.support.tensor_folders import BF16, SINGLE, TINY

NAMES = sorted(path.name for path in GOLDEN.iterdir())
SPELLINGS = ("config.json", "config_v4.json")


def record_of(name: str, spelling: str = CONFIG, **changes) -> dict:
    """Return a golden config.json with some keys changed; `...` removes a key."""
    record = json.loads((GOLDEN / name / spelling).read_text()) | changes
    return {key: value for key, value in record.items() if value is not ...}


def network_of(record: dict) -> Network:
    return fields.make_network(as_architecture(record, "").fields)


@pytest.mark.parametrize("name", NAMES)
def test_both_spellings_say_the_same_and_the_older_is_written(name):
    """All keys of config_v4.json are written with its values, from either spelling, and
    without a record a config.json that gives the same network."""
    five, four = (record_of(name, spelling) for spelling in SPELLINGS)
    assert ("rope_parameters" in five, "rope_parameters" in four) == (True, False)
    one, other = (as_architecture(record, "") for record in (five, four))
    assert one.fields == other.fields
    assert (one.dtype, one.notes, one.quantization) == ("float32", (), None)
    network = network_of(five)
    for record in (five, four):
        _, written = make_config(network, record=record)
        assert "rope_parameters" not in written
        for key, value in four.items():
            if key == "rope_scaling" and value is not None:
                assert written[key].items() >= value.items()
            elif key == "num_nextn_predict_layers":
                assert written[key] == 0
            elif key not in ("torch_dtype", "transformers_version"):
                is_same = written.get(key) == value
                assert is_same or (key, value) == ("head_dim", None), key
        assert network_of(written) == network
    family, written = make_config(network)
    assert network_of(written) == network
    assert written["model_type"] == family.name == five["model_type"]


@pytest.mark.parametrize("name", NAMES)
def test_the_table_makes_all_parameters(name):
    """Trees have the paths and shapes of a Transformer's parameters and biases."""
    network = network_of(record_of(name))
    family = FAMILIES[record_of(name)["model_type"]]
    mesh = axes.make_mesh(Topology(), jax.devices()[:1])
    model = nnx.eval_shape(lambda: Transformer(network, mesh, nnx.Rngs(0)))
    _, *states = nnx.split(model, nnx.Param, RouterBias)
    for state, leaves in zip(states, tree.abstract(family, network), strict=True):
        expected = tree.as_leaves(nnx.to_pure_dict(state))
        shapes = {path: leaf.shape for path, leaf in leaves.items()}
        assert shapes == {path: leaf.shape for path, leaf in expected.items()}
    saved = tree.save(family, network, leaves | tree.abstract(family, network)[0])
    again = tree.load(family, network, lambda key, shape: saved[key])
    assert {p: leaf.shape for p, leaf in again[1].items()} == shapes


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_is_written_byte_by_byte_as_it_is(name, tmp_path):
    """In float32 in one file as transformers wrote it; in bfloat16 in several files
    with values that are rounded once, but for correction biases."""
    record, model = record_of(name), open_model(GOLDEN / name)
    args = model.network, model.params, model.router_bias
    write_model(tmp_path / "a", *args, record=record, dtype="float32")
    assert (tmp_path / "a" / SINGLE).read_bytes() == (
        GOLDEN / name / SINGLE
    ).read_bytes()
    ids = json.loads((GOLDEN / name / "generation_config.json").read_text())
    got = json.loads((tmp_path / "a" / "generation_config.json").read_text())
    assert got.items() <= ids.items()
    options = {"record": record, "dtype": "bfloat16", "max_shard_bytes": 20_000}
    assert len(write_model(tmp_path / "b", *args, **options).plan.files) > 2
    again = open_model(tmp_path / "b")
    assert (again.network, again.architecture.dtype) == (model.network, "bfloat16")
    rounded = jax.tree.map(lambda x: x.astype(BF16), read_all(model.params))
    jax.tree.map(np.testing.assert_array_equal, read_all(again.params), rounded)
    biases = (read_all(opened.router_bias) for opened in (again, model))
    jax.tree.map(np.testing.assert_array_equal, *biases)


def test_published_names_of_a_family():
    """Kimi-K2 is DeepSeek-V3; a class that is known will do."""
    for model_type in ("kimi_k2", "kimi_next", ...):
        record = record_of("moonlight", SPELLINGS[1], model_type=model_type)
        assert as_architecture(record, "").family == "deepseek_v3"
        record["auto_map"] = {"AutoModel": "modeling_deepseek.DeepseekV3Model"}
        _, written = make_config(network_of(record), record=record)
        assert written["model_type"] == "deepseek_v3"
        assert "auto_map" not in written


def test_gpt_oss_has_a_scaling_unless_it_says_none():
    """An absent scaling is YaRN in both transformers, null in one of them alone."""
    record = record_of("gpt_oss", rope_parameters=..., rope_theta=1e4)
    rope = as_architecture(record, "").fields["rope"]
    assert (rope["scaling"], rope["factor"], rope["truncate"]) == ("yarn", 32, False)
    record["rope_scaling"] = {"rope_type": "default"}
    network = network_of(record)
    assert network.rope.scaling == "none"
    assert make_config(network)[1]["rope_scaling"] == {"rope_type": "default"}


def test_layers_are_written_as_short_periods():
    record = record_of("llama4_text", num_hidden_layers=48, layer_types=...)
    record |= {"moe_layers": None, "no_rope_layers": [], "interleave_moe_layer_step": 2}
    got = as_architecture(record, "").fields
    assert (got["model"]["layers"], got["model"]["moe_every"]) == (None, 2)
    assert got["attention"]["layers"] == ("chunked", "chunked", "chunked", "nope")
    record = record_of("gpt_oss", num_hidden_layers=36, layer_types=...)
    got = as_architecture(record, "").fields
    assert got["attention"]["layers"] == ("sliding", "full")


@pytest.mark.parametrize(
    ("name", "change", "kinds"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "dmdmdm"),
        ("qwen3_moe", {"mlp_only_layers": [0, 3]}, "dmmdmm"),
        ("qwen2_moe", {"decoder_sparse_step": 3, "mlp_only_layers": [2]}, "dddddm"),
        ("ernie4_5_moe", {"moe_layer_start_index": 3}, "dddmmm"),
        ("ernie4_5_moe", {"moe_layer_end_index": 3}, "dmmmdd"),
        ("ernie4_5_moe", {"moe_layer_interval": 2}, "dmdmdm"),
        ("glm4_moe", {"first_k_dense_replace": 2}, "ddmmmm"),
        ("llama4_text", {"moe_layers": [1, 4]}, "dmddmd"),
    ],
)
def test_kinds_of_layers_both_ways(name, change, kinds):
    record = record_of(name, num_hidden_layers=6, layer_types=...)
    if name == "llama4_text":
        record["no_rope_layers"] = []
    if name == "ernie4_5_moe":
        record["moe_layer_end_index"] = -1
    expected = tuple({"d": "dense", "m": "moe"}[kind] for kind in kinds)
    network = network_of(record | change)
    assert fields.flatten(network)["layers.ff"] == expected
    _, written = make_config(network, name)
    assert network_of(written) == network


BAD = [
    ("mixtral", {"model_type": "mamba", "architectures": ["Mamba"]}, "'mamba' is not"),
    ("mixtral", {"model_type": ["a"], "architectures": 3}, "model_type=['a'] is not"),
    ("mixtral", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported: it must"),
    ("mixtral", {"sliding_window": 4096}, "sliding_window=4096 is not supported"),
    ("mixtral", {"attention_dropout": -0.1}, "must be a number of at least 0"),
    ("mixtral", {"hidden_size": "64"}, "hidden_size='64' must be a whole number"),
    ("mixtral", {"hidden_size": True}, "hidden_size=true must be a whole number"),
    ("mixtral", {"hidden_size": 64.0}, "hidden_size=64.0 must be a whole number"),
    ("mixtral", {"hidden_size": -64}, "hidden_size=-64 must be a whole number"),
    ("mixtral", {"hidden_size": 10**30}, "must be a whole number from 1"),
    ("mixtral", {"num_hidden_layers": 10**9}, "from 1 to 4,096"),
    ("mixtral", {"hidden_size": ...}, "hidden_size is missing: a model of this"),
    ("mixtral", {"num_experts_per_tok": 9}, "Moe.top_k=9 is more than num_experts=8"),
    ("mixtral", {"num_key_value_heads": 3}, "must be a multiple of num_kv_heads=3"),
    ("mixtral", {"rms_norm_eps": -1.0}, "rms_norm_eps=-1.0 must be a number above 0"),
    ("mixtral", {"rms_norm_eps": "a\nb"}, "rms_norm_eps='a\\nb' must be a number"),
    ("mixtral", {"num_experts": 16}, "num_experts=16 contradicts num_local_experts=8"),
    ("mixtral", {"qk_layernorm": True}, "qk_layernorm=true is unknown, and could"),
    ("mixtral", {"a b": [[1]]}, "'a b'=[[1]] is unknown"),
    ("mixtral", {"layer_types": ["sliding_attention"] * 2}, "must be a list of 'full_"),
    ("mixtral", {"rope_parameters": {"rope_type": "dynamic"}}, "rope_type='dynamic' "),
    ("mixtral", {"rope_parameters": []}, "rope_parameters=[] must be an object"),
    ("mixtral", {"rope_scaling": {"type": "linear"}}, "contradicts rope_parameters"),
    ("mixtral", {"rope_theta": 3.0}, "contradicts rope_theta=3 beside it"),
    ("mixtral", {"partial_rotary_factor": 0.5}, "must be 1 in this family"),
    ("mixtral", {"dtype": "int8"}, "dtype='int8' is not supported"),
    ("mixtral", {"quantization_config": {"quant_method": "gptq"}}, "quant_method='gp"),
    ("qwen2_moe", {"use_sliding_window": True}, "use_sliding_window=true is not"),
    ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "must have a layer 'moe'"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=true is not supported"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=false is not"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "set Model.num_kv_heads=2 to num_hea"),
    ("deepseek_v3", {"n_group": 3}, "Router.num_groups=3 must divide num_experts=8"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias=true is not supported"),
    ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min=0.1 must be at most 1e-06"),
    ("gpt_oss", {"rope_parameters": None}, "rope_scaling is ambiguous: say the"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias=false is not supported"),
    ("gpt_oss", {"layer_types": ["full_attention"]}, "must have 2 entries, one for ea"),
    ("llama4_text", {"moe_layers": [0, 5]}, "must be a list of 0, 1, 2; others do"),
    ("llama4_text", {"no_rope_layers": [1, 1]}, "must have 3 entries"),
    ("llama4_text", {"no_rope_layers": [0, 0, 0]}, "has chunks in a layer without"),
]
FP8 = {"quant_method": "fp8", "fmt": "e4m3"}
BAD += [
    ("deepseek_v3", {"quantization_config": FP8 | {"fmt": "e5m2"}}, "fmt='e5m2' is"),
    ("deepseek_v3", {"quantization_config": FP8 | {"weight_block_size": [64, 64]}},
     "quantization_config: weight_block_size=[64, 64] is not supported"),
    ("deepseek_v3", {"quantization_config": FP8}, "weight_block_size is missing"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "mxfp4", "bits": 4}},
     "quantization_config: bits=4 is unknown"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "message"), BAD)
def test_what_is_not_supported_is_one_line(name, change, message, tmp_path):
    (tmp_path / CONFIG).write_text(json.dumps(record_of(name, **change)))
    with pytest.raises(ValueError) as error:
        read_architecture(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / CONFIG}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("olmoe", {}, "Model.qk_norm='none': it must be 'full'"),
        ("mixtral", {"router": {"gate_scale": 2.0}}, "Router.gate_scale=2.0"),
        ("mixtral", {"attention": {"bias": "qkv"}}, "Attention.bias='qkv'"),
        ("mixtral", {"moe": {"num_shared_experts": 1}}, "shared"),
        ("mixtral", {"rope": {"scaling": "yarn", "factor": 4.0, "mscale": 0.5}},
         "Rope.mscale=0.5"),
        ("mixtral", {"model": {"moe_every": 2}}, "layers of kind 'den"),
        ("glm4_moe", {"router": {"kind": "sigmoid"},
         "model": {"layers": ("moe", "dense")}}, "a dense layer after an MoE layer"),
        ("nothing", {}, "no family 'nothing'"),
        (None, {"model": {"block": "shortcut"}, "moe": {"num_shared_experts": 1}},
         "as llama4_text"),
    ],
)  # fmt: skip
def test_options_that_a_family_cannot_express(family, changes, message):
    base = TINY["mixtral"]
    parts = {
        part: dataclasses.replace(getattr(base, part), **fields)
        for part, fields in changes.items()
    }
    with pytest.raises(ValueError) as error:
        make_config(dataclasses.replace(base, **parts), family)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_is_written_as_it_was_imported():
    record = record_of("mixtral")
    network = network_of(record)
    other = dataclasses.replace(
        network, model=dataclasses.replace(network.model, rope_theta=5.0)
    )
    with pytest.raises(ValueError, match=r"Model.rope_theta=5.0, .* says 1000000.0"):
        make_config(other, record=record)
    with pytest.raises(ValueError, match="came from mixtral, and would be written as"):
        make_config(network, "olmoe", record)
    # How a network is computed is not part of it.
    other = dataclasses.replace(
        network, model=dataclasses.replace(network.model, remat="full")
    )
    _, written = make_config(other, record=record)
    assert written["max_position_embeddings"] == record["max_position_embeddings"]


def test_defaults_of_ours_are_a_mixtral():
    assert make_config(Network(Model(), Moe(), Router()))[0].name == "mixtral"
    latent = Network(Model(), Moe(), Router(kind="sigmoid"), mla=Mla(16))
    assert make_config(latent)[0].name == "deepseek_v3"
