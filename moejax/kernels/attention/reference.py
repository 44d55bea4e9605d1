"""Definition of attention, with gradients derived by JAX. It makes the array of all
scores, [b, h, t, u]."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from moejax.kernels.attention.reading import Inputs, Rule, key_range, scale


def attention(
    inputs: Inputs, rule: Rule, sinks_h: Float[Array, " h"] | None = None
) -> Float[Array, "b t h j"]:
    """Return, for each query, the mean of the values that it reads, weighted by softmax
    of its scores. A query that reads no key gets 0.

    A sink is a score without a value: it takes part in the softmax, and weighs nothing
    in the mean. Products and sums are taken in float32 or wider; the result has the
    dtype of the queries.
    """
    q_bthi, k_bugi, v_bugj = inputs[:3]
    (b, t, h, i), g = q_bthi.shape, k_bugi.shape[2]
    dtype = jnp.promote_types(q_bthi.dtype, jnp.float32)
    # Keys are not cast: a copy of a whole cache would take longer than their products.
    scores_bgrtu = scale(inputs, rule) * jnp.einsum(
        "btgri,bugi->bgrtu",
        q_bthi.reshape(b, t, g, h // g, i),
        k_bugi,
        precision="highest",
        preferred_element_type=dtype,
    )
    if rule.soft_cap is not None:
        scores_bgrtu = rule.soft_cap * jnp.tanh(scores_bgrtu / rule.soft_cap)
    keys, key_u = key_range(inputs, rule), jnp.arange(k_bugi.shape[1])
    is_read_btu = (key_u >= keys.low_bt[..., None]) & (key_u < keys.high_bt[..., None])
    is_read_bgrtu = is_read_btu[:, None, None]
    top_bgrt1 = jnp.max(
        scores_bgrtu, axis=-1, keepdims=True, where=is_read_bgrtu, initial=-1e30
    )
    if sinks_h is not None:
        sinks_gr11 = sinks_h.astype(dtype).reshape(g, h // g, 1, 1)
        top_bgrt1 = jnp.maximum(top_bgrt1, sinks_gr11)
    weights_bgrtu = jnp.exp(
        jnp.where(is_read_bgrtu, scores_bgrtu - top_bgrt1, -jnp.inf)
    )
    sum_bgrt1 = jnp.sum(weights_bgrtu, axis=-1, keepdims=True)
    if sinks_h is not None:
        sum_bgrt1 += jnp.exp(sinks_gr11 - top_bgrt1)
    weights_bgrtu /= jnp.where(sum_bgrt1 > 0, sum_bgrt1, 1)
    out_btgrj = jnp.einsum(
        "bgrtu,bugj->btgrj", weights_bgrtu, v_bugj.astype(dtype), precision="highest"
    )
    return out_btgrj.reshape(b, t, h, -1).astype(q_bthi.dtype)
