"""The vocabulary in slices: the embedding, and the parts of a vocabulary-parallel head.

    rows of a table [v, d]
    where it is stored   split over (data, expert, tensor), float32
    where it is used     split over (expert, tensor): each device gathers its slice
                         along data, in the compute dtype

The *group* of a device are those along expert. Each has tokens of its own, and computes
with its slice for the tokens of the whole group (Shoeybi et al. 2019, Megatron-LM,
section 3, where a group has the same tokens). So hidden states travel between the
devices of a group, and the table does not.

A vocabulary that the devices do not divide is stored as other matrices are, and padded
with rows of zeros where it is used. Gradients are summed in float32, or the dtype of
the hidden states if it is wider, and in a fixed order.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from moejax.axes import BATCH_AXES, DATA, DC, EXPERT, TENSOR, VOCAB_AXES, axis_size
from moejax.moe.weights.gather import reduce_scatter, sum_own

SLICE_AXES = (EXPERT, TENSOR)
"""The rows of a table are split over these where it is used."""
TABLE = P(VOCAB_AXES)
"""PartitionSpec of a padded table."""
BATCH = P(BATCH_AXES)
"""PartitionSpec of tokens and hidden states."""
BLOCK = 32
"""Number of sorted rows that `sum_rows` sums in one product, or a multiple of it."""
COLUMNS = 256
"""Largest number of columns that `sum_rows` sums at a time, which bounds its memory."""


@dataclasses.dataclass(frozen=True)
class Slices:
    """The slices of a vocabulary on a mesh. A slice is one block of rows from each of
    the devices along data; blocks are in the order of VOCAB_AXES.

    Methods but `pad` are for the inside of a shard_map over the mesh.
    """

    mesh: Mesh
    vocab_size: int

    @property
    def block_size(self) -> int:
        """Number of rows that a device stores, padding included."""
        return -(-self.vocab_size // axis_size(self.mesh, VOCAB_AXES))

    @property
    def num_rows(self) -> int:
        """Number of rows in a slice, padding included."""
        return self.block_size * self.mesh.shape[DATA]

    def pad(self, table_vd: Float[Array, "v d"]) -> Float[Array, "v d"]:
        """Return the table with rows of zeros at the end, so that blocks are equal."""
        size = self.block_size * axis_size(self.mesh, VOCAB_AXES)
        return jnp.pad(table_vd, ((0, size - self.vocab_size), (0, 0)))

    def gather(self, block_vd: Float[Array, "v d"], dtype) -> Float[Array, "v d"]:
        """Return the slice of this device in `dtype`, from the block it stores."""
        return jax.lax.all_gather(block_vd.astype(dtype), DATA, tiled=True)

    def sum_gradient(self, grad_vd: Float[Array, "v d"]) -> Float[Array, "v d"]:
        """Sum the gradients of one slice over the devices along data and dc that have
        it, and return the part for this device's block."""
        grad_wx = grad_vd.reshape(jax.lax.axis_size(DATA), -1)
        block_vd = sum_own(grad_wx, (DATA,), "float32").reshape(self.block_size, -1)
        return jax.lax.psum(block_vd, DC)

    def row_of(self, token_m: Int[Array, " m"]) -> Int[Array, " m"]:
        """Return the row in this device's slice of each token, and -1 for tokens of
        other slices."""
        block_m, row_m = jnp.divmod(token_m, self.block_size)
        data_m, owner_m = jnp.divmod(block_m, axis_size(self.mesh, SLICE_AXES))
        is_own_m = owner_m == jax.lax.axis_index(SLICE_AXES)
        return jnp.where(is_own_m, data_m * self.block_size + row_m, -1)

    def is_real(self) -> Array:
        """Return for each row of this device's slice whether it is no padding."""
        data_v, row_v = jnp.divmod(jnp.arange(self.num_rows), self.block_size)
        block_v = data_v * axis_size(self.mesh, SLICE_AXES)
        block_v = block_v + jax.lax.axis_index(SLICE_AXES)
        return block_v * self.block_size + row_v < self.vocab_size


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
@jax.named_scope("embedding")
def embed(
    table_vd: Float[Array, "v d"], tokens_bt: Int[Array, "b t"], slices: Slices, dtype
) -> Float[Array, "b t d"]:
    """Return the rows of the tokens, in `dtype`.

    Each device looks up the tokens of its group in its slice, with zeros for tokens of
    other slices, and the sum of all devices goes home. The sum is exact, because one
    addend is not zero.
    """

    def body(block_vd, tokens_bt):
        slice_vd = slices.gather(block_vd, dtype)
        row_m = slices.row_of(gather_group(tokens_bt.reshape(-1)))
        x_md = jnp.where(row_m[:, None] >= 0, slice_vd[jnp.maximum(row_m, 0)], 0)
        x_wnd = x_md.reshape(jax.lax.axis_size(EXPERT), -1, x_md.shape[-1])
        x_nd = reduce_scatter(x_wnd, EXPERT)
        return jax.lax.psum(x_nd, TENSOR).reshape(*tokens_bt.shape, -1)

    args = slices.pad(table_vd), tokens_bt
    return jax.shard_map(
        body, mesh=slices.mesh, in_specs=(TABLE, BATCH), out_specs=BATCH
    )(*args)


def _embed_forward(table_vd, tokens_bt, slices, dtype):
    return embed(table_vd, tokens_bt, slices, dtype), (tokens_bt, table_vd[:0])


@jax.named_scope("embedding")
def _embed_backward(slices, dtype, saved, d_x_btd):
    tokens_bt, no_rows_vd = saved

    def body(tokens_bt, d_x_btd):
        row_m = slices.row_of(gather_group(tokens_bt.reshape(-1)))
        d_x_md = gather_group(d_x_btd.reshape(-1, d_x_btd.shape[-1]))
        return slices.sum_gradient(sum_rows(d_x_md, row_m, slices.num_rows))

    grad_vd = jax.shard_map(
        body, mesh=slices.mesh, in_specs=(BATCH, BATCH), out_specs=TABLE
    )(tokens_bt, d_x_btd)
    return grad_vd[: slices.vocab_size].astype(no_rows_vd.dtype), None


embed.defvjp(_embed_forward, _embed_backward)


def sum_rows(
    x_md: Float[Array, "m d"], row_m: Int[Array, " m"], num_rows: int
) -> Float[Array, "v d"]:
    """Return for each of `num_rows` rows the sum of the x with its number; -1 is none.

    The sums are in float32, or the dtype of x if it is wider, and in a fixed order: a
    scatter on a GPU would add in a random one. Sorted by row, x is cut into blocks, and
    a product with zeros and ones sums each row's part of a block. Parts of a row that
    goes on from one block to the next are summed by a second such product. The sum is
    then where the row begins.

    Columns are summed one equal part after the other, the last one padded. Blocks of k
    take m k zeros and ones, and the second product (m / k)^2: k is some m^(1/3).
    """
    wide = jnp.promote_types(x_md.dtype, jnp.float32)
    row_m = jnp.where(row_m < 0, num_rows, row_m)
    order_m = jnp.argsort(row_m, stable=True)
    row_bk = _in_blocks(row_m[order_m], num_rows)
    is_new_bk = jnp.diff(row_bk, axis=1, prepend=-1) != 0
    is_same_bkk = row_bk[:, :, None] == row_bk[:, None]
    hit_bkk = (is_new_bk[:, :, None] & is_same_bkk).astype(x_md.dtype)

    # The last row of a block collects the parts at the beginning of later blocks.
    first_b, last_b = row_bk[:, 0], row_bk[:, -1]
    continues_b = first_b == jnp.roll(last_b, 1).at[0].set(-1)
    starts_b = ~(continues_b & (first_b == last_b))
    is_part_bb = (last_b[:, None] == first_b) & continues_b & starts_b[:, None]
    is_last_bk = is_new_bk & (row_bk == last_b[:, None])
    begin_v = jnp.searchsorted(row_bk.reshape(-1), jnp.arange(num_rows))
    begin_v = jnp.minimum(begin_v, row_bk.size - 1)
    is_there_v = row_bk.reshape(-1)[begin_v] == jnp.arange(num_rows)
    precise = {"precision": jax.lax.Precision.HIGHEST, "preferred_element_type": wide}

    def sum_columns(x_md):
        x_bkd = _in_blocks(x_md[order_m], 0)
        sum_bkd = jnp.einsum("bkj,bjd->bkd", hit_bkk, x_bkd, **precise)
        first_bd = sum_bkd[:, 0]
        more_bd = jnp.einsum("bc,cd->bd", is_part_bb.astype(wide), first_bd, **precise)
        sum_bkd += jnp.where(is_last_bk[..., None], more_bd[:, None], 0)
        sum_md = sum_bkd.reshape(row_bk.size, -1)
        return jnp.where(is_there_v[:, None], sum_md[begin_v], 0)

    d = x_md.shape[1]
    num_parts = -(-d // COLUMNS)
    if num_parts == 1:
        return sum_columns(x_md)
    columns = -(-d // num_parts)
    x_md = jnp.pad(x_md, ((0, 0), (0, num_parts * columns - d)))
    sum_cvd = jax.lax.map(
        lambda start: sum_columns(
            jax.lax.dynamic_slice_in_dim(x_md, start, columns, axis=1)
        ),
        columns * jnp.arange(num_parts),
    )
    return sum_cvd.swapaxes(0, 1).reshape(num_rows, -1)[:, :d]


def _in_blocks(x: Array, fill) -> Array:
    """Return x [m, ..] as blocks [b, k, ..], the last one padded with `fill`."""
    k = min(BLOCK * max(1, round(len(x) ** (1 / 3) / BLOCK)), len(x))
    widths = ((0, -len(x) % k), *((0, 0),) * (x.ndim - 1))
    return jnp.pad(x, widths, constant_values=fill).reshape(-1, k, *x.shape[1:])


def gather_group(x: Array, axis: int = 0) -> Array:
    """Return the values of all devices of the group, joined along a dim."""
    return jax.lax.all_gather(x, EXPERT, axis=axis, tiled=True)
