"""Top-k compression, with error feedback, of the gradients of a domain's experts.

Each member of a domain has gradients of all the domain's experts, and sends those of
other members' experts to their owners as the k largest entries of each expert.

    total    = gradient of the step + residual      on each member
    sent     = top-k of total, for each expert      one all_to_all
    residual = total - sent                         state of the run

This happens once a step, for the gradients of all micro-batches together. Error
feedback (Seide et al. 2014) sends later what was not sent now, so over steps nothing is
lost. docs/compression.md counts the bytes.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from moejax.kernels import varying_alike
from moejax.moe.mesh_roles import Axes, MeshLayout, spec
from moejax.moe.weights import compression
from moejax.moe.weights.compression import ExpertWeights, Packed
from moejax.moe.weights.domains import VALUE_DTYPE, entries
from moejax.moe.weights.over_layers import over_layers

SCALE_DTYPE, SCALE_BYTES = "float8_e8m0fnu", 1
"""Dtype of the power of two that is sent with each expert as the scale of its values,
and its size in bytes. Unscaled gradients may be smaller than the smallest positive
8-bit float.
"""


def residual_axes(mesh_layout: MeshLayout) -> tuple[Axes, ...]:
    """Return the mesh axes over which each dim of residual_lsx is split.

    Each device has residuals of its own, for all experts of its domain.
    """
    return (), mesh_layout.owner_axes, mesh_layout.width_axes


def scatter(
    grads: ExpertWeights,
    residual_lsx: Float[Array, "l s x"],
    mesh_layout: MeshLayout,
    specs: dict,
    dtype,
) -> tuple[ExpertWeights, Float[Array, "l s x"]]:
    """Send gradients of a domain's experts to their owners, compressed, in all layers.

    Return the summed gradients of own experts, and the new residuals. `grads` are the
    gradients of the domain's slots, [l, s, ..], split by `specs`, and so are the
    returned ones. The compression ratio counts against uncompressed weights of `dtype`.
    """
    ratio = mesh_layout.layout.domain.gradient_compression
    residual_spec = spec(*residual_axes(mesh_layout))

    def one_layer(layer):
        grads, residual_sx = layer
        k, blocks = entries(residual_sx.shape[1], dtype, ratio)
        sizes = (k, mesh_layout.domain_axes, VALUE_DTYPE, blocks)
        grad_sx = compression.flatten(grads)
        own_ex, residual_sx = scatter_layer(grad_sx, residual_sx, *sizes)
        return compression.unflatten(own_ex, grads["down"].shape[2]), residual_sx

    def body(grads, residual_lsx):
        return over_layers(one_layer, (grads, residual_lsx), mesh_layout.mesh)

    return jax.shard_map(
        body,
        mesh=mesh_layout.mesh,
        in_specs=(specs, residual_spec),
        out_specs=(specs, residual_spec),
    )(grads, residual_lsx)


@jax.named_scope("scatter_gradients")
def scatter_layer(
    grad_sx: Float[Array, "s x"],
    residual_sx: Float[Array, "s x"],
    k: int,
    axes: Axes,
    value_dtype: str = "bfloat16",
    blocks: int = 1,
) -> tuple[Float[Array, "e x"], Float[Array, "s x"]]:
    """Sum the gradients of one layer's experts at their owners, from k entries of each.

    Return the sums for own experts, and the new residuals. Each member sends k entries
    of gradient + residual for each expert of another member. What remains is the new
    residual (at least float32), which is 0 for own experts: their gradients are added
    whole. A sum begins with the owner's gradients; other members' follow in order.
    """
    total_sx = grad_sx.astype(compression.sum_dtype(grad_sx.dtype)) + residual_sx
    (s, size), me = total_sx.shape, jax.lax.axis_index(axes)
    members = math.prod(jax.lax.axis_size(axis) for axis in axes)
    e = s // members
    scale_s1 = _scale(total_sx)
    scaled_sx = total_sx / scale_s1
    zeros_1x = jnp.zeros_like(total_sx[:1])
    packed = compression.encode(scaled_sx, zeros_1x, k, value_dtype, blocks)
    rest_sx = compression.decode(scaled_sx, packed.replace(value_ek=-packed.value_ek))
    is_own_s1 = (jnp.arange(s, dtype=jnp.int32) // e == me)[:, None]
    residual_sx = jnp.where(is_own_s1, 0, rest_sx * scale_s1)

    words = jnp.concatenate(
        [compression.to_words(packed, size), _bytes(scale_s1)], axis=1
    )
    words = jax.lax.all_to_all(words, axes, split_axis=0, concat_axis=0, tiled=True)
    # From here s counts (sender, own expert).
    arrived = compression.from_words(
        words[:, :-SCALE_BYTES], packed.value_ek.dtype, size, blocks
    )
    scale_s1 = _from_bytes(words[:, -SCALE_BYTES:], total_sx.dtype)
    value_sk = arrived.value_ek.astype(total_sx.dtype) * scale_s1
    value_sk = jnp.where(is_own_s1, 0, value_sk)
    parts = (value_sk.reshape(-1, e, k), arrived.index_ek.reshape(-1, e, k))

    own_ex = jax.lax.dynamic_slice_in_dim(total_sx, me * e, e)
    own_ex, *parts = varying_alike(own_ex, *parts)

    def add(sum_ex, part):
        return compression.decode(sum_ex, Packed(*part, blocks)), None

    return jax.lax.scan(add, own_ex, tuple(parts))[0], residual_sx


def _scale(total_sx: Float[Array, "s x"]) -> Float[Array, "s 1"]:
    """Return the power of two nearest to each expert's largest absolute value.

    It is 1 for an expert of zeros.
    """
    max_s1 = jnp.max(jnp.abs(total_sx), axis=1, keepdims=True)
    max_s1 = jnp.where(max_s1 == 0, 1, max_s1)
    nexp = jnp.finfo(max_s1.dtype).nexp
    return jax.lax.reduce_precision(max_s1, nexp, mantissa_bits=0)


def _bytes(scale_s1: Float[Array, "s 1"]) -> UInt8[Array, "s 1"]:
    """Return powers of two as one byte each."""
    return jax.lax.bitcast_convert_type(scale_s1.astype(SCALE_DTYPE), jnp.uint8)


def _from_bytes(byte_s1: UInt8[Array, "s 1"], dtype) -> Float[Array, "s 1"]:
    """Return powers of two from the bytes that `_bytes` made."""
    scale_s1 = jax.lax.bitcast_convert_type(byte_s1, jnp.dtype(SCALE_DTYPE))
    return scale_s1.astype(dtype)
