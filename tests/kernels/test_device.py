"""The choice of kernels for a device and a shape, and the whole layer with each."""

import dataclasses
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from moejax.axes import AXES, make_mesh
from moejax.choice import Choice
from moejax.config import Config, Model, Moe, Router
from moejax.kernels.attention.choose import choose_attention
from moejax.kernels.attention.reading import CAUSAL, Inputs
from moejax.kernels.device import is_hopper
from moejax.kernels.grouped_dot import vjp
from moejax.kernels.grouped_dot.choose import choose_grouped_dot
from moejax.kernels.grouped_dot.hopper import kernels
from moejax.kernels.grouped_dot.hopper.ring import KernelRun
from moejax.kernels.permute.choose import choose_permute
from moejax.kernels.tuning import Tiles
from moejax.moe import reference, route
from moejax.moe.experts import swiglu
from moejax.moe.layer import MoeLayer
from moejax.moe.setup import LayerSetup
from moejax.moe.types import Placement
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Topology
from moejax.resolve.kernels import choose_kernels
from tests.support.close import assert_close
from tests.support.expert_fields import parts_with
from tests.support.resolved import make_layout

H200 = AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
D, F, EXPERTS, TOKENS, TOP_K = 128, 64, 4, 48, 2


def on(device: AbstractDevice):
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


def test_here_is_a_cpu():
    result = choose_grouped_dot("bfloat16", 64, 4096, 1024)
    assert result == Choice("blocked", "the kernels are for Hopper, not cpu")
    assert choose_permute("bfloat16", 4096).value == "xla"


@pytest.mark.parametrize(
    ("dtype", "align_rows", "widths", "expected", "why"),
    [
        ("bfloat16", 128, (4096, 14336), "hopper", "NVIDIA H200"),
        ("float32", 128, (4096, 14336), "blocked", "dtype float32"),
        ("float16", 64, (4096, 100), "blocked", "100 "),
        ("bfloat16", 8, (4096, 14336), "blocked", "multiples of 8 rows"),
    ],
)
def test_grouped_dot_on_hopper(dtype, align_rows, widths, expected, why):
    with on(H200):
        result = choose_grouped_dot(dtype, align_rows, *widths)
    assert result.value == expected
    assert why in result.why


def test_fp8_on_hopper_declines_parts_of_a_block():
    with on(H200):
        result = choose_grouped_dot("bfloat16", 128, 1024, 192, is_fp8=True)
        assert choose_grouped_dot("bfloat16", 128, 1024, 192).value == "hopper"
    why = "a width of 192 is not a multiple of 128, a block in fp8"
    assert result == Choice("blocked", f"the Hopper kernels decline: {why}")


def test_permute_on_hopper_declines_narrow_rows():
    with on(H200):
        assert choose_permute("bfloat16", 4096).value == "hopper"
        result = choose_permute("bfloat16", 24)
    assert result.value == "xla"
    assert "d=24 must be a multiple of" in result.why


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
        ({"rows_per_peer": 32}, 64),  # 4 devices send 128 rows to 2 slots
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


@pytest.fixture
def low_tiles(monkeypatch):
    """Use small tiles, which lower faster than those of the rule.

    test_hopper_lowers.py tests the tiles of the rule. Where possible, a warpgroup has
    only one chunk.
    """
    low = Tiles(64, 128, stages=3, halves="columns", chunk=64)
    fp8 = dataclasses.replace(low, depth=128)
    tiles = {"wgrad": Tiles(128, 128, stages=3, chunk=64)}
    tiles |= {"fp8_forward": fp8, "fp8_dgrad": fp8}
    monkeypatch.setattr(kernels, "tiles_for", lambda which, *_: tiles.get(which, low))


@pytest.mark.slow
@pytest.mark.usefixtures("low_tiles")
def test_the_layer_is_lowered_with_the_kernels_of_its_device():
    """On an H200 the layer has Hopper kernels, but none with kernels='plain'."""
    # Forward: rows to experts, two products, and rows back. Backward: combine, the
    # activation's gradient, that of x, those of two weights, and gather.
    assert num_kernels(make_case_layout()) == 10
    assert num_kernels(dataclasses.replace(make_case_layout(), kernels="plain")) == 0


@pytest.mark.long
@pytest.mark.usefixtures("low_tiles")
def test_later_rounds_are_lowered_with_kernels_too():
    """On four H200s, under remat, the buffers are so small that later rounds are
    needed: 64 rows for each peer, and 16 in a later round, so that four peers fill a
    tile."""
    sizes = {"rows_per_peer": 64, "align_rows": 64}
    layout = Layout.home(EXPERTS, 4, TOKENS * TOP_K, **sizes)
    assert layout.rows_per_round == 16
    # With peers, a window also sorts the rows that arrive, and sorts them back: 6
    # kernels forward and 8 backward. Round 0 has these, and under remat the 6 again:
    # 20. Later rounds have 6 in the forward loop, and 6 again under remat with 6 + 8 in
    # the backward loop: 26.
    assert num_kernels(layout, jax.checkpoint) == 20 + 26


def num_kernels(layout: Layout, remat=None) -> int:
    """Return the number of kernels in a layer's step that is lowered for H200s."""
    sizes = dataclasses.replace(Topology(), expert=layout.num_devices).sizes
    types = (AxisType.Auto,) * len(AXES)
    mesh = AbstractMesh(sizes, AXES, types, abstract_device=H200)
    layer, (params, x_btd) = layer_case(1024, 256, jnp.bfloat16, mesh)
    x_btd = jnp.tile(x_btd, (layout.num_devices, 1, 1))
    step = jax.jit(partial(loss_and_grads, layer, layout=layout, remat=remat))
    arguments = jax.tree.map(jax.typeof, (params, x_btd))
    text = step.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("custom_call @mosaic_gpu_v2")


def make_case_layout() -> Layout:
    return Layout.home(EXPERTS, 1, TOKENS * TOP_K, align_rows=64)


def layer_case(d: int, f: int, dtype, mesh=None):
    """Return a layer on one device, and (parameters, x).

    Both are rounded to dtype, so that every variant begins with the same numbers.
    """
    mesh = mesh or make_mesh(Topology(), jax.devices()[:1])
    moe = Moe(num_experts=EXPERTS, top_k=TOP_K, d_expert=f)
    layer = MoeLayer(moe, d, nnx.Rngs(0))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    params = jax.tree.map(lambda p: p.astype(dtype).astype(jnp.float32), params)
    x_btd = np.random.default_rng(0).standard_normal((1, TOKENS, d))
    layer = (graph, rest, LayerSetup(moe, Router(), d, make_case_layout(), mesh))
    return layer, (params, jnp.asarray(x_btd, dtype))


def loss_and_grads(layer, params, x_btd, *, layout, experts=None, remat=None):
    graph, rest, setup = layer
    setup = dataclasses.replace(setup, layout=layout)
    plan = ExpertPlan.home_in(layout, 1)
    placement = Placement.from_plan(plan, layout).layer(0)

    def loss(params, x_btd):
        merged = nnx.merge(graph, params, rest)
        y_btd, _ = merged(x_btd, placement, setup, experts=experts)
        return jnp.sum(y_btd.astype(jnp.float32) ** 2), y_btd

    loss = remat(loss) if remat else loss
    (_, y_btd), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        params, x_btd
    )
    return y_btd, grads


def by_definition(layer, params, x_btd):
    graph, rest, setup = layer

    def loss(params, x_btd):
        merged = nnx.merge(graph, params, rest)
        x_nd = x_btd.reshape(TOKENS, -1)
        router = merged.router_de[...], merged.bias_e[...], setup.router
        routes, _, _ = route.route(x_nd, *router, TOP_K)
        names = ("gate_edf", "up_edf", "down_efd")
        weights = {name: getattr(merged, name)[...] for name in names}
        y_btd = reference.moe(x_nd, routes, weights).reshape(x_btd.shape)
        return jnp.sum(y_btd**2), y_btd

    (_, y_btd), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(
        params, x_btd.astype(jnp.float32)
    )
    return y_btd, grads


def interpret(monkeypatch):
    own, run = vjp.products, KernelRun(2, plgpu.InterpretGPUParams())

    def products(name, block_rows, *options):
        is_hopper = name == "hopper"
        return (
            kernels.products(run, *options)
            if is_hopper
            else own(name, block_rows, *options)
        )

    monkeypatch.setattr(vjp, "products", products)


@pytest.mark.slow
def test_the_layer_with_hopper_kernels_equals_its_definition(monkeypatch):
    """Values and all gradients agree in bfloat16; the kernels are interpreted."""
    interpret(monkeypatch)
    layer, arguments = layer_case(D, F, jnp.bfloat16)
    experts = partial(swiglu, implementation="hopper", align_rows=64)
    step = jax.jit(
        partial(loss_and_grads, layer, layout=make_case_layout(), experts=experts)
    )
    expected = jax.jit(partial(by_definition, layer))(*arguments)
    assert_close(step(*arguments), expected, dtype=jnp.bfloat16)
