"""Cache of the checksums and of the tokens of source files.

    $MOEJAX_CACHE_DIR/hashes/<key>.json     key: path, size, mtime and inode of the file
    $MOEJAX_CACHE_DIR/tokens/<key>/         key: sha256 of sources, tokenizer, settings

The first line of a .json is the sha256 of the rest. A damaged entry is made again, and
said to be. If the variable is not set, the folder is .cache/data beside the packages.
Nothing is written beside the data, which may be read-only. The cache can be removed at
any time.
"""

import base64
import contextlib
import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.config import Data
from train.data.documents import file_format
from train.data.encoding import Recipe
from train.data.indexed import Scan, Sums, file_sha256, scan
from train.data.prepared import (
    FORMAT,
    Progress,
    prepare,
    read_manifest,
)
from train.data.records import is_gzipped, unreadable_error
from train.data.tokenizer import Tokenizer
from train.files import write_whole

_SECONDS_BETWEEN_REPORTS = 10.0
_MIN_AGE_NSEC = 2 * 10**9
"""Minimum age of a file whose hash is cached. A younger file could change again without
a change of its mtime, which has a limited resolution."""

_log = logging.getLogger(__name__)


def cache_folder() -> Path:
    folder = os.environ.get("MOEJAX_CACHE_DIR")
    if folder:
        return Path(folder).expanduser().absolute()
    return Path(__file__).resolve().parents[2] / ".cache" / "data"


def cached_sha256(path: Path) -> str:
    """Return the sha256 of a file; read the file only if the hash is not cached."""
    record = _cached_record("sha256", [path], lambda: {"sha256": file_sha256(path)})
    return record["sha256"]


def cached_scan(path: Path, read: Callable[[Path], Scan] = scan) -> Scan:
    """Return `read` of a file of tokens: its sha256, largest id and checksums.

    The file is read only if the result is not cached.
    """
    path = Path(path)
    bin_and_idx = [path.with_suffix(".bin"), path.with_suffix(".idx")]
    paths = bin_and_idx if path.suffix in (".bin", ".idx") else [path]
    record = _cached_record("block sums", paths, lambda: _scan_record(read(path)))
    sums = Sums(_decode(record["data_sums"]), _decode(record["index_sums"]))
    return Scan(record["sha256"], record["largest_id"], sums)


def _scan_record(found: Scan) -> dict[str, Any]:
    return {
        "sha256": found.sha256,
        "largest_id": found.largest_id,
        "data_sums": _encode(found.sums.data_k),
        "index_sums": _encode(found.sums.index_k),
    }


def _encode(sum_k: np.ndarray) -> str:
    return base64.b64encode(sum_k.astype("<u4").tobytes()).decode()


def _decode(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<u4")


def prepare_tokens(
    files: Sequence[Path], cfg: Data, tokenizer: Tokenizer, say: Callable[[str], None]
) -> Path:
    """Tokenize text, JSONL or parquet files, unless cached; return the tokens' folder.

    One process prepares the tokens, while others that need the same tokens wait for it.
    Raises ValueError when a file cannot be read, or when more than
    `cfg.max_bad_records` records are bad.
    """
    sha_f = [cached_sha256(path) for path in files]
    kinds = [
        [file_format(path), is_gzipped(path), sha] for path, sha in zip(files, sha_f)
    ]
    inputs = [FORMAT, tokenizer.sha256, tokenizer.separator, cfg.text_key, kinds]
    folder = _make_folder("tokens") / _hash_key(inputs)
    with _lock(folder.with_suffix(".lock"), say):
        manifest = _find_prepared(folder, say)
        if manifest is None:
            total = sum(path.stat().st_size for path in files) / 1e6
            say(f"tokenizing {len(files)} files, {total:,.0f} MB, once, into {folder}")
            recipe = Recipe(
                cfg.tokenizer,
                cfg.separator,
                cfg.text_key,
                cfg.max_bad_records,
                cfg.max_expansion,
            )
            manifest = prepare(files, folder, recipe, show=_progress_printer(say))
    if [source["sha256"] for source in manifest["sources"]] != sha_f:
        raise ValueError(
            f"a file changed while it was read: remove {folder} and try again"
        )
    _check_bad_records(manifest, cfg.max_bad_records, say)
    return folder


def _find_prepared(folder: Path, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the manifest of cached tokens; None if they must be made.

    A folder whose manifest is damaged is renamed to `folder`.damaged.
    """
    if not folder.exists():
        return None
    try:
        return read_manifest(folder)
    except ValueError as error:
        aside = folder.with_suffix(".damaged")
        with _explain_write_errors(folder):
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        say(f"{error}; the folder is now {aside}")
        return None


def _check_bad_records(
    manifest: dict[str, Any], max_bad_records: int, say: Callable[[str], None]
) -> None:
    """Raise ValueError if the cached tokens have more bad records than this run allows.

    The run that prepared the tokens may have allowed more.
    """
    if not manifest["num_bad"]:
        return
    examples = "; ".join(manifest["bad_records"][:3])
    summary = f"{manifest['num_bad']} bad records: {examples}"
    if manifest["num_bad"] > max_bad_records:
        raise ValueError(
            f"{summary}: more than Data.max_bad_records={max_bad_records}: repair the "
            "files, or raise the limit"
        )
    say(f"skipped {summary}")


def _progress_printer(say: Callable[[str], None]) -> Callable[[Progress], None]:
    """Return a function that prints the progress every _SECONDS_BETWEEN_REPORTS."""
    last_sec = time.monotonic()

    def show(progress: Progress) -> None:
        nonlocal last_sec
        if time.monotonic() - last_sec >= _SECONDS_BETWEEN_REPORTS:
            last_sec = time.monotonic()
            num_mb, total_mb = progress.num_bytes / 1e6, progress.total_bytes / 1e6
            say(
                f"  {num_mb:,.0f} of {total_mb:,.0f} MB, {progress.num_documents:,} "
                f"documents, {progress.num_bad} bad"
            )

    return show


def _cached_record(
    kind: str, paths: Sequence[Path], read: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the cached result of `read` for these files, or call it and cache it."""
    stamp = _stamp(paths)
    record_path = _make_folder("hashes") / f"{_hash_key([kind, stamp])}.json"
    record = _read_record(record_path)
    if record is not None:
        return record
    record = read()
    if _stamp(paths) != stamp:
        raise ValueError(f"'{paths[0]}' changed while it was read: try again")
    last_change_nsec = max(mtime_nsec for *_, mtime_nsec, _ in stamp)
    if time.time_ns() - last_change_nsec > _MIN_AGE_NSEC:
        body = json.dumps(record)
        with _explain_write_errors(record_path):
            text = f"{_sha256_of(body.encode())}\n{body}"
            write_whole(record_path, text, is_shared=True)
    return record


def _read_record(path: Path) -> dict[str, Any] | None:
    """Return a cached record; None if there is none, or if it is damaged."""
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    except OSError as error:
        problem = error.strerror
    else:
        if _sha256_of(body).encode() == digest:
            return json.loads(body)
        problem = "damaged"
    _log.warning("the cached record '%s' is %s: its file is read again", path, problem)
    return None


def _sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _stamp(paths: Sequence[Path]) -> list[list[Any]]:
    """Return the path, size, mtime and inode of each file, to detect changes."""
    stamp = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError as error:
            raise unreadable_error(path, error) from error
        real_path = os.path.realpath(path)
        stamp.append([real_path, stat.st_size, stat.st_mtime_ns, stat.st_ino])
    return stamp


def _hash_key(parts: list[Any]) -> str:
    return _sha256_of(json.dumps(parts).encode())[:32]


def _make_folder(name: str) -> Path:
    folder = cache_folder() / name
    with _explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def _lock(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a file; wait while another process holds it."""
    with _explain_write_errors(path):
        file = path.open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is tokenizing the corpus: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _explain_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into a ValueError that tells the user what to do."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"the data cache '{path}' cannot be written: {error.strerror}: set "
            "MOEJAX_CACHE_DIR to a folder that is writable and has space"
        ) from error
