"""Test that config.json of published models is read, that its model has the published
number of parameters, and that a dry run says what docs/models.md says."""

import math
import re
import subprocess
import sys
from typing import Literal, NamedTuple

import jax
import pytest
from flax import nnx

from moejax import axes
from moejax.interop import fields
from moejax.interop.published import read_architecture
from moejax.model.flops import num_params
from moejax.model.transformer import Transformer
from moejax.plan.layout import Topology
from tests.support.run_main import MAIN, ROOT, Ended, environment

FOLDERS = ROOT / "tests" / "golden" / "published"


class Published(NamedTuple):
    """A published model: exact counts by transformers 5.23.0, which built it from this
    config.json without memory, and what its authors say."""

    family: str
    total: int
    active: int
    """Without the experts that a token does not choose."""
    total_said: str
    """Number of parameters in the words of the authors, in as many digits."""
    active_said: str
    without: Literal[0, 1, 2] = 0
    """Embeddings that active_said leaves out: none, that of the input, or both."""
    others: int = 0
    """Parameters of other parts, which total_said includes."""


MODELS = {
    "mixtral_8x7b": Published(
        "mixtral", 46_702_792_704, 12_879_925_248, "4.67e10", "1.29e10"
    ),
    "olmoe_1b_7b": Published("olmoe", 6_919_161_856, 1_282_017_280, "6.9e9", "1.3e9"),
    "qwen1_5_moe_a2_7b": Published(
        "qwen2_moe", 14_315_784_192, 2_689_173_504, "1.43e10", "2.7e9"
    ),
    "qwen3_30b_a3b": Published(
        "qwen3_moe", 30_532_122_624, 3_353_032_704, "3.05e10", "3.3e9"
    ),
    "qwen3_235b_a22b": Published(
        "qwen3_moe", 235_093_634_560, 22_190_763_520, "2.35e11", "2.2e10"
    ),
    "deepseek_v2_lite": Published(
        "deepseek_v2", 15_706_484_224, 2_661_150_208, "1.57e10", "2.4e9", 1
    ),
    "deepseek_v2": Published(
        "deepseek_v2", 235_741_434_880, 21_375_800_320, "2.36e11", "2.1e10"
    ),
    "deepseek_v3": Published(
        "deepseek_v3", 671_026_404_352, 37_552_282_624, "6.71e11", "3.7e10"
    ),
    "moonlight_16b_a3b": Published(
        "deepseek_v3", 15_960_108_544, 2_914_774_528, "1.6e10", "2.24e9", 2
    ),
    "kimi_k2": Published(
        "deepseek_v3", 1_026_408_209_408, 32_861_477_888, "1.03e12", "3.2e10"
    ),
    "glm_4_5_air": Published(
        "glm4_moe", 106_852_245_504, 13_424_123_904, "1.06e11", "1.2e10", 2
    ),
    # Less 27 x 64: transformers counts the correction bias, which no gradient reaches.
    "ernie_4_5_21b_a3b": Published(
        "ernie4_5_moe", 21_825_436_160, 3_352_148_480, "2.1e10", "3e9"
    ),
    "granite_3_0_3b_a800m": Published(
        "granitemoe", 3_298_793_472, 882_874_368, "3.3e9", "8e8"
    ),
    "gpt_oss_20b": Published(
        "gpt_oss", 20_914_757_184, 4_187_440_704, "2.091e10", "3.61e9", 1
    ),
    "gpt_oss_120b": Published(
        "gpt_oss", 116_829_156_672, 5_711_982_912, "1.1683e11", "5.13e9", 1
    ),
    "llama_4_scout_17b_16e": Published(
        "llama4_text", 107_769_861_120, 17_172_894_720, "1.09e11", "1.7e10",
        others=871_932_416,
    ),
    "llama_4_maverick_17b_128e": Published(
        "llama4_text", 400_711_848_960, 17_184_691_200, "4.0e11", "1.7e10",
        others=871_932_416,
    ),
}  # fmt: skip
"""What authors say is from memory. The other part of Llama-4 reads images."""


def table_of_the_page() -> dict[str, list[str]]:
    """Return the cells of docs/models.md by model."""
    page = (ROOT / "docs" / "models.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\w.*) \|$", page, re.MULTILINE)
    return {name: rest.split(" | ") for name, rest in rows if name in MODELS}


def test_these_are_all():
    assert {path.parent.name for path in FOLDERS.glob("*/config.json")} == set(MODELS)
    assert list(table_of_the_page()) == list(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_as_many_as_published(name):
    """The parameters of our model, and the formula that counts them, are as many as
    those of transformers, and the authors' numbers agree in all their digits, whether
    they rounded or cut them."""
    model = MODELS[name]
    architecture = read_architecture(FOLDERS / name)
    assert (architecture.family, architecture.dtype) == (model.family, "bfloat16")
    network = fields.make_network(architecture.fields)
    counts = num_params(network)
    assert counts == {"total": model.total, "active": model.active}
    assert _num_elements(network) == model.total
    width = network.model.vocab_size * network.model.d_model
    _check_digits(model.total + model.others, model.total_said)
    _check_digits(model.active - model.without * width, model.active_said)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_the_dry_run_says_what_the_page_says(name, tmp_path):
    family, total, active, _, num_devices, mesh, gib = table_of_the_page()[name]
    params = [f"Model.from_hf = {str(FOLDERS / name)!r}"]
    params += [f"Train.batch_size = {num_devices}"]
    if mesh != "one device":
        params += [f"Mesh.{axis}" for axis in mesh.split(", ")]
    words = [sys.executable, MAIN, f"--gin_file={FOLDERS / 'dry_run.gin'}"]
    words += [f"--gin_param={param}" for param in params]
    process = subprocess.run(
        [*words, "--dry_run", "--target=h100", "--json"],
        env=environment(), cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (process.returncode, process.stderr) == (0, "")
    record = Ended(process.returncode, process.stdout, process.stderr).record
    model = MODELS[name]
    assert family == model.family
    assert record["params"] == {"total": model.total, "active": model.active}
    assert [total, active] == [f"{n:,}" for n in (model.total, model.active)]
    assert record["fit"]["fits"]
    assert f"{sum(record['memory'].values()) / 2**30:.1f}" == gib
    assert not list(tmp_path.iterdir())


OPTIONS = {
    "mixtral_8x7b": {"model.rope_theta": 1e6, "model.norm_eps": 1e-5},
    "olmoe_1b_7b": {"model.qk_norm": "full", "router.normalise_gates": False},
    "qwen1_5_moe_a2_7b": {"attention.bias": "qkv", "attention.layers": ("full",)},
    "qwen3_235b_a22b": {"model.qk_norm": "head", "router.normalise_gates": True},
    "deepseek_v2_lite": {
        "rope.scaling": "yarn", "rope.factor": 40.0, "rope.mscale_all_dim": 0.707,
        "router.kind": "softmax", "router.num_groups": 1, "model.first_k_dense": 1,
    },
    "deepseek_v2": {
        "router.num_groups": 8, "router.top_groups": 3, "router.gate_scale": 16.0,
        "router.normalise_gates": False,
    },
    "deepseek_v3": {
        "router.kind": "sigmoid", "router.num_groups": 8, "router.top_groups": 4,
        "router.gate_scale": 2.5, "router.normalise_gates": True,
        "model.first_k_dense": 3, "rope.factor": 40.0, "mla.norm_eps": 1e-6,
    },
    "moonlight_16b_a3b": {
        "model.norm_eps": 1e-5, "mla.norm_eps": 1e-6, "model.rope_theta": 5e4,
        "rope.scaling": "none", "router.gate_scale": 2.446,
    },
    "kimi_k2": {
        "rope.beta_fast": 1.0, "rope.beta_slow": 1.0, "rope.factor": 32.0,
        "router.num_groups": 1, "router.gate_scale": 2.827,
    },
    "glm_4_5_air": {
        "model.qk_norm": "none", "rope.partial_rotary_factor": 0.5,
        "attention.bias": "qkv", "router.gate_scale": 1.0,
    },
    "ernie_4_5_21b_a3b": {"router.kind": "softmax", "router.normalise_gates": True},
    "granite_3_0_3b_a800m": {
        "attention.scale": 0.015625, "model.embedding_multiplier": 12.0,
        "model.residual_multiplier": 0.22, "model.logits_scaling": 6.0,
    },
    "gpt_oss_120b": {
        "attention.layers": ("sliding", "full"), "attention.sliding_window": 128,
        "rope.truncate": False, "rope.factor": 32.0, "moe.swiglu_limit": 7.0,
    },
    "llama_4_scout_17b_16e": {
        "attention.layers": ("chunked", "chunked", "chunked", "nope"),
        "attention.chunk_size": 8192, "attention.l2_norm": True,
        "attention.temperature_scale": 0.1, "rope.scaling": "llama3",
        "rope.low_freq_factor": 1.0, "rope.high_freq_factor": 1.0,
        "router.gate_input": True,
    },
    "llama_4_maverick_17b_128e": {
        "model.moe_every": 2, "attention.l2_norm": False, "rope.scaling": "none",
    },
}  # fmt: skip
"""Fields that no count of parameters shows, as the authors describe their models."""


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_as_published(name):
    fields_of = read_architecture(FOLDERS / name).fields
    for key, value in OPTIONS[name].items():
        part, field = key.split(".")
        assert fields_of[part][field] == value, key


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepseek_v3", "fp8"),
        ("gpt_oss_20b", "mxfp4"),
        ("granite_3_0_3b_a800m", "attention_dropout=0.1"),
        ("llama_4_scout_17b_16e", "vision part is not imported"),
    ],
)
def test_what_is_not_imported_as_it_is_is_said(name, words):
    (note,) = read_architecture(FOLDERS / name).notes
    assert words in note


def _num_elements(network) -> int:
    """Return the number of elements of a model's parameters."""
    mesh = axes.make_mesh(Topology(), jax.devices()[:1])
    model = nnx.eval_shape(lambda: Transformer(network, mesh, nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    return sum(leaf.size for leaf in leaves)


def _check_digits(count: int, said: str) -> None:
    """Raise AssertionError unless a number differs from what is said by less than one
    in its last digit."""
    digits, exponent = said.split("e")
    decimals = len(digits.partition(".")[2])
    unit = 10 ** (int(exponent) - decimals)
    assert math.fabs(count - float(said)) < unit, (count, said)
