"""The Hopper kernels of the grouped product beside the cases of test_cases.py: other
tiles, what they decline, traces, and lowering for an H200 that need not be present."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.extend.core import jaxprs_in_params
from jax.sharding import use_abstract_mesh

from moejax.kernels.cases import Case, operand_dims, product_case
from moejax.kernels.grouped_dot.hopper import kernels
from moejax.kernels.shapes import MODEL_SHAPES, ProductShape
from moejax.kernels.tuning import FP8, PASSES, Tiles, align_rows_for, default_tiles
from tests.support import fp8_definition
from tests.support.close import assert_close
from tests.support.hopper_traces import H200, order
from tests.support.primitives import equations

RAGGED = ProductShape(rows=1024, d=320, f=576, groups=9)
"""Shape whose widths no tile divides."""
RAGGED_FP8 = ProductShape(rows=1024, d=640, f=1152, groups=9)
TILES = [
    Tiles(64, 128, stages=2, halves="columns"),
    Tiles(64, 256, stages=3, halves="columns", chunk=64),
    Tiles(128, 64, stages=4),
    Tiles(128, 128, depth=128, stages=2),
    Tiles(128, 256, stages=3, chunk=64, span=1),
    Tiles(256, 128, stages=2, span=64),
]
"""Tiles that a search would try."""


def interpreted_error(case: Case) -> float:
    """Return the error of a case in the interpreter; assert that there was no race."""
    arguments = case.draw()
    results = jax.device_get(jax.jit(case.call("hopper", True))(*arguments))
    assert not get_races().races_found, "a race"
    return case.error(results, case.expected(arguments))


def fits(which: str, tiles: Tiles) -> bool:
    """Return whether a pass has registers and shared memory for tiles, and whether no
    swizzle is cut in two."""
    if which == "wgrad":
        return tiles.halves == "rows" and tiles.columns >= 128
    return "swiglu" not in which or max(tiles.rows, tiles.columns) <= 128


PASSES_AND_TILES = [
    pytest.param(which, tiles, id=f"{which} {tiles}")
    for which in PASSES
    for tiles in TILES
    if which not in FP8 and fits(which, tiles)
]


@pytest.mark.long
@pytest.mark.parametrize(("which", "tiles"), PASSES_AND_TILES)
def test_other_tiles(monkeypatch, which, tiles):
    monkeypatch.setattr(kernels, "tiles_for", lambda *_: tiles)
    case = product_case(which, "bfloat16", 192, 192, (256, 0, 512), align_rows=256)
    assert interpreted_error(case) <= case.tolerance


@pytest.mark.slow
def test_gradients_in_e5m2():
    """Compare dy in e5m2 times w in e4m3 with NumPy in float64."""
    sizes = "float16", 128, 256, (64, 0, 128)
    case = product_case("fp8_dgrad", *sizes, align_rows=64, fp8="e5m2")
    dy_mf, w_gdf, rows_g = arguments = case.draw()
    actual = jax.jit(case.call("hopper", True))(*arguments)
    dy_mf = np.nan_to_num(dy_mf)
    assert_close(actual, fp8_definition.dgrad(dy_mf, w_gdf, rows_g, "e5m2"))


@pytest.mark.parametrize(
    ("dtype", "align_rows", "d", "options", "why"),
    [
        ("float32", 64, 64, {}, "dtype float32 is not one of bfloat16, float16"),
        ("bfloat16", 64, 96, {}, "a width of 96 is not a multiple of 64 in bfloat16"),
        ("float16", 8, 64, {}, "groups begin at multiples of 8 rows, not of the 64 of"),
        ("bfloat16", 64, 192, {"fp8": "e4m3"}, "a width of 192 is not a multiple of 1"),
    ],
)
def test_declines(dtype, align_rows, d, options, why):
    declined = kernels.declines(dtype, align_rows, d, 128, is_fp8=bool(options))
    assert declined.startswith(why)
    x_md, w_gdf = jnp.zeros((64, d), dtype), jnp.zeros((2, d, 128), dtype)
    rows_g = jnp.zeros(2, jnp.int32)
    run = kernels.KernelRun(1, kernels.INTERPRET)
    forward = kernels.products(run, align_rows=align_rows, **options).forward
    with pytest.raises(NotImplementedError, match=f"{why}.*: use implementation="):
        forward(x_md, w_gdf, rows_g)


def test_declines_a_device_that_is_no_hopper():
    why = "the kernels are for Hopper, not cpu: use implementation='blocked'"
    x_md, w_gdf = jnp.zeros((64, 64), "bfloat16"), jnp.zeros((2, 64, 64), "bfloat16")
    with pytest.raises(NotImplementedError, match=why):
        kernels.products(align_rows=64).forward(x_md, w_gdf, jnp.zeros(2, jnp.int32))


@pytest.mark.parametrize(
    "tiles",
    [
        Tiles(128, 128),
        Tiles(128, 256, depth=128),
        Tiles(256, 128, depth=128, stages=2),
    ],
    ids=str,
)
def test_tiles_that_a_scale_does_not_fit(tiles):
    with pytest.raises(ValueError, match="must have depth=128, and 64 x 64 or 64 x"):
        trace("fp8_forward", RAGGED_FP8, tiles)


def trace(which, shape, tiles, dtype=jnp.bfloat16, **options):
    """Trace a pass for an H200."""
    sizes = shape.rows, shape.d, shape.f, shape.groups
    dims = operand_dims(which, *sizes)
    floats = [jax.ShapeDtypeStruct(each, dtype) for each in dims]
    rows_g = jax.ShapeDtypeStruct((shape.groups,), jnp.int32)
    call = functools.partial(getattr(kernels, which), tiles=tiles, **options)
    with use_abstract_mesh(H200):
        return jax.jit(call).trace(*floats, rows_g)


def lower_to_text(which, shape, tiles, dtype=jnp.bfloat16, **options) -> str:
    with use_abstract_mesh(H200):
        result = trace(which, shape, tiles, dtype, **options)
        return result.lower(lowering_platforms=("cuda",)).as_text()


def check_lowers(which, shape, tiles, dtype=jnp.bfloat16, **options):
    """Assert that one kernel is lowered: without operations on float arrays beside it,
    or in fp8 on 8-bit values. Too much shared memory would raise a ValueError."""
    text = lower_to_text(which, shape, tiles, dtype, **options)
    if which in FP8:
        (line,) = re.findall(r"custom_call @mosaic_gpu_v2.*", text)
        rows = "f8E5M2" if options.get("gradients") == "e5m2" else "f8E4M3FN"
        assert re.findall(r"x(f8\w+)>", line) == [rows, "f8E4M3FN"]
        return
    assert re.findall(r"custom_call @(\w+)", text) == ["mosaic_gpu_v2"]
    moved = re.findall(r"stablehlo\.(?!reshape)\w+.*x(?:bf16|f16|f32)>", text)
    assert [line for line in moved if "custom_call" not in line] == []


def check_model(name, which, **options):
    """Assert that a pass of a model's shape lowers with the default tiles."""
    shape = MODEL_SHAPES[name]
    align_rows = align_rows_for(shape.rows, shape.groups)
    check_lowers(which, shape, default_tiles(which, shape, align_rows), **options)


SHORT_CASES = [
    ("mixtral_8x7b", "forward"),
    ("qwen3_30b_a3b", "dgrad"),
    ("olmoe_1b_7b", "wgrad"),
    ("fine_grained", "swiglu"),
    ("deepseek_v3", "swiglu_dgrad"),
    ("mixtral_8x7b", "fp8_forward"),
    ("fine_grained", "fp8_dgrad"),
]
"""Cases that cover all passes, both kinds of halves and both numbers of columns."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "which"), SHORT_CASES)
def test_model_shapes_lower(name, which):
    options = {"gradients": "e5m2"} if which == "fp8_dgrad" else {}
    check_model(name, which, **options)


@pytest.mark.long
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("name", MODEL_SHAPES)
def test_all_model_shapes_lower(name, which):
    check_model(name, which)


SEARCHED_FP8 = [
    pytest.param(
        which,
        Tiles(rows, columns, depth=128, stages=3, halves=halves, chunk=64),
        id=f"{which} {rows}x{columns}",
    )
    for which in FP8
    for rows, halves in ((64, "columns"), (128, "rows"))
    for columns in (128, 256 if rows == 64 else 64)
]


@pytest.mark.long
@pytest.mark.parametrize(("which", "tiles"), [*PASSES_AND_TILES, *SEARCHED_FP8])
def test_tiles_of_a_search_lower(which, tiles):
    check_lowers(which, RAGGED_FP8 if which in FP8 else RAGGED, tiles)


def find_orders(which):
    """Return the order of operations in the only loop that issues WGMMAs, and in the
    whole kernel."""
    tiles = Tiles(128, 128, stages=3)
    jaxpr = trace(which, RAGGED, tiles).jaxpr
    bodies = (b for eqn, _ in equations(jaxpr) for b in jaxprs_in_params(eqn.params))
    names = ((body, [eqn.primitive.name for eqn in body.eqns]) for body in bodies)
    (loop,) = (body for body, named in names if "wgmma_ref" in named)
    return [order(each, tiles.stages) for each in (loop, jaxpr)]


@pytest.mark.parametrize("which", [which for which in PASSES if which not in FP8])
def test_a_slot_is_given_back_when_no_wgmma_reads_it(which):
    """The interpreter sees no race in any order, because its WGMMA ends when issued."""
    num_products = 2 if which == "swiglu" else 1
    # After the wait, the products of this step still run, and those of the last do not.
    step = ["wgmma"] * num_products + [("left", num_products), ("released", 1)]
    # The accumulators are read when nothing runs; the slot of the last step is
    # released.
    end = [("left", 0)] * num_products + [("released", 1)]
    assert find_orders(which) == [step, step + end]


@pytest.mark.parametrize("which", FP8)
def test_in_fp8_a_slot_is_given_back_when_no_wgmma_reads_it(which):
    """The kernel waits for the WGMMA of a step, and then releases its slot."""
    tiles = Tiles(128, 128, depth=128, stages=3)
    jaxpr = trace(which, RAGGED_FP8, tiles).jaxpr
    assert order(jaxpr, tiles.stages) == ["wgmma", ("left", 0), ("released", 0)]
