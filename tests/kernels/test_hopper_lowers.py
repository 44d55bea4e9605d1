"""All Hopper kernels of the grouped product lower for CUDA, for an H200 that need not
be present.

The shapes are those of real models, with the tiles of the rule and with others that a
search would try. Lowering takes a second or two, so `make test` runs a few cases only.
Traces also show that no slot is released while a WGMMA may read it.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import jaxprs_in_params
from jax.sharding import use_abstract_mesh

from moejax.kernels.grouped_dot.hopper import kernels
from moejax.kernels.shapes import MODEL_SHAPES, ProductShape
from moejax.kernels.tuning import Tiles, default_tiles
from tests.support.hopper_cases import fitting, operand_dims
from tests.support.hopper_rows import FEW_STEPS, ONE_GROUP, OWN_DTYPE, PLAIN, STEEP
from tests.support.hopper_traces import H200, order
from tests.support.primitives import equations

RAGGED = ProductShape(rows=1016, d=320, f=576, groups=9)
"""Shape whose sizes no tile divides."""
SHORT_CASES = [
    ("mixtral_8x7b", "forward"),
    ("qwen3_30b_a3b", "dgrad"),
    ("olmoe_1b_7b", "wgrad"),
    ("fine_grained", "swiglu"),
    ("deepseek_v3", "swiglu_dgrad"),
]
"""Cases that cover all passes, both kinds of halves and both numbers of columns."""
LONG_CASES = [
    (name, which)
    for name in MODEL_SHAPES
    for which in OWN_DTYPE
    if (name, which) not in SHORT_CASES
]
FITTING = [
    Tiles(64, 128, stages=2, halves="columns"),
    Tiles(64, 128, stages=4, halves="columns", chunk=64),
    Tiles(64, 256, stages=3, halves="columns"),
    Tiles(128, 64, stages=4),
    Tiles(128, 128, stages=4),
    Tiles(128, 128, stages=3, chunk=64),
    Tiles(128, 128, depth=128, stages=2),
    Tiles(128, 256, stages=4),
    Tiles(128, 256, stages=3, chunk=64, span=1),
    Tiles(256, 64, stages=3, span=64),
    Tiles(256, 128, stages=2),
]
FITS = {
    "wgrad": lambda tiles: tiles.halves == "rows" and tiles.columns >= 128,
    "swiglu": lambda tiles: max(tiles.rows, tiles.columns) <= 128,
    "swiglu_dgrad": lambda tiles: max(tiles.rows, tiles.columns) <= 128,
}
"""Conditions on tiles for some passes. Other tiles would exceed the registers or the
shared memory, or would cut a swizzle in two."""


def trace(which, shape, tiles, dtype=jnp.bfloat16):
    floats = [jax.ShapeDtypeStruct(dims, dtype) for dims in operand_dims(which, shape)]
    rows_g = jax.ShapeDtypeStruct((shape.groups,), jnp.int32)
    call = jax.jit(functools.partial(getattr(kernels, which), tiles=tiles))
    with use_abstract_mesh(H200):
        return call.trace(*floats, rows_g)


def lower_to_text(which, shape, tiles, dtype=jnp.bfloat16) -> str:
    with use_abstract_mesh(H200):
        result = trace(which, shape, tiles, dtype)
        return result.lower(lowering_platforms=("cuda",)).as_text()


def check(which, shape, tiles, dtype=jnp.bfloat16):
    """Assert that one kernel is lowered, without operations on float arrays beside it.

    Too much shared memory would raise a ValueError.
    """
    text = lower_to_text(which, shape, tiles, dtype)
    assert re.findall(r"custom_call @(\w+)", text) == ["mosaic_gpu_v2"]
    moved = re.findall(r"stablehlo\.(?!reshape)\w+.*x(?:bf16|f16|f32)>", text)
    assert [line for line in moved if "custom_call" not in line] == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), SHORT_CASES)
def test_model_shapes(name, which):
    shape = MODEL_SHAPES[name]
    check(which, shape, default_tiles(which, shape))


@pytest.mark.long
@pytest.mark.parametrize(("name", "which"), LONG_CASES)
def test_all_model_shapes(name, which):
    shape = MODEL_SHAPES[name]
    check(which, shape, default_tiles(which, shape))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["forward", "wgrad"])
def test_float16_and_sizes_that_no_tile_divides(which):
    check(which, RAGGED, Tiles(128, 128), jnp.float16)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("which", "tiles"),
    [
        pytest.param(which, tiles, id=f"{which} {tiles}")
        for which in OWN_DTYPE
        for tiles in filter(FITS.get(which), FITTING)
    ],
)
def test_tiles_of_a_search(which, tiles, dtype):
    check(which, RAGGED, tiles, dtype)


@pytest.mark.long
@pytest.mark.parametrize("setup", [PLAIN, STEEP, FEW_STEPS, ONE_GROUP])
@pytest.mark.parametrize("which", OWN_DTYPE)
def test_what_is_interpreted_lowers_too(which, setup):
    setup = fitting(which, setup)
    check(which, setup.shape, setup.tiles, setup.dtype)


@pytest.mark.parametrize(
    ("which", "tiles", "why"),
    [
        ("forward", Tiles(128, 256, stages=5), "exceeds available shared memory"),
        ("wgrad", Tiles(128, 64), r"slice size \(32\) to be divisible"),
    ],
)
def test_tiles_that_do_not_lower_say_so(which, tiles, why):
    with pytest.raises(ValueError, match=why):
        lower_to_text(which, RAGGED, tiles)


def find_step_loop(jaxpr):
    """Return the only loop body that issues WGMMAs."""
    bodies = (b for eqn, _ in equations(jaxpr) for b in jaxprs_in_params(eqn.params))
    names = ((body, [eqn.primitive.name for eqn in body.eqns]) for body in bodies)
    (result,) = (body for body, named in names if "wgmma_ref" in named)
    return result


def find_orders(which):
    """Return the order of operations in the loop over steps, and in the whole
    kernel."""
    tiles = Tiles(128, 128, stages=3)
    jaxpr = trace(which, RAGGED, tiles).jaxpr
    return [order(j, tiles.stages) for j in (find_step_loop(jaxpr), jaxpr)]


@pytest.mark.parametrize("which", OWN_DTYPE)
def test_a_slot_is_given_back_when_no_wgmma_reads_it(which):
    """The interpreter sees no race in any order, because its WGMMA ends when issued."""
    num_products = 2 if which == "swiglu" else 1
    # After the wait, the products of this step still run, and those of the last do not.
    step = ["wgmma"] * num_products + [("left", num_products), ("released", 1)]
    # The accumulators are read when nothing runs; the slot of the last step is
    # released.
    end = [("left", 0)] * num_products + [("released", 1)]
    assert find_orders(which) == [step, step + end]


@pytest.mark.parametrize("which", ["forward", "wgrad"])
def test_the_order_has_no_wait_where_the_kernel_has_none(which, monkeypatch):
    monkeypatch.setattr(plgpu, "wgmma_wait", lambda n: None)
    assert find_orders(which)[0] == ["wgmma", ("released", 1)]
