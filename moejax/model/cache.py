"""Keys and values of tokens that a model has seen, for those that follow.

    prefill   tokens [b, t]  ->  hidden states, and a cache with t of u places filled
    decode    tokens [b, 1]  ->  hidden states, and the cache with one more

Here u counts the places of a cache, filled or not, and l all layers, dense ones too.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from moejax import axes
from moejax.config import Model


class KvCacheView(NamedTuple):
    """What a scan over layers carries: `layer` is the one whose turn it is."""

    key_lbugi: Float[Array, "l b u g i"]
    """Turned by RoPE."""
    value_lbugi: Float[Array, "l b u g i"]
    layer: Int[Array, ""]

    def extended(self, start, k_btgi, v_btgi) -> tuple["KvCacheView", Array, Array]:
        """With t more tokens from place `start` on in this layer; its keys and values
        [b, u, g, i]. The next layer's turn comes."""

        def put(whole_lbugi, new_btgi):
            where = (self.layer, 0, start, 0, 0)
            return jax.lax.dynamic_update_slice(whole_lbugi, new_btgi[None], where)

        def take(whole_lbugi):
            return jax.lax.dynamic_index_in_dim(whole_lbugi, self.layer, keepdims=False)

        key_lbugi, value_lbugi = (
            put(self.key_lbugi, k_btgi),
            put(self.value_lbugi, v_btgi),
        )
        cache_view = KvCacheView(key_lbugi, value_lbugi, self.layer + 1)
        return cache_view, take(key_lbugi), take(value_lbugi)


@struct.dataclass
class Cache:
    """Rows are filled alike, from the left. A row of fewer tokens begins with others at
    position -1: they are of document 0, which no later token is of."""

    key_lbugi: Float[Array, "l b u g i"]
    value_lbugi: Float[Array, "l b u g i"]
    document_bu: Int[Array, "b u"]
    """Each token's document, counted from 1 on where a position is 0."""
    num_tokens: Int[Array, ""]
    """Places filled."""

    @classmethod
    def empty(cls, cfg: Model, batch_size: int, capacity: int) -> "Cache":
        shape = (cfg.num_layers, batch_size, capacity, cfg.num_kv_heads, cfg.head_dim)
        zeros_lbugi = jnp.zeros(shape, jnp.dtype(cfg.compute_dtype))
        document_bu = jnp.zeros((batch_size, capacity), jnp.int32)
        return cls(zeros_lbugi, zeros_lbugi, document_bu, jnp.int32(0))

    @classmethod
    def shardings(cls, mesh: Mesh) -> "Cache":
        """Where each part lies: rows along the batch axes, heads along tensor."""
        heads = axes.sharding(mesh, None, axes.BATCH_AXES, None, axes.TENSOR)
        rows, whole = axes.sharding(mesh, axes.BATCH_AXES), axes.sharding(mesh)
        return cls(heads, heads, rows, whole)
