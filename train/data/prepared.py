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
from train.data.records import BadRecord, FileRange, unreadable_error
from train.data.tokenizer import load_tokenizer

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
    ranges = [part for path in paths for part in split_file(path, recipe.text_key)]
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
                self._first_record = 0
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

    def _count_bad(self, file_range: FileRange, bad: BadRecord) -> None:
        where = "" if bad.record is None else f":{self._first_record + bad.record}"
        self._num_bad += 1
        if self._num_bad <= _MAX_LISTED:
            self._listed.append(
                f"{file_range.path}{where}: {' '.join(bad.reason.split())}"
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
        raise ValueError(f"'{path}' is damaged: {error}: prepare it again") from error
    problem = _find_damage(manifest)
    if problem:
        raise ValueError(f"'{path}' is damaged: {problem}: prepare it again")
    return manifest


def _find_damage(manifest: Any) -> str | None:
    """Return what is wrong in the fields that readers of a manifest use, or None."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return f"its format is not '{FORMAT}'"
    tokenizer, shards = manifest.get("tokenizer"), manifest.get("shards")
    if not (isinstance(tokenizer, dict) and isinstance(tokenizer.get("sha256"), str)):
        return "it names no tokenizer"
    if not isinstance(manifest.get("separator"), int):
        return "it has no separator"
    if not (isinstance(shards, list) and shards):
        return "it names no shards"
    problems = map(_find_shard_damage, shards)
    return next((problem for problem in problems if problem), None)


def _find_shard_damage(shard: Any) -> str | None:
    if not isinstance(shard, dict) or not isinstance(shard.get("sha256"), str):
        return "a shard has no sha256"
    name = shard.get("file")
    if not isinstance(name, str) or Path(name).name != name or "\0" in name:
        return f"a shard has the file name {name!r}, not that of a file in the folder"
    return None


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
    """Rename the folder to `out`; then remove the previous `out`, if any."""
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
