"""Every Hopper kernel of the grouped product lowers for CUDA under an H200 that is not
here: on the shapes of real models with the tiles of the rule, and with others that a
search would try. Lowering takes a second or two, so `make test` has a handful. And in
what is traced, no slot is given back while a WGMMA may read it."""

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
"""No tile divides its sizes."""
IN_TEST = [
    ("mixtral_8x7b", "forward"),
    ("qwen3_30b_a3b", "dgrad"),
    ("olmoe_1b_7b", "wgrad"),
    ("fine_grained", "swiglu"),
    ("deepseek_v3", "swiglu_dgrad"),
]
"""Together: all passes, both kinds of halves, both numbers of columns."""
IN_ALL = [
    (name, which)
    for name in MODEL_SHAPES
    for which in OWN_DTYPE
    if (name, which) not in IN_TEST
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
WITHIN = {
    "wgrad": lambda tiles: tiles.halves == "rows" and tiles.columns >= 128,
    "swiglu": lambda tiles: max(tiles.rows, tiles.columns) <= 128,
    "swiglu_dgrad": lambda tiles: max(tiles.rows, tiles.columns) <= 128,
}
"""What else would not fit registers or shared memory, or cut a swizzle in two."""


def traced(which, shape, tiles, dtype=jnp.bfloat16):
    floats = [jax.ShapeDtypeStruct(dims, dtype) for dims in operand_dims(which, shape)]
    rows_g = jax.ShapeDtypeStruct((shape.groups,), jnp.int32)
    call = jax.jit(functools.partial(getattr(kernels, which), tiles=tiles))
    with use_abstract_mesh(H200):
        return call.trace(*floats, rows_g)


def lowered(which, shape, tiles, dtype=jnp.bfloat16) -> str:
    with use_abstract_mesh(H200):
        found = traced(which, shape, tiles, dtype)
        return found.lower(lowering_platforms=("cuda",)).as_text()


def check(which, shape, tiles, dtype=jnp.bfloat16):
    """One kernel, and no array but tables of integers is made or moved beside it. Too
    much shared memory would be a ValueError."""
    text = lowered(which, shape, tiles, dtype)
    assert re.findall(r"custom_call @(\w+)", text) == ["mosaic_gpu_v2"]
    moved = re.findall(r"stablehlo\.(?!reshape)\w+.*x(?:bf16|f16|f32)>", text)
    assert [line for line in moved if "custom_call" not in line] == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), IN_TEST)
def test_model_shapes(name, which):
    shape = MODEL_SHAPES[name]
    check(which, shape, default_tiles(which, shape))


@pytest.mark.long
@pytest.mark.parametrize(("name", "which"), IN_ALL)
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
        for tiles in filter(WITHIN.get(which), FITTING)
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
        lowered(which, RAGGED, tiles)


def loop_over_steps(jaxpr):
    """The body that begins WGMMAs; there is one."""
    bodies = (b for eqn, _ in equations(jaxpr) for b in jaxprs_in_params(eqn.params))
    names = ((body, [eqn.primitive.name for eqn in body.eqns]) for body in bodies)
    (found,) = (body for body, named in names if "wgmma_ref" in named)
    return found


def orders(which):
    """Of the loop over steps, and of the whole kernel."""
    tiles = Tiles(128, 128, stages=3)
    jaxpr = traced(which, RAGGED, tiles).jaxpr
    return [order(j, tiles.stages) for j in (loop_over_steps(jaxpr), jaxpr)]


@pytest.mark.parametrize("which", OWN_DTYPE)
def test_a_slot_is_given_back_when_no_wgmma_reads_it(which):
    """In no order does the interpreter see a race: to it a WGMMA is done when begun."""
    num_products = 2 if which == "swiglu" else 1
    # Behind the wait this step's products run on, and those of the one before do not.
    step = ["wgmma"] * num_products + [("left", num_products), ("released", 1)]
    # The accumulators are read when nothing runs, and the last step's slot can go.
    end = [("left", 0)] * num_products + [("released", 1)]
    assert orders(which) == [step, step + end]


@pytest.mark.parametrize("which", ["forward", "wgrad"])
def test_the_order_has_no_wait_where_the_kernel_has_none(which, monkeypatch):
    monkeypatch.setattr(plgpu, "wgmma_wait", lambda n: None)
    assert orders(which)[0] == ["wgmma", ("released", 1)]
