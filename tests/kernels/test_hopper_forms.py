"""The second forms of the grouped products' Hopper kernels, which Tiles choose, against
the definition of the products, in the interpreter with its race detector.

The interpreter does not know multicast; tests/support/hopper_clusters.py teaches it.
It takes the threads of a warpgroup for one, so that it sees no barrier that is missing
among them: traces are checked for those.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    reset_gpu_interpret_mode_state,
)
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import use_abstract_mesh

from moejax.kernels.grouped_dot.hopper import kernels, ring, rows_kernel
from moejax.kernels.shapes import MODEL_SHAPES, ProductShape
from moejax.kernels.tuning import (
    FUSED,
    SHARED_BYTES,
    Tiles,
    default_tiles,
    shared_bytes,
)
from tests.support.close import assert_close
from tests.support.hopper_cases import (
    INTERPRET,
    Setup,
    expected,
    interpreted,
    leave_out,
    operand_dims,
)
from tests.support.hopper_clusters import simulate_multicast
from tests.support.hopper_forms import FORMS, has_form, in_form, setup_in_form
from tests.support.hopper_rows import (
    ALL_PATTERNS,
    CASES,
    INTERPRETED,
    OWN_DTYPE,
    PLAIN,
    STEEP,
    min_cover,
    rows_of_pattern,
)
from tests.support.hopper_traces import H200, broken_barrier_rules, order

RAGGED = ProductShape(rows=1016, d=320, f=576, groups=9)
PASS_AND_FORM = [
    pytest.param(which, form, id=f"{which} {form}")
    for which in OWN_DTYPE
    for form in FORMS
    if has_form(which, form)
]


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    """Simulate multicast, and reset the interpreter after a kernel that failed."""
    simulate_multicast(monkeypatch)
    yield
    reset_gpu_interpret_mode_state()


def check(which, setup, form, rows_g):
    setup = setup_in_form(which, setup, form)
    assert_close(interpreted(which, setup, rows_g), expected(which, setup, rows_g))


@pytest.mark.slow
@pytest.mark.parametrize(("which", "form"), [("forward", "all"), ("wgrad", "turns")])
def test_forms(which, form):
    check(which, PLAIN, form, rows_of_pattern(ALL_PATTERNS[-1]))


@pytest.mark.long
@pytest.mark.parametrize(("which", "form"), PASS_AND_FORM)
def test_patterns_of_empty_groups(which, form):
    for pattern in min_cover():
        check(which, PLAIN, form, rows_of_pattern(pattern))


@pytest.mark.long
@pytest.mark.parametrize("which", OWN_DTYPE)
def test_all_patterns_of_empty_groups(which):
    for pattern in ALL_PATTERNS:
        check(which, PLAIN, "turns", rows_of_pattern(pattern))


@pytest.mark.long
@pytest.mark.parametrize(("setup", "rows_g"), CASES)
@pytest.mark.parametrize(("which", "form"), PASS_AND_FORM)
def test_cases(which, form, setup, rows_g):
    check(which, setup, form, np.array(rows_g, np.int32))


def fail_retraced(which, form, message):
    """Assert that STEEP in a form, traced again because something was left out, fails
    with this message."""
    setup = setup_in_form(which, STEEP, form)
    static = {
        "tiles": setup.tiles,
        "run": dataclasses.replace(INTERPRETED, num_blocks=2),
    }
    call = jax.jit(functools.partial(getattr(kernels, which), **static))
    rows_g = np.array([130, 0, 60, 0], np.int32)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=message):
        assert_close(
            interpreted(which, setup, rows_g, call), expected(which, setup, rows_g)
        )


MISSED = "a race|observe|phase"
"""Pattern of the interpreter's errors for missing synchronization."""


@pytest.mark.long
@pytest.mark.parametrize("form", ["turns", "cluster"])
@pytest.mark.parametrize("name", ["await_empty", "await_full"])
def test_a_ring_that_does_not_wait_is_detected(monkeypatch, form, name):
    leave_out(monkeypatch, ring.Ring, (name,))
    fail_retraced("forward", form, MISSED)


@pytest.mark.long
def test_a_slot_that_one_block_of_a_cluster_releases_is_detected(monkeypatch):
    """Each block would overwrite the slot of the other while that is being read."""

    def alone(collective_axes, **fields):
        return plgpu.Barrier(**fields)

    monkeypatch.setattr(plgpu, "ClusterBarrier", alone)
    fail_retraced("forward", "cluster", MISSED)


@pytest.mark.long
def test_blocks_of_a_cluster_that_copy_other_rows_are_detected(monkeypatch):
    copy_step = rows_kernel.Block.copy_step

    def of_other_rows(self, tile, number, slot):
        row = tile.row + 8 * jax.lax.axis_index(ring.PAIR)
        copy_step(self, dataclasses.replace(tile, row=row), number, slot)

    monkeypatch.setattr(rows_kernel.Block, "copy_step", of_other_rows)
    fail_retraced("forward", "cluster", "values off")


def trace(which, shape, tiles, dtype=jnp.bfloat16, run=kernels.ON_DEVICE):
    floats = [jax.ShapeDtypeStruct(dims, dtype) for dims in operand_dims(which, shape)]
    rows_g = jax.ShapeDtypeStruct((shape.groups,), jnp.int32)
    static = {"tiles": tiles, "run": run}
    call = jax.jit(functools.partial(getattr(kernels, which), **static))
    with use_abstract_mesh(H200):
        return call.trace(*floats, rows_g)


def lower(which, shape, tiles, dtype=jnp.bfloat16) -> str:
    with use_abstract_mesh(H200):
        lowered = trace(which, shape, tiles, dtype).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


@pytest.mark.parametrize(
    ("which", "form"),
    [
        pytest.param(*case.values, marks=[] if is_short else pytest.mark.long)
        for case in PASS_AND_FORM
        for is_short in ["turns" in case.values]
    ],
)
def test_a_slot_is_given_back_when_no_wgmma_reads_it(which, form):
    tiles = in_form(which, Tiles(128, 128, stages=3), form)
    num_products = 2 if which == "swiglu" else 1
    step = ["wgmma"] * num_products + [("left", num_products), ("released", 1)]
    end = [("left", 0)] * num_products + [("released", 1)]
    jaxpr = trace(which, RAGGED, tiles).jaxpr
    assert order(jaxpr, tiles.stages) == step + end


@pytest.mark.parametrize("which", OWN_DTYPE)
def test_threads_of_a_warpgroup_are_kept_apart(which):
    """Only blanking breaks the rules, so wgrad declines barriers='own'."""
    broken = broken_barrier_rules(trace(which, RAGGED, Tiles(128, 128)).jaxpr)
    assert bool(broken) == (which == "wgrad"), broken


def test_wgrad_declines_barriers_of_its_own():
    with pytest.raises(ValueError, match="must have barriers='auto' in wgrad"):
        trace("wgrad", RAGGED, Tiles(128, 128, barriers="own"))


@pytest.mark.parametrize(
    "form",
    ["turns", *(pytest.param(f, marks=pytest.mark.long) for f in ("own", "all"))],
)
def test_aligned_groups_have_no_blanking_to_keep_apart(form):
    tiles = dataclasses.replace(Tiles(128, 128), **FORMS[form])
    run = ring.KernelRun(is_aligned=True)
    aligned = ProductShape(rows=1024, d=320, f=576, groups=9)
    jaxpr = trace("wgrad", aligned, tiles, run=run).jaxpr
    assert broken_barrier_rules(jaxpr) == set()


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", OWN_DTYPE)
def test_aligned_groups(which, form):
    """All forms equal the definition where groups have whole tiles."""
    tiles = dataclasses.replace(Tiles(128, 128, stages=2), **FORMS[form])
    shape = ProductShape(rows=640, d=192, f=192, groups=4)
    setup = Setup(shape, tiles, num_blocks=4)
    rows_g = np.array([128, 0, 256, 128], np.int32)
    run = ring.KernelRun(setup.num_blocks, INTERPRET, is_aligned=True)
    call = functools.partial(getattr(kernels, which), tiles=tiles, run=run)
    actual = interpreted(which, setup, rows_g, jax.jit(call))
    assert_close(actual, expected(which, setup, rows_g))


def test_fp8_has_no_second_form():
    with pytest.raises(ValueError, match=r"must be .*cluster=1.* in fp8"):
        trace("fp8_forward", MODEL_SHAPES["fine_grained"], Tiles(128, 128, cluster=2))


@pytest.mark.parametrize("form", ["own", "cluster"])
def test_parameters_of_the_compiler(form):
    tiles = in_form("swiglu", Tiles(64, 128, halves="columns"), form)
    arguments = ring.kernel_arguments(ring.KernelRun(6), tiles)
    if form == "cluster":
        assert "compiler_params" not in arguments
        assert (arguments["grid"], arguments["cluster"]) == ((3,), (2,))
    else:
        parameters = arguments["compiler_params"]
        assert (parameters.approx_math, parameters.unsafe_no_auto_barriers) == (1, 1)


def test_multiprocessors_that_are_spared():
    """The second form with clusters needs two blocks."""
    run, tiles = ring.KernelRun(), Tiles(128, 128, spared=9)
    with use_abstract_mesh(H200):
        assert ring.kernel_arguments(run, tiles)["grid"] == (123,)
        pairs = dataclasses.replace(tiles, cluster=2)
        assert ring.kernel_arguments(run, pairs)["grid"] == (61,)
        with pytest.raises(
            ValueError, match="spared=131 must leave 2 or more of the 132"
        ):
            ring.kernel_arguments(run, dataclasses.replace(pairs, spared=131))
    assert not tiles.is_second_form
    assert pairs.first_form() == tiles


@pytest.mark.parametrize(
    ("which", "tiles"),
    [
        ("forward", Tiles(128, 128, stages=9, halves="turns")),
        ("wgrad", Tiles(128, 128, stages=9, halves="turns", cluster=2)),
        ("swiglu_dgrad", Tiles(64, 128, stages=20, halves="turns", chunk=64)),
    ],
)
def test_shared_bytes_are_those_of_the_lowering(which, tiles):
    need = f"smem_bytes={shared_bytes(which, tiles, 2)} "
    with pytest.raises(ValueError, match="exceeds available shared memory") as error:
        lower(which, MODEL_SHAPES["mixtral_8x7b"], tiles)
    assert need.strip() in str(error.value)


LOWERED = {
    "forward": [Tiles(128, 128, halves="turns"), Tiles(64, 256, halves="turns")],
    "dgrad": [Tiles(128, 128, halves="turns"), Tiles(128, 192, 64, 3, halves="turns")],
    "wgrad": [Tiles(128, 128, halves="turns")],
    "swiglu": [Tiles(128, 64, halves="turns"), Tiles(64, 128, halves="turns")],
    "swiglu_dgrad": [Tiles(128, 64, halves="turns"), Tiles(64, 128, halves="turns")],
}
"""Tiles for turns by pass. The other forms are lowered with default tiles."""


@pytest.mark.long
@pytest.mark.parametrize("name", MODEL_SHAPES)
@pytest.mark.parametrize("which", OWN_DTYPE)
def test_all_model_shapes_lower(which, name):
    shape = MODEL_SHAPES[name]
    default = default_tiles(which, shape)
    forms = [in_form(which, default, form) for form in ("own", "cluster")]
    turns = [in_form(which, tiles, "all") for tiles in LOWERED[which]]
    for tiles in dict.fromkeys([*LOWERED[which], *forms, *turns]):
        assert "mosaic_gpu_v2" in lower(which, shape, tiles), tiles


@pytest.mark.slow
def test_a_model_shape_lowers():
    tiles = in_form("forward", LOWERED["forward"][0], "all")
    assert "mosaic_gpu_v2" in lower("forward", MODEL_SHAPES["qwen3_30b_a3b"], tiles)


TURNS = [
    Tiles(rows, columns, halves="turns", stages=stages, chunk=chunk)
    for rows in (64, 128)
    for columns in (64, 128, 192, 256)
    for stages in (2, 5)
    for chunk in (32, 64)
    if rows * columns >= 64 * 128
]


@pytest.mark.parametrize("tiles", TURNS, ids=str)
def test_the_first_form_of_turns_takes_no_more_memory(tiles):
    first = dataclasses.replace(tiles, cluster=2, math="approx").first_form()
    assert (tiles.is_second_form, first.is_second_form) == (True, False)
    assert first.first_form() == first
    assert first.rows == tiles.rows
    assert first.columns <= tiles.columns
    for which in ("forward", "dgrad", "wgrad", *FUSED):
        assert shared_bytes(which, first, 2) <= shared_bytes(which, tiles, 2)


@pytest.mark.parametrize("form", ["own", "cluster"])
def test_the_first_form_of_other_choices_is_the_same_tile(form):
    for which in OWN_DTYPE:
        for shape in MODEL_SHAPES.values():
            tiles = default_tiles(which, shape)
            assert not tiles.is_second_form
            assert shared_bytes(which, tiles, 2) <= SHARED_BYTES
            if has_form(which, form) and (form != "own" or which in FUSED):
                other = in_form(which, tiles, form)
                assert other.is_second_form
                assert other.first_form() == tiles


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"halves": "both"}, "halves='both' is not one of"),
        ({"math": "fast"}, "math='fast' is not one of"),
        ({"barriers": "none"}, "barriers='none' is not one of"),
        ({"cluster": 4}, "cluster=4 is not one of"),
        ({"spared": -1}, "spared=-1 must be at least 0"),
        ({"rows": 64, "columns": 64, "halves": "turns"}, "64 x 64 is too small"),
        ({"columns": 320, "halves": "turns"}, "at most 256 columns"),
    ],
)
def test_choices_that_cannot_be(fields, rule):
    with pytest.raises(ValueError, match=rule):
        Tiles(**{"rows": 128, "columns": 128} | fields)
