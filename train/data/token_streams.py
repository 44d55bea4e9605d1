"""Token streams: documents of memory-mapped files, read as if they were one array.

    files     |a a a|b b|c c c c|     |d d|e e e|f|        ids of each file
    stream     a a a b b  d d f                            without documents c and e
    runs      |---------|---|-|                            contiguous in one file

Names end in `b` for tokens, `r` for runs, `d` for documents and `w` for windows.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from train.data.shards import MARK, TokenFile


@dataclasses.dataclass(frozen=True)
class TokenStream:
    """Tokens of all chosen documents, end to end, as runs within memory-mapped arrays.

    Run r holds the tokens edge_r[r] .. edge_r[r + 1] - 1 of the stream. They are
    contiguous in `files[file_r[r]].token_b`, and start there at index `first_r[r]`.
    """

    files: tuple[TokenFile, ...]
    file_r: np.ndarray
    first_r: np.ndarray
    edge_r: np.ndarray
    """Edges of the runs: int64 [runs + 1], from 0 to the number of tokens."""
    start_d: np.ndarray
    """Indices of the tokens that start a document: int64, ascending."""

    @property
    def window(self) -> int | None:
        """Number of tokens of windows of whole conversations; None for text."""
        return self.files[0].window

    @property
    def num_tokens(self) -> int:
        return int(self.edge_r[-1])


def make_token_stream(token_b: np.ndarray, start_d: np.ndarray) -> TokenStream:
    """Return the whole of one array as a token stream."""
    file, edge_r = TokenFile(token_b, start_d), np.array([0, token_b.size])
    return TokenStream(
        (file,), np.zeros(1, int), np.zeros(1, np.int64), edge_r, start_d
    )


def join_documents(files: Sequence[TokenFile]) -> TokenStream:
    """Return all documents of the files, in order, as one token stream."""
    num_documents = sum(file.start_d.size for file in files)
    return _select(files, np.ones(num_documents, bool))


def split_held_out(
    files: Sequence[TokenFile], held_out_every: int
) -> tuple[TokenStream, TokenStream]:
    """Split the documents into a training stream and a held-out stream.

    Hold out every `held_out_every`-th document. Files with fewer documents in all give
    up the last 1/held_out_every of their tokens. Of conversations whole windows are
    held out in the same way, one at least.
    """
    if window := files[0].window:
        window_d = np.concatenate(_windows_of_documents(files, window))
        number = window_d[-1] + 1
        is_held_out_d = window_d % held_out_every == held_out_every - 1
        if number < held_out_every:
            is_held_out_d = window_d == number - 1
        return _select(files, ~is_held_out_d), _select(files, is_held_out_d)
    num_documents = sum(file.start_d.size for file in files)
    if num_documents < held_out_every:
        total = sum(file.token_b.size for file in files)
        edge = total - total // held_out_every
        files, is_held_out_d = _cut_documents(files, edge)
    else:
        ordinal_d = np.arange(num_documents)
        is_held_out_d = ordinal_d % held_out_every == held_out_every - 1
    return _select(files, ~is_held_out_d), _select(files, is_held_out_d)


def _windows_of_documents(files: Sequence[TokenFile], window: int) -> list[np.ndarray]:
    """Return the number of the window of each document, counted over all files."""
    found, first = [], 0
    for file in files:
        found.append(first + file.start_d // window)
        first += len(file.token_b) // window
    return found


def read_tokens(stream: TokenStream, start_w: np.ndarray, width: int) -> np.ndarray:
    """Return the `width` tokens that begin at each start: int32 [w, width]."""
    return _read_ids(stream, start_w, width) & (MARK - 1)


def read_targets(stream: TokenStream, start_w: np.ndarray, width: int) -> np.ndarray:
    """Return whether each token that read_tokens returns is a target: bool
    [w, width]."""
    return _read_ids(stream, start_w, width) >= MARK


def _read_ids(stream: TokenStream, start_w: np.ndarray, width: int) -> np.ndarray:
    """Return tokens with their marks."""
    start_w = np.asarray(start_w, np.int64)
    _check_bounds(stream, start_w, width)
    token_wb = np.empty((start_w.size, width), np.int32)
    first_run_w = np.searchsorted(stream.edge_r, start_w, "right") - 1
    for row_b, start, first_run in zip(token_wb, start_w.tolist(), first_run_w):
        run, at = int(first_run), 0
        while at < width:
            count = min(int(stream.edge_r[run + 1]) - start - at, width - at)
            first = int(stream.first_r[run] - stream.edge_r[run]) + start + at
            token_b = stream.files[stream.file_r[run]].token_b
            row_b[at : at + count] = token_b[first : first + count]
            at, run = at + count, run + 1
    return token_wb


def read_positions(stream: TokenStream, start_w: np.ndarray, width: int) -> np.ndarray:
    """Return each token's position in its document: int32 [w, width].

    The tokens are those that read_tokens returns. Position 0 is the first token of a
    document, or of a window that begins within a document.
    """
    start_w = np.asarray(start_w, np.int64)
    _check_bounds(stream, start_w, width)
    low_w = np.searchsorted(stream.start_d, start_w)
    high_w = np.searchsorted(stream.start_d, start_w + width)
    edge_wb = np.zeros((start_w.size, width), np.int32)
    for row_b, start, low, high in zip(edge_wb, start_w, low_w, high_w):
        within = stream.start_d[low:high] - start
        row_b[within] = within
    np.maximum.accumulate(edge_wb, axis=1, out=edge_wb)
    return np.arange(width, dtype=np.int32) - edge_wb


def _check_bounds(stream: TokenStream, start_w: np.ndarray, width: int) -> None:
    assert start_w.size == 0 or (
        start_w.min() >= 0 and start_w.max() + width <= stream.num_tokens
    ), (start_w.min(), start_w.max(), width, stream.num_tokens)


def _select(files: Sequence[TokenFile], is_selected_d: np.ndarray) -> TokenStream:
    """Return the stream of the selected documents.

    Selected documents that are neighbours in a file become one run.
    """
    count_f = [file.start_d.size for file in files]
    file_d = np.repeat(np.arange(len(files), dtype=np.int32), count_f)
    first_d = np.concatenate([file.start_d for file in files])
    length_d = np.concatenate(
        [np.diff(file.start_d, append=file.token_b.size) for file in files]
    )
    (selected_d,) = np.nonzero(is_selected_d)
    file_d, first_d, length_d = (
        file_d[selected_d],
        first_d[selected_d],
        length_d[selected_d],
    )
    stop_d = np.cumsum(length_d)
    start_d = stop_d - length_d
    is_new = (np.diff(selected_d, prepend=-2) > 1) | (np.diff(file_d, prepend=-1) > 0)
    edge_r = np.append(start_d[is_new], stop_d[-1:] if stop_d.size else 0)
    return TokenStream(tuple(files), file_d[is_new], first_d[is_new], edge_r, start_d)


def _cut_documents(
    files: Sequence[TokenFile], edge: int
) -> tuple[list[TokenFile], np.ndarray]:
    """Start a new document at token `edge`, counted over all files.

    Returns the files with that start added, and for each document whether it begins at
    or after the edge.
    """
    cut, is_after, base = [], [], 0
    for file in files:
        start_d = file.start_d
        if base < edge < base + file.token_b.size:
            start_d = np.union1d(start_d, [edge - base])
        cut.append(dataclasses.replace(file, start_d=start_d))
        is_after.append(start_d + base >= edge)
        base += file.token_b.size
    return cut, np.concatenate(is_after)
