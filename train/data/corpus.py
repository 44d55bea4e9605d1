"""Open the corpora of a run: check them against manifest and model, hold out a part.

Data.corpus names           its tokens are
'pysrc'                     bytes of installed packages           (pysrc.py)
a folder of prepare.py      the shards of its manifest            (prepared.py)
text, JSONL, parquet        the same, prepared in a cache         (prepared.py)
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.config import Data
from train.data.documents import expand
from train.data.mixture import apportion
from train.data.prepared import open_prepared, prepare_cached
from train.data.pysrc import read_pysrc
from train.data.shards import TokenFile
from train.data.token_streams import (
    TokenStream,
    join_documents,
    make_token_stream,
    read_tokens,
    split_held_out,
)
from train.data.tokenizer import Tokenizer, load_tokenizer

_SAMPLE_WIDTH = 2**16
"""Maximum length of one contiguous part of a byte sample, in bytes."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One corpus, split into training and held-out tokens."""

    name: str
    sha256: str
    """Hash of the contents of all its shards."""
    train: TokenStream
    held_out: TokenStream


@dataclasses.dataclass(frozen=True)
class Corpus:
    """All corpora of a run, with their mixture weights and their tokenizer."""

    sources: tuple[Source, ...]
    weights: tuple[float, ...]
    """Share of each source in the training rows; the shares add up to 1."""
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        return " + ".join(source.name for source in self.sources)

    @property
    def sha256(self) -> str:
        return _combine_sha256([source.sha256 for source in self.sources])

    @property
    def num_train_tokens(self) -> int:
        return sum(source.train.num_tokens for source in self.sources)

    @property
    def num_held_out_tokens(self) -> int:
        return sum(source.held_out.num_tokens for source in self.sources)

    @property
    def has_targets(self) -> bool:
        """Whether the corpora are conversations, whose targets are marked."""
        return self.sources[0].train.window is not None

    @property
    def has_bytes(self) -> bool:
        """Whether every token is one byte."""
        return self.tokenizer.name == "bytes"


def load_corpus(
    cfg: Data, vocab_size: int, say: Callable[[str], None] = print
) -> Corpus:
    """Open the corpora that `cfg` names, and split off the held-out documents.

    `say` prints progress when a corpus takes long to prepare. Raises a ValueError of
    one line when a file is missing, damaged, different from its manifest or shorter
    than a window, or when the model lacks a token id.
    """
    tokenizer = load_tokenizer(cfg.tokenizer, cfg.separator, cfg.end)
    tokenizer.check(vocab_size)
    sources = []
    for entry in cfg.corpora:
        if entry == "pysrc":
            source = _open_pysrc(cfg.held_out_every, tokenizer)
        else:
            sha256, files = _open(entry, cfg, tokenizer, say)
            streams = split_held_out(files, cfg.held_out_every)
            # The name without its folder, so that a run can resume after a move.
            source = Source(Path(entry).name, sha256, *streams)
        _check_size(entry, source, cfg)
        sources.append(source)
    if len({source.train.window is None for source in sources}) > 1:
        raise ValueError(
            "Data.corpus names conversations, in which the loss counts the assistant's "
            "tokens, and texts, in which it counts all: name one kind alone"
        )
    weights = cfg.weights or tuple(source.train.num_tokens for source in sources)
    total = sum(weights)
    return Corpus(tuple(sources), tuple(w / total for w in weights), tokenizer)


def load_unsplit(
    cfg: Data, vocab_size: int, say: Callable[[str], None] = print
) -> tuple[Tokenizer, list[TokenStream]]:
    """Open all documents of each corpus for evaluation, without a held-out split.

    A corpus may be shorter than a window. Raises ValueError as load_corpus does.
    """
    tokenizer = load_tokenizer(cfg.tokenizer, cfg.separator, cfg.end)
    tokenizer.check(vocab_size)
    streams = []
    for entry in cfg.corpora:
        if entry == "pysrc":
            source = _open_pysrc(cfg.held_out_every, tokenizer)
            streams += [source.train, source.held_out]
        else:
            _, files = _open(entry, cfg, tokenizer, say)
            streams.append(join_documents(files))
    return tokenizer, streams


def byte_sample(corpus: Corpus, limit: int) -> np.ndarray | None:
    """Return about `limit` bytes of training text, uint8; None if tokens are not bytes.

    The corpora contribute in proportion to their weights. A corpus smaller than its
    share contributes everything, a larger one evenly spaced parts.
    """
    if not corpus.has_bytes or corpus.has_targets:
        return None
    parts = []
    for source, share in zip(corpus.sources, apportion(corpus.weights, limit).tolist()):
        size = source.train.num_tokens
        width = min(_SAMPLE_WIDTH, size, max(1, share))
        if size <= share:
            parts.append(read_tokens(source.train, np.zeros(1, int), size))
        else:
            start_w = np.arange(share // width) * size // (share // width)
            parts.append(read_tokens(source.train, start_w, width))
    return np.concatenate([part.ravel().astype(np.uint8) for part in parts])


def identity(corpus: Corpus, cfg: Data, batch_size: int) -> dict[str, Any]:
    """Return everything that decides the batches and the held-out text, for JSON.

    Paths are left out, so that a run can resume after its data has moved.
    """
    return {
        "name": corpus.name,
        "sha256": corpus.sha256,
        "weights": list(corpus.weights),
        "tokenizer_sha256": corpus.tokenizer.sha256,
        "separator": corpus.tokenizer.separator,
        "end": corpus.tokenizer.end,
        "documents": cfg.documents,
        "held_out_every": cfg.held_out_every,
        "seed": cfg.seed,
        "seq_len": cfg.seq_len,
        "batch_size": batch_size,
    }


def check_identity(saved: dict[str, Any] | None, current: dict[str, Any]) -> None:
    """Raise ValueError unless both identities are the same data; name all differences.

    The same contents under another name are the same data. A checkpoint that has seen
    no data, whose identity is None, goes on with any.
    """
    if saved is None:
        return
    differences = [
        f"{_field(name)} was {saved.get(name)}, is {current.get(name)}"
        for name in dict.fromkeys([*saved, *current])
        if saved.get(name) != current.get(name)
    ]
    if saved.get("sha256") == current.get("sha256"):
        differences = [text for text in differences if not text.startswith("name ")]
    if differences:
        raise ValueError(
            f"the checkpoint was trained on other data: {'; '.join(differences)}: "
            "restore the old data and settings, or use another run directory"
        )


def _field(name: str) -> str:
    """Return a name of `identity`, as the configuration has it if it is a field."""
    return f"Data.{name}" if name in Data.__dataclass_fields__ else name


def _open(
    entry: str, cfg: Data, tokenizer: Tokenizer, say: Callable[[str], None]
) -> tuple[str, list[TokenFile]]:
    """Return the sha256 and the token files of a prepared folder or of text files.

    Text files are prepared first, unless their tokens are cached.
    """
    try:
        folder = Path(entry).expanduser()
        if not folder.is_dir():
            folder = prepare_cached(expand([entry]), tokenizer, cfg.text_key, say)
        files, shas = open_prepared(folder, tokenizer)
    except ValueError as error:
        is_named = str(error).startswith(f"'{entry}'")
        message = f"{error}" if is_named else f"'{entry}': {error}"
        raise ValueError(f"Data.corpus={message}") from error
    return _combine_sha256(shas), files


def _open_pysrc(held_out_every: int, tokenizer: Tokenizer) -> Source:
    if (tokenizer.name, tokenizer.separator) != ("bytes", 0):
        raise ValueError(
            f"Data.corpus='pysrc' is bytes with 0x00 before each document, but "
            f"Data.tokenizer='{tokenizer.name}' has the separator "
            f"{tokenizer.separator}: use 'bytes' and 0, or another corpus"
        )
    sha256, *texts = read_pysrc(held_out_every)
    starts = [np.union1d([0], np.flatnonzero(text_b == 0)) for text_b in texts]
    return Source("pysrc", sha256, *map(make_token_stream, texts, starts))


def _check_size(entry: str, source: Source, cfg: Data) -> None:
    num_train, num_held_out = source.train.num_tokens, source.held_out.num_tokens
    if (window := source.train.window) is not None:
        if window != cfg.seq_len or cfg.documents != "separate":
            raise ValueError(
                f"Data.corpus='{entry}' has whole conversations in windows of {window} "
                f"tokens: set Data.seq_len = {window} (it is {cfg.seq_len}) and "
                f"Data.documents = 'separate' (it is {cfg.documents!r})"
            )
        if not num_train:
            raise ValueError(
                f"Data.corpus='{entry}' has one window of conversations, and one is "
                "held out: give more conversations"
            )
        return
    if min(num_train, num_held_out) <= cfg.seq_len:
        raise ValueError(
            f"Data.corpus='{entry}' has {num_train} tokens to train on and "
            f"{num_held_out} held out, but a window of Data.seq_len={cfg.seq_len} "
            f"needs {cfg.seq_len + 1} of each: give a longer text, or lower "
            "Data.seq_len or Data.held_out_every"
        )


def _combine_sha256(shas: Sequence[str]) -> str:
    """Return one sha256 for several; a single one is returned unchanged."""
    return (
        shas[0]
        if len(shas) == 1
        else hashlib.sha256("".join(shas).encode()).hexdigest()
    )
