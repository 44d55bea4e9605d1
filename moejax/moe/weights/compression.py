"""Experts that move inside a domain, as the k largest entries of a difference.

    form       base (what the receivers hold)        sent: top-k of
    residual   the mean of all experts [1, x]        W - mean
    delta      W~ of the last step [e, x]            W - W~, and W~ moves by it

    packed = encode(own_ex, base_ex, k)                owner, after the optimizer
    w_sx   = gathered(own_ex, packed, base_sx, axes)   own experts stay exact

Gradients go back as from an all_gather of weights: summed whole to the owner (straight-
through), or as entries too (moejax.moe.weights.gradient_compression).

residual is HybridEP's (arXiv 2510.19470, IV-B: its shared expert is the mean) and the
baseline that delta is measured against; delta is ours, after EF21 (Richtarik et al.
2021, arXiv 2106.05203) and EF21-P.

Letters: x the weights of one expert, flat; k its entries; e own experts; s experts of
the domain, in the row-major order of its axes. More in docs/compression.md.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, UInt8

from moejax.kernels import varying_alike

Weights = dict[str, Array]

LONGEST_BLOCK = 256
"""A place in such a block is one byte. Each block has as many entries: where weights
of one differ most, some stay behind for the next step."""


@struct.dataclass
class Packed:
    """Entries of experts: distinct places and what is added there, blocks in order."""

    value_ek: Float[Array, "e k"]
    index_ek: Int[Array, "e k"]
    """In the whole expert; on the wire, in its block."""
    blocks: int = struct.field(pytree_node=False, default=1)


def num_blocks(size: int, longest: int = LONGEST_BLOCK) -> int:
    """The fewest equal blocks of at most `longest` weights that an expert is cut in."""
    return next(b for b in range(-(-size // longest), size + 1) if not size % b)


def index_bytes(size: int, blocks: int) -> int:
    """What a place in a block takes on the wire."""
    longest = size // blocks
    return 1 if longest <= 2**8 else 2 if longest <= 2**16 else 4


def num_entries(
    size: int,
    ratio: float,
    value_bytes: int,
    index_bytes: int,
    weight_bytes: int | None = None,
    blocks: int = 1,
) -> int:
    """k: the most entries, as many in each block, that take at most 1/ratio of the
    bytes of the expert as it is.

    weight_bytes: of a weight that moves as it is; None: as much as a value. Raises
    ValueError where not one entry per block fits.

    >>> num_entries(98304, 50, 2, 2)
    983
    >>> num_entries(98304, 50, 2, 2, blocks=12)  # 81 in each
    972
    """
    whole = size * (weight_bytes or value_bytes)
    entry_bytes = value_bytes + index_bytes
    k = int(whole // ratio) // (entry_bytes * blocks) * blocks
    if k < 1:
        raise ValueError(
            f"one entry in each of {blocks} blocks takes {entry_bytes * blocks} bytes "
            f"and an expert of {size} weights at ratio={ratio:g} {whole / ratio:.6g}: "
            f"use at most ratio={whole / entry_bytes / blocks:g}, or fewer blocks"
        )
    return min(k, size)


def wire_bytes(num_experts: int, k: int, value_bytes: int, index_bytes: int) -> int:
    """What one device sends of so many experts to one other."""
    return num_experts * k * (value_bytes + index_bytes)


def flat(joined: Weights) -> Float[Array, "e x"]:
    """Experts as rows, of into_ed2f and down_efd."""
    e = joined["down"].shape[0]
    parts = [joined[name].reshape(e, -1) for name in ("into", "down")]
    return jnp.concatenate(parts, axis=1)


def unflat(w_sx: Float[Array, "s x"], d_model: int) -> Weights:
    """into_sd2f and down_sfd again."""
    s, size = w_sx.shape
    f = size // (3 * d_model)
    into_sx, down_sx = jnp.split(w_sx, [2 * d_model * f], axis=1)
    into_sd2f = into_sx.reshape(s, d_model, 2, f)
    return {"into": into_sd2f, "down": down_sx.reshape(s, f, d_model)}


def shared_mean(own_ex: Array, group: tuple[str, ...]) -> Float[Array, "1 x"]:
    """The mean of a group's experts: an all-reduce of one. No other base that all
    devices know leaves as small a sum of squares."""
    return jax.lax.pmean(jnp.mean(own_ex, axis=0, keepdims=True), group)


@jax.named_scope("compress")
def encode(
    target_ex: Float[Array, "e x"],
    base_ex: Float[Array, "#e x"],
    k: int,
    value_dtype: str = "bfloat16",
    blocks: int = 1,
) -> Packed:
    """The k entries of each expert that differ most from the base, k / blocks in each
    block; of equals, the first.

    The target is rounded to the base's dtype first: what receivers cannot hold would be
    sent again and again.
    """
    dtype, target_ex = wide(base_ex.dtype), target_ex.astype(base_ex.dtype)
    diff_ex = target_ex.astype(dtype) - base_ex.astype(dtype)
    e, size = diff_ex.shape
    apart_ebx = jnp.abs(diff_ex).reshape(e, blocks, size // blocks)
    _, place_ebk = jax.lax.top_k(apart_ebx, k // blocks)
    index_ek = place_ebk.reshape(e, k) + _block_start_k(k, size, blocks)
    value_ek = jnp.take_along_axis(diff_ex, index_ek, axis=1)
    return Packed(_rounded(value_ek, value_dtype), index_ek, blocks)


@jax.named_scope("compress")
def decode(base_ex: Float[Array, "#e x"], packed: Packed) -> Float[Array, "e x"]:
    """The base with each entry added where it belongs, in the base's dtype: the same
    bits wherever it is done."""
    e, size = packed.value_ek.shape[0], base_ex.shape[1]
    base_ex = jnp.broadcast_to(base_ex, (e, size))
    arrays = base_ex, packed.value_ek, packed.index_ek
    base_ex, value_ek, index_ek = varying_alike(*arrays)
    dtype = wide(base_ex.dtype)
    if value_ek.dtype.itemsize > 1:  # 8-bit floats promote to nothing by themselves
        dtype = jnp.promote_types(dtype, value_ek.dtype)
    at_ek = jnp.take_along_axis(base_ex, index_ek, axis=1).astype(dtype)
    new_ek = _rounded(at_ek + value_ek.astype(dtype), base_ex.dtype)
    row_e1 = jnp.arange(e, dtype=jnp.int32)[:, None]
    return base_ex.at[row_e1, index_ek].set(new_ek, unique_indices=True)


def received(
    packed: Packed, base_sx: Float[Array, "#s x"], axes: tuple[str, ...]
) -> Float[Array, "s x"]:
    """W~ of all experts of a domain: its members' entries, gathered, decoded.

    axes: of the domain, the slow one first; one collective each. A base that is typed
    as the same on all members gives a W~ that is: for 'delta', the next base.
    """
    size = base_sx.shape[1]
    words = to_words(packed, size)
    with jax.named_scope("gather_experts"):
        for dim, axis in enumerate(axes):
            words = jax.lax.all_gather(words, axis, axis=dim, to="invarying")
    words = words.reshape(-1, words.shape[-1])
    came = from_words(words, packed.value_ek.dtype, size, packed.blocks)
    return decode(base_sx, came)


def with_own(
    own_ex: Float[Array, "e x"], tracked_sx: Float[Array, "s x"], axes: tuple[str, ...]
) -> Float[Array, "s x"]:
    """A domain's experts: own ones as they are, the others' as tracked, in own dtype.

    The gradient of own_ex is what an all_gather of weights would give: that of all
    copies, summed by reduce-scatter. None goes to `tracked_sx`.
    """
    tracked_sx = jax.lax.stop_gradient(tracked_sx).astype(own_ex.dtype)
    return _with_own(*varying_alike(own_ex, tracked_sx), axes)


def gathered(
    own_ex: Float[Array, "e x"],
    packed: Packed,
    base_sx: Float[Array, "#s x"],
    axes: tuple[str, ...],
) -> Float[Array, "s x"]:
    """`with_own` of what is `received`, inside shard_map."""
    packed, base_sx = jax.lax.stop_gradient((packed, base_sx))
    return with_own(own_ex, received(packed, base_sx, axes), axes)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _with_own(own_ex, tracked_sx, axes):
    first = jax.lax.axis_index(axes) * own_ex.shape[0]
    return jax.lax.dynamic_update_slice_in_dim(tracked_sx, own_ex, first, axis=0)


def _with_own_forward(own_ex, tracked_sx, axes):
    return _with_own(own_ex, tracked_sx, axes), None


def _with_own_backward(axes, _, d_sx):
    sizes = [jax.lax.axis_size(axis) for axis in axes]
    d_sx = d_sx.reshape(*sizes, -1, d_sx.shape[1])
    for dim in reversed(range(len(axes))):  # fast axes first: slow ones carry the least
        d_sx = jax.lax.psum_scatter(d_sx, axes[dim], scatter_dimension=dim)
    return d_sx, None


_with_own.defvjp(_with_own_forward, _with_own_backward)


def to_words(packed: Packed, size: int) -> UInt8[Array, "e words"]:
    """One buffer of values, then of places in blocks: exactly `wire_bytes`."""
    e, k = packed.value_ek.shape
    place_ek = packed.index_ek - _block_start_k(k, size, packed.blocks)
    place_ek = place_ek.astype(f"uint{8 * index_bytes(size, packed.blocks)}")
    halves = (_bits(array, jnp.uint8) for array in (packed.value_ek, place_ek))
    return jnp.concatenate([half.reshape(e, -1) for half in halves], axis=1)


def from_words(
    words: UInt8[Array, "e words"], value_dtype, size: int, blocks: int
) -> Packed:
    """What `to_words` packed."""
    value_bytes, place_bytes = value_dtype.itemsize, index_bytes(size, blocks)
    k = words.shape[1] // (value_bytes + place_bytes)
    value, place = jnp.split(words, [k * value_bytes], axis=1)
    place_ek = _from_bits(place, k, f"uint{8 * place_bytes}").astype(jnp.int32)
    index_ek = place_ek + _block_start_k(k, size, blocks)
    return Packed(_from_bits(value, k, value_dtype), index_ek, blocks)


_bits = jax.lax.bitcast_convert_type


def _from_bits(words: Array, k: int, dtype) -> Array:
    whole = words if words.shape[1] == k else words.reshape(len(words), k, -1)
    return _bits(whole, dtype)


def _block_start_k(k: int, size: int, blocks: int) -> Int[Array, " k"]:
    """Where the block of each entry starts: entries lie block after block."""
    return jnp.arange(k, dtype=jnp.int32) // (k // blocks) * (size // blocks)


def _rounded(value: Array, dtype) -> Array:
    """In a dtype, and rounded for sure: XLA may drop a cast down and up again
    (xla_allow_excess_precision), and sender and receiver would part."""
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(value, info.nexp, info.nmant).astype(dtype)


def wide(dtype):
    """In what differences and sums are taken: float32 at least."""
    return jnp.promote_types(dtype, jnp.float32)
