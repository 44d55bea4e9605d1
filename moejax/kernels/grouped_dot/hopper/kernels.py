"""The grouped products on Hopper GPUs (Pallas, Mosaic GPU): WGMMA fed by TMA.

Operands and results are bfloat16 or float16, and sums are float32. The rows of each
group are a multiple of a tile's. Rows past sum(rows_g) are zero in results, and their
values have no effect. `declines` names the arrays that the kernels cannot take.
docs/kernels.md explains how the kernels work. Tests interpret and lower them, and
`pytest --gpu tests/kernels` runs them.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from moejax.kernels import device
from moejax.kernels.grouped_dot.fp8 import (
    BLOCK,
    FORWARD_DTYPE,
    GRADIENT_DTYPES,
    MATRIX_BLOCK,
    ROW_BLOCK,
    quantize,
)
from moejax.kernels.grouped_dot.hopper import fp8_kernel, rows_kernel, wgrad_kernel
from moejax.kernels.grouped_dot.hopper.ring import INTERPRET, KernelRun
from moejax.kernels.grouped_dot.hopper.rows_kernel import RowsProgram
from moejax.kernels.grouped_dot.products import Products, compose_products
from moejax.kernels.shapes import ProductShape
from moejax.kernels.tuning import FP8, TILE_ROWS, Pass, Tiles, tiles_for

__all__ = ["INTERPRET", "KernelRun", "declines", "products"]

DTYPES = ("bfloat16", "float16")
"""Names of the dtypes of operands and results."""
WIDTH_BYTES = 128
"""Width of the widest swizzle in bytes. Tiled copies (TMA) cut an array into tiles of
8 x WIDTH_BYTES, and Mosaic does not lower copies of an array that these do not divide:
the remainder of a row would be in the next row."""
MIN_ALIGN_ROWS = min(TILE_ROWS)
"""Smallest divisor of the rows of groups: the rows of the smallest tile."""
ON_DEVICE = KernelRun()
"""Run on the current device, with one block per multiprocessor."""


def declines(
    dtype: jax.typing.DTypeLike,
    align_rows: int,
    *widths: int,
    is_fp8: bool = False,
) -> str | None:
    """Return the reason why the kernels cannot multiply rows of this dtype and these
    widths, in groups whose rows are multiples of `align_rows`, or None if they can."""
    dtype = jnp.dtype(dtype)
    if dtype.name not in DTYPES:
        return f"dtype {dtype.name} is not one of {', '.join(DTYPES)}"
    multiple = WIDTH_BYTES // dtype.itemsize
    for width in widths:
        if width % multiple:
            return f"a width of {width} is not a multiple of {multiple} in {dtype.name}"
        if is_fp8 and width % BLOCK:
            return f"a width of {width} is not a multiple of {BLOCK}, a block in fp8"
    if align_rows % MIN_ALIGN_ROWS:
        return (
            f"groups begin at multiples of {align_rows} rows, not of the "
            f"{MIN_ALIGN_ROWS} of a tile"
        )
    return None


def products(
    run: KernelRun = ON_DEVICE, fp8: str = "none", align_rows: int = 1
) -> Products:
    """Return the products of these kernels; each call takes the tiles of its shape and
    device, which divide `align_rows`, as do the rows of every group.

    With fp8, SwiGLU is not fused into the products, and wgrad is the same as without
    fp8.
    """

    def with_tiles(which: Pass, product: Callable, dims: Callable) -> Callable:
        def call(*arrays):
            rows, rows_g = arrays[0], arrays[-1]
            widths = dims(*arrays)
            is_fp8 = which in FP8
            why = declines(rows.dtype, align_rows, *widths, is_fp8=is_fp8)
            if run.interpret is None:
                why = device.why_not_hopper() or why
            if why:
                raise NotImplementedError(f"{why}: use implementation='blocked'")
            shape = ProductShape(rows.shape[0], *widths, rows_g.shape[0])
            kind = device.device_here().device_kind
            tiles = tiles_for(which, shape, rows.dtype.name, kind, align_rows)
            return product(*arrays, tiles, run)

        return call

    def matrix_dims(_, w, *others):
        return w.shape[1:]

    tiled_wgrad = with_tiles("wgrad", wgrad, lambda x, dy, _: (x.shape[1], dy.shape[1]))
    if fp8 != "none":
        dgrad_in_format = functools.partial(fp8_dgrad, gradients=fp8)
        return compose_products(
            with_tiles("fp8_forward", fp8_forward, matrix_dims),
            with_tiles("fp8_dgrad", dgrad_in_format, matrix_dims),
            tiled_wgrad,
        )
    return Products(
        forward=with_tiles("forward", forward, matrix_dims),
        dgrad=with_tiles("dgrad", dgrad, matrix_dims),
        wgrad=tiled_wgrad,
        swiglu=with_tiles(
            "swiglu", swiglu, lambda x, into, _: (x.shape[1], into.shape[2] // 2)
        ),
        swiglu_dgrad=with_tiles(
            "swiglu_dgrad", swiglu_dgrad, lambda dy, down, *_: down.shape[1:][::-1]
        ),
    )


def forward(
    x_md: Float[Array, "m d"],
    w_gdf: Float[Array, "g d f"],
    rows_g: Int[Array, " g"],
    tiles: Tiles,
    run: KernelRun = ON_DEVICE,
) -> Float[Array, "m f"]:
    """Return x @ w with the matrix of each row's group."""
    return _product(x_md, w_gdf, rows_g, tiles, run, is_transposed=False)


def dgrad(
    dy_mf: Float[Array, "m f"],
    w_gdf: Float[Array, "g d f"],
    rows_g: Int[Array, " g"],
    tiles: Tiles,
    run: KernelRun = ON_DEVICE,
) -> Float[Array, "m d"]:
    """Return dy @ w.T with the matrix of each row's group. No transposed copy of w is
    made."""
    return _product(dy_mf, w_gdf, rows_g, tiles, run, is_transposed=True)


def wgrad(
    x_md: Float[Array, "m d"],
    dy_mf: Float[Array, "m f"],
    rows_g: Int[Array, " g"],
    tiles: Tiles,
    run: KernelRun = ON_DEVICE,
) -> Float[Array, "g d f"]:
    """Return x.T @ dy over the rows of each group; zero for an empty group."""
    return wgrad_kernel.call(x_md, dy_mf, rows_g, tiles, run)


def fp8_forward(
    x_md: Float[Array, "m d"],
    w_gdf: Float[Array, "g d f"],
    rows_g: Int[Array, " g"],
    tiles: Tiles,
    run: KernelRun = ON_DEVICE,
) -> Float[Array, "m f"]:
    """Return x @ w with the matrix of each row's group, both quantized to e4m3. XLA
    quantizes them first, and writes a transposed copy of w."""
    x = quantize(x_md, FORWARD_DTYPE, ROW_BLOCK)
    w = quantize(w_gdf, FORWARD_DTYPE, MATRIX_BLOCK)
    w = jax.tree.map(lambda a: jnp.swapaxes(a, 1, 2), w)
    return fp8_kernel.call(x, w, rows_g, x_md.dtype, tiles, run)


def fp8_dgrad(
    dy_mf: Float[Array, "m f"],
    w_gdf: Float[Array, "g d f"],
    rows_g: Int[Array, " g"],
    tiles: Tiles,
    run: KernelRun = ON_DEVICE,
    gradients: str = "e4m3",
) -> Float[Array, "m d"]:
    """Return dy @ w.T with the matrix of each row's group, with dy quantized to the
    format `gradients` and w to e4m3. No transposed copy of w is made."""
    dy = quantize(dy_mf, GRADIENT_DTYPES[gradients], ROW_BLOCK)
    w = quantize(w_gdf, FORWARD_DTYPE, MATRIX_BLOCK)
    return fp8_kernel.call(dy, w, rows_g, dy_mf.dtype, tiles, run)


def swiglu(
    x_md: Float[Array, "m d"],
    into_gdh: Float[Array, "g d 2f"],
    rows_g: Int[Array, " g"],
    tiles: Tiles,
    run: KernelRun = ON_DEVICE,
) -> tuple[Float[Array, "m f"], Float[Array, "m 2f"]]:
    """Return silu(gate) * up, and [gate, up] = x @ into with the matrix of each row's
    group, which the backward pass needs. A block computes the same columns of gate and
    of up."""
    (num_rows, d), num_groups = x_md.shape, into_gdh.shape[0]
    f = into_gdh.shape[2] // 2

    def finish(products, sources):
        # Round first: the backward pass reads rounded values and must get the same h.
        gate, up = (p.astype(x_md.dtype).astype(jnp.float32) for p in products)
        return gate * jax.nn.sigmoid(gate) * up, gate, up

    program = RowsProgram(
        tiles=tiles,
        is_transposed=False,
        num_steps=pl.cdiv(d, tiles.depth),
        num_groups=num_groups,
        num_columns=pl.cdiv(f, tiles.columns),
        finish=finish,
        products=(0, 1),
        results=((0, None), (1, 0), (1, 1)),
    )
    shapes = [(num_rows, f), (num_rows, 2, f)]
    into_gd2f = into_gdh.reshape(num_groups, d, 2, f)
    h_mf, into_m2f = rows_kernel.call(program, shapes, run, rows_g, x_md, into_gd2f)
    return h_mf, into_m2f.reshape(num_rows, 2 * f)


def swiglu_dgrad(
    dy_md: Float[Array, "m d"],
    down_gfd: Float[Array, "g f d"],
    into_mh: Float[Array, "m 2f"],
    rows_g: Int[Array, " g"],
    tiles: Tiles,
    run: KernelRun = ON_DEVICE,
) -> tuple[Float[Array, "m 2f"], Float[Array, "m f"]]:
    """Return the cotangent of [gate, up], and h = silu(gate) * up.

    dy is the cotangent of h @ down. h is computed again here because the forward pass
    does not save it and the gradient of down needs it. into_mh is a result of `swiglu`,
    and so zero in rows of padding.
    """
    (num_rows, d), (num_groups, f, _) = dy_md.shape, down_gfd.shape

    def finish(products, sources):
        (dh,), (gate, up) = products, sources
        sigmoid = jax.nn.sigmoid(gate)
        silu = gate * sigmoid
        dgate = dh * up * (sigmoid + silu * (1 - sigmoid))
        return dgate, dh * silu, silu * up

    program = RowsProgram(
        tiles=tiles,
        is_transposed=True,
        num_steps=pl.cdiv(d, tiles.depth),
        num_groups=num_groups,
        num_columns=pl.cdiv(f, tiles.columns),
        finish=finish,
        products=(None,),
        sources=(0, 1),
        results=((0, 0), (0, 1), (1, None)),
    )
    into_m2f = into_mh.reshape(num_rows, 2, f)
    shapes = [(num_rows, 2, f), (num_rows, f)]
    arrays = dy_md, down_gfd, into_m2f
    dinto_m2f, h_mf = rows_kernel.call(program, shapes, run, rows_g, *arrays)
    return dinto_m2f.reshape(num_rows, 2 * f), h_mf


def _product(x, w, rows_g, tiles, run, *, is_transposed):
    """Multiply each row of x by the matrix of its group, or by its transpose."""
    num_rows, depth = x.shape
    width = w.shape[1 if is_transposed else 2]
    program = RowsProgram(
        tiles=tiles,
        is_transposed=is_transposed,
        num_steps=pl.cdiv(depth, tiles.depth),
        num_groups=w.shape[0],
        num_columns=pl.cdiv(width, tiles.columns),
        finish=lambda products, sources: products,
        products=(None,),
    )
    (y,) = rows_kernel.call(program, [(num_rows, width)], run, rows_g, x, w)
    return y
