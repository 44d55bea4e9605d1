"""The public function, with its gradients, and sinks around every implementation."""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moejax.kernels import varying_alike
from moejax.kernels.attention import reference
from moejax.kernels.attention.choose import (
    PASSES,
    Implementation,
    Passes,
    choose_attention,
)
from moejax.kernels.attention.reading import (
    CAUSAL,
    Inputs,
    Rule,
    check,
    mean_gradient,
)


def attention(
    q_bthi: Float[Array, "b t h i"],
    k_bugi: Float[Array, "b u g i"],
    v_bugj: Float[Array, "b u g j"],
    first_bt: Int[Array, "b t"] | None = None,
    *,
    rule: Rule = CAUSAL,
    start: Int[Array, ""] | int = 0,
    sinks_h: Float[Array, " h"] | None = None,
    implementation: Implementation = "auto",
) -> Float[Array, "b t h j"]:
    """Return, for each query, the mean of the values that it reads, weighted by softmax
    of its scores.

    A query reads the keys of its document: those from `first_bt` on, which never falls
    along a row, up to its own, or as `rule` says (reading.py). None makes each row one
    document. The first query stands at key `start`; the keys may be more than the
    queries, as in a cache. Each of the g key heads serves h / g query heads in
    sequence. `sinks_h` are scores without a value, one for each query head: they take
    part in the softmax and weigh nothing in the mean (Xiao et al. 2023, arXiv
    2309.17453, and GPT-OSS).

    It is differentiable in queries, keys, values and sinks. The result has the dtype of
    the queries; softmax and sums are taken in float32 or wider. No implementation but
    'reference' makes an array [t, u].

    The implementation 'auto' takes 'reference' for few queries, as in decoding, and
    otherwise 'cudnn' on NVIDIA GPUs, or 'blocked' where that declines the arrays;
    'blocked' declines nothing. An implementation that was named raises
    NotImplementedError with the reason. Raises ValueError for shapes that do not fit
    each other.
    """
    if first_bt is None:
        first_bt = jnp.zeros(q_bthi.shape[:2], jnp.int32)
    inputs = Inputs(q_bthi, k_bugi, v_bugj, first_bt, jnp.asarray(start, jnp.int32))
    check(inputs, rule, None if sinks_h is None else sinks_h.shape[0])
    if implementation == "auto":
        implementation = choose_attention(inputs, rule).value
    if implementation == "reference":
        return reference.attention(inputs, rule, sinks_h)
    if implementation not in PASSES:
        known = ", ".join(get_args(Implementation))
        raise ValueError(f"implementation={implementation!r} is not one of {known}")
    inputs = Inputs(*varying_alike(*inputs))
    if sinks_h is not None:
        sinks_h, _ = varying_alike(sinks_h, q_bthi)
    return _attention(inputs, sinks_h, rule, PASSES[implementation])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _attention(inputs: Inputs, sinks_h: Array | None, rule: Rule, own: Passes) -> Array:
    return _forward(inputs, sinks_h, rule, own)[0]


def _forward(inputs: Inputs, sinks_h: Array | None, rule: Rule, own: Passes):
    out_bthj, lse_bht = own.forward(inputs, rule)
    if sinks_h is not None:
        without_bht = lse_bht
        lse_bht = jnp.logaddexp(lse_bht, sinks_h.astype(lse_bht.dtype)[:, None])
        share_bth1 = jnp.exp(without_bht - lse_bht).transpose(0, 2, 1)[..., None]
        out_bthj = (out_bthj * share_bth1).astype(out_bthj.dtype)
    return out_bthj, (inputs, sinks_h, out_bthj, lse_bht)


def _backward(rule: Rule, own: Passes, kept, dout_bthj: Array):
    """Return the gradients, with the weights exp(score - lse), where lse knows the
    sink. A sink's own weight is that of a key whose value is 0."""
    inputs, sinks_h, out_bthj, lse_bht = kept
    gradients = own.backward(inputs, rule, out_bthj, lse_bht, dout_bthj)
    dsinks_h = None
    if sinks_h is not None:
        weight_bht = jnp.exp(sinks_h.astype(lse_bht.dtype)[:, None] - lse_bht)
        dsinks_h = -jnp.sum(weight_bht * mean_gradient(out_bthj, dout_bthj), (0, 2))
        dsinks_h = dsinks_h.astype(sinks_h.dtype)
    nothing = (np.zeros(array.shape, jax.dtypes.float0) for array in inputs[3:])
    return Inputs(*gradients, *nothing), dsinks_h


_attention.defvjp(_forward, _backward)
