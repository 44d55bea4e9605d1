"""The benchmark's arm of 8-bit values: its own bound, and tiles of its own."""

import dataclasses
import functools

import jax.numpy as jnp
import pytest

from moejax.kernels import tuning
from moejax.kernels.shapes import Shape
from tools.bench import grouped_dot
from tools.bench import grouped_dot_cases as cases
from tools.bench import grouped_dot_peers as peers


@pytest.fixture(autouse=True)
def _fresh_arms():
    """Arms are kept by name: a test that changes what a name means leaves none."""
    peers.arms.cache_clear()
    yield
    peers.arms.cache_clear()


@pytest.mark.parametrize("which", cases.PASSES)
def test_fp8_is_within_its_own_bound(which, monkeypatch):
    """By the emulation, on padding that holds NaN: most of the bound is used, and that
    of bfloat16 is not enough."""
    ours = functools.partial(peers.ours, "blocked", "e4m3")
    monkeypatch.setitem(peers.VARIANTS, "hopper_fp8", ours)
    if which == "wgrad":
        with pytest.raises(NotImplementedError, match="wgrad has no 8-bit values"):
            peers.arms("hopper_fp8", which, 0)
        return
    shape = Shape(rows=600, d=256, f=256, groups=4)
    case = cases.small_case(which, shape, "bfloat16", 4, "with_empty")
    (arm,) = peers.arms("hopper_fp8", which, 0)
    given = case.poisoned().operands
    found = arm.results_of(arm.arguments(given, jnp.asarray(case.rows_g)))
    error = cases.error_of(which, found, case, has_zero_padding=True)
    most = cases.most_error("bfloat16", "gpu", which, is_fp8=True)
    assert most / 4 < error < most
    assert error > 2 * cases.most_error("bfloat16", "gpu")


def test_fp8_needs_measured_tiles_of_its_own(monkeypatch):
    """Where it runs, and of the products that it runs."""
    asked = []

    def require(which, shape, *_):
        asked.append((which, shape))

    monkeypatch.setattr(tuning, "require", require)
    shape = Shape(192, 128, 256, 3)
    given = {"tiny": shape, "declined": dataclasses.replace(shape, d=64)}
    some = "bfloat16", "any", "hopper_fp8"
    grouped_dot.require_tuned(given, cases.PASSES, *some)
    wide = dataclasses.replace(shape, f=512)
    assert asked == [
        *(("fp8_forward", shape), ("fp8_dgrad", shape), ("fp8_forward", wide)),
        *(("fp8_forward", shape), ("fp8_dgrad", shape), ("wgrad", shape)),
    ]
