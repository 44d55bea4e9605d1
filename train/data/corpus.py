"""Open the corpora of a run: check them against manifest and model, hold out a part.

Data.corpus names           its tokens are
'pysrc'                     bytes of installed packages           (pysrc.py)
a text file, for 'bytes'    the bytes of the file itself, as one document
text, JSONL, parquet        prepared once, then cached            (cache.py)
.npy, .bin, globs of them   those files, memory-mapped            (indexed.py)
a folder of prepare.py      the .bin files of its manifest        (prepared.py)
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.config import Data
from train.data.cache import cached_scan, prepare_tokens
from train.data.documents import expand, file_format
from train.data.indexed import Scan, TokenFile, open_bytes, open_tokens, scan_bytes
from train.data.mixture import apportion
from train.data.prepared import MANIFEST, read_manifest
from train.data.pysrc import read_pysrc
from train.data.records import is_gzipped
from train.data.token_streams import (
    TokenStream,
    join_documents,
    make_token_stream,
    read_tokens,
    split_held_out,
)
from train.data.tokenizer import Tokenizer, load_tokenizer

_TOKEN_SUFFIXES = (".npy", ".bin", ".idx")
"""Extensions of files that hold token ids instead of text."""
_SAMPLE_WIDTH = 2**16
"""Maximum length of one contiguous part of a byte sample, in bytes."""


@dataclasses.dataclass(frozen=True)
class Source:
    """One corpus, split into training and held-out tokens."""

    name: str
    sha256: str
    """Hash of the contents of all its files."""
    train: TokenStream
    held_out: TokenStream
    largest_id: int
    """Largest token id; for plain bytes 255, whether it occurs or not."""


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
    def has_bytes(self) -> bool:
        """Whether every token is one byte."""
        largest = max(source.largest_id for source in self.sources)
        return self.tokenizer.name == "bytes" and largest < 256


def load_corpus(
    cfg: Data, vocab_size: int, say: Callable[[str], None] = print
) -> Corpus:
    """Open the corpora that `cfg` names, and split off the held-out documents.

    `say` prints progress when a corpus takes long to prepare. Raises a ValueError of
    one line when a file is missing, damaged, different from its manifest or shorter
    than a window, or when the model lacks a token id.
    """
    tokenizer = load_tokenizer(cfg.tokenizer, cfg.separator)
    tokenizer.check(vocab_size)
    sources = []
    for entry in cfg.corpora:
        if entry == "pysrc":
            source = _open_pysrc(cfg.held_out_every, tokenizer)
        else:
            corpus = _open(entry, cfg, tokenizer, vocab_size, say)
            streams = split_held_out(corpus.files, cfg.held_out_every)
            source = Source(corpus.name, corpus.sha256, *streams, corpus.largest_id)
        _check_size(entry, source, cfg)
        sources.append(source)
    weights = cfg.weights or tuple(source.train.num_tokens for source in sources)
    total = sum(weights)
    return Corpus(tuple(sources), tuple(w / total for w in weights), tokenizer)


def load_unsplit(
    cfg: Data, vocab_size: int, say: Callable[[str], None] = print
) -> tuple[Tokenizer, list[TokenStream]]:
    """Open all documents of each corpus for evaluation, without a held-out split.

    A corpus may be shorter than a window. Raises ValueError as load_corpus does.
    """
    tokenizer = load_tokenizer(cfg.tokenizer, cfg.separator)
    tokenizer.check(vocab_size)
    streams = []
    for entry in cfg.corpora:
        if entry == "pysrc":
            source = _open_pysrc(cfg.held_out_every, tokenizer)
            streams += [source.train, source.held_out]
        else:
            streams.append(
                join_documents(_open(entry, cfg, tokenizer, vocab_size, say).files)
            )
    return tokenizer, streams


def byte_sample(corpus: Corpus, limit: int) -> np.ndarray | None:
    """Return about `limit` bytes of training text, uint8; None if tokens are not bytes.

    The corpora contribute in proportion to their weights. A corpus smaller than its
    share contributes everything, a larger one evenly spaced parts.
    """
    if not corpus.has_bytes:
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
        f"{name} was {saved.get(name)}, is {current.get(name)}"
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


@dataclasses.dataclass(frozen=True)
class _OpenCorpus:
    """Files of one corpus, before they are split."""

    name: str
    sha256: str
    files: tuple[TokenFile, ...]
    largest_id: int


def _open(
    entry: str,
    cfg: Data,
    tokenizer: Tokenizer,
    vocab_size: int,
    say: Callable[[str], None],
) -> _OpenCorpus:
    try:
        sha256, files, largest_id = _open_files(entry, cfg, tokenizer, say)
        if largest_id >= vocab_size:
            raise ValueError(
                f"it has the id {largest_id}, but Model.vocab_size={vocab_size}: set "
                f"Model.vocab_size to {largest_id + 1} or more"
            )
    except ValueError as error:
        is_named = str(error).startswith(f"'{entry}'")
        message = f"{error}" if is_named else f"'{entry}': {error}"
        raise ValueError(f"Data.corpus={message}") from error
    # The name without its folder, so that a run can resume after its data has moved.
    return _OpenCorpus(Path(entry).name, sha256, files, largest_id)


def _open_files(
    entry: str, cfg: Data, tokenizer: Tokenizer, say: Callable[[str], None]
) -> tuple[str, tuple[TokenFile, ...], int]:
    """Return the sha256, the token files and the largest id of a corpus."""
    folder = Path(entry).expanduser()
    if folder.is_dir():
        return _open_folder(folder, tokenizer)
    files = expand([entry])
    are_tokens = {path.suffix in _TOKEN_SUFFIXES for path in files}
    if are_tokens == {True, False}:
        raise ValueError(
            "some files hold tokens and others hold text: name them as two corpora"
        )
    if are_tokens == {True}:
        is_index = [path.suffix == ".idx" for path in files]
        bins = [p.with_suffix(".bin") if x else p for p, x in zip(files, is_index)]
        return _open_shards(list(dict.fromkeys(bins)), tokenizer)
    (first, *others) = files
    is_plain = file_format(first) == "text" and not is_gzipped(first)
    if tokenizer.name == "bytes" and is_plain and not others:
        return _open_bytes(first)
    cached = prepare_tokens(files, cfg, tokenizer, say)
    return _open_folder(cached, tokenizer, f"remove '{cached}', and run again")


def _open_shards(
    paths: Sequence[Path], tokenizer: Tokenizer
) -> tuple[str, tuple[TokenFile, ...], int]:
    return _open_scanned(paths, [cached_scan(path) for path in paths], tokenizer)


def _open_scanned(
    paths: Sequence[Path], scans: Sequence[Scan], tokenizer: Tokenizer
) -> tuple[str, tuple[TokenFile, ...], int]:
    files = tuple(
        open_tokens(path, tokenizer.separator, found.sums)
        for path, found in zip(paths, scans)
    )
    sha256 = _combine_sha256([found.sha256 for found in scans])
    return sha256, files, max(found.largest_id for found in scans)


def _open_folder(
    folder: Path, tokenizer: Tokenizer, remedy: str = "prepare the files again"
) -> tuple[str, tuple[TokenFile, ...], int]:
    """Open a prepared folder; raise ValueError unless its shards match its manifest."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(
            f"'{folder}' is a folder without {MANIFEST}: name its files, such as "
            f"'{folder}/*.jsonl', or a folder that tools/prepare.py made"
        )
    manifest = read_manifest(folder)
    made_with = manifest["tokenizer"]["sha256"], manifest["separator"]
    if made_with != (tokenizer.sha256, tokenizer.separator):
        raise ValueError(
            f"prepared with the tokenizer '{manifest['tokenizer'].get('name')}' "
            f"(sha256 {made_with[0][:12]}, separator {made_with[1]}), but "
            f"Data.tokenizer='{tokenizer.name}' has sha256 {tokenizer.sha256[:12]}, "
            f"separator {tokenizer.separator}: use that, or prepare the files again"
        )
    paths = [folder / shard["file"] for shard in manifest["shards"]]
    for path in [p.with_suffix(s) for p in paths for s in (".bin", ".idx")]:
        if not path.is_file():
            raise ValueError(
                f"{path.name}, which {MANIFEST} names, is missing: copy it there, or "
                f"{remedy}"
            )
    scans = [cached_scan(path) for path in paths]
    for path, found, shard in zip(paths, scans, manifest["shards"]):
        if found.sha256 != shard["sha256"]:
            raise ValueError(
                f"'{path}' differs from its sha256 in {MANIFEST}: it is damaged or "
                f"changed: {remedy}"
            )
    return _open_scanned(paths, scans, tokenizer)


def _open_bytes(path: Path) -> tuple[str, tuple[TokenFile, ...], int]:
    found = cached_scan(path, scan_bytes)
    return found.sha256, (open_bytes(path, found.sums),), found.largest_id


def _open_pysrc(held_out_every: int, tokenizer: Tokenizer) -> Source:
    if (tokenizer.name, tokenizer.separator) != ("bytes", 0):
        raise ValueError(
            f"Data.corpus='pysrc' is bytes with 0x00 before each document, but "
            f"Data.tokenizer='{tokenizer.name}' has the separator "
            f"{tokenizer.separator}: use 'bytes' and 0, or another corpus"
        )
    sha256, *texts = read_pysrc(held_out_every)
    starts = [np.union1d([0], np.flatnonzero(text_b == 0)) for text_b in texts]
    return Source("pysrc", sha256, *map(make_token_stream, texts, starts), 255)


def _check_size(entry: str, source: Source, cfg: Data) -> None:
    num_train, num_held_out = source.train.num_tokens, source.held_out.num_tokens
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
