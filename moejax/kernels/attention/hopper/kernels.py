"""Attention on Hopper GPUs (Pallas, Mosaic GPU): both passes, and what they decline.

Arrays are bfloat16 or float16, and sums are float32. docs/kernels.md explains how the
kernels work. Tests interpret and lower them; they have never run on a GPU.
"""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moejax.kernels import device
from moejax.kernels.attention.hopper import dkv_kernel, dq_kernel, forward_kernel
from moejax.kernels.attention.hopper.scores import LOG2E, TILE, Program
from moejax.kernels.attention.reading import (
    Inputs,
    KeyRange,
    Rule,
    key_range,
    mean_gradient,
    scale,
)

DTYPES = ("bfloat16", "float16")
"""Names of the dtypes of queries, keys and values."""
WIDTHS = (64, 128)
"""Widths of heads."""


def declines(inputs: Inputs, rule: Rule) -> str | None:
    """Return the reason why the kernels cannot compute this attention, or None if they
    can. Only shapes and dtypes are read."""
    names = [array.dtype.name for array in inputs[:3]]
    if names[0] not in DTYPES:
        return f"dtype {names[0]} is not one of {', '.join(DTYPES)}"
    if len(set(names)) > 1:
        return f"queries, keys and values have different dtypes, {', '.join(names)}"
    for width in (inputs.q_bthi.shape[3], inputs.v_bugj.shape[3]):
        if width not in WIDTHS:
            needed = " or ".join(map(str, WIDTHS))
            return f"heads of {width} values; {needed} are needed"
    if scale(inputs, rule) <= 0:
        return f"scale={rule.scale} is not above 0"
    return None


def forward(
    inputs: Inputs, rule: Rule, *, interpret: bool = False
) -> tuple[Float[Array, "b t h j"], Float[Array, "b h t"]]:
    """Return the output, and the logarithm of the softmax's sum (reference.py)."""
    program = _program(inputs, rule, interpret)
    t = inputs.q_bthi.shape[1]
    arrays = (_padded(array) for array in inputs[:3])
    out_bthj, lse_bht = forward_kernel.call(program, _ranges(inputs, rule), *arrays)
    return out_bthj[:, :t], lse_bht[:, :, :t]


def backward(
    inputs: Inputs,
    rule: Rule,
    out_bthj: Float[Array, "b t h j"],
    lse_bht: Float[Array, "b h t"],
    dout_bthj: Float[Array, "b t h j"],
    *,
    interpret: bool = False,
) -> tuple[Array, Array, Array]:
    """Return the gradients of queries, keys and values. Two kernels compute them
    without atomic additions, so that they have the same bits in every run."""
    program = _program(inputs, rule, interpret)
    t, u = inputs.q_bthi.shape[1], inputs.k_bugi.shape[1]
    dout_bthj = dout_bthj.astype(inputs.q_bthi.dtype)
    stats_bh2t = jnp.stack(
        [lse_bht * LOG2E, mean_gradient(out_bthj, dout_bthj)], axis=2
    )
    stats_bh2t = jnp.pad(stats_bh2t, [(0, 0)] * 3 + [(0, -t % TILE)])
    floats = (_padded(array) for array in (*inputs[:3], dout_bthj))
    arrays = (_ranges(inputs, rule), stats_bh2t, *floats)
    dq_bthi = dq_kernel.call(program, *arrays)
    dk_bugi, dv_bugj = dkv_kernel.call(program, *arrays)
    return dq_bthi[:, :t], dk_bugi[:, :u], dv_bugj[:, :u]


def _program(inputs: Inputs, rule: Rule, interpret: bool) -> Program:
    """Return the static part of an attention. Raises NotImplementedError if the kernels
    decline it, or if the device is no Hopper GPU and they are not interpreted."""
    why = declines(inputs, rule)
    if not interpret:
        why = device.why_not_hopper() or why
    if why:
        raise NotImplementedError(f"{why}: use implementation='blocked'")
    heads = inputs.q_bthi.shape[2] // inputs.k_bugi.shape[2]
    params = plgpu.InterpretGPUParams(detect_races=True) if interpret else None
    return Program(scale(inputs, rule), rule.soft_cap, heads, params)


def _ranges(inputs: Inputs, rule: Rule) -> KeyRange:
    """Return the keys that each query reads. Queries past the last one repeat it."""
    ends = (_padded(end, mode="edge") for end in key_range(inputs, rule))
    return KeyRange(*ends)


def _padded(array: Array, mode: str = "constant") -> Array:
    """Return an array whose second dim is a multiple of TILE."""
    missing = -array.shape[1] % TILE
    if not missing:
        return array
    rest = [(0, 0)] * (array.ndim - 2)
    return jnp.pad(array, [(0, 0), (0, missing), *rest], mode)
