"""Training batches and held-out windows: pure functions of (corpus, seed, step).

    line      # document 0  # document 1 # document 2 ...   # starts a document
    windows   |--- phase ---|=====|=====|=====|...          seq_len + 1 tokens each; the
                                                            first is the last of the
                                                            window before, and only
                                                            given, not predicted

The place in the data is a step number, and any number of processes reads the same
batches.
"""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from moejax.config import Data
from train.data.corpus import Corpus
from train.data.lines import Line, read_positions, read_tokens
from train.data.mixture import mix, pick, shares

if TYPE_CHECKING:
    from moejax.moe.types import Windows


class TrainBatches:
    """Shuffled windows of the training tokens, without end.

    Each corpus has epochs of its own. An epoch cuts the tokens into windows at stride
    seq_len and visits each once. Where the first one starts is drawn anew each epoch,
    out of the tokens that the windows leave over, so that boundaries move.
    """

    def __init__(self, corpus: Corpus, cfg: Data, batch_size: int) -> None:
        self.batch_size, self._cfg = batch_size, cfg
        self._lines = [source.train for source in corpus.sources]
        self._mixture = mix(corpus.weights)
        self._epochs = [
            _Epochs(line.num_tokens, cfg.seq_len, _seed(cfg.seed, i))
            for i, line in enumerate(self._lines)
        ]

    @property
    def num_windows(self) -> list[int]:
        """Number of windows in an epoch of each corpus."""
        return [epochs.num_windows for epochs in self._epochs]

    def rows(self, step: int, start: int, stop: int) -> "Windows":
        """Return rows start..stop of a step's batch: int32 [rows, seq_len + 1]."""
        items = self._items(step, start, stop)
        starts = [self._epochs[corpus].first_token(item) for corpus, item in items]
        return _read(self._lines, [c for c, _ in items], starts, self._cfg)

    def sample_ids(self, step: int, start: int, stop: int) -> list[str]:
        """Return names of those rows, such as 'corpus0:epoch3:window17'; a name is met
        once, and always means the same tokens."""
        return [
            f"corpus{corpus}:epoch{epoch}:window{window}"
            for corpus, item in self._items(step, start, stop)
            for epoch, window in [self._epochs[corpus].window(item)]
        ]

    def _items(self, step: int, start: int, stop: int) -> list[tuple[int, int]]:
        assert 0 <= start <= stop <= self.batch_size, (start, stop, self.batch_size)
        first = step * self.batch_size
        return [pick(self._mixture, first + row) for row in range(start, stop)]


class HeldOut:
    """Batches of held-out windows, always the same: disjoint and evenly spread.

    Those of several corpora are shared out by their weights. Raises ValueError when the
    held-out tokens have too few windows.
    """

    def __init__(
        self, corpus: Corpus, cfg: Data, batch_size: int, num_batches: int
    ) -> None:
        self.batch_size, self.num_batches, self._cfg = batch_size, num_batches, cfg
        self._lines = [source.held_out for source in corpus.sources]
        total = num_batches * batch_size
        share_c = shares(corpus.weights, total)
        for source, share in zip(corpus.sources, share_c.tolist()):
            available = source.held_out.num_tokens // (cfg.seq_len + 1)
            if available < share:
                raise ValueError(
                    f"Train.eval_batches={num_batches} of Train.batch_size="
                    f"{batch_size} need {share} held-out windows, and the "
                    f"{source.held_out.num_tokens} held-out tokens of '{source.name}' "
                    f"have {available} of Data.seq_len={cfg.seq_len}: lower "
                    "Train.eval_batches or Data.held_out_every"
                )
        self._mixture = mix(corpus.weights, total)

    def rows(self, index: int, start: int, stop: int) -> "Windows":
        """Return rows start..stop of a held-out batch: int32 [rows, seq_len + 1]."""
        assert 0 <= index < self.num_batches, (index, self.num_batches)
        assert 0 <= start <= stop <= self.batch_size, (start, stop, self.batch_size)
        first = index * self.batch_size
        rows = range(first + start, first + stop)
        items = [pick(self._mixture, row) for row in rows]
        # At least num_tokens // share apart, hence disjoint.
        starts = [
            item * self._lines[c].num_tokens // int(self._mixture.share_c[c])
            for c, item in items
        ]
        return _read(self._lines, [c for c, _ in items], starts, self._cfg)


class _Epochs:
    """The windows of one corpus, epoch after epoch."""

    def __init__(self, num_tokens: int, seq_len: int, seed: int) -> None:
        import grain  # it imports jax, so not before the flags of the backend are set

        self._seq_len, self._seed = seq_len, seed
        # One window fewer than fit leaves seq_len tokens or more for the phase.
        self.num_windows = max(1, (num_tokens - 1) // seq_len - 1)
        self._num_phases = num_tokens - self.num_windows * seq_len
        windows = grain.MapDataset.range(self.num_windows)
        self._order = windows.seed(seed).shuffle().repeat(None)

    def window(self, item: int) -> tuple[int, int]:
        """Return epoch and window of an item; grain reshuffles every epoch."""
        return item // self.num_windows, int(self._order[item])

    def first_token(self, item: int) -> int:
        epoch, window = self.window(item)
        return self._phase(epoch) + window * self._seq_len

    def _phase(self, epoch: int) -> int:
        # A hash, because NumPy does not promise its streams from version to version.
        return _hash(f"{self._seed} {epoch}") % self._num_phases


def _seed(seed: int, corpus: int) -> int:
    """The first corpus has the seed itself, so that it is the same alone and mixed."""
    return _hash(f"corpus {corpus} of {seed}") % 2**32 if corpus else seed


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def _read(
    lines: Sequence[Line], corpora: list[int], starts: list[int], cfg: Data
) -> "Windows":
    from moejax.moe.types import Windows  # it imports jax

    shape = (len(starts), cfg.seq_len + 1)
    token_bt = np.empty(shape, np.int32)
    position_bt = np.empty(shape, np.int32)
    position_bt[:] = np.arange(shape[1], dtype=np.int32)
    corpus_b, start_b = np.array(corpora, int), np.array(starts, np.int64)
    for corpus in set(corpora):
        (row_w,) = np.nonzero(corpus_b == corpus)
        args = (lines[corpus], start_b[row_w], shape[1])
        token_bt[row_w] = read_tokens(*args)
        if cfg.documents == "separate":
            position_bt[row_w] = read_positions(*args)
    return Windows(token_bt, position_bt)
