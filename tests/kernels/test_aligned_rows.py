"""The aligned forms of the Hopper kernels, for groups of whole tiles: values in the
interpreter with its race detector, traces without code for parts of tiles, and the
choice between the forms."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)
from jax.sharding import use_abstract_mesh

from moejax.kernels import quarantine
from moejax.kernels.grouped_dot import grouped_dot, grouped_swiglu
from moejax.kernels.grouped_dot.hopper import kernels
from moejax.kernels.grouped_dot.hopper.ring import KernelRun
from moejax.kernels.grouped_dot.hopper.row_tiles import GROUP, START, row_tiles
from moejax.kernels.shapes import MODEL_SHAPES, ProductShape
from moejax.kernels.tuning import FP8, PASSES, Tiles, default_tiles, has_whole_tiles
from tests.support.close import assert_close
from tests.support.hopper_cases import (
    Setup,
    expected,
    fitting,
    interpreted,
    operand_dims,
)
from tests.support.hopper_rows import (
    ALL_PATTERNS,
    NUM_GROUPS,
    OWN_DTYPE,
    min_cover,
)
from tests.support.hopper_traces import H200
from tests.support.primitives import equations

PLAIN = Setup(
    ProductShape(rows=640, d=64, f=64, groups=NUM_GROUPS),
    Tiles(64, 128, stages=3, halves="columns"),
    num_blocks=2,
    is_aligned=True,
)
"""A small setup. Its 10 tiles of rows are two more than groups."""
STEEP = Setup(
    ProductShape(rows=768, d=192, f=192, groups=4),
    Tiles(128, 128, stages=2, span=1),
    num_blocks=3,
    dtype="float16",
    is_aligned=True,
)
"""A setup with three steps in two stages, and columns outside of the array."""


@pytest.fixture(autouse=True)
def _fresh_interpreter():
    """Reset the interpreter: the state of a failed kernel would fail the next one."""
    yield
    reset_gpu_interpret_mode_state()


def check(which, setup, rows_g):
    setup = fitting(which, setup)
    rows_g = np.asarray(rows_g, np.int32)
    actual = interpreted(which, setup, rows_g)
    assert all(leaf.dtype == setup.dtype for leaf in jax.tree.leaves(actual))
    assert_close(actual, expected(which, setup, rows_g))


def whole_tiles(pattern) -> np.ndarray:
    """Return the rows of each group: a tile for groups of the pattern, 0 for others.

    In every third pattern the last group that has rows takes all remaining tiles, so
    that there is no padding."""
    tile, number = PLAIN.tiles.rows, ALL_PATTERNS.index(pattern)
    rows_g = np.where(pattern, tile, 0)
    if number % 3 == 0 and any(pattern):
        rows_g[np.flatnonzero(pattern)[-1]] += PLAIN.shape.rows - rows_g.sum()
    return rows_g


COVER = min_cover()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "patterns"),
    [
        ("forward", COVER[1:3]),
        ("wgrad", COVER[3:5]),
        *(
            pytest.param(which, COVER, marks=pytest.mark.long)
            for which in (*OWN_DTYPE, *FP8)
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else str(len(given)),
)
def test_patterns_of_empty_groups(which, patterns):
    for pattern in patterns:
        check(which, PLAIN, whole_tiles(pattern))


@pytest.mark.long
@pytest.mark.parametrize("which", OWN_DTYPE)
def test_all_patterns_of_empty_groups(which):
    for pattern in ALL_PATTERNS:
        check(which, PLAIN, whole_tiles(pattern))


@pytest.mark.long
@pytest.mark.parametrize("rows_g", [(256, 0, 384, 128), (0, 0, 0, 128), (768, 0, 0, 0)])
@pytest.mark.parametrize("which", PASSES)
def test_more_steps_than_stages(which, rows_g):
    check(which, STEEP, rows_g)


def trace(which, setup: Setup):
    """Return the jaxpr of a pass, traced for an absent H200."""
    floats = [
        jax.ShapeDtypeStruct(dims, setup.dtype)
        for dims in operand_dims(which, setup.shape)
    ]
    rows_g = jax.ShapeDtypeStruct((setup.shape.groups,), jnp.int32)
    run = KernelRun(setup.num_blocks, is_aligned=setup.is_aligned)
    call = functools.partial(getattr(kernels, which), tiles=setup.tiles, run=run)
    with use_abstract_mesh(H200):
        return jax.jit(call).trace(*floats, rows_g)


def counts(which, setup: Setup) -> dict[str, int]:
    """Return how many operations of a kernel's trace serve parts of tiles or steps."""
    setup = fitting(which, setup)
    names = [eqn.primitive.name for eqn, _ in equations(trace(which, setup).jaxpr)]
    return {name: names.count(name) for name in ("copy_smem_to_gmem", "barrier_arrive")}


def test_the_aligned_forms_have_no_code_for_parts():
    """A part of a tile is stored by a copy for each power of two of its rows, which are
    32 to 1 here; blanked steps have a barrier."""
    first_form = dataclasses.replace(PLAIN, is_aligned=False)
    chunks, pieces = 2, 6
    assert counts("forward", PLAIN)["copy_smem_to_gmem"] == chunks
    assert counts("forward", first_form)["copy_smem_to_gmem"] == chunks * (1 + pieces)
    ring_alone = counts("wgrad", PLAIN)["barrier_arrive"]
    assert counts("wgrad", first_form)["barrier_arrive"] == ring_alone + 1


def lowers(name: str, which) -> None:
    """Assert that a pass of a model's shape lowers in the aligned form."""
    shape = MODEL_SHAPES[name]
    tiles = default_tiles(which, shape)
    assert has_whole_tiles(which, tiles, 128)
    setup = Setup(shape, tiles, 132, is_aligned=True)
    with use_abstract_mesh(H200):
        trace(which, setup).lower(lowering_platforms=("cuda",))


@pytest.mark.slow
def test_it_lowers():
    lowers("olmoe_1b_7b", "swiglu_dgrad")


@pytest.mark.long
@pytest.mark.parametrize("name", MODEL_SHAPES)
@pytest.mark.parametrize("which", PASSES)
def test_all_model_shapes_lower(name, which):
    lowers(name, which)


def test_the_table_has_every_tile_once():
    """Rows of one tile are of one group; padding is one more group."""
    rng = np.random.default_rng(0)
    for tile_rows in (64, 128):
        rows_g = tile_rows * rng.choice([0, 1, 3], 12)
        num_rows = int(rows_g.sum()) + 2 * tile_rows
        table, count = row_tiles(jnp.asarray(rows_g), num_rows, tile_rows, True)
        assert table.shape == (2, int(count[0])) == (2, num_rows // tile_rows)
        assert table[START].tolist() == list(range(0, num_rows, tile_rows))
        owner_m = np.append(np.repeat(np.arange(12), rows_g), [12] * 2 * tile_rows)
        assert table[GROUP].tolist() == owner_m[::tile_rows].tolist()


@pytest.mark.parametrize(
    ("which", "tiles", "align_rows", "is_whole"),
    [
        ("forward", Tiles(128, 128), 128, True),
        ("forward", Tiles(128, 128), 64, False),
        ("forward", Tiles(64, 128, halves="columns"), 128, True),
        ("forward", Tiles(64, 128, halves="columns"), 1, False),
        ("wgrad", Tiles(256, 128), 64, True),
        ("wgrad", Tiles(128, 128, depth=128), 64, False),
    ],
)
def test_tiles_that_divide_the_alignment_take_the_aligned_form(
    which, tiles, align_rows, is_whole
):
    """In wgrad the rows of a step do, whatever the tile."""
    assert has_whole_tiles(which, tiles, align_rows) == is_whole


@pytest.mark.parametrize("fp8", ["none", pytest.param("e4m3", marks=pytest.mark.long)])
def test_products_take_the_form_of_their_tiles(fp8):
    """128 rows of a group take 64 rows a tile by the default, and 256 rows 128."""
    for mean, aligned in ((128, {64: True, 128: True}), (256, {64: False, 128: True})):
        groups, d = 2, 128
        arrays = [
            jax.ShapeDtypeStruct(dims, jnp.bfloat16)
            for dims in ((groups * mean, d), (groups, d, d))
        ]
        rows_g = jax.ShapeDtypeStruct((groups,), jnp.int32)
        for align_rows, is_aligned in aligned.items():
            forward = kernels.products(fp8=fp8, align_rows=align_rows).forward
            with use_abstract_mesh(H200):
                jaxpr = jax.jit(forward).trace(*arrays, rows_g).jaxpr
            names = [eqn.primitive.name for eqn, _ in equations(jaxpr)]
            assert (names.count("copy_smem_to_gmem") <= 8) == is_aligned


@pytest.mark.parametrize("form", quarantine.FORMS)
def test_a_quarantined_pass_keeps_its_first_form(form):
    static = Tiles(128, 128), 128, "NVIDIA H200"
    try:
        quarantine.hold("dgrad", form, "a test")
        assert not kernels.takes_aligned_form("dgrad", *static)
        assert kernels.takes_aligned_form("forward", *static)
    finally:
        quarantine.release()
    assert kernels.takes_aligned_form("dgrad", *static)


def test_rows_that_do_not_divide_are_refused_in_one_line():
    x_md, w_gdf = jnp.zeros((100, 8)), jnp.zeros((2, 8, 8))
    rows_g = jnp.zeros(2, jnp.int32)
    into_gdh = jnp.zeros((2, 8, 16))
    for call in (
        functools.partial(grouped_dot, x_md, w_gdf, rows_g),
        functools.partial(grouped_swiglu, x_md, into_gdh, w_gdf, rows_g),
    ):
        with pytest.raises(ValueError, match="align_rows=64 must divide the 100 rows"):
            call(align_rows=64)
