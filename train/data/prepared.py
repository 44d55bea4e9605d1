"""Streams of text made into token shards once: a folder of .bin, .idx and a manifest.

    out/manifest.json      sources, tokenizer, counts, bad records, sha256 of the shards
    out/shard-00000.bin    ids; each document begins with the separator
    out/shard-00000.idx    where documents begin (indexed.py)

All is written to `out`.partial, which gets its name when it is whole, by the one
process that holds the lock of `out`.partial.lock. What is written depends on the files
and the recipe alone, not on the number of workers.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import numpy as np

from train.data.documents import expand, pieces
from train.data.encoding import Chunk, Recipe, encode
from train.data.indexed import IndexedWriter, Shard, file_sha256
from train.data.records import Bad, Piece, unreadable
from train.data.tokenizer import load_tokenizer

FORMAT = "moejax tokens 1"
MANIFEST = "manifest.json"
SHARD_TOKENS = 2**29
SHARD_DOCUMENTS = 2**22
_MAX_NAMED = 1000
"""Bad records that are named; all are counted."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far prepare() is; bytes are those of the files as they lie on the disk."""

    num_bytes: int
    total_bytes: int
    num_documents: int
    num_tokens: int
    num_bad: int


def prepare(
    files: Sequence[str | Path],
    out: str | Path,
    recipe: Recipe | None = None,
    num_workers: int = 1,
    show: Callable[[Progress], None] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Write the documents of files and globs to the folder `out`; return its manifest.

    One worker is this process; more are started. `show` is called after every chunk.
    Raises ValueError for what the user can mend (no such file, too many bad records,
    a folder that is there or that another process writes), OSError when the disk does
    not take the shards and ChildProcessError when a worker dies; `out` is then as it
    was.
    """
    recipe = recipe or Recipe()
    out = Path(out).expanduser().absolute()
    _check_target(out, overwrite)
    paths = expand(files)
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.separator)
    work = [piece for path in paths for piece in pieces(path, recipe.text_key)]
    with _folder_to_be(out, overwrite) as folder, _hashed(paths) as sources:
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
        with _Shards(folder, dtype, work, recipe.max_bad_records, show) as shards:
            for piece, chunk in encode(work, recipe, num_workers):
                shards.append(piece, chunk)
            shards.finish()
        manifest = {
            "format": FORMAT,
            "tokenizer": {
                "name": tokenizer.name,
                "sha256": tokenizer.sha256,
                "vocab_size": tokenizer.vocab_size,
            },
            "separator": tokenizer.separator,
            "text_key": recipe.text_key,
            "dtype": np.dtype(dtype).name,
            **shards.record(),
            "sources": sources(),
        }
        with (folder / MANIFEST).open("x") as file:
            file.write(json.dumps(manifest, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        _publish(folder, out)
    return manifest


class _Shards:
    """Writes the chunks of all pieces in order, and counts them. A new shard begins
    with a document once one has SHARD_TOKENS or SHARD_DOCUMENTS."""

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype,
        pieces: Sequence[Piece],
        max_bad_records: int,
        show: Callable[[Progress], None] | None,
    ) -> None:
        self._folder, self._dtype, self._show = folder, dtype, show
        self._max_bad_records = max_bad_records
        self._total_bytes = sum(piece.num_bytes for piece in pieces)
        self._num_bytes = self._num_documents = self._num_tokens = 0
        self._num_empty = self._num_bad = 0
        self._named: list[str] = []
        self._first_record = 0
        self._done: list[Shard] = []
        self._writer = self._next_writer()

    def __enter__(self) -> "_Shards":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.close()

    def append(self, piece: Piece, chunk: Chunk) -> None:
        """Write a chunk; raise ValueError at one bad record more than may be."""
        for bad in chunk.bad:
            self._note(piece, bad)
        begins = chunk.start_d.size > 0 and chunk.start_d[0] == 0
        is_full = self._writer.num_tokens >= SHARD_TOKENS
        if begins and (is_full or self._writer.num_documents >= SHARD_DOCUMENTS):
            self._done.append(self._writer.finish())
            self._writer = self._next_writer()
        self._writer.append(chunk.token_b, chunk.start_d)
        self._num_documents += chunk.start_d.size
        self._num_tokens += chunk.token_b.size
        self._num_empty += chunk.num_empty
        if chunk.num_records is not None:
            self._num_bytes += piece.num_bytes
            self._first_record += chunk.num_records
            if piece.ends_file:
                self._first_record = 0
        if self._show is not None:
            self._show(self._progress())

    def finish(self) -> None:
        """Finish the last shard; raise ValueError when there is no document."""
        if not self._num_documents:
            first = f": {self._named[0]}" if self._named else ""
            raise ValueError(
                f"the files hold no documents: {self._num_empty} are empty, "
                f"{self._num_bad} bad{first}: check the files and text_key"
            )
        self._done.append(self._writer.finish())

    def record(self) -> dict[str, Any]:
        """Return counts, bad records and shards for the manifest."""
        return {
            "num_documents": self._num_documents,
            "num_tokens": self._num_tokens,
            "num_empty": self._num_empty,
            "num_bad": self._num_bad,
            "bad_records": self._named,
            "shards": [
                {
                    "file": shard.path.name,
                    "sha256": shard.sha256,
                    "num_documents": shard.num_documents,
                    "num_tokens": shard.num_tokens,
                }
                for shard in self._done
            ],
        }

    def _next_writer(self) -> IndexedWriter:
        name = f"shard-{len(self._done):05d}.bin"
        return IndexedWriter(self._folder / name, self._dtype)

    def _progress(self) -> Progress:
        return Progress(
            self._num_bytes,
            self._total_bytes,
            self._num_documents,
            self._num_tokens,
            self._num_bad,
        )

    def _note(self, piece: Piece, bad: Bad) -> None:
        where = "" if bad.record is None else f":{self._first_record + bad.record}"
        self._num_bad += 1
        if self._num_bad <= _MAX_NAMED:
            self._named.append(f"{piece.path}{where}: {' '.join(bad.reason.split())}")
        if self._num_bad > self._max_bad_records:
            raise ValueError(
                f"more than max_bad_records={self._max_bad_records} records are bad: "
                f"{'; '.join(self._named[:3])}: mend the files, or raise the limit"
            )


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Return the manifest of a folder that prepare() made. Raises ValueError in one
    line."""
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as fault:
        raise ValueError(
            f"'{folder}' is no folder of prepared tokens: {MANIFEST} cannot be read: "
            f"{fault.strerror}"
        ) from fault
    except (ValueError, RecursionError) as fault:
        raise ValueError(f"'{path}' is damaged: {fault}: prepare it anew") from fault
    wrong = _wrong_field(manifest)
    if wrong:
        raise ValueError(f"'{path}' is damaged: {wrong}: prepare it anew")
    return manifest


def _wrong_field(manifest: Any) -> str | None:
    """Return the fault of a manifest in what its readers rely on, or None."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return f"its format is not '{FORMAT}'"
    tokenizer, shards = manifest.get("tokenizer"), manifest.get("shards")
    if not (isinstance(tokenizer, dict) and isinstance(tokenizer.get("sha256"), str)):
        return "it names no tokenizer"
    if not isinstance(manifest.get("separator"), int):
        return "it has no separator"
    if not (isinstance(shards, list) and shards):
        return "it names no shards"
    return next((wrong for wrong in map(_wrong_shard, shards) if wrong), None)


def _wrong_shard(shard: Any) -> str | None:
    if not isinstance(shard, dict) or not isinstance(shard.get("sha256"), str):
        return "a shard has no sha256"
    name = shard.get("file")
    if not isinstance(name, str) or Path(name).name != name or "\0" in name:
        return f"a shard has the file name {name!r}, which is none in the folder"
    return None


def _check_target(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if not overwrite:
        raise ValueError(f"'{out}' is there: name another folder, or --overwrite it")
    if not (out / MANIFEST).is_file():
        raise ValueError(
            f"'{out}' is no folder of prepared tokens (it has no {MANIFEST}), and is "
            "not overwritten: name another folder"
        )


@contextlib.contextmanager
def _folder_to_be(out: Path, overwrite: bool) -> Iterator[Path]:
    """Yield `out`.partial, empty and this process's alone; gone unless published."""
    folder = out.with_name(out.name + ".partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        _check_target(out, overwrite)  # again: another process may have made it
        if folder.exists():  # of a process that was killed
            shutil.rmtree(folder)
        folder.mkdir()
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder; raise ValueError while another writer has it."""
    path = folder.with_name(folder.name + ".lock")
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = _is_open_as(lock, path)
        except BlockingIOError:
            is_held = False
        if not is_held:
            raise ValueError(
                f"another process writes '{folder}': wait for it, or name another "
                "folder"
            )
        try:
            yield
        finally:
            path.unlink()


def _is_open_as(file: TextIO, path: Path) -> bool:
    """Whether the path still is that file: a writer that ends removes its own."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _publish(folder: Path, out: Path) -> None:
    """Give the folder its name; one that has it is removed once this one is there."""
    old = out.with_name(out.name + ".old")
    if out.exists():
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
    folder.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    parent = os.open(out.parent, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)


@contextlib.contextmanager
def _hashed(paths: Sequence[Path]) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Hash the sources in a thread while they are encoded; yield the function that
    returns them as the manifest has them."""
    before = [_stamp(path) for path in paths]
    stop = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        digests = [thread.submit(_sha256, path, stop.is_set) for path in paths]

        def sources() -> list[dict[str, Any]]:
            shas = [digest.result() for digest in digests]
            for path, stamp in zip(paths, before):
                if _stamp(path) != stamp:
                    raise ValueError(f"'{path}' has changed meanwhile: start again")
            return [
                {"path": str(path), "num_bytes": stamp[0], "sha256": sha}
                for path, stamp, sha in zip(paths, before, shas)
            ]

        try:
            yield sources
        finally:
            stop.set()
            thread.shutdown(cancel_futures=True)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as fault:
        raise unreadable(path, fault) from fault
    return stat.st_size, stat.st_mtime_ns


def _sha256(path: Path, is_stopped: Callable[[], bool]) -> str:
    try:
        return file_sha256(path, is_stopped)
    except OSError as fault:
        raise unreadable(path, fault) from fault
