"""Loops over the rows of groups in blocks, for any XLA device, and what a block does.

    rows of x     | group 0: 940 rows                 | group 1: 90 | group 3: 40 |
    blocks of 512 | 512 whole | 256 whole | tail 192  | tail of 96  | tail of 64  |

Loops have trip counts that are known at run time only, so that empty groups and padding
cost nothing. Blocks begin at the group's own first row. Whole blocks need no mask. The
remaining rows are computed in one tail block, of the smallest of a few sizes that holds
them. Its other rows are masked by selection, and never by a product with zero, because
padding may hold NaN.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from moejax.kernels import zeros_varying_as

TAIL_ROWS = (32, 64, 96, 128, 160, 192, 224, 256)
"""Numbers of rows that a tail block can have, up to the rows of a whole block. Many
sizes leave few rows unused, and unused rows were most of the cost above a dense
product; but each size is compiled in every product."""
Carry = Any
"""Array, or tree of arrays, that a loop hands on."""


def default_block_rows(num_rows: int, num_groups: int) -> int:
    """Return the smallest power of two above the mean rows of a group, limited to 128
    to 512."""
    mean = max(1, num_rows // num_groups)
    return min(512, max(128, 1 << mean.bit_length()))


def for_each_group(
    rows_g: Array, of_group: Callable[[Array, Array, Array, Carry], Carry], carry: Carry
) -> Carry:
    """Loop over the groups that have rows, and return the last carry.

    Each iteration computes carry = of_group(group, start, end, carry), where start is
    the group's first row and end the row after its last one.
    """
    ends_g = jnp.cumsum(rows_g, dtype=jnp.int32)  # int32 for any dtype of rows_g

    def has_rows(state: tuple[Array, Carry]) -> Array:
        return state[0] < ends_g[-1]

    def body(state: tuple[Array, Carry]) -> tuple[Array, Carry]:
        start, carry = state
        group = jnp.sum(ends_g <= start, dtype=jnp.int32)  # the owner of row `start`
        end = lax.dynamic_index_in_dim(
            ends_g, group, keepdims=False, allow_negative_indices=False
        )
        return end, of_group(group, start, end, carry)

    start = zeros_varying_as(ends_g, (), ends_g.dtype)
    return lax.while_loop(has_rows, body, (start, carry))[1]


class Tail(NamedTuple):
    """The rows of a group that are in no whole block, which one tail block computes."""

    start: Array
    """The first of them."""
    end: Array
    """The row after the last one."""
    num_rows: int
    """Number of rows of the buffer."""
    sizes: tuple[int, ...]
    """Numbers of rows that the block may have, the smallest first."""

    def block(self, size: int) -> tuple[Array, Array]:
        """Return the first row of a block of `size` rows that holds the tail, and which
        rows of the block belong to it, bool [size, 1]. The block begins at the tail's
        first row, or earlier where it would otherwise end outside of the buffer."""
        first = jnp.minimum(self.start, self.num_rows - size)
        return first, is_own(first, size, self.start, self.end)

    def switch(self, compute: Callable[[int], Carry], nothing: Carry) -> Carry:
        """Return compute(size) for the smallest size that holds the tail, or `nothing`
        if there is none. Results must be small: XLA:CPU copies what branches return."""
        size_b = jnp.array([0, *self.sizes], jnp.int32)
        which = jnp.sum(self.end - self.start > size_b, dtype=jnp.int32)
        branches = [partial(compute, size) for size in self.sizes]
        return lax.switch(which, [lambda: nothing, *branches])

    def in_window(self, block: Array) -> Array:
        """Return a block's rows in a window of the largest size, zeros in the others:
        all sizes have results of one shape."""
        most = self.sizes[-1]
        window = zeros_varying_as(block, (most, *block.shape[1:]), block.dtype)
        shift = self.block(len(block))[0] - self.block(most)[0]
        return put(window, block, (shift, 0))

    def put(self, y: Array, window: Array) -> Array:
        """Return y with the tail's rows, from the window that has them."""
        first, is_own_c1 = self.block(len(window))
        here = take(y, first, len(window))
        return put(y, jnp.where(is_own_c1, window, here), (first, 0))


def whole_blocks(
    start: Array, end: Array, block_rows: int, num_rows: int
) -> tuple[list[tuple[Array, Array, int]], Tail]:
    """Return the spans of whole blocks of the group with rows [start, end) of a buffer
    of `num_rows`, and the rows after them.

    A span is (first row, number of blocks, rows of a block). Blocks have two sizes if a
    whole block is larger than the largest tail.
    """
    spans = []
    for size in sorted({block_rows, min(block_rows, TAIL_ROWS[-1])}, reverse=True):
        num_blocks = lax.div(end - start, jnp.int32(size))
        spans.append((start, num_blocks, size))
        start = start + num_blocks * size
    largest = min(block_rows, TAIL_ROWS[-1])
    sizes = (*(size for size in TAIL_ROWS if size < largest), largest)
    return spans, Tail(start, end, num_rows, sizes)


def for_each_block(
    spans: list[tuple[Array, Array, int]],
    of_block: Callable[[Array, int, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Loop over the blocks of all spans with carry = of_block(first row, rows, carry),
    and return the last carry."""
    for start, num_blocks, size in spans:

        def body(i, carry, start=start, size=size):
            return of_block(start + i * size, size, carry)

        carry = lax.fori_loop(0, num_blocks, body, carry)
    return carry


def zeros_of(x: Array, shape: tuple[int, ...]) -> Array:
    """Return zeros of x's dtype that vary over the same mesh axes, made where they are
    used: those of a loop over layers would be made once before it, and copied."""
    zero, _ = lax.optimization_barrier((zeros_varying_as(x, (), x.dtype), x))
    return jnp.broadcast_to(zero, shape)


def is_own(first: Array, size: int, start: Array, end: Array) -> Array:
    """Return which of the `size` rows from row `first` are in [start, end), bool
    [size, 1]."""
    row_c1 = first + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    return (start <= row_c1) & (row_c1 < end)


def take(x_md: Array, first: Array, size: int) -> Array:
    """Return `size` rows of x from row `first`."""
    return lax.dynamic_slice_in_dim(x_md, first, size, 0, allow_negative_indices=False)


def put(y: Array, block: Array, first: tuple) -> Array:
    """Return y with a block written at the indices `first`."""
    first = tuple(jnp.int32(index) for index in first)
    return lax.dynamic_update_slice(y, block, first, allow_negative_indices=False)


def matrix_of(w_gdf: Array, group: Array) -> Array:
    """Return the matrix of a group."""
    return lax.dynamic_index_in_dim(
        w_gdf, group, 0, keepdims=False, allow_negative_indices=False
    )


def dot(x: Array, y: Array, contract: tuple[int, int]) -> Array:
    """Return the product of two matrices over the dims `contract` of x and of y, in the
    accumulator's dtype."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=accumulator(x))


def outer(x_cd: Array, dy_cf: Array) -> Array:
    """Return x.T @ dy over the rows of a block."""
    # The barrier makes the copy that slices x transpose it, not the product. XLA:CPU
    # has two products, and the faster one takes no transposed left side.
    return dot(lax.optimization_barrier(x_cd.T), dy_cf, contract=(1, 0))


def accumulator(x: Array) -> jax.typing.DTypeLike:
    """Return the dtype of sums over x: float32 or wider."""
    return jnp.promote_types(x.dtype, jnp.float32)
