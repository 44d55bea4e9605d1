"""The choice of kernels for a device and a shape, and the kernels of a whole layer."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from moejax.axes import AXES
from moejax.choice import Choice
from moejax.config import Config, Model, Moe, Router
from moejax.kernels.attention.choose import choose_attention
from moejax.kernels.attention.reading import CAUSAL, Inputs
from moejax.kernels.device import is_hopper
from moejax.kernels.grouped_dot.choose import choose_grouped_dot
from moejax.kernels.grouped_dot.hopper import kernels
from moejax.kernels.permute.choose import choose_permute
from moejax.kernels.tuning import Tiles
from moejax.moe.layer import MoeLayer, moe_layer
from moejax.moe.setup import LayerSetup
from moejax.moe.types import Placement
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Topology
from moejax.resolve.kernels import choose_kernels
from tests.support.expert_fields import parts_with
from tests.support.resolved import make_layout

H200 = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
D, EXPERTS, TOKENS, TOP_K = 1024, 4, 48, 2


def on(device: AbstractDevice | None):
    mesh = AbstractMesh((), (), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (H200, True),
        (AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"), True),
        (AbstractDevice("NVIDIA A100-SXM4-80GB", num_cores=108, platform="gpu"), False),
        (AbstractDevice("NVIDIA B200", num_cores=148, platform="gpu"), False),
        (AbstractDevice("cpu", num_cores=None, platform="cpu"), False),
        (SimpleNamespace(device_kind="any", compute_capability="9.0"), True),
        (SimpleNamespace(device_kind="H200-like", compute_capability="10.0"), False),
    ],
)
def test_is_hopper(device, expected):
    assert is_hopper(device) is expected


@pytest.mark.parametrize(
    ("device", "dtype", "align_rows", "widths", "is_fp8", "expected", "why"),
    [
        (None, "bfloat16", 64, (4096, 1024), False, "blocked", "not cpu"),
        (H200, "bfloat16", 128, (4096, 14336), False, "hopper", "NVIDIA H200"),
        (H200, "float32", 128, (4096, 14336), False, "blocked", "dtype float32"),
        (H200, "float16", 64, (4096, 100), False, "blocked", "100 "),
        (H200, "bfloat16", 8, (4096, 14336), False, "blocked", "multiples of 8 rows"),
        (H200, "bfloat16", 128, (1024, 192), False, "hopper", "NVIDIA H200"),
        (H200, "bfloat16", 128, (1024, 192), True, "blocked",
         "a width of 192 is not a multiple of 128, a block in fp8"),
    ],
)  # fmt: skip
def test_choice_of_the_grouped_product(
    device, dtype, align_rows, widths, is_fp8, expected, why
):
    with on(device):
        result = choose_grouped_dot(dtype, align_rows, *widths, is_fp8=is_fp8)
    assert result.value == expected
    assert why in result.why


@pytest.mark.parametrize(
    ("device", "d", "expected", "why"),
    [
        (None, 4096, "xla", "not cpu"),
        (H200, 4096, "hopper", "NVIDIA H200"),
        (H200, 24, "xla", "d=24 must be a multiple of"),
    ],
)
def test_choice_of_the_permutation(device, d, expected, why):
    with on(device):
        result = choose_permute("bfloat16", d)
    assert result.value == expected
    assert why in result.why


def test_few_queries_take_the_definition_of_attention_on_any_device():
    """A token that is decoded reads a cache of 4096 keys."""
    q_bthi = jax.ShapeDtypeStruct((2, 1, 8, 128), "bfloat16")
    k_bugi = jax.ShapeDtypeStruct((2, 4096, 2, 128), "bfloat16")
    first_bt = jax.ShapeDtypeStruct((2, 1), "int32")
    start = jax.ShapeDtypeStruct((), "int32")
    inputs = Inputs(q_bthi, k_bugi, k_bugi, first_bt, start)
    expected = Choice("reference", "few queries: 1")
    assert choose_attention(inputs, CAUSAL) == expected
    with on(H200):
        assert choose_attention(inputs, CAUSAL) == expected


def config(**moe) -> Config:
    return Config(
        model=Model(d_model=1024, compute_dtype="bfloat16"),
        **parts_with({"num_experts": 8, "d_expert": 256} | moe),
        mesh=Topology(expert=4),
    )


def test_the_run_says_what_it_takes_and_why():
    cfg = config()
    layout = make_layout(cfg)
    assert layout.align_rows == 1
    choice = choose_kernels(cfg, layout)["grouped_dot"]
    assert choice == Choice("blocked", "the kernels are for Hopper, not cpu")
    layout = make_layout(cfg, H200)
    with on(H200):
        choices = choose_kernels(cfg, layout)
    detail = r"NVIDIA H200, slots of whole tiles of \d+ rows, \d of 6 products with"
    assert choices["grouped_dot"].value == choices["permute"].value == "hopper"
    assert re.match(detail, choices["grouped_dot"].why)


@pytest.mark.parametrize(
    ("options", "align_rows"),
    [
        ({}, 128),
        ({"buffer_factor": 0.02}, 64),
        ({"kernels": "plain"}, 1),
        ({"d_expert": 100}, 1),  # the kernels decline this width
    ],
)
def test_slots_have_whole_tiles_where_the_kernels_run(options, align_rows):
    assert make_layout(config(**options), H200).align_rows == align_rows


def test_plain_kernels_on_any_device():
    cfg = config(kernels="plain")
    layout = make_layout(cfg)
    assert layout.kernels == "plain"
    with on(H200):
        result = choose_kernels(cfg, layout)
    names = [result[name].value for name in ("grouped_dot", "permute")]
    assert names == ["blocked", "xla"]
    assert result["grouped_dot"].why == "Dispatch.kernels='plain'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "factor", "expected"),
    # Forward: rows to experts, two products, and their sum. Backward: combine, the
    # activation's gradient, that of x, those of two weights, and gather.
    [(1, 1.0, 4 + 6),
    # With peers, rows are also packed for them, and sums added up. Round 0 has 6 + 8,
    # and so have later rounds. Their 6 run in the forward loop, and again in the
    # backward loop.
     pytest.param(4, 2.0, 6 + 8 + 6 + 6 + 8, marks=pytest.mark.long)],
)  # fmt: skip
def test_the_layer_is_lowered_with_the_kernels_of_its_device(
    monkeypatch, num_devices, factor, expected
):
    """On H200s the layer has Hopper kernels, but none with kernels='plain'. The tiles
    are small, which lower faster than those of the rule."""
    low = Tiles(64, 128, stages=3, halves="columns", chunk=64)
    wgrad = Tiles(128, 128, stages=3, chunk=64)
    choose = lambda which, *_: wgrad if which == "wgrad" else low  # noqa: E731
    monkeypatch.setattr(kernels, "tiles_for", choose)
    sizes = {"buffer_factor": factor, "top_k": TOP_K, "align_rows": 64}
    layout = Layout.home(EXPERTS, num_devices, TOKENS * TOP_K, **sizes)
    assert num_kernels(layout) == expected
    assert num_kernels(dataclasses.replace(layout, kernels="plain")) == 0


def num_kernels(layout: Layout) -> int:
    """Return the number of kernels in a layer's step that is lowered for H200s."""
    sizes = Topology(expert=layout.num_devices).sizes
    types = (AxisType.Auto,) * len(AXES)
    mesh = AbstractMesh(sizes, AXES, types, abstract_device=H200)
    moe = Moe(num_experts=EXPERTS, top_k=TOP_K, d_expert=256)
    setup = LayerSetup(moe, Router(), D, layout, mesh)
    plan = ExpertPlan.home_in(layout, 1)
    placement = Placement.from_plan(plan, layout).layer(0)

    def loss(params, x_btd):
        y_btd, _ = moe_layer(params, x_btd, placement, setup)
        return jnp.sum(y_btd.astype(jnp.float32) ** 2)

    params = nnx.eval_shape(lambda: MoeLayer(moe, D, nnx.Rngs(0)).params())
    x_btd = jax.ShapeDtypeStruct((layout.num_devices, TOKENS, D), jnp.bfloat16)
    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    lowered = step.trace(params, x_btd).lower(lowering_platforms=("cuda",))
    return lowered.as_text().count("custom_call @mosaic_gpu_v2")
