"""Views of quantised tensors, decoded to float32 box by box.

    fp8_blocks    DeepSeek-V3, Kimi-K2: weight float8_e4m3fn [.., o, i], and
                  weight_scale_inv float32 [.., ceil(o / 128), ceil(i / 128)]; a weight
                  is the product of its code and the scale of its block
    mxfp4         GPT-OSS: blocks uint8 [.., g, 16] and scales uint8 [.., g]; a group is
                  32 weights, two to a byte, the first in the low four bits, and each is
                  the product of its code (FP4_VALUES) and 2 ** (scale - 127). Scale 255
                  makes a group NaN

MXFP4 is the MX format with FP4 E2M1 elements and E8M0 scales (Open Compute
Project, Microscaling Formats, version 1.0, sections 5.3.3 and 5.4.1).
"""

import ml_dtypes
import numpy as np

from moejax.interop.views import View, assign

BLOCK = 128
"""Rows and columns of a block that has one scale, in FP8 checkpoints."""
GROUP = 32
"""Weights that have one scale, in MXFP4."""
FP4_VALUES = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""Values of the codes 0 to 7; codes 8 to 15 are their negatives."""
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(_FP8).astype(np.float32)
_FP4_BY_CODE = np.concatenate([FP4_VALUES, -FP4_VALUES])
_FP4_PAIRS = np.stack(
    [_FP4_BY_CODE[np.arange(256) & 15], _FP4_BY_CODE[np.arange(256) >> 4]], axis=1
).view(np.uint64)[:, 0]
"""The two values of each byte, as one element: twice the speed."""
_E8M0_VALUES = np.concatenate(
    [np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32([np.nan])]
)
"""The scale of each code."""


def fp8_blocks(weight: View, scale: View) -> View:
    """Return the float32 weights of a block-scaled FP8 tensor.

    Raises ValueError unless dtypes and shapes are as above.
    """
    *outer, rows, columns = weight.shape
    blocks = (*outer, -(-rows // BLOCK), -(-columns // BLOCK))
    _check(weight, _FP8, weight.shape)
    _check(scale, np.dtype(np.float32), blocks)

    def fill(out, box):
        codes = weight.read(box).view(np.uint8)
        in_blocks = [range(r.start // BLOCK, r[-1] // BLOCK + 1) for r in box[-2:]]
        scales = scale.read((*box[:-2], *in_blocks))
        row_i, column_i = (
            np.array(r) // BLOCK - b.start for r, b in zip(box[-2:], in_blocks)
        )
        with np.errstate(over="ignore", invalid="ignore"):  # as the product is
            values = _FP8_VALUES[codes] * scales[..., row_i, :][..., column_i]
        assign(out, values)

    return View(weight.shape, np.dtype(np.float32), weight.label, fill)


def mxfp4(blocks: View, scales: View) -> View:
    """Return the float32 weights [.., 32 g] of an MXFP4 tensor.

    Raises ValueError unless dtypes and shapes are as above.
    """
    code = np.dtype(np.uint8)
    *outer, num_groups, _ = blocks.shape
    _check(blocks, code, (*outer, num_groups, GROUP // 2))
    _check(scales, code, (*outer, num_groups))

    def fill(out, box):
        *above, last = box
        groups = range(last.start // GROUP, last[-1] // GROUP + 1)
        codes = blocks.read((*above, groups))
        values = _FP4_PAIRS[codes].view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # as the product is
            values *= _E8M0_VALUES[scales.read((*above, groups))][..., None]
        values = values.reshape(*map(len, above), -1)
        first = groups.start * GROUP
        assign(out, values[..., last.start - first : last.stop - first : last.step])

    shape = (*outer, num_groups * GROUP)
    return View(shape, np.dtype(np.float32), blocks.label, fill)


def _check(view: View, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    if (view.dtype, view.shape) != (dtype, shape):
        raise ValueError(
            f"{view.label} is {view.dtype}{list(view.shape)} and must be "
            f"{dtype}{list(shape)}: the quantisation in config.json is another one"
        )
