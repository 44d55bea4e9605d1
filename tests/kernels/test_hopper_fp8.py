"""The Hopper kernel of 8-bit values against the definition of its products.

It runs in the interpreter with its race detector, and is lowered for an H200 that need
not be present. test_hopper_dot.py has more cases of what the kernels share (tiles,
ring, edges).
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)
from jax.sharding import use_abstract_mesh

from moejax.kernels.grouped_dot.hopper import fp8_kernel, kernels
from moejax.kernels.shapes import MODEL_SHAPES, ProductShape
from moejax.kernels.tuning import FP8, Tiles, default_tiles
from tests.support import fp8_definition as definition
from tests.support.close import assert_close
from tests.support.hopper_cases import (
    Setup,
    expected,
    fitting,
    interpreted,
    kernel,
    leave_out,
    operand_dims,
    operands,
    padded_with,
)
from tests.support.hopper_rows import (
    ALL_PATTERNS,
    CASES,
    FEW_STEPS,
    INTERPRETED,
    PLAIN,
    STEEP,
    min_cover,
    rows_of_pattern,
)
from tests.support.hopper_traces import H200, order

OUTSIDE = Setup(
    ProductShape(rows=72, d=64, f=192, groups=3),
    Tiles(64, 256, stages=3, halves="columns"),
    num_blocks=2,
    dtype="float16",
)
"""Case with 384 columns after doubling of the width. In the second tile, all columns of
one warpgroup lie outside, where w has no scale."""


@pytest.fixture(autouse=True)
def _fresh_interpreter():
    """Reset the interpreter: the state of a failed kernel would fail the next one."""
    yield
    reset_gpu_interpret_mode_state()


def check(which, setup, rows_g):
    setup, rows_g = fitting(which, setup), np.array(rows_g, np.int32)
    actual = interpreted(which, setup, rows_g)
    assert actual.dtype == setup.dtype
    assert_close(actual, expected(which, setup, rows_g))


@pytest.mark.slow
def test_a_plain_case():
    check("fp8_forward", PLAIN, rows_of_pattern(ALL_PATTERNS[-1]))


@pytest.mark.slow
def test_patterns_of_empty_groups():
    """Three patterns run here, and all of them in `make test-all`."""
    for pattern in min_cover()[::2]:
        check("fp8_forward", PLAIN, rows_of_pattern(pattern))


@pytest.mark.long
@pytest.mark.parametrize("which", FP8)
def test_all_patterns_of_empty_groups(which):
    for pattern in ALL_PATTERNS:
        check(which, PLAIN, rows_of_pattern(pattern))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "setup", "rows_g"),
    [
        pytest.param("fp8_dgrad", STEEP, (3, 0, 130, 20), id="inside a tile"),
        pytest.param("fp8_forward", OUTSIDE, (9, 0, 50), id="columns outside"),
    ],
)
def test_cases(which, setup, rows_g):
    check(which, setup, rows_g)


@pytest.mark.long
@pytest.mark.parametrize(("setup", "rows_g"), CASES)
@pytest.mark.parametrize("which", FP8)
def test_all_cases(which, setup, rows_g):
    check(which, setup, rows_g)


@pytest.mark.slow
def test_gradients_in_e5m2():
    """Compare dy in e5m2 times w in e4m3 with NumPy in float64."""
    setup, rows_g = fitting("fp8_dgrad", FEW_STEPS), np.array([1, 20, 0, 7] + [3] * 5)
    static = {"tiles": setup.tiles, "run": INTERPRETED, "gradients": "e5m2"}
    call = jax.jit(functools.partial(kernels.fp8_dgrad, **static))
    actual = interpreted("fp8_dgrad", setup, rows_g.astype(np.int32), call)
    dy_mf, w_gdf = padded_with(0, "fp8_dgrad", setup, rows_g)
    assert_close(actual, definition.dgrad(dy_mf, w_gdf, rows_g, "e5m2"))


@pytest.mark.slow
def test_scales_that_are_refilled_in_use_are_seen(monkeypatch):
    """Without the fence between reads of scales and the next copy there is a race."""
    leave_out(monkeypatch, fp8_kernel, ("commit_smem",))
    setup = fitting("fp8_forward", STEEP)
    static = {"tiles": setup.tiles, "run": INTERPRETED}
    call = jax.jit(functools.partial(kernels.fp8_forward, **static))
    with pytest.raises(AssertionError, match="a race"):
        interpreted("fp8_forward", setup, np.array([130, 0, 0, 0], np.int32), call)


def test_a_row_that_is_not_finite_stays_alone():
    setup = fitting("fp8_forward", PLAIN)
    x_md, w_gdf = operands(setup)["fp8_forward"]
    rows_g = np.array([200] + [0] * 7, np.int32)
    call = kernel("fp8_forward", setup)
    is_bad = np.isnan(call(x_md.at[70, 3].set(jnp.inf), w_gdf, rows_g))
    assert is_bad[70].all()
    assert is_bad.sum() == is_bad[70].sum()


def trace(which, shape, tiles, dtype=jnp.bfloat16, **options):
    floats = [jax.ShapeDtypeStruct(dims, dtype) for dims in operand_dims(which, shape)]
    rows_g = jax.ShapeDtypeStruct((shape.groups,), jnp.int32)
    call = functools.partial(getattr(kernels, which), tiles=tiles, **options)
    with use_abstract_mesh(H200):
        return jax.jit(call).trace(*floats, rows_g)


def check_lowers(which, shape, tiles, dtype=jnp.bfloat16, **options):
    """Assert that one kernel is lowered, which reads 8-bit values.

    Too much shared memory would raise an error.
    """
    with use_abstract_mesh(H200):
        result = trace(which, shape, tiles, dtype, **options)
        text = result.lower(lowering_platforms=("cuda",)).as_text()
    (line,) = re.findall(r"custom_call @mosaic_gpu_v2.*", text)
    row_type = "f8E5M2" if options.get("gradients") == "e5m2" else "f8E4M3FN"
    types = re.findall(r"x(f8\w+)>", line)
    assert types == [row_type, "f8E4M3FN"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "which", "options"),
    [
        ("mixtral_8x7b", "fp8_forward", {}),
        ("fine_grained", "fp8_dgrad", {"gradients": "e5m2"}),
    ],
)
def test_model_shapes_lower(name, which, options):
    shape = MODEL_SHAPES[name]
    check_lowers(which, shape, default_tiles(which, shape), **options)


@pytest.mark.long
@pytest.mark.parametrize("name", MODEL_SHAPES)
@pytest.mark.parametrize("which", FP8)
def test_all_model_shapes_lower(name, which):
    shape = MODEL_SHAPES[name]
    check_lowers(which, shape, default_tiles(which, shape))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("sizes", [(64, 128), (64, 256), (128, 64), (128, 128)])
@pytest.mark.parametrize("which", FP8)
def test_tiles_of_a_search_lower(which, sizes, dtype):
    halves = "columns" if sizes[0] == 64 else "rows"
    for chunk in (32, 64):
        tiles = Tiles(*sizes, depth=128, stages=3, halves=halves, chunk=chunk)
        check_lowers(which, ProductShape(1016, 640, 1152, 9), tiles, dtype)


@pytest.mark.parametrize("which", FP8)
def test_a_slot_is_given_back_when_no_wgmma_reads_it(which):
    """The interpreter cannot test this, because its WGMMA ends when it is issued. The
    kernel waits for the WGMMA of a step, and then releases the slot of that step."""
    tiles = Tiles(128, 128, depth=128, stages=3)
    jaxpr = trace(which, ProductShape(1016, 640, 1152, 9), tiles).jaxpr
    assert order(jaxpr, tiles.stages) == ["wgmma", ("left", 0), ("released", 0)]


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
        trace("fp8_forward", ProductShape(1016, 640, 1152, 9), tiles)


def test_declines():
    assert kernels.declines("bfloat16", 128, 4096, 14336, is_fp8=True) is None
    why = "a width of 192 is not a multiple of 128, a block in fp8"
    assert kernels.declines("bfloat16", 128, 128, 192, is_fp8=True) == why
    assert kernels.declines("bfloat16", 128, 128, 192) is None
    shape = dataclasses.replace(PLAIN.shape, d=192, f=128)
    for which in FP8:
        arrays = [jnp.zeros(dims, "bfloat16") for dims in operand_dims(which, shape)]
        rows_g = jnp.zeros(shape.groups, jnp.int32)
        static = {"tiles": default_tiles(which, shape), "run": INTERPRETED}
        with pytest.raises(NotImplementedError, match=f"{why}: use implementation="):
            getattr(kernels, which)(*arrays, rows_g, **static)
