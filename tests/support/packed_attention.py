"""Attention over packed documents in JAX, in place of cuDNN's kernels where no GPU is.

Each function takes the place of a primitive in jax._src.cudnn. It reads documents from
the flat buffers by their offsets and lengths, as cuDNN does, and fills the places past
a document's end with NaN.
"""

import jax.numpy as jnp
from jax._src.cudnn.fused_attention_stablehlo import MaskType


def forward(q, k, v, bias, length_q, length_k, offset_q, offset_k, *tables, **options):
    """Return the output [1, t, h, i] and the logarithms [m, h, t]."""
    assert options["is_training"]
    assert options["variadic_args"] == (False, False)
    q_mthi, k_mtgi, v_mtgi = _all_documents(q, k, v, offset_q, offset_k)
    scores_mhtu = _scores(q_mthi, k_mtgi, length_k, options)
    stat_mht = jnp.log(jnp.sum(jnp.exp(scores_mhtu), axis=3))
    weights_mhtu = jnp.exp(scores_mhtu - stat_mht[..., None])
    out_mthi = jnp.einsum("mhtu,muhi->mthi", weights_mhtu, _repeat(v_mtgi, q))
    is_token_mt = jnp.arange(q.shape[1]) < length_q[0][:, None]
    stat_mht = jnp.where(is_token_mt[:, None], stat_mht, jnp.nan)
    return _row_of(out_mthi, length_q, offset_q, q), stat_mht


def backward(q, k, v, bias, length_q, length_k, offset_q, offset_k, *rest, **options):
    """Return the gradients of queries, keys and values."""
    *_, stat_mht, out, dout = rest
    q_mthi, k_mtgi, v_mtgi = _all_documents(q, k, v, offset_q, offset_k)
    out_mthi, dout_mthi = (_documents(array, offset_q) for array in (out, dout))
    is_token_mt = jnp.arange(q.shape[1]) < length_q[0][:, None]
    scores_mhtu = _scores(q_mthi, k_mtgi, length_k, options)
    weights_mhtu = jnp.exp(scores_mhtu - stat_mht[..., None])
    weights_mhtu = jnp.where(is_token_mt[:, None, :, None], weights_mhtu, 0)
    mean_mht1 = jnp.einsum("mthi,mthi->mht", out_mthi, dout_mthi)[..., None]
    dweights_mhtu = jnp.einsum("mthi,muhi->mhtu", dout_mthi, _repeat(v_mtgi, q))
    ds_mhtu = weights_mhtu * (dweights_mhtu - mean_mht1) * options["scale"]
    dq_mthi = jnp.einsum("mhtu,muhi->mthi", ds_mhtu, _repeat(k_mtgi, q))
    dk_muhi = jnp.einsum("mhtu,mthi->muhi", ds_mhtu, q_mthi)
    dv_muhi = jnp.einsum("mhtu,mthi->muhi", weights_mhtu, dout_mthi)
    return [
        _row_of(dq_mthi, length_q, offset_q, q),
        _row_of(_sum_groups(dk_muhi, k), length_k, offset_k, k),
        _row_of(_sum_groups(dv_muhi, v), length_k, offset_k, v),
    ]


def _scores(q_mthi, k_mtgi, length_k, options):
    """Return the scaled scores, -inf for keys that are not read."""
    t = q_mthi.shape[1]
    query_t1, key_u = jnp.arange(t)[:, None], jnp.arange(t)
    is_read_mtu = (key_u < length_k[0][:, None])[:, None]
    if options["mask_type"] is MaskType.PADDING_CAUSAL:
        is_read_mtu &= key_u <= query_t1
    if (window := options["sliding_window_length"]) is not None:
        is_read_mtu &= key_u > query_t1 - window
    scores_mhtu = jnp.einsum("mthi,muhi->mhtu", q_mthi, _repeat(k_mtgi, q_mthi))
    scores_mhtu *= options["scale"]
    return jnp.where(is_read_mtu[:, None], scores_mhtu, -jnp.inf)


def _all_documents(q, k, v, offset_q, offset_k):
    return _documents(q, offset_q), _documents(k, offset_k), _documents(v, offset_k)


def _documents(array, offset_1n):
    """Return the numbers of a row [1, t, heads, i] from each offset on, in float32."""
    shape = array.shape[1:]
    place_z = jnp.arange(array.size)
    index_mz = offset_1n[0, :-1, None] + place_z
    parts_mz = array.reshape(-1).at[index_mz].get(mode="fill", fill_value=0)
    return parts_mz.reshape(-1, *shape).astype(jnp.float32)


def _row_of(parts_mthi, length_1m, offset_1n, like):
    """Return the row in which each document is at its offset; NaN elsewhere."""
    m, t = parts_mthi.shape[:2]
    is_token_mt = jnp.arange(t) < length_1m[0][:, None]
    index_mz = offset_1n[0, :-1, None] + jnp.arange(like.size)
    is_in_mz = jnp.repeat(is_token_mt, like.size // t, axis=1)
    index_mz = jnp.where(is_in_mz, index_mz, like.size)
    flat_z = jnp.full(like.size, jnp.nan, like.dtype)
    parts_mz = parts_mthi.reshape(m, -1).astype(like.dtype)
    return flat_z.at[index_mz].set(parts_mz, mode="drop").reshape(like.shape)


def _repeat(array_mtgi, q):
    return jnp.repeat(array_mtgi, q.shape[2] // array_mtgi.shape[2], axis=2)


def _sum_groups(array_muhi, like):
    m, u, h, i = array_muhi.shape
    g = like.shape[2]
    return array_muhi.reshape(m, u, g, h // g, i).sum(axis=3)
