"""One safetensors file: its checked header, and boxes of its tensors read from it.

The bytes are read by `pread` and not mapped: they are counted, a file that is cut while
it is read is an error and no crash, and its pages are no memory of the process.
"""

import itertools
import math
import os
import pathlib
import threading

import numpy as np

from moejax.interop.boxes import Box, shape_of
from moejax.interop.header import Entry, read_header
from moejax.interop.strict_json import open_file, quoted

MAX_GAP_BYTES = 512
"""Bytes between two runs that are read with them: they take less time than another
call. With 1024, two processes that split 1024 columns of bfloat16 would read all."""
SCRATCH_BYTES = 2**22
"""Bytes of the runs, with the gaps between them, that are read at a time."""


class TensorFile:
    """A safetensors file that is open for reading. Several threads may read from it."""

    def __init__(self, path: pathlib.Path):
        """Open a file and read its header.

        Raises OSError, and ValueError, one line, as `read_header` does.
        """
        self.path = path
        self.bytes_read = 0
        """Number of bytes of tensors that were read, gaps between runs included."""
        self._lock = threading.Lock()
        self._descriptor = open_file(path)
        try:
            self.entries = read_header(self._descriptor, path)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. Reading from it is an OSError then."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def read_box(self, name: str, box: Box, out: np.ndarray) -> None:
        """Read a box of a tensor, which is not empty, into a C-contiguous array of its
        shape and dtype.

        Only the bytes of the box are read, and gaps of at most MAX_GAP_BYTES. Raises
        OSError, and ValueError where the file has become shorter.
        """
        entry = self.entries[name]
        out_bytes = out.reshape(-1).view(np.uint8)
        runs = _Runs(entry, box)
        if runs.gap > MAX_GAP_BYTES or runs.num_in_row == 1:
            for start in runs.starts():
                self._read(name, out_bytes[: runs.length], start)
                out_bytes = out_bytes[runs.length :]
            return
        stride = runs.length + runs.gap
        step = max(1, SCRATCH_BYTES // stride)
        scratch = np.empty(min(step, runs.num_in_row) * stride, np.uint8)
        for start in runs.row_starts():
            for first in range(0, runs.num_in_row, step):
                num = min(step, runs.num_in_row - first)
                span = scratch[: num * stride - runs.gap]
                self._read(name, span, start + first * stride)
                taken = scratch[: num * stride].reshape(num, stride)[:, : runs.length]
                out_bytes[: taken.size].reshape(taken.shape)[:] = taken
                out_bytes = out_bytes[taken.size :]

    def _read(self, name: str, out: np.ndarray, start: int) -> None:
        """Fill an array of bytes from the file, from byte `start` on."""
        done = 0
        while done < out.size:
            try:
                num = os.preadv(self._descriptor, [out[done:].data], start + done)
            except OSError as error:
                error.filename = os.fspath(self.path)
                raise
            if num == 0:
                raise ValueError(
                    f"{self.path}: tensor {quoted(name)} ends too early: the file has "
                    "become shorter since it was opened; do not change it meanwhile"
                )
            done += num
        with self._lock:
            self.bytes_read += done


class _Runs:
    """The runs of neighbouring bytes of which a box of a tensor consists."""

    def __init__(self, entry: Entry, box: Box):
        shape, dim, size = entry.shape, len(entry.shape), entry.dtype.itemsize
        while dim and box[dim - 1] == (0, shape[dim - 1]):
            dim -= 1
            size *= shape[dim]
        strides = [
            entry.dtype.itemsize * math.prod(shape[d + 1 :]) for d in range(len(shape))
        ]
        self._first, self._box, self._strides = entry.start, box[:dim], strides
        self.length = size
        if dim:
            start, stop = box[dim - 1]
            self._first += start * size
            self.length = (stop - start) * size
            self._box = box[: dim - 1]
        counts = shape_of(self._box)
        self.num_in_row = counts[-1] if counts else 1
        """Number of runs in a row: they have the same distance from each other."""
        self.gap = strides[len(counts) - 1] - self.length if counts else 0
        """Bytes between two runs of a row."""

    def starts(self):
        """Yield the first byte of each run in the file."""
        return self._starts(self._box)

    def row_starts(self):
        """Yield the first byte of the first run of each row."""
        if not self._box:
            return self._starts(())
        first, _ = self._box[-1]
        return self._starts((*self._box[:-1], (first, first + 1)))

    def _starts(self, box: Box):
        for at in itertools.product(*(range(*part) for part in box)):
            yield self._first + sum(i * s for i, s in zip(at, self._strides))
