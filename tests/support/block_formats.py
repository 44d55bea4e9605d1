"""Formats of quantised weights by their definitions, in plain NumPy.

FP8 E4M3 in blocks of 128 x 128    DeepSeek-V3 (arXiv 2412.19437, section 3.3)
MXFP4 in groups of 32              Microscaling Formats 1.0, sections 5.3.3, 5.4.1
"""

import math

import numpy as np

BLOCK, GROUP = 128, 32
F8_BIAS, F8_MANTISSA = 7, 3


def e4m3(code: int) -> float:
    """Return the value of a code of FP8 E4M3: one sign, four exponent and three
    mantissa bits, no infinity, and NaN where all but the sign are ones (Micikevicius et
    al. 2022, table 1)."""
    sign = -1.0 if code >> 7 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if (exponent, mantissa) == (15, 7):
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - F8_BIAS - F8_MANTISSA)
    return sign * (8 + mantissa) * 2.0 ** (exponent - F8_BIAS - F8_MANTISSA)


def e2m1(code: int) -> float:
    """Return the value of a code of FP4 E2M1: one sign, two exponent and one mantissa
    bit (Microscaling Formats 1.0, section 5.3.3)."""
    sign = -1.0 if code >> 3 else 1.0
    exponent, mantissa = code >> 1 & 3, code & 1
    return sign * (
        mantissa * 0.5 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2)
    )


E4M3_VALUES = np.float32([e4m3(code) for code in range(256)])
E2M1_VALUES = np.float32([e2m1(code) for code in range(16)])


def decode_fp8(codes_oi: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the weights [o, i] of uint8 codes and a scale for each block."""
    rows, columns = codes_oi.shape
    scale_oi = np.repeat(np.repeat(scale, BLOCK, axis=0), BLOCK, axis=1)
    return E4M3_VALUES[codes_oi] * scale_oi[:rows, :columns]


def decode_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the weights [.., 32 g] of bytes [.., g, 16] and scales [.., g] below 255.
    The low four bits of a byte come first."""
    codes = np.stack([blocks % 16, blocks // 16], axis=-1)
    values = E2M1_VALUES[codes].reshape(*blocks.shape[:-1], GROUP)
    values = values * np.float32(2.0) ** (scales[..., None].astype(np.int32) - 127)
    return values.reshape(*blocks.shape[:-2], -1).astype(np.float32)
