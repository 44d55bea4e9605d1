"""Top-k compression of the expert weights that move inside a domain.

The other members of a domain hold an estimate W~ of each expert. After the optimizer,
an owner sends the k largest entries of W - W~ of each of its experts, and all members
add them to W~.

    packed      = encode(own_ex, base_ex, k)         at the owner; base_ex: its own W~
    tracked_sx  = receive(packed, tracked_sx, axes)  the next W~ of all experts
    w_sx        = insert_own(own_ex, tracked_sx, axes)   own experts stay exact

Gradients go back as from an all_gather of the weights, as if the estimates were exact
(straight-through), and are summed whole at the owner.

Compression is HybridEP's idea (arXiv 2510.19470, section IV-B), which sends the largest
entries of W minus the mean of all experts, and keeps no state. Here it is top-k with
error feedback after EF21 (Richtarik et al. 2021, arXiv 2106.05203) and EF21-P: what was
not sent is still in W - W~.

Letters: x counts the weights of one expert, laid out flat; k its entries; e own
experts; s experts of the domain, in the row-major order of its axes.
docs/compression.md has more.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, UInt8

from moejax.kernels import varying_alike

ExpertWeights = dict[str, Array]
"""Weights of experts by name.

Parameters are gate_edf, up_edf and down_efd (moejax.moe.weights.stores.EXPERT_PARAMS).
Slots are `into` (gate beside up, [s, d, 2, f]) and `down` ([s, f, d]).
"""

MAX_BLOCK_SIZE = 256
"""Number of weights in a block, at most, so that an index in a block is one byte.

All blocks send the same number of entries. A block with more large differences than
that leaves some of them for the next step.
"""


@struct.dataclass
class Packed:
    """Compressed experts: k distinct indices each, and the value to add at each index.

    Entries are in the order of their blocks.
    """

    value_ek: Float[Array, "e k"]
    index_ek: Int[Array, "e k"]
    """Indices into the whole expert. They are sent as offsets into their blocks."""
    blocks: int = struct.field(pytree_node=False, default=1)
    """Number of equal blocks that each expert is cut into."""


def num_blocks(size: int, max_size: int = MAX_BLOCK_SIZE) -> int:
    """Return the smallest number of equal blocks of at most `max_size` weights into
    which an expert of `size` weights can be cut."""
    return next(b for b in range(-(-size // max_size), size + 1) if not size % b)


def index_bytes(size: int, blocks: int) -> int:
    """Return the number of bytes of an entry's index, which is its offset into one of
    `blocks` equal blocks of an expert's `size` weights."""
    block_size = size // blocks
    return 1 if block_size <= 2**8 else 2 if block_size <= 2**16 else 4


def num_entries(
    size: int,
    ratio: float,
    value_bytes: int,
    index_bytes: int,
    weight_bytes: int | None = None,
    blocks: int = 1,
) -> int:
    """Return k, the largest number of entries that take at most 1/ratio of the bytes of
    an uncompressed expert.

    Every block has the same number of entries. `weight_bytes` is the size of a weight
    that travels uncompressed; None means `value_bytes`. Raise ValueError if not even
    one entry per block fits.

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
            f"one entry in each of {blocks} blocks takes {entry_bytes * blocks} bytes, "
            f"but at ratio={ratio:g} an expert of {size} weights may take only "
            f"{whole / ratio:.6g} bytes: use at most "
            f"ratio={whole / entry_bytes / blocks:g}, or fewer blocks"
        )
    return min(k, size)


def wire_bytes(num_experts: int, k: int, value_bytes: int, index_bytes: int) -> int:
    """Return the bytes that a device sends to one other device for `num_experts`
    compressed experts."""
    return num_experts * k * (value_bytes + index_bytes)


def flatten(joined: ExpertWeights) -> Float[Array, "e x"]:
    """Return the weights `into` and `down` as one row per expert."""
    e = joined["down"].shape[0]
    parts = [joined[name].reshape(e, -1) for name in ("into", "down")]
    return jnp.concatenate(parts, axis=1)


def unflatten(w_sx: Float[Array, "s x"], d_model: int) -> ExpertWeights:
    """Return the weights `into` and `down` from one row per expert."""
    s, size = w_sx.shape
    f = size // (3 * d_model)
    into_sx, down_sx = jnp.split(w_sx, [2 * d_model * f], axis=1)
    into_sd2f = into_sx.reshape(s, d_model, 2, f)
    return {"into": into_sd2f, "down": down_sx.reshape(s, f, d_model)}


@jax.named_scope("compress")
def encode(
    target_ex: Float[Array, "e x"],
    base_ex: Float[Array, "#e x"],
    k: int,
    value_dtype: str = "bfloat16",
    blocks: int = 1,
) -> Packed:
    """Pack the k entries of each expert that differ most from the base.

    Each block contributes k / blocks entries. If differences are equal, the first is
    taken. The target is first rounded to the dtype of the base. Otherwise differences
    that the receivers cannot represent would be sent again in every step.
    """
    dtype = sum_dtype(base_ex.dtype)
    target_ex = target_ex.astype(base_ex.dtype)
    diff_ex = target_ex.astype(dtype) - base_ex.astype(dtype)
    e, size = diff_ex.shape
    distance_ebx = jnp.abs(diff_ex).reshape(e, blocks, size // blocks)
    _, offset_ebk = jax.lax.top_k(distance_ebx, k // blocks)
    index_ek = offset_ebk.reshape(e, k) + _block_start_k(k, size, blocks)
    value_ek = jnp.take_along_axis(diff_ex, index_ek, axis=1)
    return Packed(_round_to(value_ek, value_dtype), index_ek, blocks)


@jax.named_scope("compress")
def decode(base_ex: Float[Array, "#e x"], packed: Packed) -> Float[Array, "e x"]:
    """Return the base with each entry added at its index, in the dtype of the base.

    Every device that decodes the same entries onto the same base gets the same bits.
    """
    e, size = packed.value_ek.shape[0], base_ex.shape[1]
    base_ex = jnp.broadcast_to(base_ex, (e, size))
    arrays = base_ex, packed.value_ek, packed.index_ek
    base_ex, value_ek, index_ek = varying_alike(*arrays)
    dtype = sum_dtype(base_ex.dtype)
    if value_ek.dtype.itemsize > 1:  # JAX promotes no 8-bit float implicitly
        dtype = jnp.promote_types(dtype, value_ek.dtype)
    old_ek = jnp.take_along_axis(base_ex, index_ek, axis=1).astype(dtype)
    new_ek = _round_to(old_ek + value_ek.astype(dtype), base_ex.dtype)
    row_e1 = jnp.arange(e, dtype=jnp.int32)[:, None]
    return base_ex.at[row_e1, index_ek].set(new_ek, unique_indices=True)


def receive(
    packed: Packed, base_sx: Float[Array, "#s x"], axes: tuple[str, ...]
) -> Float[Array, "s x"]:
    """Gather the entries of a domain's members, and decode them: the estimates W~ of
    all its experts.

    `axes` are those of the domain, the slowest first; each takes one collective. If the
    base is typed as equal on all members, so is the result, which is the next base.
    """
    size = base_sx.shape[1]
    words = to_words(packed, size)
    with jax.named_scope("gather_experts"):
        for dim, axis in enumerate(axes):
            words = jax.lax.all_gather(words, axis, axis=dim, to="invarying")
    words = words.reshape(-1, words.shape[-1])
    every = from_words(words, packed.value_ek.dtype, size, packed.blocks)
    return decode(base_sx, every)


def insert_own(
    own_ex: Float[Array, "e x"], tracked_sx: Float[Array, "s x"], axes: tuple[str, ...]
) -> Float[Array, "s x"]:
    """Return all experts of a domain: this device's own exactly, the others estimated.

    All have the dtype of `own_ex`. The gradient of `own_ex` is the one that an
    all_gather of weights would give: the sum over all copies, by reduce-scatter.
    `tracked_sx`, the estimates, gets no gradient.
    """
    tracked_sx = jax.lax.stop_gradient(tracked_sx).astype(own_ex.dtype)
    return _insert_own(*varying_alike(own_ex, tracked_sx), axes)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _insert_own(own_ex, tracked_sx, axes):
    first = jax.lax.axis_index(axes) * own_ex.shape[0]
    return jax.lax.dynamic_update_slice_in_dim(tracked_sx, own_ex, first, axis=0)


def _insert_own_forward(own_ex, tracked_sx, axes):
    return _insert_own(own_ex, tracked_sx, axes), None


def _insert_own_backward(axes, _, d_sx):
    sizes = [jax.lax.axis_size(axis) for axis in axes]
    d_sx = d_sx.reshape(*sizes, -1, d_sx.shape[1])
    for dim in reversed(range(len(axes))):  # fast axes first: slow links carry least
        d_sx = jax.lax.psum_scatter(d_sx, axes[dim], scatter_dimension=dim)
    return d_sx, None


_insert_own.defvjp(_insert_own_forward, _insert_own_backward)


def to_words(packed: Packed, size: int) -> UInt8[Array, "e words"]:
    """Return entries as one buffer of bytes: all values, then all offsets in blocks.

    The buffer has exactly `wire_bytes` bytes.
    """
    e, k = packed.value_ek.shape
    offset_ek = packed.index_ek - _block_start_k(k, size, packed.blocks)
    offset_ek = offset_ek.astype(f"uint{8 * index_bytes(size, packed.blocks)}")
    halves = (_bits(array, jnp.uint8) for array in (packed.value_ek, offset_ek))
    return jnp.concatenate([half.reshape(e, -1) for half in halves], axis=1)


def from_words(
    words: UInt8[Array, "e words"], value_dtype, size: int, blocks: int
) -> Packed:
    """Return the entries from a buffer that `to_words` made."""
    value_bytes, offset_bytes = value_dtype.itemsize, index_bytes(size, blocks)
    k = words.shape[1] // (value_bytes + offset_bytes)
    value, offset = jnp.split(words, [k * value_bytes], axis=1)
    offset_ek = _from_bits(offset, k, f"uint{8 * offset_bytes}").astype(jnp.int32)
    index_ek = offset_ek + _block_start_k(k, size, blocks)
    return Packed(_from_bits(value, k, value_dtype), index_ek, blocks)


_bits = jax.lax.bitcast_convert_type


def _from_bits(words: Array, k: int, dtype) -> Array:
    """Return bytes as k numbers of a dtype per row."""
    whole = words if words.shape[1] == k else words.reshape(len(words), k, -1)
    return _bits(whole, dtype)


def _block_start_k(k: int, size: int, blocks: int) -> Int[Array, " k"]:
    """Return the index at which the block of each entry starts."""
    return jnp.arange(k, dtype=jnp.int32) // (k // blocks) * (size // blocks)


def _round_to(value: Array, dtype) -> Array:
    """Round values to a dtype, explicitly.

    XLA may drop a cast to a narrower dtype and back (xla_allow_excess_precision). The
    sender's and the receivers' estimates would then differ.
    """
    info = jnp.finfo(dtype)
    return jax.lax.reduce_precision(value, info.nexp, info.nmant).astype(dtype)


def sum_dtype(dtype):
    """Return the dtype in which differences and sums are computed: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)
