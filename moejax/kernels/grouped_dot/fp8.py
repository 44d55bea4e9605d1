"""Quantization to 8-bit floats with one power-of-two scale per block.

An array is represented by 8-bit values and scales; it is approximately values * scale.

    x_md, dy_mf    a block is 128 values of one row           scales [m, d / 128]
    w_gdf          a block is 128 x 128 values of a matrix    scales [g, d/128, f/128]

Blocks are those of DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), but each scale is a
power of two: the smallest one with which the block's largest value fits the format.
Dividing by it is exact, so that rounding to 8 bits is the only error. The product
values * scale is exact in bfloat16 and in float32, and quantizing it again gives the
same values. A matrix and its transpose have the same values. Where 128 does not divide
a width, the last block is smaller.

A block that holds a NaN or an infinity becomes NaN as a whole, so that a gradient that
is not finite is still detected. Blocks never span rows of x or dy, so values in padding
rows do not reach other rows.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

BLOCK = 128
"""Number of values along each quantized dim of a block."""
FORWARD_DTYPE = jnp.float8_e4m3fn
"""8-bit dtype of x and w."""
GRADIENT_DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
"""8-bit dtype of dy, by the value of the option `fp8`."""
ROW_BLOCK, MATRIX_BLOCK = (1, BLOCK), (BLOCK, BLOCK)
"""Shapes of a block of x or dy, and of a block of w, in the last two dims."""
DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes of arrays that can be quantized."""
MIN_EXPONENT = -63
"""Minimum exponent of a scale. With it, the product of two scales is a normal float32.
A block whose largest value is below 448 * 2**-63, 5e-17, loses precision."""
MANTISSA_BITS, EXPONENT_BIAS = 23, 127
"""Layout of a float32."""
LARGEST_MANTISSA = 0x600000
"""Mantissa bits, as a float32, of the largest value of either format, which is 1.75
times a power of two."""


class Quantized(NamedTuple):
    """Array quantized to 8 bits: approximately values * scale, block by block."""

    values: Array
    """8-bit floats, with the shape of the array."""
    scale: Float[Array, "... b c"]
    """Scale of each block, float32."""


def quantize(array: Array, dtype, block: tuple[int, int]) -> Quantized:
    """Return an array quantized to an 8-bit dtype, in blocks of this shape of its last
    two dims. Each value is the nearest one under its block's scale."""
    blocks = _blocks(array, block).astype(jnp.float32)
    scale = _power_of_two_scale(jnp.max(jnp.abs(blocks), axis=(-3, -1)), dtype)
    values = (blocks / _spread(scale)).astype(dtype)
    return Quantized(_unblock(values, array.shape), scale)


def round_to_fp8(array: Array, dtype, block: tuple[int, int]) -> Array:
    """Return the array quantized as by `quantize` and converted back.

    The result is bfloat16 for a bfloat16 array and float32 otherwise, also for float16,
    whose range can be too small for a rounded value.
    """
    values, scale = quantize(array, dtype, block)
    # Without the barrier, XLA for GPUs removes the conversion to 8 bits and back
    # (xla_allow_excess_precision).
    values = lax.optimization_barrier(values)
    wide = _blocks(values, block).astype(jnp.float32) * _spread(scale)
    result_dtype = jnp.bfloat16 if array.dtype == jnp.bfloat16 else jnp.float32
    return _unblock(wide, array.shape).astype(result_dtype)


def round_rows(x_md: Array, dtype=FORWARD_DTYPE) -> Array:
    """Return rows rounded to 8-bit values, with a scale for 128 values of a row."""
    return round_to_fp8(x_md, dtype, ROW_BLOCK)


def round_matrices(w_gdf: Array) -> Array:
    """Return matrices rounded to e4m3, with a scale for 128 x 128 values."""
    return round_to_fp8(w_gdf, FORWARD_DTYPE, MATRIX_BLOCK)


def check_option(fp8: str, dtype) -> None:
    """Raise ValueError unless `fp8` is 'none', or names a format of gradients and
    arrays of `dtype` can be quantized."""
    if fp8 not in ("none", *GRADIENT_DTYPES):
        raise ValueError(
            f"fp8={fp8!r} is not one of none, {', '.join(GRADIENT_DTYPES)}"
        )
    if fp8 != "none" and jnp.dtype(dtype).name not in DTYPES:
        raise ValueError(
            f"fp8={fp8!r} rounds arrays of {', '.join(DTYPES)}, and x_md is {dtype}: "
            "cast it, or use fp8='none'"
        )


def _power_of_two_scale(largest: Array, dtype) -> Array:
    """Return the smallest power of two that is at least `largest` divided by the
    format's largest value, and at least 2**MIN_EXPONENT; NaN where `largest` is not
    finite."""
    top = int(np.log2(float(jnp.finfo(dtype).max)))
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    mantissa = bits & ((1 << MANTISSA_BITS) - 1)
    exponent = (bits >> MANTISSA_BITS) - EXPONENT_BIAS - top
    exponent = jnp.maximum(exponent + (mantissa > LARGEST_MANTISSA), MIN_EXPONENT)
    scale = lax.bitcast_convert_type(
        (exponent + EXPONENT_BIAS) << MANTISSA_BITS, jnp.float32
    )
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def _blocks(array: Array, block: tuple[int, int]) -> Array:
    """Return the array reshaped to [.., blocks, height, blocks, width], with zeros that
    fill up the last block of each dim."""
    *outer, height, width = array.shape
    missing = [(0, -size % step) for size, step in zip((height, width), block)]
    if any(after for _, after in missing):
        array = jnp.pad(array, [(0, 0)] * len(outer) + missing)
    high, wide = (size // step for size, step in zip(array.shape[-2:], block))
    return array.reshape(*outer, high, block[0], wide, block[1])


def _spread(scale: Array) -> Array:
    """Return scales reshaped so that they broadcast over the values of their blocks."""
    return scale[..., :, None, :, None]


def _unblock(blocks: Array, shape: tuple[int, ...]) -> Array:
    """Return the array of this shape whose _blocks are given."""
    *outer, high, block_height, wide, block_width = blocks.shape
    array = blocks.reshape(*outer, high * block_height, wide * block_width)
    return array[..., : shape[-2], : shape[-1]]
