"""Documents in a line: tokens that lie in mapped files, read as if they were one array.

    files     |a a a|b b|c c c c|     |d d|e e e|f|        token_b of each
    line       a a a b b  d d f                            without c and e
    runs      |---------|---|-|                            read from one file in one go

Names end in `b` for tokens, `r` for runs, `d` for documents and `w` for windows.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from train.data.indexed import Indexed


@dataclasses.dataclass(frozen=True)
class Line:
    """Run r is the tokens edge_r[r] .. edge_r[r + 1] - 1 of the line, and they start at
    `first_r[r]` of `arrays[array_r[r]]`."""

    arrays: tuple[np.ndarray, ...]
    array_r: np.ndarray
    first_r: np.ndarray
    edge_r: np.ndarray
    """int64 [runs + 1], from 0 to the number of tokens."""
    start_d: np.ndarray
    """int64, ascending: tokens of the line that start a document."""

    @property
    def num_tokens(self) -> int:
        return int(self.edge_r[-1])


def make_line(token_b: np.ndarray, start_d: np.ndarray) -> Line:
    """Return all of one array as a line."""
    edge_r = np.array([0, token_b.size])
    return Line((token_b,), np.zeros(1, int), np.zeros(1, np.int64), edge_r, start_d)


def whole(files: Sequence[Indexed]) -> Line:
    """Return all documents of the files, in order, as a line."""
    num_documents = sum(file.start_d.size for file in files)
    return _pick(files, np.ones(num_documents, bool))


def split(files: Sequence[Indexed], held_out_every: int) -> tuple[Line, Line]:
    """Return the documents to train on, and every held_out_every-th, which is held out.

    With fewer documents, that share of the tokens, at the end, is held out.
    """
    num_documents = sum(file.start_d.size for file in files)
    if num_documents < held_out_every:
        total = sum(file.token_b.size for file in files)
        edge = total - total // held_out_every
        files, is_held_out_d = _cut(files, edge)
    else:
        ordinal_d = np.arange(num_documents)
        is_held_out_d = ordinal_d % held_out_every == held_out_every - 1
    return _pick(files, ~is_held_out_d), _pick(files, is_held_out_d)


def read_tokens(line: Line, start_w: np.ndarray, width: int) -> np.ndarray:
    """Return `width` tokens from each of `start_w`: int32 [w, width]."""
    start_w = np.asarray(start_w, np.int64)
    _check(line, start_w, width)
    token_wb = np.empty((start_w.size, width), np.int32)
    run_w = np.searchsorted(line.edge_r, start_w, "right") - 1
    for row_b, start, run in zip(token_wb, start_w.tolist(), run_w.tolist()):
        _copy(line, start, run, row_b)
    return token_wb


def read_positions(line: Line, start_w: np.ndarray, width: int) -> np.ndarray:
    """Return positions in their documents of what read_tokens gives: int32 [w, width].

    Position 0 is the first token of a document, or of a window that begins within one.
    """
    start_w = np.asarray(start_w, np.int64)
    _check(line, start_w, width)
    low_w = np.searchsorted(line.start_d, start_w)
    high_w = np.searchsorted(line.start_d, start_w + width)
    edge_wb = np.zeros((start_w.size, width), np.int32)
    for row_b, start, low, high in zip(edge_wb, start_w, low_w, high_w):
        within = line.start_d[low:high] - start
        row_b[within] = within
    np.maximum.accumulate(edge_wb, axis=1, out=edge_wb)
    return np.arange(width, dtype=np.int32) - edge_wb


def _copy(line: Line, start: int, run: int, row_b: np.ndarray) -> None:
    """Fill the row with the tokens from `start`, which lies in `run`."""
    done = 0
    while done < row_b.size:
        at = start + done
        count = min(int(line.edge_r[run + 1]) - at, row_b.size - done)
        first = int(line.first_r[run] + at - line.edge_r[run])
        array_b = line.arrays[line.array_r[run]]
        row_b[done : done + count] = array_b[first : first + count]
        done += count
        run += 1


def _check(line: Line, start_w: np.ndarray, width: int) -> None:
    assert start_w.size == 0 or (
        start_w.min() >= 0 and start_w.max() + width <= line.num_tokens
    ), (start_w.min(), start_w.max(), width, line.num_tokens)


def _pick(files: Sequence[Indexed], is_in_d: np.ndarray) -> Line:
    """Return the line of the documents that are in; neighbours in a file join runs."""
    count_f = [file.start_d.size for file in files]
    array_d = np.repeat(np.arange(len(files), dtype=np.int32), count_f)
    first_d = np.concatenate([file.start_d for file in files])
    length_d = np.concatenate(
        [np.diff(file.start_d, append=file.token_b.size) for file in files]
    )
    (in_d,) = np.nonzero(is_in_d)
    array_d, first_d, length_d = array_d[in_d], first_d[in_d], length_d[in_d]
    stop_d = np.cumsum(length_d)
    start_d = stop_d - length_d
    is_new = (np.diff(in_d, prepend=-2) > 1) | (np.diff(array_d, prepend=-1) > 0)
    edge_r = np.append(start_d[is_new], stop_d[-1:] if stop_d.size else 0)
    arrays = tuple(file.token_b for file in files)
    return Line(arrays, array_d[is_new], first_d[is_new], edge_r, start_d)


def _cut(files: Sequence[Indexed], edge: int) -> tuple[list[Indexed], np.ndarray]:
    """Return the files with a document that starts at token `edge` of all, and whether
    each document lies behind it."""
    cut, is_behind, base = [], [], 0
    for file in files:
        start_d = file.start_d
        if base < edge < base + file.token_b.size:
            start_d = np.union1d(start_d, [edge - base])
        cut.append(dataclasses.replace(file, start_d=start_d))
        is_behind.append(start_d + base >= edge)
        base += file.token_b.size
    return cut, np.concatenate(is_behind)
