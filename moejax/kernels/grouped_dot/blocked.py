"""The three grouped products as loops over blocks that hold rows, for any XLA device.

    rows of x     |  group 0: 700 rows         | group 1: 90   | group 3: 40 | padding
    blocks of 512 |  512 whole  |  tail of 192 | tail of 96    | tail of 64  |

Trip counts are known at run time only: empty groups and padding cost nothing. A
group's matrix is sliced once. Its blocks begin at the group's own first row; the whole
ones need no mask, and what remains goes through one tail block of the least sufficient
of a few sizes, masked by selection (never by a product: padding may hold NaN). One tail
call a group, because a call costs as much as some 30 rows: each packs the matrix again.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moejax.kernels import zeros_varying_as

TAIL_SIXTEENTHS = (2, 4, 8, 12, 16)
"""Sizes of tail blocks, in sixteenths of a block; more of them gained nothing in a
training step, and each is compiled in every product."""
MIN_TAIL_ROWS = 32
"""No smaller tail: a call costs as much as some 30 rows."""


def default_block_rows(num_rows: int, num_groups: int) -> int:
    """The power of two at or above the mean rows of a group, within 128 to 512."""
    mean = max(1, num_rows // num_groups)
    return min(512, max(128, 1 << (mean - 1).bit_length()))


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
        return _dot(x_cd, dy_cf, contract=(0, 0))

    def of_group(group: Array, start: Array, end: Array, dw_gdf: Array) -> Array:
        def tail(size: int) -> Array:
            first, is_own_c1 = _clamped(start_tail, end, size, num_rows)
            x_cd, dy_cf = (_take(a, first, size) for a in (x_md, dy_mf))
            return contract(
                jnp.where(is_own_c1, x_cd, 0), jnp.where(is_own_c1, dy_cf, 0)
            )

        def add_block(i: Array, dw_df: Array) -> Array:
            first = start + i * block_rows
            x_cd, dy_cf = (_take(a, first, block_rows) for a in (x_md, dy_mf))
            return dw_df + contract(x_cd, dy_cf)

        num_whole = (end - start) // block_rows
        start_tail = start + num_whole * block_rows
        nothing = partial(zeros_varying_as, dw_gdf, (d, f), _accumulator(x_md))
        # The tail goes first: it makes the accumulator, without a pass of zeros.
        dw_df = _switch_tail(end - start_tail, block_rows, tail, nothing)
        dw_df = lax.fori_loop(0, num_whole, add_block, dw_df)
        return lax.dynamic_update_index_in_dim(
            dw_gdf, dw_df.astype(dw_gdf.dtype), group, 0
        )

    dw_gdf = zeros_varying_as(x_md, (rows_g.shape[0], d, f), x_md.dtype)
    return _for_each_group(rows_g, of_group, dw_gdf)


def _rows_product(
    x_md: Array, w_gdf: Array, rows_g: Array, block_rows: int, contract_w: int
) -> Array:
    """Rows of x times their group's matrix, contracted over its dim `contract_w`."""
    num_rows = x_md.shape[0]
    width_out = w_gdf.shape[2 - contract_w]

    def of_group(group: Array, start: Array, end: Array, y_mf: Array) -> Array:
        w_df = lax.dynamic_index_in_dim(w_gdf, group, 0, keepdims=False)

        def product(first: Array, size: int) -> Array:
            x_cd = _take(x_md, first, size)
            return _dot(x_cd, w_df, contract=(1, contract_w)).astype(x_md.dtype)

        def whole(i: Array, y_mf: Array) -> Array:
            first = start + i * block_rows
            return lax.dynamic_update_slice(
                y_mf, product(first, block_rows), (first, 0)
            )

        def tail(size: int) -> Array:
            first, is_own_c1 = _clamped(start_tail, end, size, num_rows)
            y_cf = jnp.where(is_own_c1, product(first, size), _take(y_mf, first, size))
            return lax.dynamic_update_slice(y_mf, y_cf, (first, 0))

        num_whole = (end - start) // block_rows
        start_tail = start + num_whole * block_rows
        y_mf = lax.fori_loop(0, num_whole, whole, y_mf)
        return _switch_tail(end - start_tail, block_rows, tail, lambda: y_mf)

    y_mf = zeros_varying_as(x_md, (num_rows, width_out), x_md.dtype)
    return _for_each_group(rows_g, of_group, y_mf)


def _for_each_group(
    rows_g: Array, of_group: Callable[[Array, Array, Array, Array], Array], carry: Array
) -> Array:
    """carry = of_group(group, first row, row past its last, carry), where not empty."""
    ends_g = jnp.cumsum(rows_g)
    not_empty_first_g = jnp.argsort(rows_g == 0, stable=True)

    def body(i: Array, carry: Array) -> Array:
        group = not_empty_first_g[i]
        return of_group(group, ends_g[group] - rows_g[group], ends_g[group], carry)

    return lax.fori_loop(0, jnp.sum(rows_g > 0, dtype=jnp.int32), body, carry)


def _switch_tail(
    num_tail: Array,
    block_rows: int,
    tail: Callable[[int], Array],
    nothing: Callable[[], Array],
) -> Array:
    """tail(size) with the least size that holds num_tail rows, or nothing()."""
    least = min(MIN_TAIL_ROWS, block_rows)
    sizes = sorted({max(least, -(-n * block_rows // 16)) for n in TAIL_SIXTEENTHS})
    which = jnp.sum(num_tail > jnp.array([0, *sizes]), dtype=jnp.int32)
    return lax.switch(which, [nothing] + [partial(tail, size) for size in sizes])


def _clamped(start: Array, end: Array, size: int, num_rows: int) -> tuple[Array, Array]:
    """First row of a block of `size` that holds [start, end) and lies in the buffer,
    and which of its rows these are."""
    first = jnp.minimum(start, num_rows - size)
    row_c1 = first + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
    return first, (start <= row_c1) & (row_c1 < end)


def _take(x_md: Array, first: Array, size: int) -> Array:
    return lax.dynamic_slice_in_dim(x_md, first, size, 0)


def _dot(x: Array, y: Array, contract: tuple[int, int]) -> Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=_accumulator(x))


def _accumulator(x: Array) -> jax.typing.DTypeLike:
    return jnp.promote_types(x.dtype, jnp.float32)
