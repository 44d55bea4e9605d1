"""Definitions of the kernels' operations, in NumPy and float64.

The grouped products are defined for periodic operands, so that their results are known
without products of the whole widths: value i of a row of x is x_rp[r, i % p], and value
(i, j) of a matrix w_gpq[g, i % p, j % q]. Sums over i then count each i % p as often as
it occurs. With primes for p and q, no two tiles of an operand are equal.
"""

import numpy as np
from jaxtyping import Float, Int

SIGNIFICANT_BITS = {"none": None, "e4m3": 4, "e5m2": 3}
"""Significant bits of 8-bit formats. A scale is a power of two, so that rounding to a
format is rounding to so many bits, except for values that are tiny in their block."""

Rows = Float[np.ndarray, "r p"]
Matrices = Float[np.ndarray, "g p q"]


def counts(size: int, period: int) -> Int[np.ndarray, " p"]:
    """Return how often each i % period occurs for i in range(size)."""
    return np.bincount(np.arange(size) % period, minlength=min(size, period))


def rounded(values: np.ndarray, fp8: str) -> np.ndarray:
    """Return values rounded to the significant bits of an 8-bit format, ties to
    even."""
    bits = SIGNIFICANT_BITS[fp8]
    if bits is None:
        return values
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits)


def dot(x_rp: Rows, w_gpq: Matrices, group_r: Int[np.ndarray, " r"], size: int) -> Rows:
    """Return the product of each row with the matrix of its group, for rows of `size`
    values."""
    x_rp = x_rp * counts(size, x_rp.shape[1])
    y_rq = np.zeros((len(x_rp), w_gpq.shape[2]))
    for group in np.unique(group_r):
        y_rq[group_r == group] = x_rp[group_r == group] @ w_gpq[group]
    return y_rq


def outer(x_rp: Rows, dy_rq: Rows, group_r, num_groups: int) -> Matrices:
    """Return the sum of the outer products of each group's rows, the gradient of its
    matrix."""
    is_group_gr = np.arange(num_groups)[:, None] == group_r
    return np.einsum("gr,rp,rq->gpq", is_group_gr, x_rp, dy_rq, optimize=True)


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Return silu(gate) * up."""
    return gate / (1 + np.exp(-gate)) * up


def swiglu_gradient(
    dh: np.ndarray, gate: np.ndarray, up: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of gate and up for the gradient of silu(gate) * up."""
    sigmoid = 1 / (1 + np.exp(-gate))
    silu = gate * sigmoid
    return dh * up * (sigmoid + silu * (1 - sigmoid)), dh * silu


def attention(
    q_bthi, k_bugi, v_bugj, first_bt, dout_bthj, *, scale=None, window=None, sinks_h=()
) -> tuple[np.ndarray, ...]:
    """Return causal attention within documents, and the gradients of queries, keys,
    values and sinks.

    A document begins at key first_bt. `scale` multiplies scores (None: 1 / sqrt(width
    of a query)), `window` limits the keys that a query reads, and `sinks_h` are scores
    without a value, one for each query head or none.
    """
    (_, t, h, i), g = q_bthi.shape, k_bugi.shape[2]
    scale, window = i**-0.5 if scale is None else scale, window or t
    k_buhi, v_buhj = (np.repeat(each, h // g, axis=2) for each in (k_bugi, v_bugj))
    scores_bhtu = np.einsum("bthi,buhi->bhtu", q_bthi, k_buhi, optimize=True) * scale
    place = np.arange(t)
    low_bt = np.maximum(first_bt, place - window + 1)
    is_read_btu = (place >= low_bt[..., None]) & (place <= place[:, None])
    scores_bhtu = np.where(is_read_btu[:, None], scores_bhtu, -np.inf)
    sink_h11 = np.reshape(sinks_h if len(sinks_h) else [-np.inf], (-1, 1, 1))
    most_bht1 = np.maximum(scores_bhtu.max(axis=-1, keepdims=True), sink_h11)
    weight_bhtu, sink_bht1 = np.exp(scores_bhtu - most_bht1), sink_h11 - most_bht1
    total_bht1 = weight_bhtu.sum(axis=-1, keepdims=True) + np.exp(sink_bht1)
    weight_bhtu /= total_bht1
    out_bthj = np.einsum("bhtu,buhj->bthj", weight_bhtu, v_buhj, optimize=True)

    dv_buhj = np.einsum("bhtu,bthj->buhj", weight_bhtu, dout_bthj, optimize=True)
    dweight_bhtu = np.einsum("bthj,buhj->bhtu", dout_bthj, v_buhj, optimize=True)
    mean_bht1 = (weight_bhtu * dweight_bhtu).sum(axis=-1, keepdims=True)
    dsink_h = -(np.exp(sink_bht1) / total_bht1 * mean_bht1).sum(axis=(0, 2, 3))
    dscore_bhtu = weight_bhtu * (dweight_bhtu - mean_bht1) * scale
    dq_bthi = np.einsum("bhtu,buhi->bthi", dscore_bhtu, k_buhi, optimize=True)
    dk_buhi = np.einsum("bhtu,bthi->buhi", dscore_bhtu, q_bthi, optimize=True)

    def over_heads(gradient_buhx):
        return gradient_buhx.reshape(*gradient_buhx.shape[:2], g, h // g, -1).sum(3)

    gradients = dq_bthi, over_heads(dk_buhi), over_heads(dv_buhj)
    return (out_bthj, *gradients, *([dsink_h] if len(sinks_h) else []))
