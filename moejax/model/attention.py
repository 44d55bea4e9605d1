"""Causal grouped-query attention with RoPE, and what models add to it.

Heads are split over the tensor axis. Each device has whole groups; a group is one
key-value head and the query heads that read it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from moejax.config import LayerAttention, Network
from moejax.kernels.attention import Rule, attention
from moejax.model.cache import Cache, KvCacheView
from moejax.model.layers import RmsNorm, bias, input_matrix, output_matrix, unit_rms
from moejax.model.rope import Rotation, rope, rotation
from moejax.model.sharding import on_own_rows, on_rows, sum_parts


class AttentionContext(NamedTuple):
    """Positions and documents of a batch's tokens, shared by all layers."""

    rotation: Rotation
    """RoPE angles of the tokens, by their positions in their documents."""
    first_bt: Int[Array, "b t"]
    """Key at which each token's document begins. It never falls along a row."""
    position_bt: Int[Array, "b t"]
    """Positions of the tokens in their documents."""
    start: Int[Array, ""] | int = 0
    """Key at whose place the batch's first token stands: the number of tokens in the KV
    cache, or 0 without one."""

    @classmethod
    def from_windows(
        cls, position_bt: Int[Array, "b t"], cfg: Network
    ) -> "AttentionContext":
        """Return the context of whole windows, as in training and evaluation.

        A document begins where a position is 0, and at the start of a window, which may
        continue one. If documents are separate, tokens attend only to tokens of their
        own document.
        """
        angles = _rotation(position_bt, cfg)
        if cfg.documents == "joined":
            first_bt = jnp.zeros(position_bt.shape, jnp.int32)
        else:
            first_bt = _last_begin(position_bt == 0)
        return cls(angles, first_bt, position_bt)

    @classmethod
    def from_cache(
        cls, position_bt: Int[Array, "b t"], cfg: Network, cache: Cache
    ) -> tuple["AttentionContext", Int[Array, "b u"]]:
        """Return the context of t tokens that follow those in the cache.

        Also return the document numbers of all cached tokens, the new ones included
        (Cache.document_bu).
        """
        before_b1 = jnp.max(cache.document_bu, axis=1, keepdims=True)
        document_bt = before_b1 + jnp.cumsum(position_bt == 0, axis=1)
        start, num_new = cache.num_tokens, position_bt.shape[1]
        document_bu = jax.lax.dynamic_update_slice(
            cache.document_bu, document_bt, (0, start)
        )
        # Padding is document 0, so the first real token of a row begins another one.
        is_begin_bu = jnp.diff(document_bu, axis=1, prepend=0) != 0
        first_bt = jax.lax.dynamic_slice_in_dim(
            _last_begin(is_begin_bu), start, num_new, axis=1
        )
        context = cls(_rotation(position_bt, cfg), first_bt, position_bt, start)
        return context, document_bu

    def first_of_chunk(self, size: int) -> Int[Array, "b t"]:
        """Return the first key that each token reads where it reads its own chunk of
        `size` positions alone, or its document if that begins later."""
        place_t = self.start + jnp.arange(self.first_bt.shape[1], dtype=jnp.int32)
        return jnp.maximum(self.first_bt, place_t - self.position_bt % size)


def _rotation(position_bt: Int[Array, "b t"], cfg: Network) -> Rotation:
    return rotation(position_bt, cfg.rotary_dim, cfg.model.rope_theta, cfg.rope)


def _last_begin(is_begin_bt: Bool[Array, "b t"]) -> Int[Array, "b t"]:
    """Return the last place up to each token where a document begins, or 0."""
    place_t = jnp.arange(is_begin_bt.shape[1], dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(is_begin_bt, place_t, 0), axis=1)


def make_rule(cfg: Network, kind: LayerAttention) -> Rule:
    """Return the static part of the attention of a layer of this kind."""
    factor, scale = cfg.rope.softmax_factor(), cfg.attention.scale
    if factor != 1 or cfg.is_latent:  # queries of a cache are wider than those here
        scale = factor * (scale or cfg.query_dim**-0.5)
    window = cfg.attention.sliding_window if kind == "sliding" else None
    return Rule(scale=scale, window=window)


class Attention(nnx.Module):
    """Projections, optional biases, QK-norms and sinks of one attention layer."""

    def __init__(self, cfg: Network, kind: LayerAttention, mesh: Mesh, rngs: nnx.Rngs):
        self.network, self.cfg, self.kind, self.mesh = cfg, cfg.model, kind, mesh
        options, cfg = cfg.attention, cfg.model
        d, h, g, i = cfg.d_model, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        self.q_dhi = input_matrix(rngs, d, h * i)
        self.k_dgi = input_matrix(rngs, d, g * i)
        self.v_dgi = input_matrix(rngs, d, g * i)
        self.out_hid = output_matrix(rngs, h * i, d)
        widths = {"none": (None, None), "head": (i, i), "full": (h * i, g * i)}
        self.q_norm, self.k_norm = (
            width and RmsNorm(width, cfg.norm_eps) for width in widths[cfg.qk_norm]
        )
        has_bias = options.bias != "none"
        self.q_bias_hi, self.k_bias_gi, self.v_bias_gi = (
            bias(heads * i, tensor_dim=0) if has_bias else None for heads in (h, g, g)
        )
        self.out_bias_d = bias(d, None) if options.bias == "all" else None
        self.sinks_h = bias(h, tensor_dim=0) if options.sinks else None

    @jax.named_scope("attention")
    def __call__(
        self,
        parts: tuple[Float[Array, "b t d"], ...],
        contexts: tuple[AttentionContext, ...],
        cache_view: KvCacheView | None = None,
    ) -> tuple[tuple[Float[Array, "b t d"], ...], KvCacheView | None]:
        """Return the output for each part of a batch, and the cache view with these
        tokens appended. Each part has its context.

        Without a view the tokens attend to one another only, and None is returned in
        its place. A view is that of a batch in one part.
        """
        heads = []
        for projected, context in zip(self._project(parts), contexts, strict=True):
            out_bthi, cache_view = self._attend(*projected, context, cache_view)
            heads.append(out_bthi)
        reduce_dtype = self.cfg.gradient_reduce_dtype
        outputs = sum_heads(tuple(heads), self.out_hid, self.mesh, reduce_dtype)
        if self.out_bias_d is not None:
            bias_d = self.out_bias_d[...].astype(outputs[0].dtype)
            outputs = tuple(out_btd + bias_d for out_btd in outputs)
        return outputs, cache_view

    def _attend(
        self, q_bthi, k_bugi, v_bugi, context: AttentionContext, cache_view
    ) -> tuple[Float[Array, "b t h i"], KvCacheView | None]:
        """Return the output of each head, and the cache view with these keys and values
        appended."""
        q_bthi = self._rotate(self._normalize(q_bthi, self.q_norm), context)
        q_bthi = query_temperature(q_bthi, context, self.network, self.kind)
        k_bugi = self._rotate(self._normalize(k_bugi, self.k_norm), context)
        v_bugi = self._clip(v_bugi)
        implementation = self.cfg.attention
        if cache_view is not None:
            cache_view, k_bugi, v_bugi = cache_view.append(
                context.start, k_bugi, v_bugi
            )
            implementation = "auto"  # the one that was named is for windows
        first_bt = first_keys(context, self.network, self.kind)
        arrays = (q_bthi, k_bugi, v_bugi, first_bt, jnp.int32(context.start))
        sinks = tuple(param[...] for param in _given(self.sinks_h))
        out_bthi = on_own_rows(
            lambda q, k, v, first_bt, start, *sinks: attention(
                q,
                k,
                v,
                first_bt,
                rule=make_rule(self.network, self.kind),
                start=start,
                sinks_h=sinks[0] if sinks else None,
                implementation=implementation,
            ),
            arrays,
            (2, 2, 2, None, None),
            self.mesh,
            out_tensor_dim=2,
            per_head=sinks,
        )
        return out_bthi, cache_view

    def _project(
        self, parts: tuple[Float[Array, "b t d"], ...]
    ) -> tuple[list[Array], ...]:
        """Return queries, keys and values [b, t, heads, i] of each part, made by one
        product.

        Three products would sum the gradient of x over the tensor axis three times.
        """

        def body(x_btd, *params):
            (b, t, d), i = x_btd.shape, self.cfg.head_dim
            weights, biases = params[:3], params[3:]
            g = weights[-1].shape[1] // i  # heads of this device
            parts = [weight.reshape(d, g, -1, i) for weight in weights]
            # c: the query heads of a group, then its key head, then its value head.
            w_dgci = jnp.concatenate(parts, axis=2)
            y_btgci = jnp.einsum("btd,dgci->btgci", x_btd, w_dgci)
            if biases:
                parts = [each.reshape(g, -1, i) for each in biases]
                y_btgci += jnp.concatenate(parts, axis=1)
            last = y_btgci.shape[3] - 1
            parts = jnp.split(y_btgci, [last - 1, last], axis=3)
            return [part.reshape(b, t, -1, i) for part in parts]

        params = (self.q_dhi, self.k_dgi, self.v_dgi)
        params += _given(self.q_bias_hi, self.k_bias_gi, self.v_bias_gi)
        reduce_dtype = self.cfg.gradient_reduce_dtype
        return on_rows(body, parts, params, self.mesh, reduce_dtype, out_tensor_dim=2)

    def _normalize(self, y_bthi: Array, norm: RmsNorm | None) -> Array:
        """Return the queries or keys, normalised as cfg.qk_norm says: not at all, each
        head by itself, or all heads together."""
        if norm is None:
            return y_bthi
        if self.cfg.qk_norm == "full":
            return norm(y_bthi.reshape(*y_bthi.shape[:2], -1)).reshape(y_bthi.shape)
        return norm(y_bthi)

    def _rotate(self, y_bthi: Array, context: AttentionContext) -> Array:
        """Return queries or keys, clipped as cfg.attention says, rotated by RoPE if the
        layer has it, and then with a root mean square of 1 in each head if l2_norm says
        so."""
        y_bthi = turn(self._clip(y_bthi), context, self.kind)
        if self.kind == "nope" or not self.network.attention.l2_norm:
            return y_bthi
        return unit_rms(y_bthi, self.cfg.norm_eps).astype(y_bthi.dtype)

    def _clip(self, y_bthi: Array) -> Array:
        """Return queries, keys or values, clipped to Attention.clip_qkv."""
        limit = self.network.attention.clip_qkv
        return y_bthi if limit is None else jnp.clip(y_bthi, -limit, limit)


def turn(y_bthi: Array, context: AttentionContext, kind: LayerAttention) -> Array:
    """Return queries or keys, rotated by RoPE if this kind of layer has it."""
    return y_bthi if kind == "nope" else rope(y_bthi, context.rotation)


def query_temperature(
    q_bthi: Array, context: AttentionContext, cfg: Network, kind: LayerAttention
) -> Array:
    """Return queries, times their temperature in a layer without RoPE."""
    options = cfg.attention
    if kind != "nope" or not options.temperature_scale:
        return q_bthi
    step_bt = (context.position_bt + 1) // options.temperature_floor
    factor_bt = 1 + options.temperature_scale * jnp.log1p(step_bt)
    return (q_bthi * factor_bt[:, :, None, None]).astype(q_bthi.dtype)


def first_keys(
    context: AttentionContext, cfg: Network, kind: LayerAttention
) -> Int[Array, "b t"]:
    """Return the first key that each token may read in a layer of this kind."""
    if kind == "chunked":
        return context.first_of_chunk(cfg.attention.chunk_size)
    return context.first_bt


def sum_heads(
    heads: tuple[Float[Array, "b t h i"], ...],
    matrix: nnx.Param,
    mesh: Mesh,
    reduce_dtype: str,
) -> tuple[Float[Array, "b t d"], ...]:
    """Return the output of attention from that of the heads, for each part."""

    def body(out_bthi, weight_hid):
        out_btd = out_bthi.reshape(*out_bthi.shape[:2], -1) @ weight_hid
        return sum_parts(out_btd, mesh)

    return on_rows(body, heads, (matrix,), mesh, reduce_dtype, tensor_dim=2)


def _given(*params: nnx.Param | None) -> tuple[nnx.Param, ...]:
    """Return the parameters that a layer has."""
    return tuple(param for param in params if param is not None)
