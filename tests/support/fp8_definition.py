"""Arrays as 8-bit values and what they stand for, once more: by NumPy, in float64."""

import math

import ml_dtypes
import numpy as np

FORMATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def rounded(array, fp8: str, block: tuple[int, int]) -> np.ndarray:
    """What blocks of the last two dims stand for; NaN where one is not finite."""
    array = np.asarray(array).astype(np.float64)
    found = np.empty_like(array)
    for outer in np.ndindex(array.shape[:-2]):
        for row in range(0, array.shape[-2], block[0]):
            for column in range(0, array.shape[-1], block[1]):
                rows, columns = (
                    slice(row, row + block[0]),
                    slice(column, column + block[1]),
                )
                at = (*outer, rows, columns)
                found[at] = _of_block(array[at], FORMATS[fp8])
    return found


def power_of_two_scale(largest: float, dtype) -> float:
    """The least power of two, from 2**-63 on, that brings `largest` into the format."""
    if not math.isfinite(largest):
        return math.nan
    most, scale = float(ml_dtypes.finfo(dtype).max), 2.0**-63
    while largest / scale > most:
        scale *= 2
    return scale


def _of_block(block: np.ndarray, dtype) -> np.ndarray:
    scale = power_of_two_scale(np.abs(block).max(), dtype)
    return (block / scale).astype(dtype).astype(np.float64) * scale


def rounded_rows(x_md, fp8: str = "e4m3") -> np.ndarray:
    return rounded(x_md, fp8, (1, 128))


def rounded_matrices(w_gdf) -> np.ndarray:
    return rounded(w_gdf, "e4m3", (128, 128))


def forward(x_md, w_gdf, rows_g) -> np.ndarray:
    return product(rounded_rows(x_md), rounded_matrices(w_gdf), rows_g)


def dgrad(dy_mf, w_gdf, rows_g, fp8: str) -> np.ndarray:
    w_gfd = np.swapaxes(rounded_matrices(w_gdf), 1, 2)
    return product(rounded_rows(dy_mf, fp8), w_gfd, rows_g)


def wgrad(x_md, dy_mf, rows_g) -> np.ndarray:
    """Of the arrays as they are."""
    x_md, dy_mf = (np.asarray(a).astype(np.float64) for a in (x_md, dy_mf))
    return np.stack([x_md[s].T @ dy_mf[s] for s in spans(rows_g)])


def product(x_md, w_gdf, rows_g) -> np.ndarray:
    y_mf = np.zeros((len(x_md), w_gdf.shape[2]))
    for span, w_df in zip(spans(rows_g), w_gdf, strict=True):
        y_mf[span] = x_md[span] @ w_df
    return y_mf


def spans(rows_g) -> list[slice]:
    ends = np.cumsum(rows_g)
    return [slice(end - rows, end) for rows, end in zip(rows_g, ends, strict=True)]
