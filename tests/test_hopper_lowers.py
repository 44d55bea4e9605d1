"""Every Hopper kernel of the grouped product lowers for CUDA under an H200 that is not
here: on the shapes of real models with the tiles of the rule, and with others that a
search would try. Lowering takes a second or two, so `make test` has a handful."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from hopper_cases import dims_of, fitting
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from test_hopper_dot import FEW_STEPS, ONE_GROUP, PLAIN, STEEP

from moejax.kernels.grouped_dot import hopper
from moejax.kernels.shapes import MODEL_SHAPES, Shape
from moejax.kernels.tuning import PASSES, Tiles, by_rule

H200 = AbstractMesh(
    (), (), abstract_device=AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
)
RAGGED = Shape(rows=1016, d=320, f=576, groups=9)
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
    for which in PASSES
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


def lowered(which, shape, tiles, dtype=jnp.bfloat16) -> str:
    floats = [jax.ShapeDtypeStruct(dims, dtype) for dims in dims_of(which, shape)]
    rows_g = jax.ShapeDtypeStruct((shape.groups,), jnp.int32)
    call = jax.jit(functools.partial(getattr(hopper, which), tiles=tiles))
    with use_abstract_mesh(H200):
        return call.trace(*floats, rows_g).lower(lowering_platforms=("cuda",)).as_text()


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
    check(which, shape, by_rule(which, shape))


@pytest.mark.long
@pytest.mark.parametrize(("name", "which"), IN_ALL)
def test_all_model_shapes(name, which):
    shape = MODEL_SHAPES[name]
    check(which, shape, by_rule(which, shape))


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
        for which in PASSES
        for tiles in filter(WITHIN.get(which), FITTING)
    ],
)
def test_tiles_of_a_search(which, tiles, dtype):
    check(which, RAGGED, tiles, dtype)


@pytest.mark.long
@pytest.mark.parametrize("setup", [PLAIN, STEEP, FEW_STEPS, ONE_GROUP])
@pytest.mark.parametrize("which", PASSES)
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
