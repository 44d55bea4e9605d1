"""Corpora: opened, checked against their manifest and the model, split once.

Data.corpus names           its tokens are
'pysrc'                     bytes of installed packages           (pysrc.py)
one file of text, bytes     the bytes of the file itself, one document
text, JSONL, parquet        made once and kept                    (cache.py)
.npy, .bin, globs of them   those files, memory-mapped            (indexed.py)
a folder of prepare.py      the .bin that its manifest names      (prepared.py)
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.config import Data
from train.data.cache import known_scan, known_sha256, prepare_tokens
from train.data.documents import expand, file_format
from train.data.indexed import Indexed, open_tokens
from train.data.lines import Line, make_line, read_tokens, split, whole
from train.data.mixture import shares
from train.data.prepared import MANIFEST, read_manifest
from train.data.pysrc import read_pysrc
from train.data.records import is_packed
from train.data.tokenizer import Tokenizer, load_tokenizer

_SHARDS = (".npy", ".bin", ".idx")
_SAMPLE_WIDTH = 2**16


@dataclasses.dataclass(frozen=True)
class Source:
    """One of the corpora. `sha256` covers the contents of all its files."""

    name: str
    sha256: str
    train: Line
    held_out: Line
    largest_id: int


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The corpora of a run. `weights` are the shares of the sources; their sum is 1."""

    sources: tuple[Source, ...]
    weights: tuple[float, ...]
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        return " + ".join(source.name for source in self.sources)

    @property
    def sha256(self) -> str:
        return _joint_sha256([source.sha256 for source in self.sources])

    @property
    def num_train_tokens(self) -> int:
        return sum(source.train.num_tokens for source in self.sources)

    @property
    def num_held_out_tokens(self) -> int:
        return sum(source.held_out.num_tokens for source in self.sources)

    @property
    def has_bytes(self) -> bool:
        """Every token is one byte."""
        largest = max(source.largest_id for source in self.sources)
        return self.tokenizer.name == "bytes" and largest < 256


def load_corpus(
    cfg: Data, vocab_size: int, say: Callable[[str], None] = print
) -> Corpus:
    """Open the corpora that `cfg` names. `say` gets a line when one takes its time.

    Raises ValueError, in one line, for files that are missing, damaged, not those of
    their manifest or shorter than a window, and for ids that the model lacks.
    """
    tokenizer = load_tokenizer(cfg.tokenizer, cfg.separator)
    tokenizer.check(vocab_size)
    sources = []
    for entry in cfg.corpora:
        if entry == "pysrc":
            source = _pysrc(cfg.held_out_every, tokenizer)
        else:
            opened = _open(entry, cfg, tokenizer, vocab_size, say)
            lines = split(opened.files, cfg.held_out_every)
            source = Source(opened.name, opened.sha256, *lines, opened.largest_id)
        _check_size(entry, source, cfg)
        sources.append(source)
    weights = cfg.weights or tuple(source.train.num_tokens for source in sources)
    total = sum(weights)
    return Corpus(tuple(sources), tuple(w / total for w in weights), tokenizer)


def load_whole(
    cfg: Data, vocab_size: int, say: Callable[[str], None] = print
) -> tuple[Tokenizer, list[Line]]:
    """Open all documents of each corpus of `cfg`, of any size, not split, to evaluate.

    Raises ValueError as load_corpus does.
    """
    tokenizer = load_tokenizer(cfg.tokenizer, cfg.separator)
    tokenizer.check(vocab_size)
    lines = []
    for entry in cfg.corpora:
        if entry == "pysrc":
            source = _pysrc(cfg.held_out_every, tokenizer)
            lines += [source.train, source.held_out]
        else:
            lines.append(whole(_open(entry, cfg, tokenizer, vocab_size, say).files))
    return tokenizer, lines


def byte_sample(corpus: Corpus, limit: int) -> np.ndarray | None:
    """Return about `limit` bytes to train on, by the weights, uint8; None if tokens are
    not bytes. A corpus with fewer than its share gives all, a larger one even parts."""
    if not corpus.has_bytes:
        return None
    parts = []
    for source, share in zip(corpus.sources, shares(corpus.weights, limit).tolist()):
        size = source.train.num_tokens
        width = min(_SAMPLE_WIDTH, size, max(1, share))
        if size <= share:
            parts.append(read_tokens(source.train, np.zeros(1, int), size))
        else:
            start_w = np.arange(share // width) * size // (share // width)
            parts.append(read_tokens(source.train, start_w, width))
    return np.concatenate([part.ravel().astype(np.uint8) for part in parts])


def identity(corpus: Corpus, cfg: Data, batch_size: int) -> dict[str, Any]:
    """Return all that the batch of a step and the held-out text depend on, as JSON.

    Paths are not part of it: a run may go on after its data has moved.
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


def check_identity(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise ValueError, naming every difference, unless both are the same data.

    The same contents by another name are the same data.
    """
    differences = [
        f"{name} was {saved.get(name)}, is {current.get(name)}"
        for name in dict.fromkeys([*saved, *current])
        if saved.get(name) != current.get(name)
    ]
    if saved.get("sha256") == current.get("sha256"):
        differences = [line for line in differences if not line.startswith("name ")]
    if differences:
        raise ValueError(
            f"the checkpoint was trained on other data: {'; '.join(differences)}: give "
            "the run what it had, or another run directory"
        )


@dataclasses.dataclass(frozen=True)
class _Opened:
    name: str
    sha256: str
    files: tuple[Indexed, ...]
    largest_id: int


def _open(
    entry: str,
    cfg: Data,
    tokenizer: Tokenizer,
    vocab_size: int,
    say: Callable[[str], None],
) -> _Opened:
    try:
        sha256, files, largest_id = _open_files(entry, cfg, tokenizer, say)
        if largest_id >= vocab_size:
            raise ValueError(
                f"it has the id {largest_id}, and Model.vocab_size={vocab_size}: set "
                f"Model.vocab_size to {largest_id + 1} or more"
            )
    except ValueError as fault:
        is_said = str(fault).startswith(f"'{entry}'")
        named = f"{fault}" if is_said else f"'{entry}': {fault}"
        raise ValueError(f"Data.corpus={named}") from fault
    # The name alone: a run may go on after its data has moved.
    return _Opened(Path(entry).name, sha256, files, largest_id)


def _open_files(
    entry: str, cfg: Data, tokenizer: Tokenizer, say: Callable[[str], None]
) -> tuple[str, tuple[Indexed, ...], int]:
    """Return sha256, files and the largest id of a corpus."""
    folder = Path(entry).expanduser()
    if folder.is_dir():
        return _open_folder(folder, tokenizer)
    files = expand([entry])
    are_shards = {path.suffix in _SHARDS for path in files}
    if are_shards == {True, False}:
        raise ValueError(
            "some files hold tokens and others text: name them as two corpora"
        )
    if are_shards == {True}:
        is_index = [path.suffix == ".idx" for path in files]
        bins = [p.with_suffix(".bin") if x else p for p, x in zip(files, is_index)]
        return _open_shards(list(dict.fromkeys(bins)), tokenizer)
    (first, *others) = files
    is_plain = file_format(first) == "text" and not is_packed(first)
    if tokenizer.name == "bytes" and is_plain and not others:
        return _open_bytes(first)
    return _open_folder(prepare_tokens(files, cfg, tokenizer, say), tokenizer)


def _open_shards(
    paths: Sequence[Path], tokenizer: Tokenizer
) -> tuple[str, tuple[Indexed, ...], int]:
    shas, largest = zip(*[known_scan(path) for path in paths])
    files = tuple(open_tokens(path, tokenizer.separator) for path in paths)
    return _joint_sha256(shas), files, max(largest)


def _open_folder(
    folder: Path, tokenizer: Tokenizer
) -> tuple[str, tuple[Indexed, ...], int]:
    """Open a prepared folder; raise ValueError unless its shards are its manifest's."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(
            f"'{folder}' is a folder without {MANIFEST}: name its files, "
            f"'{folder}/*.jsonl', or a folder that tools/prepare.py has made"
        )
    manifest = read_manifest(folder)
    made_with = manifest["tokenizer"]["sha256"], manifest["separator"]
    if made_with != (tokenizer.sha256, tokenizer.separator):
        raise ValueError(
            f"made with the tokenizer '{manifest['tokenizer'].get('name')}' (sha256 "
            f"{made_with[0][:12]}, separator {made_with[1]}), and Data.tokenizer="
            f"'{tokenizer.name}' is {tokenizer.sha256[:12]}, {tokenizer.separator}: "
            "use that one, or prepare the files anew"
        )
    paths = [folder / shard["file"] for shard in manifest["shards"]]
    for path in [p.with_suffix(s) for p in paths for s in (".bin", ".idx")]:
        if not path.is_file():
            raise ValueError(
                f"{path.name}, which its {MANIFEST} names, is missing: copy it there, "
                "or prepare the files anew"
            )
    for path, shard in zip(paths, manifest["shards"]):
        if known_scan(path)[0] != shard["sha256"]:
            raise ValueError(
                f"'{path}' differs from its sha256 in {MANIFEST}: it is damaged or "
                "changed: prepare the files anew"
            )
    return _open_shards(paths, tokenizer)


def _open_bytes(path: Path) -> tuple[str, tuple[Indexed, ...], int]:
    sha256 = known_sha256(path)
    if path.stat().st_size == 0:
        raise ValueError(f"'{path}' is empty: give a file that holds text")
    token_b = np.memmap(path, np.uint8, "r")
    return sha256, (Indexed(path, token_b, np.zeros(1, np.int64)),), 255


def _pysrc(held_out_every: int, tokenizer: Tokenizer) -> Source:
    if (tokenizer.name, tokenizer.separator) != ("bytes", 0):
        raise ValueError(
            f"Data.corpus='pysrc' is bytes with 0x00 before each document, and "
            f"Data.tokenizer='{tokenizer.name}' has the separator "
            f"{tokenizer.separator}: use 'bytes' and 0, or another corpus"
        )
    sha256, *sides = read_pysrc(held_out_every)
    starts = [np.union1d([0], np.flatnonzero(text_b == 0)) for text_b in sides]
    return Source("pysrc", sha256, *map(make_line, sides, starts), 255)


def _check_size(entry: str, source: Source, cfg: Data) -> None:
    num_train, num_held_out = source.train.num_tokens, source.held_out.num_tokens
    if min(num_train, num_held_out) <= cfg.seq_len:
        raise ValueError(
            f"Data.corpus='{entry}' has {num_train} tokens to train on and "
            f"{num_held_out} held out, and a window of Data.seq_len={cfg.seq_len} "
            f"needs {cfg.seq_len + 1} in each: give a longer text, or lower "
            "Data.seq_len or Data.held_out_every"
        )


def _joint_sha256(shas: Sequence[str]) -> str:
    """Return the sha256 of several; a single one stays as it is."""
    return (
        shas[0]
        if len(shas) == 1
        else hashlib.sha256("".join(shas).encode()).hexdigest()
    )
