"""The three grouped products as loops over blocks of rows, for any XLA device.

    rows of x     | group 0: 940 rows                 | group 1: 90 | group 3: 40 |
    blocks of 512 | 512 whole | 256 whole | tail 192  | tail of 96  | tail of 64  |

Loops have trip counts that are known at run time only, so that empty groups and padding
cost nothing. The matrix of a group is sliced once. Blocks begin at the group's own
first row. Whole blocks need no mask. The remaining rows are computed in one tail block,
of the smallest of a few sizes that holds them. Its other rows are masked by selection,
and never by a product with zero, because padding may hold NaN.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moejax.kernels import zeros_varying_as
from moejax.kernels.grouped_dot.products import Products, compose_products

TAIL_ROWS = (32, 64, 96, 128, 160, 192, 224, 256)
"""Numbers of rows that a tail block can have, up to the rows of a whole block. Many
sizes leave few rows unused, and unused rows were most of the cost above a dense
product; but each size is compiled in every product."""


def products(block_rows: int | None = None) -> Products:
    """Return the products with blocks of `block_rows` rows, or of a default number."""

    def with_block_rows(product: Callable) -> Callable:
        def call(*arrays: Array) -> Array:
            num_rows, num_groups = arrays[0].shape[0], arrays[-1].shape[0]
            rows = block_rows or default_block_rows(num_rows, num_groups)
            return product(*arrays, min(rows, num_rows))

        return call

    return compose_products(*map(with_block_rows, (forward, dgrad, wgrad)))


def default_block_rows(num_rows: int, num_groups: int) -> int:
    """Return the smallest power of two above the mean rows of a group, limited to 128
    to 512."""
    mean = max(1, num_rows // num_groups)
    return min(512, max(128, 1 << mean.bit_length()))


def forward(
    x_md: Float[Array, "m d"],
    w_gdf: Float[Array, "g d f"],
    rows_g: Int[Array, " g"],
    block_rows: int,
) -> Float[Array, "m f"]:
    """Return x @ w with the matrix of each row's group; zero in rows past sum(rows_g).
    block_rows must be at most m."""
    return _rows_product(x_md, w_gdf, rows_g, block_rows, contract_w=0)


def dgrad(
    dy_mf: Float[Array, "m f"],
    w_gdf: Float[Array, "g d f"],
    rows_g: Int[Array, " g"],
    block_rows: int,
) -> Float[Array, "m d"]:
    """Return dy @ w.T with the matrix of each row's group; zero in rows past
    sum(rows_g)."""
    return _rows_product(dy_mf, w_gdf, rows_g, block_rows, contract_w=1)


def wgrad(
    x_md: Float[Array, "m d"],
    dy_mf: Float[Array, "m f"],
    rows_g: Int[Array, " g"],
    block_rows: int,
) -> Float[Array, "g d f"]:
    """Return x.T @ dy over the rows of each group; zero for an empty group."""
    (num_rows, d), f = x_md.shape, dy_mf.shape[1]

    def contract(x_cd: Array, dy_cf: Array) -> Array:
        # The barrier makes the copy that slices x transpose it, not the product.
        # XLA:CPU has two products, and the faster one takes no transposed left side.
        return _dot(lax.optimization_barrier(x_cd.T), dy_cf, contract=(1, 0))

    def of_group(group: Array, start: Array, end: Array, dw_gdf: Array) -> Array:
        def tail(size: int, first: Array) -> Array:
            is_own_c1 = _is_own(first, size, start_tail, end)
            x_cd, dy_cf = (_take(a, first, size) for a in (x_md, dy_mf))
            return contract(
                jnp.where(is_own_c1, x_cd, 0), jnp.where(is_own_c1, dy_cf, 0)
            )

        def add_block(first: Array, size: int, dw_df: Array) -> Array:
            x_cd, dy_cf = (_take(a, first, size) for a in (x_md, dy_mf))
            return dw_df + contract(x_cd, dy_cf)

        spans, start_tail = _whole_blocks(start, end, block_rows)
        shape = (d, f), _accumulator(x_md)
        # The tail comes first and makes the accumulator, which saves writing zeros.
        dw_df = _switch_tail(
            (start_tail, end, num_rows),
            block_rows,
            tail,
            lambda _: zeros_varying_as(dw_gdf, *shape),
        )
        dw_df = _for_each_block(spans, add_block, dw_df)
        return _put(dw_gdf, dw_df[None].astype(dw_gdf.dtype), (group, 0, 0))

    dw_gdf = zeros_varying_as(x_md, (rows_g.shape[0], d, f), x_md.dtype)
    return _for_each_group(rows_g, of_group, dw_gdf)


def _rows_product(
    x_md: Array, w_gdf: Array, rows_g: Array, block_rows: int, contract_w: int
) -> Array:
    """Return the rows of x times the matrix of their group, contracted over dim
    `contract_w` of the matrix."""
    num_rows = x_md.shape[0]
    width_out = w_gdf.shape[2 - contract_w]

    def of_group(group: Array, start: Array, end: Array, y_mf: Array) -> Array:
        w_df = lax.dynamic_index_in_dim(
            w_gdf, group, 0, keepdims=False, allow_negative_indices=False
        )

        def product(first: Array, size: int) -> Array:
            x_cd = _take(x_md, first, size)
            return _dot(x_cd, w_df, contract=(1, contract_w)).astype(x_md.dtype)

        def whole(first: Array, size: int, y_mf: Array) -> Array:
            return _put(y_mf, product(first, size), (first, 0))

        def tail(size: int, first: Array) -> Array:
            is_own_c1 = _is_own(first, size, start_tail, end)
            y_cf = jnp.where(is_own_c1, product(first, size), _take(y_mf, first, size))
            return _put(y_mf, y_cf, (first, 0))

        spans, start_tail = _whole_blocks(start, end, block_rows)
        y_mf = _for_each_block(spans, whole, y_mf)
        rest = start_tail, end, num_rows
        return _switch_tail(rest, block_rows, tail, lambda _: y_mf)

    y_mf = zeros_varying_as(x_md, (num_rows, width_out), x_md.dtype)
    return _for_each_group(rows_g, of_group, y_mf)


def _for_each_group(
    rows_g: Array, of_group: Callable[[Array, Array, Array, Array], Array], carry: Array
) -> Array:
    """Loop over the groups that have rows, and return the last carry.

    Each iteration computes carry = of_group(group, start, end, carry), where start is
    the group's first row and end the row after its last one.
    """
    ends_g = jnp.cumsum(rows_g, dtype=jnp.int32)  # int32 for any dtype of rows_g

    def has_rows(state: tuple[Array, Array]) -> Array:
        return state[0] < ends_g[-1]

    def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
        start, carry = state
        group = jnp.sum(ends_g <= start, dtype=jnp.int32)  # the owner of row `start`
        end = lax.dynamic_index_in_dim(
            ends_g, group, keepdims=False, allow_negative_indices=False
        )
        return end, of_group(group, start, end, carry)

    start = zeros_varying_as(ends_g, (), ends_g.dtype)
    return lax.while_loop(has_rows, body, (start, carry))[1]


def _whole_blocks(
    start: Array, end: Array, block_rows: int
) -> tuple[list[tuple[Array, Array, int]], Array]:
    """Return the spans of whole blocks of the group with rows [start, end), and the
    first row after them.

    A span is (first row, number of blocks, rows of a block). Blocks have two sizes if a
    whole block is larger than the largest tail.
    """
    spans = []
    for size in sorted({block_rows, min(block_rows, TAIL_ROWS[-1])}, reverse=True):
        num_blocks = lax.div(end - start, jnp.int32(size))
        spans.append((start, num_blocks, size))
        start = start + num_blocks * size
    return spans, start


def _for_each_block(
    spans: list[tuple[Array, Array, int]],
    of_block: Callable[[Array, int, Array], Array],
    carry: Array,
) -> Array:
    """Loop over the blocks of all spans with carry = of_block(first row, rows, carry),
    and return the last carry."""
    for start, num_blocks, size in spans:

        def body(i, carry, start=start, size=size):
            return of_block(start + i * size, size, carry)

        carry = lax.fori_loop(0, num_blocks, body, carry)
    return carry


def _switch_tail(
    rest: tuple[Array, Array, int],
    block_rows: int,
    tail: Callable[[int, Array], Array],
    nothing: Callable[[Array], Array],
) -> Array:
    """Return tail(size, first) for the remaining rows of a group, or nothing(first) if
    there are none.

    `rest` is (start, end, number of rows of the buffer), and size is the smallest tail
    size that holds the rows [start, end). The block begins at row start, or earlier
    where it would otherwise end outside of the buffer.
    """
    start, end, num_rows = rest
    largest = min(block_rows, TAIL_ROWS[-1])
    sizes = [size for size in TAIL_ROWS if size < largest] + [largest]
    size_b = jnp.array([0, *sizes], jnp.int32)
    which = jnp.sum(end - start > size_b, dtype=jnp.int32)
    first = jnp.minimum(start, num_rows - size_b[which])
    return lax.switch(which, [nothing] + [partial(tail, s) for s in sizes], first)


def _is_own(first: Array, size: int, start: Array, end: Array) -> Array:
    """Return which of the `size` rows from row `first` are in [start, end), bool
    [size, 1]."""
    row_c1 = first + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    return (start <= row_c1) & (row_c1 < end)


def _take(x_md: Array, first: Array, size: int) -> Array:
    """Return `size` rows of x from row `first`."""
    return lax.dynamic_slice_in_dim(x_md, first, size, 0, allow_negative_indices=False)


def _put(y: Array, block: Array, first: tuple) -> Array:
    """Return y with a block written at the indices `first`."""
    first = tuple(jnp.int32(index) for index in first)
    return lax.dynamic_update_slice(y, block, first, allow_negative_indices=False)


def _dot(x: Array, y: Array, contract: tuple[int, int]) -> Array:
    """Return the product of two matrices over the dims `contract` of x and of y, in the
    accumulator's dtype."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=_accumulator(x))


def _accumulator(x: Array) -> jax.typing.DTypeLike:
    """Return the dtype of sums over x: float32 or wider."""
    return jnp.promote_types(x.dtype, jnp.float32)
