"""The header of a safetensors file: dtype, shape and place of each tensor, all checked
before a tensor is read.

    8 bytes    length n of the header, an unsigned integer
    n bytes    JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
               and, if wanted, "__metadata__": {text: text}
    the rest   the bytes of the tensors, row-major, without gaps

Offsets count from the end of the header. All numbers are little-endian, as those of
every machine that JAX runs on.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

from moejax.interop.strict_json import parse_json, quoted

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
MAX_HEADER_BYTES = 100_000_000
"""Limit of the format."""
MAX_DIMS = 32
METADATA = "__metadata__"
_KEYS = ["data_offsets", "dtype", "shape"]
_AGAIN = "download the file again"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor's dtype, shape and place in its file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    """Byte of the file at which the tensor begins."""

    @property
    def num_bytes(self) -> int:
        """The number of bytes that the tensor takes in its file."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(descriptor: int, path: pathlib.Path) -> dict[str, Entry]:
    """Return the tensors of an open file by name, in the order of the file.

    Nothing but the header is read. Raises ValueError, one line with file, tensor and
    remedy, unless the header is within the file and MAX_HEADER_BYTES, is JSON without
    duplicate names, has dtypes of DTYPES, and the tensors cover the rest of the file
    without gap or overlap, each with the bytes of its shape.
    """
    size = os.fstat(descriptor).st_size
    if size < LENGTH_BYTES:
        raise ValueError(
            f"{path} has {size} bytes, and a safetensors file begins with "
            f"{LENGTH_BYTES} bytes for the length of its header: {_AGAIN}"
        )
    length = int.from_bytes(os.pread(descriptor, LENGTH_BYTES, 0), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(
            f"{path} claims a header of {length:,} bytes, and the limit is "
            f"{MAX_HEADER_BYTES:,}: is it a safetensors file?"
        )
    if length > size - LENGTH_BYTES:
        raise ValueError(
            f"{path} claims a header of {length:,} bytes and has {size:,} in all, so "
            f"it is cut off: {_AGAIN}"
        )
    data = os.pread(descriptor, length, LENGTH_BYTES)
    if not data.startswith(b"{"):
        raise ValueError(f"{path}: the header does not begin with '{{': {_AGAIN}")
    records = parse_json(data, f"{path}: the header")
    _check_metadata(records.pop(METADATA, {}), path)
    first = LENGTH_BYTES + length
    places = [
        (*_check_offsets(record, path, name), name, _check_entry(record, path, name))
        for name, record in records.items()
    ]
    places.sort(key=lambda place: place[:2])
    entries = dict(_check_places(places, size - first, first, path))
    return entries


def encode_header(entries: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> bytes:
    """Return the first bytes of a file with tensors of these dtypes and shapes, one
    after the other.

    They are the bytes that the library `safetensors` writes for tensors in its order
    (`file_order`): compact JSON, padded by spaces to a multiple of 8.
    """
    records: dict[str, object] = {METADATA: {"format": "pt"}}
    stop = 0
    for name, (dtype, shape) in entries.items():
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        records[name] = {
            "dtype": dtype_name(dtype),
            "shape": list(shape),
            "data_offsets": [start, stop],
        }
    data = json.dumps(records, separators=(",", ":"), ensure_ascii=False).encode()
    data += b" " * (-len(data) % LENGTH_BYTES)
    if len(data) > MAX_HEADER_BYTES:
        raise ValueError(
            f"the header of {len(entries):,} tensors has {len(data):,} bytes, and the "
            f"limit is {MAX_HEADER_BYTES:,}: write smaller shards"
        )
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def file_order(
    entries: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
) -> list[str]:
    """Return names as they follow each other in a file: wide dtypes first, so that all
    are aligned, then by name."""
    return sorted(entries, key=lambda name: (-entries[name][0].itemsize, name))


def dtype_name(dtype: np.dtype) -> str:
    """Return the name of a dtype in headers. Raises ValueError if it has none."""
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise ValueError(f"safetensors has no dtype {dtype}: use bfloat16 or float32")


def _check_metadata(metadata: object, path: pathlib.Path) -> None:
    is_text = isinstance(metadata, dict) and all(
        isinstance(value, str) for value in metadata.values()
    )
    if not is_text:
        raise ValueError(f"{path}: {METADATA} must map text to text: {_AGAIN}")


def _check_offsets(record: object, path: pathlib.Path, name: str) -> tuple[int, int]:
    where = f"{path}: tensor {quoted(name)}"
    if not isinstance(record, dict) or sorted(record) != _KEYS:
        raise ValueError(f"{where} must have dtype, shape and data_offsets: {_AGAIN}")
    offsets = record["data_offsets"]
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(
            f"{where} has data_offsets {quoted(offsets)}, and they must be the begin "
            f"and the end, in bytes: {_AGAIN}"
        )
    return offsets[0], offsets[1]


def _check_entry(record: dict, path: pathlib.Path, name: str) -> Entry:
    where = f"{path}: tensor {quoted(name)}"
    dtype = record["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(
            f"{where} has dtype {quoted(dtype)}, and moejax reads "
            f"{', '.join(DTYPES)}: convert it to BF16"
        )
    shape, itemsize = record["shape"], DTYPES[dtype].itemsize
    if not _are_counts(shape) or len(shape) > MAX_DIMS:
        raise ValueError(f"{where} has shape {quoted(shape)}: {_AGAIN}")
    if math.prod(max(dim, 1) for dim in shape) * itemsize >= 2**63:
        raise ValueError(f"{where} has shape {quoted(shape)}, too large: {_AGAIN}")
    start, stop = record["data_offsets"]
    entry = Entry(DTYPES[dtype], tuple(shape), start)
    if entry.num_bytes != stop - start:
        raise ValueError(
            f"{where} has shape {quoted(shape)} of {dtype}, {entry.num_bytes:,} bytes, "
            f"and data_offsets for {stop - start:,}: {_AGAIN}"
        )
    return entry


def _check_places(
    places: list[tuple[int, int, str, Entry]],
    num_bytes: int,
    first: int,
    path: pathlib.Path,
) -> Iterator[tuple[str, Entry]]:
    """Yield the tensors, sorted by their place, with their first byte in the file."""
    end, last = 0, ""
    for start, stop, name, entry in places:
        where = f"{path}: tensor {quoted(name)}"
        if start < end:
            raise ValueError(
                f"{where} begins at byte {start:,}, and {quoted(last)} ends at "
                f"{end:,}: they overlap; {_AGAIN}"
            )
        if start > end:
            raise ValueError(
                f"{where} begins at byte {start:,}, and nothing covers the bytes from "
                f"{end:,}: {_AGAIN}"
            )
        if stop > num_bytes:
            raise ValueError(
                f"{where} ends at byte {stop:,} of {num_bytes:,}, so the file is cut "
                f"off: {_AGAIN}"
            )
        yield name, dataclasses.replace(entry, start=first + start)
        end, last = stop, name
    if end != num_bytes:
        raise ValueError(
            f"{path} has {num_bytes - end:,} bytes after its last tensor: {_AGAIN}"
        )


def _are_counts(values: object) -> bool:
    """Return whether a value is a list of integers that are 0 or more."""
    return isinstance(values, list) and all(
        type(value) is int and value >= 0 for value in values
    )
