"""The header of a safetensors file: dtype, shape and place of each tensor.

    8 bytes    length n of the header, an unsigned integer
    n bytes    JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
               and, if wanted, "__metadata__": {text: text}
    the rest   the bytes of the tensors, row-major, without gaps

Offsets count from the end of the header. All numbers are little-endian, as those of
every machine that JAX runs on.
"""

import json
import math
import pathlib
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from moejax.interop.strict_json import parse_json, quoted, refuse_lfs_pointer

DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
}
"""NumPy's dtype for each name in a header. Dtypes of less than a byte are not read."""
LENGTH_BYTES = 8
MAX_DIMS = 32
METADATA = "__metadata__"
_AGAIN = "download the file again"

Spec = tuple[np.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""


def map_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file by name: arrays that map it, and read nothing yet.

    Raises OSError, and ValueError, one line with file, tensor and remedy, unless the
    header is JSON without duplicate names, has dtypes of DTYPES, and the tensors cover
    the rest of the file without gap or overlap, each with the bytes of its shape.
    """
    size = path.stat().st_size
    if size < LENGTH_BYTES:
        raise ValueError(f"{path} has {size} bytes, and no header: {_AGAIN}")
    data = np.memmap(path, np.uint8, "r").view(np.ndarray)
    refuse_lfs_pointer(data[:200].tobytes(), str(path))
    length = int.from_bytes(data[:LENGTH_BYTES].tobytes(), "little")
    first = LENGTH_BYTES + length
    if first > size:
        raise ValueError(
            f"{path} claims a header of {length:,} bytes and has {size:,} in all: it "
            f"is cut off, or no safetensors file; {_AGAIN}"
        )
    header = data[LENGTH_BYTES:first].tobytes()
    if not header.startswith(b"{"):
        raise ValueError(f"{path}: the header does not begin with '{{': {_AGAIN}")
    records = parse_json(header, f"{path}: the header")
    metadata = records.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise ValueError(f"{path}: {METADATA} must map text to text: {_AGAIN}")
    tensors, places = {}, []
    for name, record in records.items():
        dtype, shape, start, stop = _entry(record, f"{path}: tensor {quoted(name)}")
        places.append((start, stop, name))
        tensors[name] = (dtype, shape, first + start, first + stop)
    end, last = 0, None
    for start, stop, name in sorted(places):
        where = f"{path}: tensor {quoted(name)}"
        if start < end:
            raise ValueError(f"{where} overlaps with {quoted(last)}: {_AGAIN}")
        if start > end:
            raise ValueError(
                f"{where} begins at byte {start:,}, and nothing covers the bytes from "
                f"{end:,}: {_AGAIN}"
            )
        end, last = stop, name
    if first + end != size:
        raise ValueError(
            f"{path}: the tensors end at byte {first + end:,} of {size:,}: {_AGAIN}"
        )
    return {
        name: data[start:stop].view(dtype).reshape(shape)
        for name, (dtype, shape, start, stop) in tensors.items()
    }


def _entry(record: object, where: str) -> tuple[np.dtype, tuple[int, ...], int, int]:
    """Return the dtype, shape, first byte and end of a tensor."""
    if not isinstance(record, dict) or record.keys() != {
        "dtype", "shape", "data_offsets",
    }:  # fmt: skip
        raise ValueError(f"{where} must have dtype, shape and data_offsets: {_AGAIN}")
    name, shape, offsets = record["dtype"], record["shape"], record["data_offsets"]
    if not isinstance(name, str) or name not in DTYPES:
        raise ValueError(
            f"{where} has dtype {quoted(name)}, and moejax reads {', '.join(DTYPES)}: "
            "convert it to BF16"
        )
    itemsize = DTYPES[name].itemsize
    is_right = (
        all(map(_are_counts, (shape, offsets)))
        and len(offsets) == 2
        and len(shape) <= MAX_DIMS
        and math.prod(max(dim, 1) for dim in shape) * itemsize < 2**63
        and math.prod(shape) * itemsize == offsets[1] - offsets[0]
    )
    if not is_right:
        raise ValueError(
            f"{where} has shape {quoted(shape)} of {name}, and data_offsets "
            f"{quoted(offsets)} for another number of bytes: {_AGAIN}"
        )
    return DTYPES[name], tuple(shape), *offsets


def _are_counts(values: object) -> bool:
    """Return whether a value is a list of integers that are 0 or more."""
    return isinstance(values, list) and all(
        type(value) is int and value >= 0 for value in values
    )


def encode_header(specs: Mapping[str, Spec]) -> bytes:
    """Return the first bytes of a file with tensors of these dtypes and shapes, one
    after the other.

    They are the bytes that the library `safetensors` writes for tensors in its order
    (`file_order`): compact JSON, padded by spaces to a multiple of 8.
    """
    records: dict[str, object] = {METADATA: {"format": "pt"}}
    names = {dtype: name for name, dtype in DTYPES.items()}
    stop = 0
    for name, (dtype, shape) in specs.items():
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        records[name] = {
            "dtype": names[dtype],
            "shape": list(shape),
            "data_offsets": [start, stop],
        }
    data = json.dumps(records, separators=(",", ":"), ensure_ascii=False).encode()
    data += b" " * (-len(data) % LENGTH_BYTES)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def file_order(specs: Mapping[str, Spec]) -> list[str]:
    """Return names as they follow each other in a file: wide dtypes first, so that all
    are aligned, then by name."""
    return sorted(specs, key=lambda name: (-specs[name][0].itemsize, name))
