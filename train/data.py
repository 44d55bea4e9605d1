"""Bytes are the tokens: a corpus, its training batches and its held-out windows.

    corpus    document 0 document 0 document 0 ...    0: one 0x00 byte
    windows   |--- phase ---|=====|=====|=====|...    seq_len + 1 bytes each; the first
                                                      is the last of the window before,
                                                      and only given, not predicted

A batch is a pure function of (corpus, seed, step): the position in the data is a step
number, and any number of processes reads the same batches. Texts and positions in them
end in `b` (bytes), batches of windows in `bt`.
"""

import dataclasses
import hashlib
import logging
from importlib import metadata
from pathlib import Path

import numpy as np

from moejax.config import Data

_PINNED = {
    "jax": (
        "0.11.2",
        "e14b18c7a88bf10af0983b1a3d6f689252e37e928586495fe557a5848af85c10",
    ),
    "flax": (
        "0.12.12",
        "fdedd563f3fccd98519599c9f2c9a2140b4aa581f07822221089ea2ef5cb890a",
    ),
    "optax": (
        "0.2.8",
        "6bd7c7a39065a3bfa7325bfaefcb5717fdc6ea9e98a5f08b978a959acdfc02f6",
    ),
    "orbax-checkpoint": (
        "0.12.8",
        "be12be48acaa5f9f06863e2c754996255bde33fdd5f82e246590ae9f6724e9d7",
    ),
    "grain": (
        "0.2.18",
        "110a8826dc7728f0503449e4de4a53d401dad38736b63a4b36b16aa326a91e07",
    ),
}
"""Packages of pysrc: the version in constraints.txt and the sha256 of its .py files."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text as bytes, split once. `sha256` covers all of it, names of documents too."""

    name: str
    sha256: str
    train_b: np.ndarray
    held_out_b: np.ndarray


def load_corpus(cfg: Data) -> Corpus:
    """The corpus that `cfg` names: 'pysrc' or the path of a text file.

    Raises ValueError when a file is missing, empty or shorter than a window, and when
    files of an installed package of pysrc are not those of its release.
    """
    if cfg.corpus == "pysrc":
        corpus = _load_pysrc(cfg.held_out_every)
    else:
        corpus = _load_file(cfg.corpus, cfg.held_out_every)
    if min(corpus.train_b.size, corpus.held_out_b.size) <= cfg.seq_len:
        raise ValueError(
            f"Data.corpus='{cfg.corpus}' has {corpus.train_b.size} bytes to train on "
            f"and {corpus.held_out_b.size} held out, and a window of Data.seq_len="
            f"{cfg.seq_len} needs {cfg.seq_len + 1} in each: give a longer text, or "
            "lower Data.seq_len or Data.held_out_every"
        )
    return corpus


class TrainBatches:
    """Shuffled windows of the training bytes, without end.

    An epoch cuts the bytes into `num_windows` windows at stride seq_len and visits each
    once. Where the first one starts is drawn anew each epoch, out of the bytes that
    num_windows * seq_len leave over, so that boundaries move.
    """

    def __init__(self, corpus: Corpus, cfg: Data, batch_size: int) -> None:
        import grain  # it imports jax, so not before the flags of the backend are set

        num_b = corpus.train_b.size
        self.batch_size, self._cfg = batch_size, cfg
        # One window fewer than fit leaves seq_len bytes or more for the phase.
        self.num_windows = max(1, (num_b - 1) // cfg.seq_len - 1)
        self._num_phases = num_b - self.num_windows * cfg.seq_len
        self._window_bt = _windows(corpus.train_b, cfg.seq_len)
        windows = grain.MapDataset.range(self.num_windows)
        self._order = windows.seed(cfg.seed).shuffle().repeat(None)

    def rows(self, step: int, start: int, stop: int) -> np.ndarray:
        """Rows start..stop of the global batch of a step: int32 [rows, seq_len + 1]."""
        assert 0 <= start <= stop <= self.batch_size, (start, stop, self.batch_size)
        first = step * self.batch_size
        rows = range(first + start, first + stop)
        starts_b = np.fromiter(map(self._first_byte, rows), np.int64, len(rows))
        return self._window_bt[starts_b].astype(np.int32)

    def _first_byte(self, row: int) -> int:
        """Where the row-th window since step 0 starts; grain reshuffles every epoch."""
        phase = self._phase(row // self.num_windows)
        return phase + self._order[row] * self._cfg.seq_len

    def _phase(self, epoch: int) -> int:
        # A hash, because NumPy does not promise its streams from version to version.
        digest = hashlib.sha256(f"{self._cfg.seed} {epoch}".encode()).digest()
        return int.from_bytes(digest[:8]) % self._num_phases


class HeldOut:
    """Batches of held-out windows, always the same: disjoint and evenly spread.

    Raises ValueError when the held-out bytes have too few windows.
    """

    def __init__(
        self, corpus: Corpus, cfg: Data, batch_size: int, num_batches: int
    ) -> None:
        self.batch_size, self.num_batches = batch_size, num_batches
        num_windows = num_batches * batch_size
        num_b = corpus.held_out_b.size
        available = num_b // (cfg.seq_len + 1)
        if available < num_windows:
            raise ValueError(
                f"Train.eval_batches={num_batches} of Train.batch_size={batch_size} "
                f"need {num_windows} held-out windows, and the {num_b} held-out bytes "
                f"of '{corpus.name}' have {available} of Data.seq_len={cfg.seq_len}: "
                "lower Train.eval_batches or Data.held_out_every"
            )
        # At least num_b // num_windows apart, hence disjoint.
        starts_b = np.arange(num_windows) * num_b // num_windows
        self._tokens_bt = _windows(corpus.held_out_b, cfg.seq_len)[starts_b]

    def rows(self, index: int, start: int, stop: int) -> np.ndarray:
        """Rows start..stop of a held-out batch: int32 [rows, seq_len + 1]."""
        assert 0 <= index < self.num_batches, (index, self.num_batches)
        assert 0 <= start <= stop <= self.batch_size, (start, stop, self.batch_size)
        first = index * self.batch_size
        return self._tokens_bt[first + start : first + stop].astype(np.int32)


def identity(corpus: Corpus, cfg: Data, batch_size: int) -> dict[str, str | int]:
    """All that the batch of a step and the held-out text depend on, for checkpoints."""
    return {
        "name": corpus.name,
        "sha256": corpus.sha256,
        "held_out_every": cfg.held_out_every,
        "seed": cfg.seed,
        "seq_len": cfg.seq_len,
        "batch_size": batch_size,
    }


def check_identity(saved: dict[str, str | int], current: dict[str, str | int]) -> None:
    """Raises ValueError, naming every difference, unless both are the same data."""
    differences = [
        f"{name} was {saved.get(name)}, is {current.get(name)}"
        for name in dict.fromkeys([*saved, *current])
        if saved.get(name) != current.get(name)
    ]
    if differences:
        raise ValueError(
            f"the checkpoint was trained on other data: {'; '.join(differences)}: give "
            "the run what it had, or another run directory"
        )


def _windows(text_b: np.ndarray, seq_len: int) -> np.ndarray:
    """Every window of seq_len + 1 bytes, by its first byte; a view."""
    return np.lib.stride_tricks.sliding_window_view(text_b, seq_len + 1)


def _load_file(name: str, held_out_every: int) -> Corpus:
    path = Path(name)
    if not path.is_file():
        raise ValueError(
            f"Data.corpus='{name}' is no file: give the path of a text file, or 'pysrc'"
        )
    text = path.read_bytes()
    if not text:
        raise ValueError(f"Data.corpus='{name}' is empty: give a file that holds text")
    text_b = np.frombuffer(text, np.uint8)
    num_train = text_b.size - text_b.size // held_out_every
    sha256 = hashlib.sha256(text).hexdigest()
    # The name of the file alone: a run may go on after its data has moved.
    return Corpus(path.name, sha256, text_b[:num_train], text_b[num_train:])


def _load_pysrc(held_out_every: int) -> Corpus:
    """The .py files that the packages of _PINNED list in their RECORD.

    Some repeat another (a licence alone, in __init__.py): each text is kept once, so
    that none is both trained on and held out.
    """
    sources = {package: _read_package(package) for package in _PINNED}
    shas = {package: _sha256(files) for package, files in sources.items()}
    _check_release(shas)
    texts = dict.fromkeys(t for files in sources.values() for t in files.values())
    texts.pop(b"", None)
    assert not any(b"\0" in text for text in texts), "0x00 separates documents"
    documents = [text + b"\0" for text in texts]
    held_out = documents[held_out_every - 1 :: held_out_every]
    del documents[held_out_every - 1 :: held_out_every]
    sha256 = hashlib.sha256("".join(shas.values()).encode()).hexdigest()
    return Corpus("pysrc", sha256, _join(documents), _join(held_out))


def _read_package(package: str) -> dict[str, bytes]:
    """Contents of its .py files by path, in the order of paths; nothing is imported.

    `files` leaves out what RECORD lists and the disk lacks: the sha256 then differs.
    """
    distribution = metadata.distribution(package)
    sources = [file for file in distribution.files or () if file.suffix == ".py"]
    if not sources:
        raise ValueError(
            f"pysrc: the installation of {package} lists no .py files (an editable one "
            f"does not): reinstall {package} from a wheel"
        )
    sources.sort(key=lambda file: file.as_posix())
    return {file.as_posix(): file.read_binary() for file in sources}


def _check_release(shas: dict[str, str]) -> None:
    """Raises ValueError for changed files; other versions are a warning."""
    versions = {package: metadata.version(package) for package in shas}
    others = [p for p in shas if versions[p] != _PINNED[p][0]]
    changed = [p for p in shas if p not in others and shas[p] != _PINNED[p][1]]
    if changed:
        names = " ".join(f"{package}=={versions[package]}" for package in changed)
        raise ValueError(
            f"pysrc: the installed .py files of {names} are not those of the release "
            f"(sha256 {', '.join(shas[p][:12] for p in changed)} instead of "
            f"{', '.join(_PINNED[p][1][:12] for p in changed)}): reinstall with "
            f"pip install --force-reinstall --no-deps {names}"
        )
    if others:
        _log.warning(
            "pysrc is another text than the documented one: %s",
            ", ".join(f"{p} is {versions[p]}, not {_PINNED[p][0]}" for p in others),
        )


def _sha256(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for path, text in files.items():
        digest.update(f"{path} {len(text)}\n".encode())
        digest.update(text)
    return digest.hexdigest()


def _join(documents: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(documents), np.uint8)
