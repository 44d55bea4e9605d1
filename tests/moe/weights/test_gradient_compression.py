"""Test the compression of the gradients of a domain's experts.

The tests cover what arrives, what stays in the residual, and which bytes are sent. The
domain has 2 x 2 devices on the axes (dc, expert), as in test_compression.py.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.moe.weights import compression
from moejax.moe.weights.gradient_compression import SCALE_BYTES, scatter_layer
from tests.support.close import assert_close
from tests.support.compressed_domain import (
    ALL,
    BLOCKS,
    COMMUNICATION,
    DOMAIN,
    MEMBERS,
    OWN,
    SIZE,
    on_devices,
    weights,
)


@functools.cache
def scatter_on_devices(k, value_dtype, blocks=1):
    """Return `scatter_layer` for all members at once.

    The function takes gradients and residuals [w, s, x]. It returns the owners'
    gradients [s, x] and the new residuals [w, s, x].
    """

    def body(grad_wsx, residual_wsx):
        sizes = (k, DOMAIN, value_dtype, blocks)
        own_ex, residual_sx = scatter_layer(grad_wsx[0], residual_wsx[0], *sizes)
        return own_ex, residual_sx[None]

    return on_devices(body, (P(DOMAIN),) * 2, (P(DOMAIN),) * 2)


@pytest.mark.parametrize("value_dtype", COMMUNICATION)
def test_gradients_that_stay_behind_come_later(value_dtype):
    """After several steps the gradients that arrived plus the residuals are the sum of
    all gradients.

    The sums are exact, because the gradients are integers in float64. A device has no
    residual for its own experts.
    """
    steps, k = 5, 8
    grads = np.random.default_rng(0).integers(-999, 999, (steps, MEMBERS, ALL, SIZE))

    def body(grad_twsx, residual_wsx):
        def step(residual_sx, grad_wsx):
            own_ex, residual_sx = scatter_layer(
                grad_wsx[0], residual_sx, k, DOMAIN, value_dtype, BLOCKS
            )
            return residual_sx, own_ex

        residual_sx, own_tex = jax.lax.scan(step, residual_wsx[0], grad_twsx)
        return own_tex, residual_sx[None]

    split = P(None, DOMAIN)
    run = on_devices(body, (split, P(DOMAIN)), (split, P(DOMAIN)))
    with jax.enable_x64(True):
        zeros_wsx = np.zeros((MEMBERS, ALL, SIZE))
        arrived_tsx, residual_wsx = jax.device_get(run(grads * 1.0, zeros_wsx))
    total_sx = arrived_tsx.sum(axis=0) + residual_wsx.sum(axis=0)
    assert np.array_equal(total_sx, grads.sum(axis=(0, 1)))
    residual_wwex = residual_wsx.reshape(MEMBERS, MEMBERS, OWN, SIZE)
    assert np.all(np.any(residual_wwex, axis=(2, 3)) == ~np.eye(MEMBERS, dtype=bool))
    others_wex = grads[0, :-1, -OWN:]  # the others' first gradients of the last owner
    zeros_1x = np.zeros((1, SIZE), np.float32)
    expected_ex = grads[0, -1, -OWN:].astype(np.float32)
    for other_ex in others_wex:
        packed = compression.encode(other_ex, zeros_1x, k, value_dtype, BLOCKS)
        expected_ex = compression.decode(expected_ex, packed)
    assert np.array_equal(arrived_tsx[0, -OWN:], expected_ex)


def test_all_entries_of_gradients_are_a_reduce_scatter():
    grad_wsx = weights(0, MEMBERS * ALL).reshape(MEMBERS, ALL, SIZE)

    def body(grad_wsx):
        zeros_sx = jnp.zeros_like(grad_wsx[0])
        own, residual = scatter_layer(grad_wsx[0], zeros_sx, SIZE, DOMAIN, "float32")
        return own, residual[None]

    own_sx, residual_wsx = on_devices(body, P(DOMAIN), (P(DOMAIN),) * 2)(grad_wsx)
    assert_close(own_sx, grad_wsx.sum(axis=0))
    assert not np.any(residual_wsx)


@pytest.mark.parametrize("value_dtype", COMMUNICATION)
@pytest.mark.parametrize("power", [-60, -17, 9])
def test_gradients_of_any_size_are_sent_alike(value_dtype, power):
    """Scaling all gradients by a power of two scales the results exactly, also far
    below the smallest 8-bit float."""
    grad_wsx = weights(0, MEMBERS * ALL).reshape(MEMBERS, ALL, SIZE)
    run = scatter_on_devices(8, value_dtype, BLOCKS)
    zeros_wsx = np.zeros_like(grad_wsx)
    own_sx, residual_wsx = run(grad_wsx, zeros_wsx)
    scaled = run(grad_wsx * np.float32(2.0**power), zeros_wsx)
    assert np.array_equal(scaled[0], own_sx * np.float32(2.0**power))
    assert np.array_equal(scaled[1], residual_wsx * np.float32(2.0**power))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_never_lost(bad):
    """A NaN or infinity is in the gradients that arrive or in the residuals, whether it
    was sent or not, so that a step can detect it."""
    run = scatter_on_devices(4, "float8_e5m2", BLOCKS)
    for seed in range(4):
        member, expert, index = np.random.default_rng(seed).integers((4, ALL, SIZE))
        grad_wsx = weights(seed, MEMBERS * ALL).reshape(MEMBERS, ALL, SIZE)
        grad_wsx[member, expert, index] = bad
        own_sx, residual_wsx = run(grad_wsx, np.zeros_like(grad_wsx))
        assert not (np.isfinite(own_sx).all() and np.isfinite(residual_wsx).all())


def test_one_buffer_goes_to_every_member():
    """One all-to-all carries the entries and a scale of each expert; there is no other
    collective."""
    k, shape = 8, (MEMBERS, ALL, SIZE)
    run = scatter_on_devices(k, "bfloat16", BLOCKS)
    text = run.lower(np.zeros(shape), np.zeros(shape)).compile().as_text()
    kinds = r"= (.*?) (all-[\w-]+|reduce-scatter|collective-\S*?)\("
    ((arrays, kind),) = re.findall(kinds, text)
    sizes = re.findall(r"u8\[([\d,]*)\]", arrays)
    sent = sum(np.prod([int(n) for n in dims.split(",")]) for dims in sizes)
    words = compression.wire_bytes(ALL, k, 2, compression.index_bytes(SIZE, BLOCKS))
    assert (kind, sent) == ("all-to-all", words + ALL * SCALE_BYTES)
