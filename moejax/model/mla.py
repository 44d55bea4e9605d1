"""Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values of a token are made from two short vectors, and only these are cached:

    c  = norm(x kv_a)     the latent, kv_lora_rank wide
    kr = rope(x k_rope)   a rotated key, qk_rope_head_dim wide, which all heads share
    k  = [c kv_b(key) | kr],  v = c kv_b(value)           for each head
    q  = [qn | rope(qr)]  from x, or from norm(x q_a) with q_lora_rank

Over windows keys and values are made, and attention is that of full heads. With a cache
they are not: the products with kv_b move to the other side of the scores (the paper's
"absorbed" form), where they act on the new tokens alone:

    qn . (c kv_b(key)) = (qn kv_b(key)^T) . c        one key head, c and kr side by side
    sum_u w_u (c_u kv_b(value)) = (sum_u w_u c_u) kv_b(value)
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from moejax.config import LayerAttention, Network
from moejax.kernels.attention import attention
from moejax.model.attention import (
    AttentionContext,
    first_keys,
    make_rule,
    query_temperature,
    sum_heads,
    turn,
)
from moejax.model.cache import KvCacheView
from moejax.model.layers import RmsNorm, input_matrix, latent_matrix, output_matrix
from moejax.model.sharding import on_own_rows, on_rows


class LatentAttention(nnx.Module):
    """Projections and inner norms of one layer of latent attention."""

    def __init__(self, cfg: Network, kind: LayerAttention, mesh: Mesh, rngs: nnx.Rngs):
        self.network, self.kind, self.mesh = cfg, kind, mesh
        model, mla = cfg.model, cfg.mla
        d, h, r, c = model.d_model, model.num_heads, mla.q_lora_rank, mla.kv_lora_rank
        self.q_a_dr = latent_matrix(rngs, d, r) if r else None
        self.q_a_norm = RmsNorm(r, mla.norm_eps) if r else None
        self.q_dhi = None if r else input_matrix(rngs, d, h * cfg.query_dim)
        self.q_b_rhi = input_matrix(rngs, r, h * cfg.query_dim) if r else None
        self.kv_a_dc = latent_matrix(rngs, d, c)
        self.kv_a_norm = RmsNorm(c, mla.norm_eps)
        self.k_rope_di = latent_matrix(rngs, d, mla.qk_rope_head_dim)
        width = mla.qk_nope_head_dim + mla.v_head_dim
        self.kv_b_chj = input_matrix(rngs, c, h * width)
        self.out_hjd = output_matrix(rngs, h * mla.v_head_dim, d)

    @jax.named_scope("attention")
    def __call__(
        self,
        parts: tuple[Float[Array, "b t d"], ...],
        contexts: tuple[AttentionContext, ...],
        cache_view: KvCacheView | None = None,
    ) -> tuple[tuple[Float[Array, "b t d"], ...], KvCacheView | None]:
        """Return the output for each part of a batch, and the cache view with these
        tokens' latents and rotated keys appended, as `Attention` does."""
        latents, ropes, queries = self._project(parts)
        of_layer = self.network, self.kind
        queries = [
            query_temperature(self._turn_last(q, context), context, *of_layer)
            for q, context in zip(queries, contexts, strict=True)
        ]
        keys = [
            turn(rope[:, :, None], context, self.kind)
            for rope, context in zip(ropes, contexts, strict=True)
        ]
        if cache_view is None:
            heads = self._over_windows(queries, latents, keys, contexts)
        else:
            arrays = queries[0], latents[0], keys[0]
            out_bthj, cache_view = self._over_cache(*arrays, contexts[0], cache_view)
            heads = (out_bthj,)
        reduce_dtype = self.network.model.gradient_reduce_dtype
        return sum_heads(heads, self.out_hjd, self.mesh, reduce_dtype), cache_view

    def _project(self, parts):
        """Return for each part the normed latents [b, t, c], the keys that all heads
        share before RoPE [b, t, i], and the queries [b, t, h, i] before RoPE."""
        params = (self.kv_a_dc, self.k_rope_di)
        params += () if self.q_a_dr is None else (self.q_a_dr,)
        reduce_dtype = self.network.model.gradient_reduce_dtype

        def compress(x_btd, *weights):
            return tuple(x_btd @ weight for weight in weights)

        compressed = on_rows(compress, parts, params, self.mesh, reduce_dtype)
        latents = tuple(self.kv_a_norm(each[0]) for each in compressed)
        sources, matrix = parts, self.q_dhi
        if self.q_a_dr is not None:
            sources = tuple(self.q_a_norm(each[2]) for each in compressed)
            matrix = self.q_b_rhi
        queries = self._by_head(sources, matrix, self.network.query_dim)
        return latents, [each[1] for each in compressed], queries

    def _by_head(self, parts, matrix: nnx.Param, width: int):
        """Return the product of each part with a matrix, [b, t, h, width]."""

        def body(x, weight):
            return (x @ weight).reshape(*x.shape[:2], -1, width)

        reduce_dtype = self.network.model.gradient_reduce_dtype
        args = body, parts, (matrix,), self.mesh, reduce_dtype
        return on_rows(*args, out_tensor_dim=2)

    def _turn_last(self, q_bthi: Array, context: AttentionContext) -> Array:
        """Return queries with their last components rotated."""
        nope_bthi, rope_bthi = jnp.split(
            q_bthi, [self.network.mla.qk_nope_head_dim], axis=-1
        )
        turned_bthi = turn(rope_bthi, context, self.kind)
        return jnp.concatenate([nope_bthi, turned_bthi], axis=-1)

    def _over_windows(self, queries, latents, keys, contexts):
        """Return each head's output for whole windows, [b, t, h, j] for each part."""
        mla = self.network.mla
        width = mla.qk_nope_head_dim + mla.v_head_dim
        both = self._by_head(latents, self.kv_b_chj, width)

        def body(q_bthi, both_buhj, rope_bu1i, first_bt):
            k_buhi, v_buhj = jnp.split(both_buhj, [mla.qk_nope_head_dim], axis=-1)
            shape = (*k_buhi.shape[:3], rope_bu1i.shape[-1])
            shared_buhi = jnp.broadcast_to(rope_bu1i, shape)
            k_buhi = jnp.concatenate([k_buhi, shared_buhi], axis=-1)
            rule = make_rule(self.network, self.kind)
            named = self.network.model.attention
            args = q_bthi, k_buhi, v_buhj, first_bt
            return attention(*args, rule=rule, implementation=named)

        heads = []
        dims = (2, 2, None, None)
        for *made, context in zip(queries, both, keys, contexts, strict=True):
            arrays = (*made, first_keys(context, self.network, self.kind))
            heads.append(on_own_rows(body, arrays, dims, self.mesh, out_tensor_dim=2))
        return tuple(heads)

    def _over_cache(self, q_bthi, latent_btc, key_bt1i, context, cache_view):
        """Return each head's output [b, t, h, j] for tokens that read a cache, and the
        cache view with theirs appended."""
        mla, start = self.network.mla, jnp.int32(context.start)
        cache_view, key_bu1i, latent_bu1c = cache_view.append(
            context.start, key_bt1i, latent_btc[:, :, None]
        )
        reduce_dtype = self.network.model.gradient_reduce_dtype

        def by_head(weight, num_heads):
            weight = weight.reshape(weight.shape[0], num_heads, -1)
            return jnp.split(weight, [mla.qk_nope_head_dim], axis=-1)

        def absorb(q_bthi, weight):
            key_chi, _ = by_head(weight, q_bthi.shape[2])
            nope_bthi, rope_bthi = jnp.split(q_bthi, [mla.qk_nope_head_dim], axis=-1)
            q_bthc = jnp.einsum("bthi,chi->bthc", nope_bthi, key_chi)
            return jnp.concatenate([q_bthc, rope_bthi], axis=-1)

        def release(out_bthc, weight):
            _, value_chj = by_head(weight, out_bthc.shape[2])
            return jnp.einsum("bthc,chj->bthj", out_bthc, value_chj)

        def body(q_bthc, key_bu1i, latent_bu1c, first_bt, start):
            k_bu1c = jnp.concatenate([latent_bu1c, key_bu1i], axis=-1)
            rule = make_rule(self.network, self.kind)
            args = q_bthc, k_bu1c, latent_bu1c, first_bt
            return attention(*args, rule=rule, start=start)

        split = {"tensor_dim": 2, "out_tensor_dim": 2}
        args = (self.kv_b_chj,), self.mesh, reduce_dtype
        (q_bthc,) = on_rows(absorb, (q_bthi,), *args, **split)
        first_bt = first_keys(context, self.network, self.kind)
        arrays = (q_bthc, key_bu1i, latent_bu1c, first_bt, start)
        dims = (2, None, None, None, None)
        out_bthc = on_own_rows(body, arrays, dims, self.mesh, out_tensor_dim=2)
        (out_bthj,) = on_rows(release, (out_bthc,), *args, **split)
        return out_bthj, cache_view
