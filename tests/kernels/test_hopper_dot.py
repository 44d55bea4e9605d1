"""All Hopper kernels of the grouped product against its definition, in the Mosaic GPU
interpreter with its race detector.

The cases are empty groups, single rows, boundaries within a tile and at its edge,
padding that holds NaN, and sizes that no tile divides.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import (
    get_races,
    reset_gpu_interpret_mode_state,
)

from moejax.kernels.grouped_dot.hopper import kernels, ring, rows_store, wgrad_kernel
from moejax.kernels.shapes import ProductShape
from moejax.kernels.tuning import Tiles
from tests.support.close import assert_close
from tests.support.hopper_cases import (
    expected,
    fitting,
    interpreted,
    kernel,
    leave_out,
    operand_dims,
    operands,
)
from tests.support.hopper_rows import (
    ALL_PATTERNS,
    CASES,
    FEW_STEPS,
    INTERPRETED,
    NUM_GROUPS,
    ONE_GROUP,
    OWN_DTYPE,
    PLAIN,
    STEEP,
    min_cover,
    rows_of_pattern,
)


def random_cover():
    """Return 32 patterns: the six of min_cover, and random others."""
    cover = min_cover()
    others = [pattern for pattern in ALL_PATTERNS if pattern not in cover]
    chosen = np.random.default_rng(0).choice(
        len(others), 32 - len(cover), replace=False
    )
    return cover + [others[i] for i in chosen]


@pytest.fixture(autouse=True)
def _fresh_interpreter():
    """Reset the interpreter: the state of a failed kernel would fail the next one."""
    yield
    reset_gpu_interpret_mode_state()


def check(which, setup, rows_g):
    setup = fitting(which, setup)
    actual = interpreted(which, setup, rows_g)
    assert all(leaf.dtype == setup.dtype for leaf in jax.tree.leaves(actual))
    assert_close(actual, expected(which, setup, rows_g))


@pytest.mark.parametrize("patterns", [min_cover(), random_cover()], ids=["6", "32"])
def test_patterns_cover_every_pair(patterns):
    assert len(set(patterns)) == len(patterns)
    for i, j in itertools.combinations(range(NUM_GROUPS), 2):
        assert len({(pattern[i], pattern[j]) for pattern in patterns}) == 4


# The six patterns cover every pair of groups. Three are enough for the passes that
# share tiles, ring and edges with forward. One call takes up to half a second.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "patterns"),
    [
        *(("forward", min_cover()), ("wgrad", min_cover())),
        *((which, min_cover()[::2]) for which in ("dgrad", "swiglu", "swiglu_dgrad")),
        pytest.param("forward", random_cover(), marks=pytest.mark.long),
    ],
    ids=lambda given: given if isinstance(given, str) else str(len(given)),
)
def test_patterns_of_empty_groups(which, patterns):
    for pattern in patterns:
        check(which, PLAIN, rows_of_pattern(pattern))


@pytest.mark.long
@pytest.mark.parametrize("which", OWN_DTYPE)
def test_all_patterns_of_empty_groups(which):
    for pattern in ALL_PATTERNS:
        check(which, PLAIN, rows_of_pattern(pattern))


# Also to save time: only forward and wgrad run all cases in `make test`.
FOR_OTHERS = {STEEP: ("swiglu_dgrad",), FEW_STEPS: ("swiglu",), ONE_GROUP: ("dgrad",)}


@pytest.mark.slow
@pytest.mark.parametrize(("setup", "rows_g"), CASES)
@pytest.mark.parametrize("which", ["forward", "wgrad"])
def test_cases(which, setup, rows_g):
    check(which, setup, np.array(rows_g, np.int32))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("setup", "rows_g"), [CASES[0], CASES[2], CASES[3]])
def test_a_case_of_each_other(setup, rows_g):
    (which,) = FOR_OTHERS[setup]
    check(which, setup, np.array(rows_g, np.int32))


@pytest.mark.long
@pytest.mark.parametrize(("setup", "rows_g"), CASES)
@pytest.mark.parametrize("which", ["dgrad", "swiglu", "swiglu_dgrad"])
def test_cases_of_the_others(which, setup, rows_g):
    check(which, setup, np.array(rows_g, np.int32))


def test_a_plain_case():
    check("forward", PLAIN, rows_of_pattern(ALL_PATTERNS[-1]))


@pytest.mark.slow
def test_both_passes_of_swiglu_give_the_same_h():
    """Both values of h agree bit for bit, so the gradient of down uses the h of the
    forward pass."""
    rows_g = rows_of_pattern(ALL_PATTERNS[-1])
    x_md, into_gdh = operands(PLAIN)["swiglu"]
    dy_md, down_gfd, _ = operands(PLAIN)["swiglu_dgrad"]
    h_mf, into_mh = kernel("swiglu", PLAIN)(x_md, into_gdh, rows_g)
    _, again_mf = kernel("swiglu_dgrad", PLAIN)(dy_md, down_gfd, into_mh, rows_g)
    np.testing.assert_array_equal(h_mf, again_mf)


UNOBSERVED = "observed .*phase|observe each barrier completion|must do so in all phases"
"""Pattern of the interpreter's errors for a barrier that nobody waits for."""
COMMIT, STORED, WAIT = ("commit_smem",), ("wait_smem_to_gmem",), ("barrier_wait",)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "names", "which", "message"),
    [
        pytest.param(*case, id=name)
        for name, case in {
            "slots refilled in use": (
                ring.Ring,
                ("await_empty",),
                "forward",
                UNOBSERVED,
            ),
            "slots read unfilled": (ring.Ring, ("await_full",), "forward", UNOBSERVED),
            "stores not fenced": (rows_store, COMMIT, "forward", "a race"),
            "stores of matrices not fenced": (wgrad_kernel, COMMIT, "wgrad", "a race"),
            "slots stored over": (rows_store, STORED, "forward", "a race"),
            "sources read too early": (rows_store, WAIT, "swiglu_dgrad", UNOBSERVED),
        }.items()
    ],
)
def test_a_missing_synchronization_is_detected(
    monkeypatch, module, names, which, message
):
    """The interpreter reports a race, or a barrier that nobody waited for."""
    leave_out(monkeypatch, module, names)
    with pytest.raises((AssertionError, jax.errors.JaxRuntimeError), match=message):
        run_retraced(which, np.array([130, 0, 0, 0], np.int32))
    assert get_races().races_found or message == UNOBSERVED


@pytest.mark.slow
def test_blanking_that_nobody_waits_for_is_seen(monkeypatch):
    """Only wrong values show it: the interpreter reads a WGMMA's operands when it is
    issued, and reports no race. Each group here has partial steps in each tile."""
    leave_out(monkeypatch, wgrad_kernel, ("barrier_arrive", "barrier_wait"))
    rows_g = np.array([60, 50, 49, 30], np.int32)
    actual = run_retraced("wgrad", rows_g)
    with pytest.raises(AssertionError, match="values off"):
        assert_close(actual, expected("wgrad", fitting("wgrad", STEEP), rows_g))


def run_retraced(which, rows_g):
    """Run STEEP on one block, traced again, because leave_out changes the trace."""
    setup = fitting(which, STEEP)
    static = {"tiles": setup.tiles, "run": INTERPRETED}
    call = functools.partial(getattr(kernels, which), **static)
    return interpreted(which, setup, rows_g, jax.jit(call))


def test_single_rows_leave_from_places_that_a_copy_may_have(monkeypatch):
    """Copies start at multiples of 128 bytes: a GPU faults elsewhere, but the
    interpreter does not."""
    copy, offsets = gpu_callbacks.AsyncCopySmemToGmemTask, []
    before = copy.pre_read

    def record(self, number, memory):
        buffer = memory.buffer_shape_and_dtype(self.src_allocation_key)
        first = [getattr(at, "start", at) or 0 for at in self.src_access.range]
        place = np.ravel_multi_index(first, buffer.shape)
        offsets.append(int(place) * np.dtype(buffer.dtype).itemsize)
        return before(self, number, memory)

    monkeypatch.setattr(copy, "pre_read", record)
    check("forward", PLAIN, np.array([1, 7, 9, 14, 3, 40, 5, 63], np.int32))
    assert max(offsets), "no copy was recorded"
    assert not any(offset % 128 for offset in offsets)


@pytest.mark.parametrize(
    ("dtype", "rows", "d", "why"),
    [
        ("float32", 128, 64, "dtype float32 is not one of bfloat16, float16"),
        ("bfloat16", 128, 96, "a width of 96 is not a multiple of 64 in bfloat16"),
        ("float16", 56, 64, "56 rows are fewer than the 64 of a tile"),
        ("bfloat16", 100, 64, "100 rows are not a multiple of 8"),
    ],
)
def test_declines(dtype, rows, d, why):
    assert kernels.declines(dtype, rows, d, 64) == why
    for call in make_calls(dtype, rows, d, INTERPRETED):
        with pytest.raises(NotImplementedError, match=f"{why}: use implementation="):
            call()


def test_declines_a_device_that_is_no_hopper():
    why = "the kernels are for Hopper, not cpu: use implementation='blocked'"
    for call in make_calls("bfloat16", 128, 64, ring.KernelRun(1)):
        with pytest.raises(NotImplementedError, match=why):
            call()


def make_calls(dtype, rows, d, run):
    """Yield a call of each pass, on arrays with this number of rows."""
    shape, static = ProductShape(rows, d, 64, 2), {"tiles": Tiles(128, 128), "run": run}
    for which in OWN_DTYPE:
        arrays = [jnp.zeros(dims, dtype) for dims in operand_dims(which, shape)]
        rows_g = jnp.zeros(shape.groups, jnp.int32)
        yield functools.partial(getattr(kernels, which), *arrays, rows_g, **static)


def test_takes_widths_of_real_models():
    for width in (512, 768, 1408, 2048, 2880, 7168, 14336):
        assert kernels.declines("bfloat16", 65536, width) is None
