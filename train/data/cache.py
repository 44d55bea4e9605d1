"""Cache of the sha256 and of the tokens of source files.

    $MOEJAX_CACHE_DIR/hashes/<key>.json     key: path, size, mtime and inode of the file
    $MOEJAX_CACHE_DIR/tokens/<key>/         key: sha256 of sources, tokenizer, settings

If the variable is not set, the folder is .cache/data beside the packages. Nothing is
written beside the data, which may be read-only. The cache can be removed at any time.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moejax.config import Data
from train.data.documents import file_format
from train.data.encoding import Recipe
from train.data.indexed import file_sha256, scan
from train.data.prepared import FORMAT, MANIFEST, Progress, prepare, read_manifest
from train.data.records import is_gzipped, unreadable_error
from train.data.tokenizer import Tokenizer

_SECONDS_BETWEEN_REPORTS = 10.0
_MIN_AGE_NSEC = 2 * 10**9
"""Minimum age of a file whose hash is cached. A younger file could change again without
a change of its mtime, which has a limited resolution."""


def cache_folder() -> Path:
    folder = os.environ.get("MOEJAX_CACHE_DIR")
    if folder:
        return Path(folder).expanduser().absolute()
    return Path(__file__).resolve().parents[2] / ".cache" / "data"


def cached_sha256(path: Path) -> str:
    """Return the sha256 of a file; read the file only if the hash is not cached."""
    record = _cached_record("sha256", [path], lambda: {"sha256": file_sha256(path)})
    return record["sha256"]


def cached_scan(path: Path) -> tuple[str, int]:
    """Return the sha256 and the largest id of a .npy or .bin, as `scan` does.

    The file is read only if the result is not cached.
    """

    def read() -> dict[str, Any]:
        sha256, largest = scan(path)
        return {"sha256": sha256, "largest": largest}

    bin_and_idx = [path.with_suffix(".bin"), path.with_suffix(".idx")]
    paths = [path] if path.suffix == ".npy" else bin_and_idx
    record = _cached_record("scan", paths, read)
    return record["sha256"], record["largest"]


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
        if not (folder / MANIFEST).is_file():
            total = sum(path.stat().st_size for path in files) / 1e6
            say(f"tokenizing {len(files)} files, {total:,.0f} MB, once, into {folder}")
            recipe = Recipe(
                cfg.tokenizer, cfg.separator, cfg.text_key, cfg.max_bad_records
            )
            prepare(files, folder, recipe, show=_progress_printer(say))
        manifest = read_manifest(folder)
    if [source["sha256"] for source in manifest["sources"]] != sha_f:
        raise ValueError(
            f"a file changed while it was read: remove {folder} and try again"
        )
    _check_bad_records(manifest, cfg.max_bad_records, say)
    return folder


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
    try:
        return json.loads(record_path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # missing, or truncated
        record = read()
    if _stamp(paths) != stamp:
        raise ValueError(f"'{paths[0]}' changed while it was read: try again")
    last_change_nsec = max(mtime_nsec for *_, mtime_nsec, _ in stamp)
    if time.time_ns() - last_change_nsec > _MIN_AGE_NSEC:
        _write(record_path, json.dumps(record))
    return record


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
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _make_folder(name: str) -> Path:
    folder = cache_folder() / name
    with _explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(path: Path, text: str) -> None:
    with _explain_write_errors(path):
        number, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(number, "w") as file:
            file.write(text)
        os.replace(temporary, path)


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
