"""Experts with biases and clamped SwiGLU: rows by definition, with zero rows between
aligned slots."""

import jax
import jax.numpy as jnp
import numpy as np

from moejax.config import Moe
from moejax.moe.experts import unfused
from tests.support.close import assert_close

MOE = Moe(
    num_experts=4, top_k=2, d_expert=8,
    expert_bias=True, activation="clamped_swiglu", swiglu_limit=0.5,
)  # fmt: skip
WIDTH = 6


def by_row(x_md, slot_m, weights):
    """Return the results of rows one by one; slot -1 is no row, whose result is 0."""
    gate_md, up_md = jnp.split(weights["into_sdh"], 2, axis=2)
    gate_bias, up_bias = jnp.split(weights["into_bias_sh"], 2, axis=1)
    gate_mf = jnp.einsum("md,mdf->mf", x_md, gate_md[slot_m]) + gate_bias[slot_m]
    up_mf = jnp.einsum("md,mdf->mf", x_md, up_md[slot_m]) + up_bias[slot_m]
    gate_mf, up_mf = jnp.minimum(gate_mf, 0.5), jnp.clip(up_mf, -0.5, 0.5)
    hidden_mf = gate_mf / (1 + jnp.exp(-1.702 * gate_mf)) * (up_mf + 1)
    y_md = jnp.einsum("mf,mfd->md", hidden_mf, weights["down_sfd"][slot_m])
    return (y_md + weights["down_bias_sw"][slot_m]) * (slot_m >= 0)[:, None]


def test_rows_by_definition():
    """Values and gradients are those of each row by itself. Rows that fill a slot up,
    and padding, change no gradient: nobody reads their results."""
    rng, count_s = np.random.default_rng(0), np.array([5, 0, 3, 9])
    align_rows = 64
    rows_s = -(-count_s // align_rows) * align_rows
    slot_m = np.full(rows_s.sum() + align_rows, -1)
    for slot, first in enumerate(np.cumsum(rows_s) - rows_s):
        slot_m[first : first + count_s[slot]] = slot
    x_md = rng.normal(size=(len(slot_m), WIDTH)) * (slot_m >= 0)[:, None]
    shapes = {"into_sdh": (4, WIDTH, 16), "down_sfd": (4, 8, WIDTH)}
    shapes |= {"into_bias_sh": (4, 16), "down_bias_sw": (4, WIDTH)}
    weights = {n: rng.normal(size=shape) for n, shape in shapes.items()}
    args = jax.tree.map(np.float32, (x_md, weights))
    pull_md = rng.normal(size=x_md.shape) * (slot_m >= 0)[:, None]

    def ours(x_md, weights):
        rows = np.int32(rows_s)
        y_md = unfused(x_md, rows, weights, MOE, (), align_rows=align_rows)
        return jnp.sum(y_md * pull_md), y_md

    def expected(x_md, weights):
        y_md = by_row(x_md, slot_m, weights)
        return jnp.sum(y_md * pull_md), y_md

    (_, actual), grads = jax.jit(jax.value_and_grad(ours, (0, 1), True))(*args)
    wanted_step = jax.jit(jax.value_and_grad(expected, (0, 1), True))
    (_, wanted), expected_grads = wanted_step(*args)
    assert_close(actual[slot_m >= 0], wanted[slot_m >= 0])
    d_x, expected_d_x = grads[0], expected_grads[0]
    assert_close(
        (d_x[slot_m >= 0], grads[1]), (expected_d_x[slot_m >= 0], expected_grads[1])
    )
