"""The three grouped products as loops over blocks of rows (blocks.py), for any XLA
device, and the SwiGLU expert of its group in one such loop for each pass.

The matrix of a group is sliced once. An expert in one loop leaves no array of its
hidden width but the one that the backward pass reads, and computes nothing for rows
that no group owns.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.kernels import zeros_varying_as
from moejax.kernels.grouped_dot.blocks import (
    accumulator,
    default_block_rows,
    dot,
    for_each_block,
    for_each_group,
    matrix_of,
    outer,
    put,
    take,
    whole_blocks,
    zeros_of,
)
from moejax.kernels.grouped_dot.products import (
    Experts,
    Products,
    activate,
    activation_gradient,
    compose_products,
)


def products(block_rows: int | None = None) -> Products:
    """Return the products with blocks of `block_rows` rows, or of a default number."""

    def with_block_rows(product: Callable) -> Callable:
        def call(*arrays: Array) -> Array:
            num_rows, num_groups = arrays[0].shape[0], arrays[-1].shape[0]
            rows = block_rows or default_block_rows(num_rows, num_groups)
            return product(*arrays, min(rows, num_rows))

        return call

    composed = compose_products(*map(with_block_rows, (forward, dgrad, wgrad)))
    passes = map(with_block_rows, (experts_forward, experts_backward))
    return composed._replace(experts=Experts(*passes))


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

    def of_group(group: Array, start: Array, end: Array, dw_gdf: Array) -> Array:
        def of_tail(size: int) -> Array:
            first, is_own_c1 = tail.block(size)
            x_cd, dy_cf = (take(a, first, size) for a in (x_md, dy_mf))
            return outer(jnp.where(is_own_c1, x_cd, 0), jnp.where(is_own_c1, dy_cf, 0))

        def add_block(first: Array, size: int, dw_df: Array) -> Array:
            x_cd, dy_cf = (take(a, first, size) for a in (x_md, dy_mf))
            return dw_df + outer(x_cd, dy_cf)

        spans, tail = whole_blocks(start, end, block_rows, num_rows)
        nothing = zeros_varying_as(dw_gdf, (d, f), accumulator(x_md))
        # The tail comes first and makes the accumulator, which saves writing zeros.
        dw_df = tail.switch(of_tail, nothing)
        dw_df = for_each_block(spans, add_block, dw_df)
        return put(dw_gdf, dw_df[None].astype(dw_gdf.dtype), (group, 0, 0))

    dw_gdf = zeros_varying_as(x_md, (rows_g.shape[0], d, f), x_md.dtype)
    return for_each_group(rows_g, of_group, dw_gdf)


def _rows_product(
    x_md: Array, w_gdf: Array, rows_g: Array, block_rows: int, contract_w: int
) -> Array:
    """Return the rows of x times the matrix of their group, contracted over dim
    `contract_w` of the matrix."""

    def rows_of(group: Array) -> Callable:
        w_df = matrix_of(w_gdf, group)

        def compute(first: Array, size: int) -> tuple[Array]:
            x_cd = take(x_md, first, size)
            return (dot(x_cd, w_df, contract=(1, contract_w)).astype(x_md.dtype),)

        return compute

    shape = x_md.shape[0], w_gdf.shape[2 - contract_w]
    zeros = (zeros_of(x_md, shape),)
    return _by_blocks(rows_g, rows_of, zeros, block_rows)[0]


def _by_blocks(
    rows_g: Array,
    rows_of: Callable[[Array], Callable[[Array, int], tuple[Array, ...]]],
    made: tuple[Array, ...],
    block_rows: int,
) -> tuple[Array, ...]:
    """Return arrays [m, ..] with the rows of all groups written into them, block by
    block: rows_of(group)(first row, number of rows) are those of a block."""

    def of_group(group: Array, start: Array, end: Array, made: tuple) -> tuple:
        compute = rows_of(group)

        def whole(first: Array, size: int, made: tuple) -> tuple:
            blocks = compute(first, size)
            return tuple(put(y, block, (first, 0)) for y, block in zip(made, blocks))

        def of_tail(size: int) -> tuple:
            blocks = compute(tail.block(size)[0], size)
            return tuple(tail.in_window(block) for block in blocks)

        spans, tail = whole_blocks(start, end, block_rows, len(made[0]))
        made = for_each_block(spans, whole, made)
        most = tail.sizes[-1]
        nothing = tuple(zeros_varying_as(y, (most, y.shape[1]), y.dtype) for y in made)
        return tuple(map(tail.put, made, tail.switch(of_tail, nothing)))

    return for_each_group(rows_g, of_group, made)


def experts_forward(
    x_md: Float[Array, "m d"],
    into_gdh: Float[Array, "g d h"],
    down_gfd: Float[Array, "g f d"],
    rows_g: Int[Array, " g"],
    block_rows: int,
) -> tuple[Float[Array, "m d"], Float[Array, "m h"]]:
    """Return the rows of x through the expert of their group, and into = [gate, up];
    zero in rows past sum(rows_g)."""

    def rows_of(group: Array) -> Callable:
        into_dh, down_fd = matrix_of(into_gdh, group), matrix_of(down_gfd, group)

        def compute(first: Array, size: int) -> tuple[Array, Array]:
            x_cd = take(x_md, first, size)
            into_ch = dot(x_cd, into_dh, contract=(1, 0)).astype(x_cd.dtype)
            y_cd = dot(activate(into_ch), down_fd, contract=(1, 0))
            return y_cd.astype(x_cd.dtype), into_ch

        return compute

    shapes = x_md.shape, (x_md.shape[0], into_gdh.shape[2])
    zeros = tuple(zeros_of(x_md, shape) for shape in shapes)
    return _by_blocks(rows_g, rows_of, zeros, block_rows)


def experts_backward(
    dy_md: Float[Array, "m d"],
    x_md: Float[Array, "m d"],
    into_mh: Float[Array, "m h"],
    into_gdh: Float[Array, "g d h"],
    down_gfd: Float[Array, "g f d"],
    rows_g: Int[Array, " g"],
    block_rows: int,
) -> tuple[Float[Array, "m d"], Float[Array, "g d h"], Float[Array, "g f d"]]:
    """Return the cotangents of x, into and down for the cotangent dy of the experts'
    result; zero in rows past sum(rows_g), and for an empty group."""
    num_rows = x_md.shape[0]

    def of_group(group: Array, start: Array, end: Array, made: tuple) -> tuple:
        into_dh, down_fd = matrix_of(into_gdh, group), matrix_of(down_gfd, group)
        dx_md, *dw_gs = made

        def compute(arrays: list[Array]) -> tuple[Array, Array, Array]:
            dy_cd, x_cd, into_ch = arrays
            dh_cf = dot(dy_cd, down_fd, contract=(1, 1)).astype(x_cd.dtype)
            dinto_ch, h_cf = activation_gradient(dh_cf, into_ch)
            dx_cd = dot(dinto_ch, into_dh, contract=(1, 1)).astype(x_cd.dtype)
            return dx_cd, outer(x_cd, dinto_ch), outer(h_cf, dy_cd)

        def taken(first: Array, size: int) -> list[Array]:
            return [take(a, first, size) for a in (dy_md, x_md, into_mh)]

        def of_tail(size: int) -> tuple:
            first, is_own_c1 = tail.block(size)
            owned = [jnp.where(is_own_c1, a, 0) for a in taken(first, size)]
            dx_cd, *dw = compute(owned)
            return tail.in_window(dx_cd), *dw

        def add_block(first: Array, size: int, sums: tuple) -> tuple:
            dx_md, *dw = sums
            dx_cd, *more = compute(taken(first, size))
            dw = (total + part for total, part in zip(dw, more))
            return put(dx_md, dx_cd, (first, 0)), *dw

        spans, tail = whole_blocks(start, end, block_rows, num_rows)
        shape = tail.sizes[-1], x_md.shape[1]
        nothing = (
            zeros_varying_as(dx_md, shape, x_md.dtype),
            *(zeros_varying_as(w, w.shape[1:], wide) for w in dw_gs),
        )
        # The tail comes first and makes the sums, which saves writing zeros.
        dx_cd, *dw = tail.switch(of_tail, nothing)
        dx_md = tail.put(dx_md, dx_cd)
        dx_md, *dw = for_each_block(spans, add_block, (dx_md, *dw))
        rows = (w[None].astype(w_g.dtype) for w, w_g in zip(dw, dw_gs))
        return dx_md, *(put(w_g, row, (group, 0, 0)) for w_g, row in zip(dw_gs, rows))

    wide = accumulator(x_md)
    like = (x_md, into_gdh, down_gfd)
    zeros = tuple(zeros_of(x_md, a.shape) for a in like)
    return for_each_group(rows_g, of_group, zeros)
