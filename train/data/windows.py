"""Training batches and held-out windows: pure functions of (corpus, seed, step).

    stream    # document 0  # document 1 # document 2 ...   # starts a document
    windows   |--- phase ---|=====|=====|=====|...          seq_len + 1 tokens each

The first token of a window is the last token of the window before it. It is only an
input and is not predicted. The position in the data is a step number, and any number of
processes reads the same batches.
"""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from moejax.config import Data
from train.data.corpus import Corpus
from train.data.mixture import apportion, find_row, make_mixture
from train.data.permutation import permute
from train.data.token_streams import (
    TokenStream,
    read_positions,
    read_targets,
    read_tokens,
)

if TYPE_CHECKING:
    from moejax.moe.types import Windows


class TrainBatches:
    """An endless sequence of batches of shuffled windows of the training tokens.

    Each corpus has its own epochs. An epoch cuts the tokens into windows at stride
    seq_len and visits each window once. The start of the first window (the phase) is
    drawn anew in each epoch, from the tokens that the windows leave over, so that the
    window boundaries move.
    """

    def __init__(self, corpus: Corpus, cfg: Data, batch_size: int) -> None:
        self.batch_size, self._cfg = batch_size, cfg
        self._streams = [source.train for source in corpus.sources]
        self._mixture = make_mixture(corpus.weights)
        self._epochs = [
            _Epochs(stream, cfg.seq_len, _seed(cfg.seed, i))
            for i, stream in enumerate(self._streams)
        ]

    @property
    def num_windows(self) -> list[int]:
        """Number of windows in one epoch of each corpus."""
        return [epochs.num_windows for epochs in self._epochs]

    def rows(self, step: int, start: int, stop: int) -> "Windows":
        """Return rows start .. stop - 1 of the step with this index, from 0: int32
        [rows, seq_len + 1]."""
        items = self._items(step, start, stop)
        starts = [self._epochs[corpus].first_token(item) for corpus, item in items]
        return _read(self._streams, [c for c, _ in items], starts, self._cfg)

    def sample_ids(self, step: int, start: int, stop: int) -> list[str]:
        """Return the names of the same rows, such as 'corpus0:epoch3:window17'.

        A name occurs once in a run, and always stands for the same tokens.
        """
        return [
            f"corpus{corpus}:epoch{epoch}:window{window}"
            for corpus, item in self._items(step, start, stop)
            for epoch, window in [self._epochs[corpus].window(item)]
        ]

    def _items(self, step: int, start: int, stop: int) -> list[tuple[int, int]]:
        assert 0 <= start <= stop <= self.batch_size, (start, stop, self.batch_size)
        first = step * self.batch_size
        return [find_row(self._mixture, first + row) for row in range(start, stop)]


class HeldOut:
    """A fixed set of batches of held-out windows, which are disjoint and evenly spread.

    Several corpora share the windows in proportion to their weights. Raises ValueError
    when the held-out tokens have too few windows.
    """

    def __init__(
        self, corpus: Corpus, cfg: Data, batch_size: int, num_batches: int
    ) -> None:
        self.batch_size, self.num_batches, self._cfg = batch_size, num_batches, cfg
        self._streams = [source.held_out for source in corpus.sources]
        total = num_batches * batch_size
        share_c = apportion(corpus.weights, total)
        for source, share in zip(corpus.sources, share_c.tolist()):
            stream = source.held_out
            available = stream.num_tokens // (stream.window or cfg.seq_len + 1)
            if available < share:
                raise ValueError(
                    f"Train.eval_batches={num_batches} of Train.batch_size="
                    f"{batch_size} need {share} held-out windows, but the "
                    f"{source.held_out.num_tokens} held-out tokens of '{source.name}' "
                    f"have {available} of Data.seq_len={cfg.seq_len}: lower "
                    "Train.eval_batches or Data.held_out_every"
                )
        self._mixture = make_mixture(corpus.weights, total)

    def rows(self, index: int, start: int, stop: int) -> "Windows":
        """Return rows start .. stop - 1 of batch `index`: int32 [rows, seq_len + 1]."""
        assert 0 <= index < self.num_batches, (index, self.num_batches)
        assert 0 <= start <= stop <= self.batch_size, (start, stop, self.batch_size)
        first = index * self.batch_size
        rows = range(first + start, first + stop)
        items = [find_row(self._mixture, row) for row in rows]
        # Starts are at least num_tokens // share apart, so the windows are disjoint.
        starts = []
        for c, item in items:
            unit = self._streams[c].window or 1  # of whole conversations
            number, share = self._streams[c].num_tokens // unit, self._mixture.share_c
            starts.append(item * number // int(share[c]) * unit)
        return _read(self._streams, [c for c, _ in items], starts, self._cfg)


class _Epochs:
    """Windows of one corpus, shuffled anew in each epoch."""

    def __init__(self, stream: TokenStream, seq_len: int, seed: int) -> None:
        self._seq_len, self._seed = seq_len, seed
        num_tokens = stream.num_tokens
        # One window fewer than fits leaves at least seq_len tokens for the phase.
        self.num_windows = max(1, (num_tokens - 1) // seq_len - 1)
        self._num_phases = num_tokens - self.num_windows * seq_len
        if stream.window is not None:  # windows of whole conversations stay as they are
            self.num_windows, self._num_phases = num_tokens // seq_len, 1
        (self._order_seed,) = np.random.SeedSequence((seed, 1)).generate_state(1)

    def window(self, item: int) -> tuple[int, int]:
        """Return the epoch and window of an item."""
        epoch, index = divmod(item, self.num_windows)
        seed = (int(self._order_seed) + epoch) % 2**32
        return epoch, permute(index, self.num_windows, seed)

    def first_token(self, item: int) -> int:
        """Return the index in the stream of the first token of an item's window."""
        epoch, window = self.window(item)
        # A hash, because NumPy does not promise its streams from version to version.
        phase = _hash(f"{self._seed} {epoch}") % self._num_phases
        return phase + window * self._seq_len


def _seed(seed: int, corpus: int) -> int:
    # The first corpus has the given seed itself: it gives the same windows alone and in
    # a mixture.
    return _hash(f"corpus {corpus} of {seed}") % 2**32 if corpus else seed


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def _read(
    streams: Sequence[TokenStream], corpora: list[int], starts: list[int], cfg: Data
) -> "Windows":
    from moejax.moe.types import Windows  # not at the top: it imports jax

    shape = (len(starts), cfg.seq_len + 1)
    token_bt = np.empty(shape, np.int32)
    position_bt = np.empty(shape, np.int32)
    position_bt[:] = np.arange(shape[1], dtype=np.int32)
    corpus_b, start_b = np.array(corpora, int), np.array(starts, np.int64)
    # The token behind a window of whole conversations begins another one: it is no
    # target, whatever it is, and the last window has none.
    has_targets = streams[0].window is not None
    is_target_bt = np.zeros(shape, bool) if has_targets else None
    width = shape[1] - has_targets
    for corpus in set(corpora):
        (row_w,) = np.nonzero(corpus_b == corpus)
        args = (streams[corpus], start_b[row_w], width)
        token_bt[row_w, :width] = read_tokens(*args)
        if cfg.documents == "separate":
            position_bt[row_w, :width] = read_positions(*args)
        if has_targets:
            is_target_bt[row_w, :width] = read_targets(*args)
            token_bt[row_w, width:] = position_bt[row_w, width:] = 0
    return Windows(token_bt, position_bt, is_target_bt)
