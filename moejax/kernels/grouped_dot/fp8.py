"""Arrays as 8-bit floats with a scale for each block, and what they stand for.

    x_md, dy_mf    a block is 128 values of one row         scales [m, d / 128]
    w_gdf          a block is 128 x 128 values of a matrix  [g, d / 128, f / 128]

Blocks as in DeepSeek-V3 (arXiv 2412.19437, section 3.3.2), but a scale is a power of
two: the least one that brings the block's largest value within the format. To divide
by it is exact, so that rounding to 8 bits is the only error; what the array stands for,
values times scale, is exact in bfloat16 and in float32, and rounding that once more
changes nothing. A matrix and its transpose have the same values. Where 128 does not
divide a width, the last block is smaller.

A block that holds a NaN or an infinity stands for NaN, all of it: a gradient that is
not finite stays seen. Rows never meet: what padding holds stays there.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

BLOCK = 128
VALUES = jnp.float8_e4m3fn
"""Of x and w."""
GRADIENTS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
"""Of dy, by the option's name."""
OF_ROWS, OF_MATRICES = (1, BLOCK), (BLOCK, BLOCK)
"""Shapes of a block, of the last two dims."""
DTYPES = ("float32", "bfloat16", "float16")
"""That have such values."""
MIN_EXPONENT = -63
"""Of a scale: the product of two is a normal float32. A block whose largest value is
below 448 * 2**-63, 5e-17, keeps fewer bits."""
MANTISSA_BITS, EXPONENT_BIAS = 23, 127
LARGEST_MANTISSA = 0x600000
"""The largest value of either format is 1.75 times a power of two: its bits."""


class Scaled(NamedTuple):
    """values * scale, block by block."""

    values: Array
    scale: Float[Array, "... b c"]
    """float32, one of each block."""


def scaled(array: Array, dtype, block: tuple[int, int]) -> Scaled:
    """The nearest values of an 8-bit dtype under the scale of their block."""
    parts = _parts(array, block).astype(jnp.float32)
    scale = _power_of_two_scale(jnp.max(jnp.abs(parts), axis=(-3, -1)), dtype)
    values = (parts / _spread(scale)).astype(dtype)
    return Scaled(_whole(values, array.shape), scale)


def rounded(array: Array, dtype, block: tuple[int, int]) -> Array:
    """What `scaled` stands for: in bfloat16 where the array is, else in float32, for
    float16 ends before the next power of two does."""
    values, scale = scaled(array, dtype, block)
    # XLA for GPUs drops a rounding that is widened again (xla_allow_excess_precision).
    values = lax.optimization_barrier(values)
    wide = _parts(values, block).astype(jnp.float32) * _spread(scale)
    kept = jnp.bfloat16 if array.dtype == jnp.bfloat16 else jnp.float32
    return _whole(wide, array.shape).astype(kept)


def rounded_rows(x_md: Array, dtype=VALUES) -> Array:
    return rounded(x_md, dtype, OF_ROWS)


def rounded_matrices(w_gdf: Array) -> Array:
    return rounded(w_gdf, VALUES, OF_MATRICES)


def check_option(fp8: str, dtype) -> None:
    """ValueError for another name, or arrays that have no 8-bit values."""
    if fp8 not in ("none", *GRADIENTS):
        raise ValueError(f"fp8={fp8!r} is not one of none, {', '.join(GRADIENTS)}")
    if fp8 != "none" and jnp.dtype(dtype).name not in DTYPES:
        raise ValueError(
            f"fp8={fp8!r} rounds arrays of {', '.join(DTYPES)}, and x_md is {dtype}: "
            "cast it, or use fp8='none'"
        )


def _power_of_two_scale(largest: Array, dtype) -> Array:
    """The least power of two that is `largest` over the format's largest or more."""
    top = int(np.log2(float(jnp.finfo(dtype).max)))
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    mantissa = bits & ((1 << MANTISSA_BITS) - 1)
    exponent = (bits >> MANTISSA_BITS) - EXPONENT_BIAS - top
    exponent = jnp.maximum(exponent + (mantissa > LARGEST_MANTISSA), MIN_EXPONENT)
    scale = lax.bitcast_convert_type(
        (exponent + EXPONENT_BIAS) << MANTISSA_BITS, jnp.float32
    )
    return jnp.where(jnp.isfinite(largest), scale, jnp.nan)


def _parts(array: Array, block: tuple[int, int]) -> Array:
    """[.., blocks, height, blocks, width]; zeros fill up the last of each."""
    *outer, height, width = array.shape
    missing = [(0, -size % step) for size, step in zip((height, width), block)]
    if any(after for _, after in missing):
        array = jnp.pad(array, [(0, 0)] * len(outer) + missing)
    high, wide = (size // step for size, step in zip(array.shape[-2:], block))
    return array.reshape(*outer, high, block[0], wide, block[1])


def _spread(scale: Array) -> Array:
    return scale[..., :, None, :, None]


def _whole(parts: Array, shape: tuple[int, ...]) -> Array:
    """The inverse of _parts."""
    *outer, high, block_height, wide, block_width = parts.shape
    whole = parts.reshape(*outer, high * block_height, wide * block_width)
    return whole[..., : shape[-2], : shape[-1]]
