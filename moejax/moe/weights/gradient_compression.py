"""Gradients of a domain's experts, to their owners as the k largest entries.

    wanted = gradient of the step + what was kept until now          each member's own
    sent   = its k largest entries of each expert of another member  one all_to_all
    kept   = wanted - sent                                           state of the run

Once a step: of all micro-batches together, as experts move once a step. Error feedback
is Seide et al.'s (2014): over steps nothing is lost. docs/compression.md has the bytes.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from moejax.kernels import varying_alike
from moejax.moe.mesh_roles import Axes, MeshLayout, spec
from moejax.moe.weights import compression
from moejax.moe.weights.compression import Packed, Weights
from moejax.moe.weights.domains import VALUE_DTYPE, entries

SCALE_DTYPE, SCALE_BYTES = "float8_e8m0fnu", 1
"""Of each expert's power of two on the wire: gradients may be smaller than any 8-bit
float but zero."""


def residual_axes(mesh_layout: MeshLayout) -> tuple[Axes, ...]:
    """Return the mesh axes of residual_lsx: each device keeps its own, for all experts
    of its domain."""
    return (), mesh_layout.owner_axes, mesh_layout.width_axes


def scatter(
    grads: Weights,
    residual_lsx: Float[Array, "l s x"],
    mesh_layout: MeshLayout,
    specs: dict,
    dtype,
) -> tuple[Weights, Float[Array, "l s x"]]:
    """Gradients of own experts, and what is kept of the others' now.

    `grads` are those of a domain's slots, [l, s, ..] and split by `specs`; what returns
    is split alike. Weights that move whole would be in `dtype`: bytes are counted
    against it.
    """
    ratio = mesh_layout.layout.domain.gradient_compression
    where = spec(*residual_axes(mesh_layout))

    def one_layer(layer):
        grads, residual_sx = layer
        k, blocks = entries(residual_sx.shape[1], dtype, ratio)
        sizes = (k, mesh_layout.domain_axes, VALUE_DTYPE, blocks)
        own_ex, residual_sx = scattered(compression.flat(grads), residual_sx, *sizes)
        return compression.unflat(own_ex, grads["down"].shape[2]), residual_sx

    def body(grads, residual_lsx):
        return jax.lax.map(one_layer, (grads, residual_lsx))

    return jax.shard_map(
        body, mesh=mesh_layout.mesh, in_specs=(specs, where), out_specs=(specs, where)
    )(grads, residual_lsx)


@jax.named_scope("scatter_gradients")
def scattered(
    grad_sx: Float[Array, "s x"],
    residual_sx: Float[Array, "s x"],
    k: int,
    axes: Axes,
    value_dtype: str = "bfloat16",
    blocks: int = 1,
) -> tuple[Float[Array, "e x"], Float[Array, "s x"]]:
    """Gradients of a domain's experts, summed at their owners; and what is kept.

    Each member sends k entries of gradient + kept per expert of another one and keeps
    the rest (float32 at least). What it has of its own experts arrives whole. Sums are
    in member order.
    """
    wanted_sx = grad_sx.astype(compression.wide(grad_sx.dtype)) + residual_sx
    (s, size), me = wanted_sx.shape, jax.lax.axis_index(axes)
    members = math.prod(jax.lax.axis_size(axis) for axis in axes)
    e = s // members
    scale_s1 = _scale(wanted_sx)
    scaled_sx = wanted_sx / scale_s1
    zeros_1x = jnp.zeros_like(wanted_sx[:1])
    packed = compression.encode(scaled_sx, zeros_1x, k, value_dtype, blocks)
    left_sx = compression.decode(scaled_sx, packed.replace(value_ek=-packed.value_ek))
    is_own_s1 = (jnp.arange(s, dtype=jnp.int32) // e == me)[:, None]
    residual_sx = jnp.where(is_own_s1, 0, left_sx * scale_s1)

    words = jnp.concatenate(
        [compression.to_words(packed, size), _bytes(scale_s1)], axis=1
    )
    words = jax.lax.all_to_all(words, axes, split_axis=0, concat_axis=0, tiled=True)
    came = compression.from_words(
        words[:, :-SCALE_BYTES], packed.value_ek.dtype, size, blocks
    )  # s: senders' now
    scale_s1 = _from_bytes(words[:, -SCALE_BYTES:], wanted_sx.dtype)
    value_sk = jnp.where(is_own_s1, 0, came.value_ek.astype(wanted_sx.dtype) * scale_s1)
    parts = (value_sk.reshape(-1, e, k), came.index_ek.reshape(-1, e, k))

    own_ex = jax.lax.dynamic_slice_in_dim(wanted_sx, me * e, e)
    own_ex, *parts = varying_alike(own_ex, *parts)

    def add(sum_ex, part):
        return compression.decode(sum_ex, Packed(*part, blocks)), None

    return jax.lax.scan(add, own_ex, tuple(parts))[0], residual_sx


def _scale(wanted_sx: Float[Array, "s x"]) -> Float[Array, "s 1"]:
    """The power of two next to each expert's largest gradient; 1 for zeros."""
    max_s1 = jnp.max(jnp.abs(wanted_sx), axis=1, keepdims=True)
    max_s1 = jnp.where(max_s1 == 0, 1, max_s1)
    nexp = jnp.finfo(max_s1.dtype).nexp
    return jax.lax.reduce_precision(max_s1, nexp, mantissa_bits=0)


def _bytes(scale_s1: Float[Array, "s 1"]) -> UInt8[Array, "s 1"]:
    return jax.lax.bitcast_convert_type(scale_s1.astype(SCALE_DTYPE), jnp.uint8)


def _from_bytes(byte_s1: UInt8[Array, "s 1"], dtype) -> Float[Array, "s 1"]:
    scale_s1 = jax.lax.bitcast_convert_type(byte_s1, jnp.dtype(SCALE_DTYPE))
    return scale_s1.astype(dtype)
