"""Experts with biases and clamped SwiGLU: rows by definition, zero rows between aligned
slots, and layers whose experts have replicas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Moe, Router
from moejax.moe.experts import unfused
from moejax.plan.layout import Topology
from tests.support.close import assert_close
from tests.support.layers import (
    ALL_ROWS,
    BATCH,
    config,
    home,
    in_order,
    layer_of,
    on_mesh,
    operands,
)
from tests.support.random_plans import random_plan

OPTIONS = {"expert_bias": True, "activation": "clamped_swiglu", "swiglu_limit": 0.5}
MOE = Moe(num_experts=4, top_k=2, d_expert=8, **OPTIONS)
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


def make(align_rows=1, **fields):
    router = Router(kind="sigmoid", gate_input=True, normalise_gates=False)
    cfg = config(
        Topology(data=2, expert=4), router=router, **OPTIONS, **ALL_ROWS, **fields
    )
    return layer_of(cfg, align_rows=align_rows)


def run(layer, plan):
    """Return output and losses, and all gradients in logical order, for random
    biases."""
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape)), layer.params)
    given = on_mesh(layer._replace(params=params), plan, operands(BATCH, "zipf"))
    (_, (y_btd, losses, _)), (d_params, d_x) = jax.device_get(layer.run(*given))
    d_params = in_order(d_params, np.argsort(plan.owned_le[0]))
    return y_btd, losses, d_params, d_x


@pytest.mark.slow
def test_a_layer_with_replicas_is_the_layer_at_home():
    """Gates multiply the input of two experts a token. Owners and replicas are
    random, and slots begin at multiples of 64 rows."""
    at_home = make()
    slots = {"slots_per_device": 6, "store": "resident"}
    layer = make(split="local_first", align_rows=64, **slots)
    plan = random_plan(np.random.default_rng(3), layer.layout, 1)
    assert_close(run(layer, plan), run(at_home, home(at_home)))
