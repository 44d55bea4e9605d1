"""Rows wait for copies of experts: by a zero that XLA does not know, chosen by size."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.moe.weights import dependency
from moejax.plan.layout import Layout


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_what_arrives_counts_as_zero(dtype):
    ones = jax.lax.bitcast_convert_type(jnp.full((1, 1), 2**32 - 1, jnp.uint32), "f4")
    values = [jnp.full((2, 3), x, dtype) for x in (0.0, -0.0, 1.5, np.inf, np.nan)]
    for arrived in (ones, *values):
        np.testing.assert_array_equal(dependency.zero_of(arrived), np.zeros(1))


def test_the_compiled_program_still_waits():
    """A zero that XLA folded would leave the weights unused."""

    def wait(weights, values):
        return values + dependency.zero_of(weights)

    args = jnp.ones((4, 4)), jnp.arange(3)
    text = jax.jit(wait).lower(*args).compile().as_text()
    assert "popcnt" in text
    np.testing.assert_array_equal(jax.jit(wait)(*args), args[1])


@pytest.mark.parametrize(("flops", "fits"), [(0, False), (2.9, False), (3.1, True)])
def test_copies_wait_where_they_fit_under_attention(flops, fits):
    """Three experts of 48 bytes travel; `flops` are those of one such expert."""
    layout = Layout(
        8, 4, 4, 8, store="transient", offers_per_device=1, copies_per_device=2
    )
    own = [jnp.zeros((5, 2, 4), jnp.float32), jnp.zeros((5, 8), jnp.bfloat16)]
    mesh_layout = SimpleNamespace(layout=layout)
    attention_flops = flops * 48 * dependency.FLOP_PER_BYTE
    assert dependency.fits_in_attention(own, mesh_layout, attention_flops) == fits


@pytest.mark.parametrize(
    ("changes", "is_awaited"),
    [
        ({}, True),
        ({"prefetch": False}, False),
        ({"store": "resident"}, False),
        ({"makes_replicas": True}, False),
        ({"copies_per_device": 0}, False),
        ({"master_axes": ("data",)}, False),
        ({"domain_axes": ("dc",)}, False),
    ],
)
def test_rows_wait_for_copies_after_which_nothing_is_gathered(changes, is_awaited):
    fields = {
        "prefetch": True, "store": "transient", "copies_per_device": 2,
        "offers_per_device": 1, "makes_replicas": False, "master_axes": (),
        "domain_axes": (),
    } | changes  # fmt: skip
    axes = {name: fields.pop(name) for name in ("master_axes", "domain_axes")}
    mesh_layout = SimpleNamespace(layout=SimpleNamespace(**fields), **axes)
    assert dependency.is_awaited(mesh_layout) == is_awaited
