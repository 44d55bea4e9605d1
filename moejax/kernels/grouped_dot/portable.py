"""The three grouped products as loops over blocks that hold rows, for any XLA device.

    rows of x     | group 0: 940 rows                 | group 1: 90 | group 3: 40 |
    blocks of 512 | 512 whole | 256 whole | tail 192  | tail of 96  | tail of 64  |

Trip counts are known at run time only: empty groups and padding cost nothing. A
group's matrix is sliced once. Its blocks begin at the group's own first row; the whole
ones need no mask, and what remains goes through one tail block of the least sufficient
of a few sizes, masked by selection (never by a product: padding may hold NaN).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moejax.kernels import zeros_varying_as
from moejax.kernels.grouped_dot.products import Products, composed

TAIL_ROWS = (32, 64, 96, 128, 160, 192, 224, 256)
"""Sizes of tail blocks, up to the block's own. What fills up the tails was most of what
a product cost above a dense one; but each size is compiled in every product."""


def products(block_rows: int | None = None) -> Products:
    """Return the products with blocks of this many rows, or else of the default."""

    def of(product: Callable) -> Callable:
        def bound(*arrays: Array) -> Array:
            num_rows, num_groups = arrays[0].shape[0], arrays[-1].shape[0]
            rows = block_rows or default_block_rows(num_rows, num_groups)
            return product(*arrays, min(rows, num_rows))

        return bound

    return composed(of(forward), of(dgrad), of(wgrad))


def default_block_rows(num_rows: int, num_groups: int) -> int:
    """The power of two above the mean rows of a group, within 128 to 512."""
    mean = max(1, num_rows // num_groups)
    return min(512, max(128, 1 << mean.bit_length()))


def forward(
    x_md: Float[Array, "m d"],
    w_gdf: Float[Array, "g d f"],
    rows_g: Int[Array, " g"],
    block_rows: int,
) -> Float[Array, "m f"]:
    """x @ w of each row's group; zero in rows past sum(rows_g). block_rows <= m."""
    return _rows_product(x_md, w_gdf, rows_g, block_rows, contract_w=0)


def dgrad(
    dy_mf: Float[Array, "m f"],
    w_gdf: Float[Array, "g d f"],
    rows_g: Int[Array, " g"],
    block_rows: int,
) -> Float[Array, "m d"]:
    """dy @ w.T of each row's group; zero in rows past sum(rows_g)."""
    return _rows_product(dy_mf, w_gdf, rows_g, block_rows, contract_w=1)


def wgrad(
    x_md: Float[Array, "m d"],
    dy_mf: Float[Array, "m f"],
    rows_g: Int[Array, " g"],
    block_rows: int,
) -> Float[Array, "g d f"]:
    """x.T @ dy over the rows of each group; zero for an empty group."""
    (num_rows, d), f = x_md.shape, dy_mf.shape[1]

    def contract(x_cd: Array, dy_cf: Array) -> Array:
        # Transposed by the copy that slices it, and not by the product: of the two
        # that XLA:CPU has, the one that takes no transposed left side is the faster.
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
        # The tail goes first: it makes the accumulator, without a pass of zeros.
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
    """Rows of x times their group's matrix, contracted over its dim `contract_w`."""
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
    """carry = of_group(group, first row, row past its last, carry), where not empty."""
    ends_g = jnp.cumsum(rows_g, dtype=jnp.int32)  # whatever the rows' dtype

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
    """Spans (first row, number of blocks, their rows) of the whole blocks of a group,
    of two sizes where a block is larger than any tail, and the first row behind."""
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
    """carry = of_block(first row, rows, carry) for each block of each span."""
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
    """tail(size, first) or nothing(first), with the least size that holds the rows of
    rest = (start, end, rows of the buffer). The block's first row is start, or what
    lies before it where the block would end outside of the buffer."""
    start, end, num_rows = rest
    largest = min(block_rows, TAIL_ROWS[-1])
    sizes = [size for size in TAIL_ROWS if size < largest] + [largest]
    size_b = jnp.array([0, *sizes], jnp.int32)
    which = jnp.sum(end - start > size_b, dtype=jnp.int32)
    first = jnp.minimum(start, num_rows - size_b[which])
    return lax.switch(which, [nothing] + [partial(tail, s) for s in sizes], first)


def _is_own(first: Array, size: int, start: Array, end: Array) -> Array:
    """Which of `size` rows from `first` lie in [start, end), as a column."""
    row_c1 = first + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    return (start <= row_c1) & (row_c1 < end)


def _take(x_md: Array, first: Array, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x_md, first, size, 0, allow_negative_indices=False)


def _put(y: Array, block: Array, first: tuple) -> Array:
    first = tuple(jnp.int32(index) for index in first)
    return lax.dynamic_update_slice(y, block, first, allow_negative_indices=False)


def _dot(x: Array, y: Array, contract: tuple[int, int]) -> Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=_accumulator(x))


def _accumulator(x: Array) -> jax.typing.DTypeLike:
    return jnp.promote_types(x.dtype, jnp.float32)
