"""Views of quantised tensors, decoded to float32 box by box.

    fp8_blocks    DeepSeek-V3, Kimi-K2: weight float8_e4m3fn [.., o, i], and
                  weight_scale_inv float32 [.., ceil(o / 128), ceil(i / 128)]; a weight
                  is the product of its code and the scale of its block
    mxfp4         GPT-OSS: blocks uint8 [.., g, 16] and scales uint8 [.., g]; a group is
                  32 weights, two to a byte, the first in the low four bits, and each is
                  the product of its code (FP4_VALUES) and 2 ** (scale - 127). Scale 255
                  makes a group NaN

`taken` rows of MXFP4 are taken before they are decoded: no others are.

MXFP4 is the MX format with FP4 E2M1 elements and E8M0 scales (Open Compute
Project, Microscaling Formats, version 1.0, sections 5.3.3 and 5.4.1).
"""

import ml_dtypes
import numpy as np

from moejax.interop import boxes
from moejax.interop.boxes import Box
from moejax.interop.views import View, assign

BLOCK = 128
"""Rows and columns of a block that has one scale, in FP8 checkpoints."""
GROUP = 32
"""Weights that have one scale, in MXFP4."""
FP4_VALUES = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
"""Values of the codes 0 to 7; codes 8 to 15 are their negatives."""
_FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
_FP4_BY_CODE = np.concatenate([FP4_VALUES, -FP4_VALUES])
_FP4_PAIRS = np.stack(
    [_FP4_BY_CODE[np.arange(256) & 15], _FP4_BY_CODE[np.arange(256) >> 4]], axis=1
).view(np.uint64)[:, 0]
"""The two values of each byte, as one element: twice the speed."""
_FP8_VALUES = np.arange(256, dtype=np.uint8).view(_FP8).astype(np.float32)
_FP8_PAIRS = np.stack(
    [_FP8_VALUES[np.arange(65536) & 255], _FP8_VALUES[np.arange(65536) >> 8]], axis=1
).view(np.uint64)[:, 0]
"""The two values of each two bytes: four times the speed of ml_dtypes' cast."""
_E8M0_VALUES = np.concatenate(
    [np.ldexp(np.float32(1), np.arange(-127, 128)), np.float32([np.nan])]
)
"""The scale of each code."""


def fp8_blocks(weight: View, scale: View) -> View:
    """Return the float32 weights of a block-scaled FP8 tensor.

    Raises ValueError unless dtypes and shapes are as above.
    """
    return _Fp8Blocks(weight, scale)


def mxfp4(blocks: View, scales: View) -> View:
    """Return the float32 weights [.., 32 g] of an MXFP4 tensor.

    Raises ValueError unless dtypes and shapes are as above.
    """
    return _Mxfp4(blocks, scales)


class _Fp8Blocks(View):
    def __init__(self, weight: View, scale: View):
        _check(weight, _FP8, None)
        *outer, rows, columns = weight.shape
        blocks = (*outer, -(-rows // BLOCK), -(-columns // BLOCK))
        _check(scale, np.dtype(np.float32), blocks)
        super().__init__(weight.shape, scale.dtype, weight.order, weight.label)
        self._weight, self._scale = weight, scale

    def fill(self, out, box: Box) -> None:
        (start, stop), (first, end) = rows, columns = box[-2:]
        scaled = tuple((a // BLOCK, -(-b // BLOCK)) for a, b in (rows, columns))
        scales = self._scale.read_box((*box[:-2], *scaled))
        column_i = np.arange(first, end) // BLOCK - scaled[1][0]
        scales = scales.take(column_i, axis=-1)
        values = self._decode(box)
        for block in range(*scaled[0]):
            top, bottom = block * BLOCK - start, (block + 1) * BLOCK - start
            block_rows = values[..., max(top, 0) : min(bottom, stop - start), :]
            row = block - scaled[0][0]
            with np.errstate(over="ignore", invalid="ignore"):  # as the product is
                block_rows *= scales[..., row : row + 1, :]
        assign(out, values)

    def _decode(self, box: Box) -> np.ndarray:
        """Return the values of a box without their scales."""
        size = boxes.size_of(box)
        data = np.empty(size + size % 2, np.uint8)
        data[size:] = 0
        shape = boxes.shape_of(box)
        self._weight.fill(data[:size].view(_FP8).reshape(shape), box)
        pairs = _FP8_PAIRS[data.view(np.uint16)]
        return pairs.view(np.float32)[:size].reshape(shape)


class _Mxfp4(View):
    def __init__(self, blocks: View, scales: View):
        code = np.dtype(np.uint8)
        _check(blocks, code, (*blocks.shape[:-1], GROUP // 2))
        _check(scales, code, blocks.shape[:-1])
        *outer, num_groups, _ = blocks.shape
        last = len(outer)
        order = tuple(dim for dim in blocks.order if dim <= last)
        shape = (*outer, num_groups * GROUP)
        super().__init__(shape, np.dtype(np.float32), order, blocks.label)
        self._blocks, self._scales = blocks, scales

    def take(self, dim, index_i) -> View:
        if dim == len(self.shape) - 1:
            return super().take(dim, index_i)
        return _Mxfp4(*(v.take(dim, index_i) for v in (self._blocks, self._scales)))

    def fill(self, out, box: Box) -> None:
        box_shape, (start, stop) = boxes.shape_of(box), box[-1]
        groups = (start // GROUP, -(-stop // GROUP))
        codes = self._blocks.read_box((*box[:-1], groups, (0, GROUP // 2)))
        scales = _E8M0_VALUES.take(self._scales.read_box((*box[:-1], groups)))
        values = _FP4_PAIRS[codes].view(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):  # as the product is
            values *= scales[..., None]
        values = values.reshape(*box_shape[:-1], -1)
        first = groups[0] * GROUP
        assign(out, values[..., start - first : stop - first])


def _check(view: View, dtype: np.dtype, shape: tuple[int, ...] | None) -> None:
    if view.dtype != dtype:
        raise ValueError(
            f"{view.label} is {view.dtype} and must be {dtype}: the quantisation in "
            "config.json is another one"
        )
    if shape is None and len(view.shape) < 2:
        raise ValueError(
            f"{view.label} has {len(view.shape)} dims, and blocks need two: the "
            "quantisation in config.json is another one"
        )
    if shape is not None and view.shape != shape:
        raise ValueError(
            f"{view.label} has shape {list(view.shape)} and must have {list(shape)}: "
            "the quantisation in config.json is another one"
        )
