"""Choice of the implementation of attention, by device, dtype and shape."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from jaxtyping import Array

from moejax.choice import Choice
from moejax.kernels.attention import cudnn, portable
from moejax.kernels.attention.reading import Inputs, Rule
from moejax.kernels.device import device_here

Implementation = Literal["auto", "reference", "blocked", "cudnn"]

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


PASSES = {
    "blocked": Passes(portable.forward, portable.backward),
    "cudnn": Passes(cudnn.forward, cudnn.backward),
}
"""Passes of each implementation, except 'reference', whose gradients JAX derives."""


def choose_attention(inputs: Inputs, rule: Rule) -> Choice[str]:
    """Return the implementation for these arrays on the current device: 'reference'
    for few queries, else 'cudnn', or 'blocked' where it declines.

    Only shapes and dtypes are read, so the arrays may be jax.ShapeDtypeStruct.
    """
    num_queries = inputs.q_bthi.shape[1]
    if num_queries <= FEW_QUERIES:
        return Choice("reference", f"few queries: {num_queries}")
    if why := why_not("cudnn", inputs, rule):
        return Choice("blocked", why)
    return Choice("cudnn", device_here().device_kind)


def why_not(implementation: Implementation, inputs: Inputs, rule: Rule) -> str | None:
    """Return the reason why an implementation cannot compute attention of these arrays
    on the current device, or None if it can.

    Only shapes and dtypes are read, so the arrays may be jax.ShapeDtypeStruct.
    """
    if implementation != "cudnn":
        return None
    why = cudnn.declines(inputs, rule)
    return why and f"cuDNN declines: {why}"
