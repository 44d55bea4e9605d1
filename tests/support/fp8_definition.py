"""Define quantization to 8-bit values and grouped products of it, in NumPy and float64.

Tests compare moejax/kernels with these definitions.
"""

import math

import ml_dtypes
import numpy as np

FORMATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def rounded(array, fp8: str, block: tuple[int, int]) -> np.ndarray:
    """Return the values that an array has after rounding to 8 bits, one scale for each
    block of the last two dims.

    A block with a value that is not finite becomes NaN.
    """
    array = np.asarray(array).astype(np.float64)
    result = np.empty_like(array)
    for outer in np.ndindex(array.shape[:-2]):
        for row in range(0, array.shape[-2], block[0]):
            for column in range(0, array.shape[-1], block[1]):
                rows, columns = (
                    slice(row, row + block[0]),
                    slice(column, column + block[1]),
                )
                at = (*outer, rows, columns)
                result[at] = _round_block(array[at], FORMATS[fp8])
    return result


def power_of_two_scale(largest: float, dtype) -> float:
    """Return the smallest power of two, at least 2**-63, for which `largest` divided by
    it is in the range of the format."""
    if not math.isfinite(largest):
        return math.nan
    max_value, scale = float(ml_dtypes.finfo(dtype).max), 2.0**-63
    while largest / scale > max_value:
        scale *= 2
    return scale


def _round_block(block: np.ndarray, dtype) -> np.ndarray:
    """Return a block after rounding to 8 bits with one scale, in float64."""
    scale = power_of_two_scale(np.abs(block).max(), dtype)
    return (block / scale).astype(dtype).astype(np.float64) * scale


def rounded_rows(x_md, fp8: str = "e4m3") -> np.ndarray:
    """Return rows after rounding, one scale for each 128 values of a row."""
    return rounded(x_md, fp8, (1, 128))


def rounded_matrices(w_gdf) -> np.ndarray:
    """Return matrices after rounding, one scale for each block of 128 x 128."""
    return rounded(w_gdf, "e4m3", (128, 128))


def forward(x_md, w_gdf, rows_g) -> np.ndarray:
    """Return the grouped product of rounded rows and rounded matrices."""
    return product(rounded_rows(x_md), rounded_matrices(w_gdf), rows_g)


def dgrad(dy_mf, w_gdf, rows_g, fp8: str) -> np.ndarray:
    """Return the gradient to rows, from rounded dy_mf and rounded matrices."""
    w_gfd = np.swapaxes(rounded_matrices(w_gdf), 1, 2)
    return product(rounded_rows(dy_mf, fp8), w_gfd, rows_g)


def wgrad(x_md, dy_mf, rows_g) -> np.ndarray:
    """Return the gradient to matrices, from arrays that are not rounded."""
    x_md, dy_mf = (np.asarray(a).astype(np.float64) for a in (x_md, dy_mf))
    return np.stack([x_md[s].T @ dy_mf[s] for s in spans(rows_g)])


def product(x_md, w_gdf, rows_g) -> np.ndarray:
    """Return each group's rows times the group's matrix; padding gives zeros."""
    y_mf = np.zeros((len(x_md), w_gdf.shape[2]))
    for span, w_df in zip(spans(rows_g), w_gdf, strict=True):
        y_mf[span] = x_md[span] @ w_df
    return y_mf


def spans(rows_g) -> list[slice]:
    """Return the slice of rows of each group."""
    ends = np.cumsum(rows_g)
    return [slice(end - rows, end) for rows, end in zip(rows_g, ends, strict=True)]
