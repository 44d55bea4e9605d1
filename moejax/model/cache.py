"""The KV cache: keys and values of earlier tokens, kept for generating later ones.

    prefill   tokens [b, t]  ->  hidden states, and a cache with t of u positions filled
    decode    tokens [b, 1]  ->  hidden states, and the cache with one more

Here u counts the positions of a cache, filled or not, and l all layers, dense ones
included. Latent attention (moejax.model.mla) has one head g here: its keys are those
that RoPE rotates, and its values are the latents, from which each head's keys and
values are made.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from moejax import axes
from moejax.config import Network


class KvCacheView(NamedTuple):
    """View of one layer of the KV cache, as a scan over the layers carries it.

    The arrays are those of all layers; `layer` selects the current one.
    """

    key_lbugi: Float[Array, "l b u g i"]
    """Keys of all layers, rotated by RoPE."""
    value_lbugi: Float[Array, "l b u g i"]
    """Values of all layers."""
    layer: Int[Array, ""]
    """Index of the current layer."""

    def append(self, start, k_btgi, v_btgi) -> tuple["KvCacheView", Array, Array]:
        """Write t tokens into the current layer, from position `start` on.

        Return the view of the next layer, and the current layer's keys and values
        [b, u, g, i] with the new tokens in them.
        """

        def write(cache_lbugi, new_btgi):
            begin = (self.layer, 0, start, 0, 0)
            return jax.lax.dynamic_update_slice(cache_lbugi, new_btgi[None], begin)

        def read(cache_lbugi):
            return jax.lax.dynamic_index_in_dim(cache_lbugi, self.layer, keepdims=False)

        key_lbugi = write(self.key_lbugi, k_btgi)
        value_lbugi = write(self.value_lbugi, v_btgi)
        cache_view = KvCacheView(key_lbugi, value_lbugi, self.layer + 1)
        return cache_view, read(key_lbugi), read(value_lbugi)


@struct.dataclass
class Cache:
    """Keys and values of the tokens that a model has read, for all layers.

    All rows hold the same number of tokens, filled from the left. A shorter row begins
    with padding tokens at position -1. These belong to document 0, which no real token
    belongs to, so no real token attends to them.
    """

    key_lbugi: Float[Array, "l b u g i"]
    """Keys, rotated by RoPE."""
    value_lbugi: Float[Array, "l b u g i"]
    """Values."""
    document_bu: Int[Array, "b u"]
    """Document number of each token. A row's documents count from 1; a new one begins
    at each position 0."""
    num_tokens: Int[Array, ""]
    """Number of positions filled, equal for all rows."""

    @classmethod
    def empty(cls, cfg: Network, batch_size: int, capacity: int) -> "Cache":
        """Return a cache without tokens, with `capacity` positions per row."""
        model, heads = cfg.model, cfg.model.num_kv_heads
        widths = (model.head_dim, model.head_dim)
        if cfg.is_latent:
            heads, widths = 1, (cfg.mla.qk_rope_head_dim, cfg.mla.kv_lora_rank)
        tokens = (model.num_layers, batch_size, capacity, heads)
        dtype = jnp.dtype(model.compute_dtype)
        key_lbugi, value_lbugi = (jnp.zeros((*tokens, i), dtype) for i in widths)
        document_bu = jnp.zeros((batch_size, capacity), jnp.int32)
        return cls(key_lbugi, value_lbugi, document_bu, jnp.int32(0))

    @classmethod
    def shardings(cls, cfg: Network, mesh: Mesh) -> "Cache":
        """Return the sharding of each field: rows over the batch axes, heads over the
        tensor axis. The one head of latent attention is whole."""
        split = None if cfg.is_latent else axes.TENSOR
        heads = axes.sharding(mesh, None, axes.BATCH_AXES, None, split)
        rows, whole = axes.sharding(mesh, axes.BATCH_AXES), axes.sharding(mesh)
        return cls(heads, heads, rows, whole)
