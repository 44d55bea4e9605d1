"""Attention in blocks, for any XLA device, in memory that grows with t ('blocked').

Queries and keys are cut into blocks. A block of queries visits only the blocks of keys
that it reads (reading.py), and never are more scores in memory than those of one pair
of blocks. The forward pass keeps the maximum and the sum of the softmax while it goes
on (Milakov and Gimelshein 2018, arXiv 1805.02867; Dao 2023, FlashAttention-2, arXiv
2307.08691). The backward pass computes the scores of each pair of blocks again, and has
blocks of keys outside, so that only the gradient of queries is added to in memory.
Short windows are computed several rows at a time, because a pair of blocks of one row
is too little work for the cores.

    forward    for each block of queries:    for each block of keys that it reads
    backward   for each block of keys:       for each block of queries that reads it

Letters: a queries of a block, n blocks of queries, x keys of a block, c blocks of keys,
w rows of the batch at a time, z turns of w rows, g key heads of w rows, m = a times the
query heads of a key head.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.kernels import varying_alike, zeros_varying_as
from moejax.kernels.attention.reading import (
    Inputs,
    Rule,
    key_range,
    mean_gradient,
    scale,
    sum_dtype,
)

QUERIES = 128
"""Queries of a block."""
KEYS = 128
"""Keys of a block."""
FEW_BLOCKS = 4
"""Blocks of a window, at most, of which several rows are computed at a time. Longer
windows skip more blocks where each row goes its own way."""
SCORES_AT_A_TIME = 2**20
"""Scores of a pair of blocks, at most, for several rows at a time: 4 MiB in float32."""
FLOOR = -1e30
"""Score of a key that is not read. It is finite, so that differences are."""


class BlockRange(NamedTuple):
    """Range of blocks [begin, end) of the other side that each block needs."""

    begin_zn: Int[Array, "z n"]
    """First block of the range."""
    end_zn: Int[Array, "z n"]
    """Block after the last one."""


class Blocks(NamedTuple):
    """Arrays of attention, cut into blocks. Rows past the last token are zeros."""

    q_zngmi: Float[Array, "z n g m i"]
    """Queries; row r * a + k of a block is its query k in head r of the key head."""
    k_zcgxi: Float[Array, "z c g x i"]
    """Keys."""
    v_zcgxj: Float[Array, "z c g x j"]
    """Values."""
    low_znwa: Int[Array, "z n w a"]
    """First key that each query reads. Queries past the last one repeat it."""
    high_znwa: Int[Array, "z n w a"]
    """Key after the last one that each query reads."""

    @classmethod
    def of(cls, inputs: Inputs, rule: Rule) -> "Blocks":
        """Cut the arrays into blocks."""
        (b, t, h, _), (u, g) = inputs.q_bthi.shape, inputs.k_bugi.shape[1:3]
        a, x = (min(most, size) for most, size in ((QUERIES, t), (KEYS, u)))
        w = 1
        if max(-(-t // a), -(-u // x)) <= FEW_BLOCKS:
            fitting = max(1, SCORES_AT_A_TIME // (h * a * x))
            w = max(w for w in range(1, b + 1) if b % w == 0 and w <= fitting)
        pad = ((0, 0), (0, -t % a))
        ends = (
            jnp.pad(end_bt, pad, "edge").reshape(b // w, w, -1, a).swapaxes(1, 2)
            for end_bt in key_range(inputs, rule)
        )
        return cls(
            _cut_queries(inputs.q_bthi, w, g, a),
            _cut_keys(inputs.k_bugi, w, x),
            _cut_keys(inputs.v_bugj, w, x),
            *ends,
        )

    def key_blocks(self) -> BlockRange:
        """Return the blocks of keys that each block of queries reads in any row."""
        x = self.k_zcgxi.shape[3]
        low_zn, high_zn = self.low_znwa.min((2, 3)), self.high_znwa.max((2, 3))
        return BlockRange(low_zn // x, -(-high_zn // x))

    def query_blocks(self) -> BlockRange:
        """Return the blocks of queries that read each block of keys in any row."""
        begin_zn, end_zn = self.key_blocks()
        block_c1 = jnp.arange(self.k_zcgxi.shape[1], dtype=jnp.int32)[:, None]
        count = functools.partial(jnp.sum, axis=2, dtype=jnp.int32)
        return BlockRange(
            count(end_zn[:, None] <= block_c1), count(begin_zn[:, None] <= block_c1)
        )


def forward(
    inputs: Inputs, rule: Rule
) -> tuple[Float[Array, "b t h j"], Float[Array, "b h t"]]:
    """Return the output, and the logarithm of the softmax's sum (reference.py)."""
    blocks = Blocks.of(inputs, rule)
    factor, (z, n, g, m, _) = scale(inputs, rule), blocks.q_zngmi.shape
    w, (x, j) = blocks.low_znwa.shape[2], blocks.v_zcgxj.shape[3:]
    dtype = sum_dtype(*inputs[:3])

    def of_queries(_, block):
        turn, q_gmi, low_wa, high_wa, begin, end = block

        def add_keys(c, carry):
            top_gm, sum_gm, out_gmj = carry
            k_gxi, v_gxj = blocks.k_zcgxi[turn, c], blocks.v_zcgxj[turn, c]
            scores_gmx, _ = _scores(q_gmi, k_gxi, factor, rule)
            scores_gmx = _only_read(scores_gmx, low_wa, high_wa, c * x, FLOOR)
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

    turn_y = jnp.repeat(jnp.arange(z), n)
    per_block = (blocks.q_zngmi, *blocks[3:], *blocks.key_blocks())
    _, (out_ygmj, lse_ygm) = jax.lax.scan(of_queries, None, _flat(turn_y, *per_block))
    h = inputs.q_bthi.shape[2]
    out_bthj = _join_queries(out_ygmj.reshape(z, n, g, m, j), w, h)
    lse_bth1 = _join_queries(lse_ygm.reshape(z, n, g, m, 1), w, h)
    t = inputs.q_bthi.shape[1]
    return out_bthj[:, :t], lse_bth1[:, :t, :, 0].transpose(0, 2, 1)


def backward(
    inputs: Inputs,
    rule: Rule,
    out_bthj: Float[Array, "b t h j"],
    lse_bht: Float[Array, "b h t"],
    dout_bthj: Float[Array, "b t h j"],
) -> tuple[Array, Array, Array]:
    """Return the gradients of queries, keys and values."""
    blocks = Blocks.of(inputs, rule)
    factor, (z, n, g, m, i) = scale(inputs, rule), blocks.q_zngmi.shape
    c, (x, j) = blocks.k_zcgxi.shape[1], blocks.v_zcgxj.shape[3:]
    w, a = blocks.low_znwa.shape[2:]
    dtype, key_heads = sum_dtype(*inputs[:3]), inputs.k_bugi.shape[2]
    dout_zngmj = _cut_queries(dout_bthj.astype(inputs.v_bugj.dtype), w, key_heads, a)
    lse_zngm1, mean_zngm1 = (
        _cut_queries(stat_bht.transpose(0, 2, 1)[..., None], w, key_heads, a)
        for stat_bht in (lse_bht, mean_gradient(out_bthj, dout_bthj))
    )

    def of_keys(dq_ygmi, block):
        turn, k, k_gxi, v_gxj, begin, end = block

        def add_queries(q, carry):
            dq_ygmi, dk_gxi, dv_gxj = carry
            q_gmi, dout_gmj = blocks.q_zngmi[turn, q], dout_zngmj[turn, q]
            low_wa, high_wa = blocks.low_znwa[turn, q], blocks.high_znwa[turn, q]
            scores_gmx, slope_gmx = _scores(q_gmi, k_gxi, factor, rule)
            weights_gmx = jnp.exp(scores_gmx - lse_zngm1[turn, q])
            weights_gmx = _only_read(weights_gmx, low_wa, high_wa, k * x, 0)
            dv_gxj += _dot("gmx,gmj->gxj", weights_gmx.astype(v_gxj.dtype), dout_gmj)
            dweights_gmx = _dot("gmj,gxj->gmx", dout_gmj, v_gxj)
            ds_gmx = weights_gmx * (dweights_gmx - mean_zngm1[turn, q]) * slope_gmx
            ds_gmx = ds_gmx.astype(k_gxi.dtype)
            dk_gxi += _dot("gmx,gmi->gxi", ds_gmx, q_gmi)
            dq_gmi = _dot("gmx,gxi->gmi", ds_gmx, k_gxi)
            return dq_ygmi.at[turn * n + q].add(dq_gmi), dk_gxi, dv_gxj

        zeros = [zeros_varying_as(k_gxi, y.shape, dtype) for y in (k_gxi, v_gxj)]
        dq_ygmi, dk_gxi, dv_gxj = jax.lax.fori_loop(
            begin, end, add_queries, (dq_ygmi, *zeros)
        )
        dk_gxi = (dk_gxi * factor).astype(k_gxi.dtype)
        return dq_ygmi, (dk_gxi, dv_gxj.astype(v_gxj.dtype))

    turn_y, k_y = jnp.repeat(jnp.arange(z), c), jnp.tile(jnp.arange(c), z)
    readers = blocks.query_blocks()
    per_block = _flat(turn_y, k_y, blocks.k_zcgxi, blocks.v_zcgxj, *readers)
    dq_ygmi = zeros_varying_as(blocks.q_zngmi, (z * n, g, m, i), dtype)
    dq_ygmi, (dk_ygxi, dv_ygxj) = jax.lax.scan(of_keys, dq_ygmi, per_block)
    (t, h), u = inputs.q_bthi.shape[1:3], inputs.k_bugi.shape[1]
    dq_zngmi = (dq_ygmi * factor).astype(inputs.q_bthi.dtype).reshape(z, n, g, m, i)
    return (
        _join_queries(dq_zngmi, w, h)[:, :t],
        _join_keys(dk_ygxi.reshape(z, c, g, x, i), w)[:, :u],
        _join_keys(dv_ygxj.reshape(z, c, g, x, j), w)[:, :u],
    )


def _scores(q_gmi: Array, k_gxi: Array, factor: float, rule: Rule):
    """Return the scores of a pair of blocks, and their derivative by the product of
    query and key divided by the factor."""
    scores_gmx = _dot("gmi,gxi->gmx", q_gmi, k_gxi) * factor
    if rule.soft_cap is None:
        return scores_gmx, 1
    bounded_gmx = jnp.tanh(scores_gmx / rule.soft_cap)
    return rule.soft_cap * bounded_gmx, 1 - bounded_gmx**2


def _only_read(
    y_gmx: Array, low_wa: Array, high_wa: Array, begin: Array, other: float
) -> Array:
    """Return the values of the keys from `begin` on that each query reads, and `other`
    for keys that it does not read."""
    (g, m, x), (w, a) = y_gmx.shape, low_wa.shape
    key_x = begin + jnp.arange(x, dtype=jnp.int32)
    is_read_wax = (key_x >= low_wa[:, :, None]) & (key_x < high_wa[:, :, None])
    y_wgrax = y_gmx.reshape(w, g // w, m // a, a, x)
    return jnp.where(is_read_wax[:, None, None], y_wgrax, other).reshape(g, m, x)


def _dot(dims: str, x: Array, y: Array) -> Array:
    """Return a product whose sums are float32 or wider."""
    return jnp.einsum(dims, x, y, preferred_element_type=sum_dtype(x))


def _flat(*arrays: Array) -> tuple[Array, ...]:
    """Return arrays [z, n, ..] as [z * n, ..], for a scan. One-dimensional arrays are
    flat already."""
    flat = (y if y.ndim == 1 else y.reshape(-1, *y.shape[2:]) for y in arrays)
    return varying_alike(*flat)


def _cut_queries(y_bthi: Array, w: int, g: int, a: int) -> Float[Array, "z n g m i"]:
    """Return an array with a row for each query and query head, in blocks."""
    b, t, h, i = y_bthi.shape
    y_bthi = jnp.pad(y_bthi, ((0, 0), (0, -t % a), (0, 0), (0, 0)))
    y_zwnagri = y_bthi.reshape(b // w, w, -1, a, g, h // g, i)
    y_znwgrai = y_zwnagri.transpose(0, 2, 1, 4, 5, 3, 6)
    return y_znwgrai.reshape(b // w, -1, w * g, h // g * a, i)


def _join_queries(y_zngmi: Array, w: int, h: int) -> Float[Array, "b t h i"]:
    """Return what _cut_queries cut, of h heads, with the rows that it added."""
    z, n, g, m, i = y_zngmi.shape
    r = h * w // g
    y_znwgrai = y_zngmi.reshape(z, n, w, g // w, r, m // r, i)
    return y_znwgrai.transpose(0, 2, 1, 5, 3, 4, 6).reshape(z * w, -1, h, i)


def _cut_keys(y_bugi: Array, w: int, x: int) -> Float[Array, "z c g x i"]:
    """Return an array with a row for each key and key head, in blocks."""
    b, u, g, i = y_bugi.shape
    y_bugi = jnp.pad(y_bugi, ((0, 0), (0, -u % x), (0, 0), (0, 0)))
    y_zwcxgi = y_bugi.reshape(b // w, w, -1, x, g, i)
    return y_zwcxgi.transpose(0, 2, 1, 4, 3, 5).reshape(b // w, -1, w * g, x, i)


def _join_keys(y_zcgxi: Array, w: int) -> Float[Array, "b u g i"]:
    """Return what _cut_keys cut, with the rows that it added."""
    z, c, g, x, i = y_zcgxi.shape
    y_zcwgxi = y_zcgxi.reshape(z, c, w, g // w, x, i)
    return y_zcwgxi.transpose(0, 2, 1, 4, 3, 5).reshape(z * w, c * x, g // w, i)
