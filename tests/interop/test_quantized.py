"""Test quantised tensors against the definitions of their formats: all codes and
scales."""

import math

import numpy as np
import pytest

from moejax.interop import quantized
from moejax.interop.folder import TensorFolder
from moejax.interop.views import held, stacked, taken, transposed
from tests.support.block_formats import e2m1, e4m3
from tests.support.tensor_folders import BF16, E4M3, SINGLE, write_arrays

MAX_FLOAT32 = float(np.finfo(np.float32).max)


def as_float32(value: float) -> np.float32:
    """Return the nearest float32; infinity beyond the largest."""
    with np.errstate(over="ignore"):
        return np.float32(value)


def same(got: np.ndarray, want: np.ndarray) -> bool:
    """Return whether values are equal, signs of zeros and NaN included."""
    return np.array_equal(got, want, equal_nan=True) and np.array_equal(
        np.signbit(got[~np.isnan(got)]), np.signbit(want[~np.isnan(want)])
    )


def make_fp8(rng, *shape) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return codes, scales, and the weights by definition, element by element."""
    codes = rng.integers(0, 256, shape, np.uint8)
    *outer, rows, columns = shape
    scale = rng.standard_normal((*outer, -(-rows // 128), -(-columns // 128)))
    scale = scale.astype(np.float32)
    want = np.empty(shape, np.float32)
    for at in np.ndindex(*shape):
        block = (*at[:-2], at[-2] // 128, at[-1] // 128)
        want[at] = np.float32(e4m3(int(codes[at]))) * scale[block]
    return codes.view(E4M3), scale, want


def test_every_code_of_fp8_times_some_scales():
    codes = np.arange(256, dtype=np.uint8)
    scales = np.float32([1, -3, 1e-30, 3e38, 0, 2.0**-140, 0.1, np.inf])
    weight = held(np.tile(codes, (len(scales) * 128, 1)).view(E4M3))
    scale = held(np.stack([scales, scales], axis=1))
    got = quantized.fp8_blocks(weight, scale).read()[::128]
    with np.errstate(over="ignore", invalid="ignore"):
        want = np.float32([e4m3(code) for code in range(256)]) * scales[:, None]
    assert same(got, want)


@pytest.mark.parametrize("shape", [(128, 128), (130, 257), (1, 1), (100, 300)])
def test_slices_of_fp8_blocks(shape, tmp_path):
    rng = np.random.default_rng(0)
    codes, scale, want = make_fp8(rng, *shape)
    write_arrays(tmp_path / SINGLE, {"scale": scale, "weight": codes})
    folder = TensorFolder(tmp_path)
    view = quantized.fp8_blocks(folder.view("weight"), folder.view("scale"))
    assert view.shape == shape
    assert view.dtype == np.float32
    assert same(view.read(), want)
    for _ in range(20):
        index = tuple(slice(*np.sort(rng.integers(0, s + 1, 2))) for s in shape)
        before = folder.bytes_read
        assert same(view.read(index), want[index])
        assert folder.bytes_read - before <= shape[0] * shape[1] + scale.nbytes
    assert same(transposed(view, (1, 0)).read(), want.T)
    both = stacked([view, view]).read((slice(1, 2), slice(0, 50)), BF16)
    assert same(both[0].astype("f"), want[:50].astype(BF16).astype("f"))


def test_every_code_and_every_scale_of_mxfp4():
    scales = np.arange(256, dtype=np.uint8)[:, None]
    blocks = np.tile(np.arange(16, dtype=np.uint8) * 17, (256, 1, 1))
    got = quantized.mxfp4(held(blocks), held(scales)).read()
    want = [
        [
            math.nan if scale == 255 else as_float32(e2m1(code) * 2.0 ** (scale - 127))
            for code in np.repeat(np.arange(16), 2).tolist()
        ]
        for scale in range(256)
    ]
    assert same(got, np.float32(want))
    assert np.isnan(got[255]).all()
    assert np.isfinite(got[:252]).all()
    assert got[0, 2] == 2.0**-128, "the smallest scale times a half is subnormal"


def test_the_low_four_bits_of_a_byte_come_first():
    blocks = np.zeros((1, 16), np.uint8)
    blocks[0, :2] = 0x21, 0xF7  # codes 1, 2; 7, 15
    got = quantized.mxfp4(held(blocks), held(np.uint8([128]))).read()
    assert got[:5].tolist() == [1.0, 2.0, 12.0, -12.0, 0.0]


def test_slices_of_mxfp4(tmp_path):
    rng = np.random.default_rng(0)
    e, o, g = 3, 5, 4
    blocks = rng.integers(0, 256, (e, o, g, 16), np.uint8)
    scales = rng.integers(100, 140, (e, o, g), np.uint8)
    want = np.empty((e, o, 32 * g), np.float32)
    for at in np.ndindex(*want.shape):
        byte = blocks[*at[:2], at[2] // 32, at[2] % 32 // 2]
        code = int(byte >> 4 if at[2] % 2 else byte & 15)
        want[at] = e2m1(code) * 2.0 ** (int(scales[*at[:2], at[2] // 32]) - 127)
    write_arrays(tmp_path / SINGLE, {"b": blocks, "s": scales})
    folder = TensorFolder(tmp_path)
    view = quantized.mxfp4(folder.view("b"), folder.view("s"))
    assert view.shape == want.shape
    assert same(view.read(), want)
    for _ in range(30):
        index = tuple(slice(*np.sort(rng.integers(0, s + 1, 2))) for s in want.shape)
        assert same(view.read(index), want[index])
    before = folder.bytes_read
    view.read((slice(1, 2), slice(2, 3)))
    assert folder.bytes_read - before == g * 17
    rows = range(1, o, 2)
    some = [taken(folder.view(name), 1, rows) for name in ("b", "s")]
    assert same(quantized.mxfp4(*some).read(), want[:, 1::2])
    # As GPT-OSS needs it: [e, in, out], gate in the even columns.
    assert same(transposed(view, (0, 2, 1)).read(), want.transpose(0, 2, 1))


BLOCKS, SCALES = np.zeros((3, 2, 16), np.uint8), np.zeros((3, 2), np.uint8)


@pytest.mark.parametrize(
    ("decode", "codes", "scale"),
    [
        (quantized.fp8_blocks, np.zeros((4, 4), BF16), np.ones((1, 1), "f")),
        (quantized.fp8_blocks, np.zeros((4, 4), E4M3), np.ones((1, 1), BF16)),
        (quantized.fp8_blocks, np.zeros((4, 200), E4M3), np.ones((1, 1), "f")),
        (quantized.mxfp4, BLOCKS[..., :8], SCALES),
        (quantized.mxfp4, BLOCKS, SCALES[:2]),
        (quantized.mxfp4, SCALES, BLOCKS),
        (quantized.mxfp4, BLOCKS, SCALES.astype("f")),
    ],
)
def test_wrong_codes_are_refused(decode, codes, scale):
    message = "and must be .*the quantisation in config.json is another one"
    with pytest.raises(ValueError, match=message):
        decode(held(codes), held(scale))
