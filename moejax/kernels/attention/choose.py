"""Choice of the implementation of attention, by device, dtype and shape."""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from jaxtyping import Array

from moejax.kernels import quarantine
from moejax.kernels.attention import portable
from moejax.kernels.attention.reading import Inputs, Rule
from moejax.kernels.device import KernelChoice, device_here, why_not_hopper

Implementation = Literal["auto", "reference", "blocked", "cudnn", "hopper"]


FEW_QUERIES = 16
"""Largest number of queries, as in decoding, that take 'reference'. Their scores
[b, h, 16, u] are small, and blocks of queries would be mostly padding."""


class Passes(NamedTuple):
    """Both passes of one implementation. Sinks are added around them (vjp.py)."""

    forward: Callable[[Inputs, Rule], tuple[Array, Array]]
    """Returns the output [b, t, h, j] in the dtype of the queries, and the logarithm of
    the softmax's sum [b, h, t] in float32 or wider, -inf for a query that reads no
    key."""
    backward: Callable[[Inputs, Rule, Array, Array, Array], tuple[Array, Array, Array]]
    """(inputs, rule, out_bthj, lse_bht, dout_bthj) -> the gradients of queries, keys
    and values, in their dtypes. The weights are exp(score - lse)."""


def choose_attention(inputs: Inputs, rule: Rule) -> KernelChoice:
    """Return the implementation for these arrays on the current device: 'reference'
    for few queries, else 'hopper', 'cudnn' or 'blocked', the first of them that does
    not decline.

    Only shapes and dtypes are read, so the arrays may be jax.ShapeDtypeStruct.
    """
    num_queries = inputs.q_bthi.shape[1]
    if num_queries <= FEW_QUERIES:
        return KernelChoice("reference", f"few queries: {num_queries}")
    declined = []
    for implementation in ("hopper", "cudnn"):
        if not (why := why_not(implementation, inputs, rule)):
            why = "; ".join(declined) or device_here().device_kind
            return KernelChoice(implementation, why)
        declined.append(why)
    return KernelChoice("blocked", "; ".join(declined))


def why_not(implementation: Implementation, inputs: Inputs, rule: Rule) -> str | None:
    """Return the reason why an implementation cannot compute attention of these arrays
    on the current device, or None if it can.

    Only shapes and dtypes are read, so the arrays may be jax.ShapeDtypeStruct.
    """
    if implementation == "hopper":
        if why := why_not_hopper():
            return why
        # Importing Pallas takes half a second, and only Hopper GPUs need it.
        from moejax.kernels.attention.hopper.kernels import declines

        why = quarantine.why_unusable("attention", device_here().device_kind)
        why = why or declines(inputs, rule)
        return why and f"the Hopper kernels decline: {why}"
    if implementation == "cudnn":
        if device_here().platform != "gpu":
            return f"cuDNN is for NVIDIA GPUs, not {device_here().device_kind}"
        from moejax.kernels.attention.cudnn import declines

        why = quarantine.why_unusable("attention_cudnn", device_here().device_kind)
        why = why or declines(inputs, rule)
        return why and f"cuDNN declines: {why}"
    return None


@functools.cache
def passes(implementation: str, interpret: bool) -> Passes:
    """Return the passes of an implementation. Equal arguments give the same object,
    because it is part of the key under which JAX caches a trace."""
    if implementation == "blocked":
        return Passes(portable.forward, portable.backward)
    if implementation == "cudnn":
        from moejax.kernels.attention.cudnn import backward, forward

        return Passes(forward, backward)
    if implementation != "hopper":
        known = ", ".join(get_args(Implementation))
        raise ValueError(f"implementation={implementation!r} is not one of {known}")
    # Importing Pallas takes half a second, and only this path needs it.
    from moejax.kernels.attention.hopper import kernels

    both = kernels.forward, kernels.backward
    return Passes(*(functools.partial(each, interpret=interpret) for each in both))
