"""Attention in blocks, for any XLA device, in memory that grows with t ('blocked').

Queries and keys are cut into blocks. A block of queries visits only the blocks of keys
that it reads (reading.py), and never are more scores in memory than those of one pair
of blocks. The forward pass keeps the maximum and the sum of the softmax while it goes
on (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao 2023, FlashAttention-2, arXiv
2307.08691). The backward pass computes the scores of each pair of blocks again, and has
blocks of keys outside, so that only the gradient of queries is added to in memory.

    forward    for each block of queries:    for each block of keys that it reads
    backward   for each block of keys:       for each block of queries that reads it

Letters: n blocks of queries, c blocks of keys, m rows of a block of queries, which are
its queries times the query heads of a group, x keys of a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.kernels import varying_alike, zeros_varying_as
from moejax.kernels.attention.reading import (
    Inputs,
    KeyRange,
    Rule,
    key_blocks,
    key_range,
    mean_gradient,
    query_blocks,
    scale,
    sum_dtype,
)

QUERIES = 256
"""Queries of a block."""
KEYS = 256
"""Keys of a block."""
FLOOR = -1e30
"""Score of a key that is not read. It is finite, so that differences are."""


class Blocks(NamedTuple):
    """Arrays of attention, cut into blocks. Rows past the last token are zeros."""

    q_bngmi: Float[Array, "b n g m i"]
    """Queries; row r * queries + a of a block is query a in head r of the group."""
    k_bcgxi: Float[Array, "b c g x i"]
    """Keys."""
    v_bcgxj: Float[Array, "b c g x j"]
    """Values."""
    low_bna: Int[Array, "b n a"]
    """First key that each query reads. Queries past the last one repeat it."""
    high_bna: Int[Array, "b n a"]
    """Key after the last one that each query reads."""


def forward(
    inputs: Inputs, rule: Rule
) -> tuple[Float[Array, "b t h j"], Float[Array, "b h t"]]:
    """Return the output, and the logarithm of the softmax's sum (reference.py)."""
    blocks, keys = _cut(inputs, rule)
    factor, (b, n, g, m, _) = scale(inputs, rule), blocks.q_bngmi.shape
    x, j = blocks.v_bcgxj.shape[3:]
    begin_bn, end_bn = key_blocks(keys, blocks.low_bna.shape[2], x)
    dtype = sum_dtype(*inputs[:3])

    def of_queries(_, block):
        row, q_gmi, low_a, high_a, begin, end = block

        def add_keys(c, carry):
            top_gm, sum_gm, out_gmj = carry
            k_gxi, v_gxj = blocks.k_bcgxi[row, c], blocks.v_bcgxj[row, c]
            scores_gmx, _ = _scores(q_gmi, k_gxi, factor, rule)
            is_read_mx = _is_read(low_a, high_a, c * x, x, m)
            scores_gmx = jnp.where(is_read_mx, scores_gmx, FLOOR)
            new_gm = jnp.maximum(top_gm, jnp.max(scores_gmx, axis=2))
            weights_gmx = jnp.exp(scores_gmx - new_gm[:, :, None])
            fade_gm = jnp.exp(top_gm - new_gm)
            sum_gm = sum_gm * fade_gm + jnp.sum(weights_gmx, axis=2)
            more_gmj = _dot("gmx,gxj->gmj", weights_gmx.astype(v_gxj.dtype), v_gxj)
            return new_gm, sum_gm, out_gmj * fade_gm[:, :, None] + more_gmj

        empty = (
            zeros_varying_as(q_gmi, (g, m), dtype) + FLOOR / 2,
            zeros_varying_as(q_gmi, (g, m), dtype),
            zeros_varying_as(q_gmi, (g, m, j), dtype),
        )
        top_gm, sum_gm, out_gmj = jax.lax.fori_loop(begin, end, add_keys, empty)
        is_any_gm = sum_gm > 0
        sum_gm = jnp.where(is_any_gm, sum_gm, 1)
        out_gmj = (out_gmj / sum_gm[:, :, None]).astype(inputs.q_bthi.dtype)
        return None, (out_gmj, jnp.where(is_any_gm, top_gm + jnp.log(sum_gm), -jnp.inf))

    flat = [
        array.reshape(b * n, *array.shape[2:])
        for array in (blocks.q_bngmi, blocks.low_bna, blocks.high_bna, begin_bn, end_bn)
    ]
    row_z = varying_alike(jnp.repeat(jnp.arange(b), n), flat[0])[0]
    _, (out_zgmj, lse_zgm) = jax.lax.scan(of_queries, None, (row_z, *flat))
    t, h = inputs.q_bthi.shape[1:3]
    out_bthj = _join_queries(out_zgmj.reshape(b, n, g, m, j), t, h)
    lse_bth1 = _join_queries(lse_zgm.reshape(b, n, g, m, 1), t, h)
    return out_bthj, lse_bth1[..., 0].transpose(0, 2, 1)


def backward(
    inputs: Inputs,
    rule: Rule,
    out_bthj: Float[Array, "b t h j"],
    lse_bht: Float[Array, "b h t"],
    dout_bthj: Float[Array, "b t h j"],
) -> tuple[Array, Array, Array]:
    """Return the gradients of queries, keys and values."""
    blocks, keys = _cut(inputs, rule)
    factor, (b, n, g, m, i) = scale(inputs, rule), blocks.q_bngmi.shape
    c, (x, j) = blocks.k_bcgxi.shape[1], blocks.v_bcgxj.shape[3:]
    a = blocks.low_bna.shape[2]
    begin_bc, end_bc = query_blocks(key_blocks(keys, a, x), c)
    dtype = sum_dtype(*inputs[:3])
    dout_bngmj = _cut_queries(dout_bthj.astype(inputs.v_bugj.dtype), g, a)
    lse_bth1, mean_bth1 = (
        stat_bht.transpose(0, 2, 1)[..., None]
        for stat_bht in (lse_bht, mean_gradient(out_bthj, dout_bthj))
    )
    lse_bngm1, mean_bngm1 = (_cut_queries(s, g, a) for s in (lse_bth1, mean_bth1))

    def of_keys(dq_zgmi, block):
        row, k, k_gxi, v_gxj, begin, end = block

        def add_queries(query, carry):
            dq_zgmi, dk_gxi, dv_gxj = carry
            q_gmi, dout_gmj = blocks.q_bngmi[row, query], dout_bngmj[row, query]
            scores_gmx, slope_gmx = _scores(q_gmi, k_gxi, factor, rule)
            low_a, high_a = blocks.low_bna[row, query], blocks.high_bna[row, query]
            is_read_mx = _is_read(low_a, high_a, k * x, x, m)
            score_gmx = scores_gmx - lse_bngm1[row, query]
            weights_gmx = jnp.where(is_read_mx, jnp.exp(score_gmx), 0)
            dv_gxj += _dot("gmx,gmj->gxj", weights_gmx.astype(v_gxj.dtype), dout_gmj)
            dweights_gmx = _dot("gmj,gxj->gmx", dout_gmj, v_gxj)
            ds_gmx = weights_gmx * (dweights_gmx - mean_bngm1[row, query]) * slope_gmx
            ds_gmx = ds_gmx.astype(k_gxi.dtype)
            dk_gxi += _dot("gmx,gmi->gxi", ds_gmx, q_gmi)
            dq_gmi = _dot("gmx,gxi->gmi", ds_gmx, k_gxi)
            dq_zgmi = dq_zgmi.at[row * n + query].add(dq_gmi)
            return dq_zgmi, dk_gxi, dv_gxj

        empty = (
            zeros_varying_as(k_gxi, k_gxi.shape, dtype),
            zeros_varying_as(v_gxj, v_gxj.shape, dtype),
        )
        dq_zgmi, dk_gxi, dv_gxj = jax.lax.fori_loop(
            begin, end, add_queries, (dq_zgmi, *empty)
        )
        return dq_zgmi, (dk_gxi.astype(k_gxi.dtype), dv_gxj.astype(v_gxj.dtype))

    flat = [
        array.reshape(b * c, *array.shape[2:])
        for array in (blocks.k_bcgxi, blocks.v_bcgxj, begin_bc, end_bc)
    ]
    row_z, k_z, _ = varying_alike(
        jnp.repeat(jnp.arange(b), c), jnp.tile(jnp.arange(c), b), flat[0]
    )
    dq_zgmi = zeros_varying_as(flat[0], (b * n, g, m, i), dtype)
    dq_zgmi, (dk_zgxi, dv_zgxj) = jax.lax.scan(of_keys, dq_zgmi, (row_z, k_z, *flat))
    t, h, u = *inputs.q_bthi.shape[1:3], inputs.k_bugi.shape[1]
    dq_bngmi = (dq_zgmi * factor).astype(inputs.q_bthi.dtype).reshape(b, n, g, m, i)
    return (
        _join_queries(dq_bngmi, t, h),
        _join_keys((dk_zgxi * factor).reshape(b, c, g, x, i), u),
        _join_keys(dv_zgxj.reshape(b, c, g, x, j), u),
    )


def _scores(q_gmi: Array, k_gxi: Array, factor: float, rule: Rule):
    """Return the scores of a pair of blocks, and their derivative by the product of
    query and key divided by the factor."""
    scores_gmx = _dot("gmi,gxi->gmx", q_gmi, k_gxi) * factor
    if rule.soft_cap is None:
        return scores_gmx, 1
    bounded_gmx = jnp.tanh(scores_gmx / rule.soft_cap)
    return rule.soft_cap * bounded_gmx, 1 - bounded_gmx**2


def _is_read(low_a: Array, high_a: Array, begin: Array, x: int, m: int) -> Array:
    """Return whether each row of a block of queries reads each of the x keys from
    `begin` on."""
    key_x = begin + jnp.arange(x, dtype=jnp.int32)
    is_read_ax = (key_x >= low_a[:, None]) & (key_x < high_a[:, None])
    return jnp.tile(is_read_ax, (m // low_a.shape[0], 1))


def _dot(dims: str, x: Array, y: Array) -> Array:
    """Return a product whose sums are float32 or wider."""
    return jnp.einsum(dims, x, y, preferred_element_type=sum_dtype(x))


def _cut(inputs: Inputs, rule: Rule) -> tuple[Blocks, KeyRange]:
    """Return the arrays in blocks, and the ranges of all queries, those past the last
    one included."""
    t, u, g = *(array.shape[1] for array in inputs[:2]), inputs.k_bugi.shape[2]
    a, x = min(QUERIES, _round_up(t, 8)), min(KEYS, _round_up(u, 8))
    pad = ((0, 0), (0, _round_up(t, a) - t))
    keys = KeyRange(*(jnp.pad(end, pad, "edge") for end in key_range(inputs, rule)))
    q_bngmi = _cut_queries(inputs.q_bthi, g, a)
    cut_keys = (_cut_keys(array, x) for array in inputs[1:3])
    ends = (end.reshape(*q_bngmi.shape[:2], a) for end in keys)
    return Blocks(q_bngmi, *cut_keys, *ends), keys


def _cut_queries(y_bthi: Array, g: int, a: int) -> Float[Array, "b n g m i"]:
    """Return an array with a row for each query and head, in blocks of `a` queries."""
    b, t, h, i = y_bthi.shape
    y_bthi = jnp.pad(y_bthi, ((0, 0), (0, -t % a), (0, 0), (0, 0)))
    y_bnagri = y_bthi.reshape(b, -1, a, g, h // g, i)
    return y_bnagri.transpose(0, 1, 3, 4, 2, 5).reshape(b, -1, g, h // g * a, i)


def _join_queries(y_bngmi: Array, t: int, h: int) -> Float[Array, "b t h i"]:
    """Return what _cut_queries cut, of t queries and h heads."""
    b, n, g, m, i = y_bngmi.shape
    y_bngrai = y_bngmi.reshape(b, n, g, h // g, m * g // h, i)
    return y_bngrai.transpose(0, 1, 4, 2, 3, 5).reshape(b, -1, h, i)[:, :t]


def _cut_keys(y_bugi: Array, x: int) -> Float[Array, "b c g x i"]:
    """Return an array with a row for each key and key head, in blocks of x keys."""
    b, u, g, i = y_bugi.shape
    y_bugi = jnp.pad(y_bugi, ((0, 0), (0, -u % x), (0, 0), (0, 0)))
    return y_bugi.reshape(b, -1, x, g, i).transpose(0, 1, 3, 2, 4)


def _join_keys(y_bcgxi: Array, u: int) -> Float[Array, "b u g i"]:
    """Return what _cut_keys cut, of u keys."""
    b, c, g, x, i = y_bcgxi.shape
    return y_bcgxi.transpose(0, 1, 3, 2, 4).reshape(b, c * x, g, i)[:, :u]


def _round_up(size: int, multiple: int) -> int:
    """Return the least multiple that is not below `size`."""
    return -(-size // multiple) * multiple
