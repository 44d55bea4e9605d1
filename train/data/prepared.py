"""Prepare text once as token shards: a folder of .bin and .idx files and a manifest.

    out/manifest.json      sources, tokenizer, counts, bad records, sha256 of the shards
    out/shard-00000.bin    ids; each document begins with the separator
    out/shard-00000.idx    where documents begin (indexed.py)

Everything is written to the folder `out`.partial, which is renamed to `out` when it is
complete. Only the process that holds the lock `out`.partial.lock writes there. The
contents depend on the files and the recipe alone, not on the number of workers.
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

from train.data.documents import expand, split_file
from train.data.encoding import Chunk, Recipe, encode
from train.data.indexed import IndexedWriter, Shard, file_sha256
from train.data.records import (
    ALWAYS_READ_BYTES,
    BadRecord,
    FileRange,
    expansion_error,
    max_text_bytes,
    unreadable_error,
)
from train.data.tokenizer import load_tokenizer
from train.files import sync_folder
from train.messages import one_line

FORMAT = "moejax tokens 1"
MANIFEST = "manifest.json"
SHARD_TOKENS = 2**29
SHARD_DOCUMENTS = 2**22
_MAX_LISTED = 1000
"""Maximum number of bad records that the manifest lists; all are counted."""


@dataclasses.dataclass(frozen=True)
class Progress:
    """Progress of prepare(). Bytes are counted on disk, so before decompression."""

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
    """Tokenize the documents of files and globs into the folder `out`.

    Returns the manifest. With one worker, this process encodes; with more, processes
    are started. `show` is called after every chunk. Raises ValueError for a problem
    that the user can solve: a missing file, too many bad records, a folder that exists
    or that another process is writing. Raises OSError when writing the shards fails,
    and ChildProcessError when a worker dies. After an error, `out` is unchanged.
    """
    recipe = recipe or Recipe()
    out = Path(out).expanduser().absolute()
    _check_target(out, overwrite)
    paths = expand(files)
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.separator)
    ranges = [
        part
        for path in paths
        for part in split_file(path, recipe.text_key, recipe.max_expansion)
    ]
    with _partial_folder(out, overwrite) as folder, _hash_sources(paths) as sources:
        dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
        with _Shards(folder, dtype, ranges, recipe.max_bad_records, show) as shards:
            for file_range, chunk in encode(ranges, recipe, num_workers):
                shards.append(file_range, chunk)
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
    """Writer of all chunks, in order, into shards; it also counts them.

    After a shard has reached SHARD_TOKENS or SHARD_DOCUMENTS, the next chunk that
    begins with a document opens a new shard.
    """

    def __init__(
        self,
        folder: Path,
        dtype: np.dtype,
        ranges: Sequence[FileRange],
        max_bad_records: int,
        show: Callable[[Progress], None] | None,
    ) -> None:
        self._folder, self._dtype, self._show = folder, dtype, show
        self._max_bad_records = max_bad_records
        self._total_bytes = sum(file_range.num_bytes for file_range in ranges)
        self._num_bytes = self._num_documents = self._num_tokens = 0
        self._num_empty = self._num_bad = 0
        self._text_chars = 0  # of the file that is being written
        self._listed: list[str] = []
        self._first_record = 0
        self._finished: list[Shard] = []
        self._writer = self._next_writer()

    def __enter__(self) -> "_Shards":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._writer.close()

    def append(self, file_range: FileRange, chunk: Chunk) -> None:
        """Write a chunk; raise ValueError once too many records are bad."""
        for bad in chunk.bad_records:
            self._count_bad(file_range, bad)
        self._check_expansion(file_range, chunk)
        begins = chunk.start_d.size > 0 and chunk.start_d[0] == 0
        is_full = self._writer.num_tokens >= SHARD_TOKENS
        if begins and (is_full or self._writer.num_documents >= SHARD_DOCUMENTS):
            self._finished.append(self._writer.finish())
            self._writer = self._next_writer()
        self._writer.append(chunk.token_b, chunk.start_d)
        self._num_documents += chunk.start_d.size
        self._num_tokens += chunk.token_b.size
        self._num_empty += chunk.num_empty
        if chunk.num_records is not None:
            self._num_bytes += file_range.num_bytes
            self._first_record += chunk.num_records
            if file_range.ends_file:
                self._first_record = self._text_chars = 0
        if self._show is not None:
            self._show(self._progress())

    def finish(self) -> None:
        """Finish the last shard; raise ValueError when there are no documents."""
        if not self._num_documents:
            first = f": {self._listed[0]}" if self._listed else ""
            raise ValueError(
                f"the files hold no documents: {self._num_empty} are empty, "
                f"{self._num_bad} bad{first}: check the files and text_key"
            )
        self._finished.append(self._writer.finish())

    def record(self) -> dict[str, Any]:
        """Return the counts, bad records and shards, for the manifest."""
        return {
            "num_documents": self._num_documents,
            "num_tokens": self._num_tokens,
            "num_empty": self._num_empty,
            "num_bad": self._num_bad,
            "bad_records": self._listed,
            "shards": [
                {
                    "file": shard.path.name,
                    "sha256": shard.sha256,
                    "num_documents": shard.num_documents,
                    "num_tokens": shard.num_tokens,
                }
                for shard in self._finished
            ],
        }

    def _next_writer(self) -> IndexedWriter:
        name = f"shard-{len(self._finished):05d}.bin"
        return IndexedWriter(self._folder / name, self._dtype)

    def _progress(self) -> Progress:
        return Progress(
            self._num_bytes,
            self._total_bytes,
            self._num_documents,
            self._num_tokens,
            self._num_bad,
        )

    def _check_expansion(self, file_range: FileRange, chunk: Chunk) -> None:
        """Raise ValueError once a file has given more text than its size allows.

        A record counts as one character more, so that empty ones have an end too.
        """
        num_documents = chunk.start_d.size + chunk.num_empty + len(chunk.bad_records)
        self._text_chars += chunk.num_chars + num_documents
        if self._text_chars <= ALWAYS_READ_BYTES:
            return
        path, max_expansion = file_range.path, file_range.max_expansion
        if self._text_chars > max_text_bytes(path, max_expansion):
            raise expansion_error(path, max_expansion)

    def _count_bad(self, file_range: FileRange, bad: BadRecord) -> None:
        where = "" if bad.record is None else f":{self._first_record + bad.record}"
        self._num_bad += 1
        if self._num_bad <= _MAX_LISTED:
            self._listed.append(
                f"{file_range.path}{where}: {one_line(bad.reason, 400)}"
            )
        if self._num_bad > self._max_bad_records:
            raise ValueError(
                f"more than max_bad_records={self._max_bad_records} records are bad: "
                f"{'; '.join(self._listed[:3])}: repair the files, or raise the limit"
            )


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """Return the manifest of a folder that prepare() made.

    Raises a ValueError of one line when it is missing or damaged.
    """
    path = Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(
            f"'{folder}' is not a folder of prepared tokens: {MANIFEST} cannot be "
            f"read: {error.strerror}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"'{path}' is damaged: {one_line(error, 120)}: prepare it again"
        ) from error
    problem = _find_damage(manifest)
    if problem:
        raise ValueError(f"'{path}' is damaged: {problem}: prepare it again")
    return manifest


def _find_damage(manifest: Any) -> str | None:
    """Return what is wrong in the fields that readers of a manifest use, or None."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return f"its format is not '{FORMAT}'"
    tokenizer, shards = manifest.get("tokenizer"), manifest.get("shards")
    sources = manifest.get("sources")
    is_right = {
        "tokenizer": isinstance(tokenizer, dict) and _has_sha256(tokenizer),
        "separator": _is_count(manifest.get("separator")),
        "num_bad": _is_count(manifest.get("num_bad")),
        "bad_records": _is_list_of(manifest.get("bad_records"), str),
        "sources": _is_list_of(sources, dict) and all(map(_has_sha256, sources)),
        "shards": _is_list_of(shards, dict) and bool(shards),
    }
    wrong = [name for name, is_so in is_right.items() if not is_so]
    if wrong:
        return f"it has no {wrong[0]}, or none of the right type"
    problems = map(_find_shard_damage, shards)
    return next((problem for problem in problems if problem), None)


def _find_shard_damage(shard: dict[str, Any]) -> str | None:
    if not _has_sha256(shard):
        return "a shard has no sha256"
    name = shard.get("file")
    if not isinstance(name, str) or Path(name).name != name or "\0" in name:
        return (
            f"a shard has the file name '{one_line(name, 120)}', not that of a file in "
            "the folder"
        )
    return None


def _has_sha256(entry: dict[str, Any]) -> bool:
    return isinstance(entry.get("sha256"), str)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _check_target(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if not overwrite:
        raise ValueError(f"'{out}' exists: name another folder, or use --overwrite")
    if not (out / MANIFEST).is_file():
        raise ValueError(
            f"'{out}' is not a folder of prepared tokens (it has no {MANIFEST}), so it "
            "is not overwritten: name another folder"
        )


@contextlib.contextmanager
def _partial_folder(out: Path, overwrite: bool) -> Iterator[Path]:
    """Yield the empty folder `out`.partial, locked for this process.

    The folder is removed if the body raises.
    """
    folder = out.with_name(out.name + ".partial")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        _check_target(out, overwrite)  # again: another process may have created it
        if folder.exists():  # left behind by a process that was killed
            shutil.rmtree(folder)
        folder.mkdir()
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder; raise ValueError if another process holds it."""
    path = folder.with_name(folder.name + ".lock")
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = _is_same_file(lock, path)
        except BlockingIOError:
            is_held = False
        if not is_held:
            raise ValueError(
                f"another process is writing '{folder}': wait for it, or name another "
                "folder"
            )
        try:
            yield
        finally:
            path.unlink()


def _is_same_file(file: TextIO, path: Path) -> bool:
    """Return whether the path still names the open file.

    A writer removes its lock file when it ends, perhaps while we were opening it.
    """
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _publish(folder: Path, out: Path) -> None:
    """Rename the folder to `out`, when its entries are on the disk; then remove the
    previous `out`, if any."""
    sync_folder(folder)
    old = out.with_name(out.name + ".old")
    if out.exists():
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
    folder.rename(out)
    sync_folder(out.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _hash_sources(
    paths: Sequence[Path],
) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Hash the sources in a thread while they are encoded.

    Yields a function that returns the sources' entries for the manifest.
    """
    before = [_stamp(path) for path in paths]
    stop = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        digests = [thread.submit(_sha256, path, stop.is_set) for path in paths]

        def sources() -> list[dict[str, Any]]:
            shas = [digest.result() for digest in digests]
            for path, stamp in zip(paths, before):
                if _stamp(path) != stamp:
                    raise ValueError(f"'{path}' changed while it was read: try again")
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
    except OSError as error:
        raise unreadable_error(path, error) from error
    return stat.st_size, stat.st_mtime_ns


def _sha256(path: Path, is_stopped: Callable[[], bool]) -> str:
    try:
        return file_sha256(path, is_stopped)
    except OSError as error:
        raise unreadable_error(path, error) from error
