"""The Hopper kernels of attention lower for CUDA, for an H200 that need not be present.

Traces also show that no slot is released while a WGMMA may read it.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import use_abstract_mesh

from moejax.kernels.attention.hopper import kernels
from moejax.kernels.attention.reading import CAUSAL, Inputs, Rule
from tests.support.hopper_traces import H200, order
from tests.support.primitives import equations

OLMOE = (1, 4096, 16, 16, 128, 128)
"""Row of olmoe_1b_7b: rows, tokens, query heads, key heads, widths of both."""
QWEN = (1, 4096, 32, 4, 128, 128)
"""Row of qwen3_30b_a3b."""
ORDERS = {
    # Scores are read, and the slot of the keys goes back; the same for the values.
    "attention_forward": ["wgmma", ("left", 0), ("released", 0)] * 2,
    # Scores are read while the gradients of weights still run, and those next. The slot
    # goes back after the product with it. Then the sum is read.
    "attention_dq": [
        *("wgmma", "wgmma", ("left", 1), ("left", 0)),
        *("wgmma", ("left", 0), ("released", 0), ("left", 0)),
    ],
    # The gradients of weights are read while the product for dv still runs. The slot
    # goes back after that for dk. Then both sums are read.
    "attention_dkv": [
        *("wgmma", "wgmma", ("left", 1), "wgmma", ("left", 1)),
        *("wgmma", ("left", 0), ("released", 0), ("left", 0), ("left", 0)),
    ],
}
"""Order of products, waits and releases in each kernel (hopper_traces.order)."""
STAGES = {"attention_forward": 2, "attention_dq": 2, "attention_dkv": 4}
"""Slots of the rings of each kernel for heads of 128 values."""


@functools.cache
def trace(dims, rule=CAUSAL, dtype="bfloat16"):
    """Return the traces of both passes for an H200."""
    b, t, h, g, i, j = dims
    shapes = (b, t, h, i), (b, t, g, i), (b, t, g, j), (b, t, h, j)
    q, k, v, out = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
    first_bt = jax.ShapeDtypeStruct((b, t), jnp.int32)
    inputs = Inputs(q, k, v, first_bt, jax.ShapeDtypeStruct((), jnp.int32))
    lse_bht = jax.ShapeDtypeStruct((b, h, t), jnp.float32)

    def forward(inputs):
        return kernels.forward(inputs, rule)

    def backward(inputs, out_bthj, lse_bht, dout_bthj):
        return kernels.backward(inputs, rule, out_bthj, lse_bht, dout_bthj)

    with use_abstract_mesh(H200):
        return (
            jax.jit(forward).trace(inputs),
            jax.jit(backward).trace(inputs, out, lse_bht, out),
        )


def lower_to_text(traced) -> str:
    with use_abstract_mesh(H200):
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def check(*args):
    """Assert that one kernel and two are lowered, and that XLA moves no queries, keys
    or values around them. Too much shared memory would raise a ValueError."""
    for traced, count in zip(trace(*args), (1, 2), strict=True):
        text = lower_to_text(traced)
        assert re.findall(r"custom_call @(\w+)", text) == ["mosaic_gpu_v2"] * count
        moved = r"stablehlo\.(?:transpose|pad|slice|concatenate|gather).*x(?:bf16|f16)>"
        assert re.findall(moved, text) == []


@pytest.mark.slow
def test_a_model():
    check(QWEN)


@pytest.mark.long
@pytest.mark.parametrize(
    "args",
    [
        (OLMOE,),
        (QWEN, Rule(window=1024)),
        (QWEN, CAUSAL, "float16"),
        (OLMOE, Rule(soft_cap=50.0)),
        (OLMOE, Rule(is_causal=False)),
        ((4, 32768, 32, 4, 128, 128),),
        ((2, 4096, 64, 8, 64, 64), Rule(window=128)),
        ((2, 4096, 16, 16, 128, 64),),
        ((2, 4096, 16, 16, 64, 128),),
    ],
    ids=str,
)
def test_other_shapes_and_rules(args):
    check(*args)


def find_kernels():
    """Return the jaxpr of each kernel, by the kernel's name."""
    eqns = (eqn for traced in trace(QWEN) for eqn, _ in equations(traced.jaxpr))
    kernel_eqns = (eqn.params for eqn in eqns if eqn.primitive.name == "mpmd_map")
    return {params["name"]: params["jaxprs"][0] for params in kernel_eqns}


def find_orders():
    """Return the order of each kernel, by the kernel's name."""
    return {name: order(jaxpr, STAGES[name]) for name, jaxpr in find_kernels().items()}


def test_products_wait_for_the_tile_and_for_the_slot():
    """The interpreter does not look for races with what its WGMMA reads."""
    for name, jaxpr in find_kernels().items():
        events = [
            eqn.invars[0].aval.shape if eqn.primitive.name == "barrier_wait" else None
            for eqn, _ in equations(jaxpr)
            if eqn.primitive.name in ("barrier_wait", "wgmma_ref")
        ]
        first = events.index(None)
        assert events[first - 2 : first] == [(), (STAGES[name],)], name


def test_a_slot_is_given_back_when_no_wgmma_reads_it():
    """The interpreter sees no race in any order, because its WGMMA ends when issued."""
    assert find_orders() == ORDERS


def test_the_order_has_no_wait_where_the_kernels_have_none(monkeypatch):
    monkeypatch.setattr(plgpu, "wgmma_wait", lambda n: None)
    trace.cache_clear()
    dq = find_orders()["attention_dq"]
    trace.cache_clear()
    assert dq[-3:] == ["wgmma", ("released", 0), ("left", 0)]
