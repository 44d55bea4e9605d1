"""Figures of a file that are worked out once and kept: its sha256, and its tokens.

    $MOEJAX_CACHE_DIR/hashes/<key>.json     key: path, size, time and inode of the file
    $MOEJAX_CACHE_DIR/tokens/<key>/         key: sha256 of sources, tokenizer, settings

Without the variable the folder is .cache/data beside the packages. Nothing is written
beside the data, which may be read-only. All of it can be removed at any time.
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
from train.data.records import is_packed, unreadable
from train.data.tokenizer import Tokenizer

_SECONDS_BETWEEN_LINES = 10.0
_TOO_YOUNG_NSEC = 2 * 10**9
"""A file that has just changed can change again at the same time of its clock."""


def cache_folder() -> Path:
    named = os.environ.get("MOEJAX_CACHE_DIR")
    if named:
        return Path(named).expanduser().absolute()
    return Path(__file__).resolve().parents[2] / ".cache" / "data"


def known_sha256(path: Path) -> str:
    """Return the sha256 of a file; read it only when it was not read before."""
    return _known("sha256", [path], lambda: {"sha256": file_sha256(path)})["sha256"]


def known_scan(path: Path) -> tuple[str, int]:
    """Return sha256 and largest id of a .npy or .bin, as `scan` does."""

    def read() -> dict[str, Any]:
        sha256, largest = scan(path)
        return {"sha256": sha256, "largest": largest}

    both = [path.with_suffix(".bin"), path.with_suffix(".idx")]
    record = _known("scan", [path] if path.suffix == ".npy" else both, read)
    return record["sha256"], record["largest"]


def prepare_tokens(
    files: Sequence[Path], cfg: Data, tokenizer: Tokenizer, say: Callable[[str], None]
) -> Path:
    """Return the folder of prepared tokens of text, JSONL or parquet files.

    Made once, by one process; others that come meanwhile wait for it. Raises ValueError
    for files that cannot be read, and for more bad records than may be.
    """
    sha_f = [known_sha256(path) for path in files]
    kinds = [
        [file_format(path), is_packed(path), sha] for path, sha in zip(files, sha_f)
    ]
    made_of = [FORMAT, tokenizer.sha256, tokenizer.separator, cfg.text_key, kinds]
    folder = _made("tokens") / _key(made_of)
    with _locked(folder.with_suffix(".lock"), say):
        if not (folder / MANIFEST).is_file():
            total = sum(path.stat().st_size for path in files) / 1e6
            say(f"tokenizing {len(files)} files, {total:,.0f} MB, once, into {folder}")
            recipe = Recipe(
                cfg.tokenizer, cfg.separator, cfg.text_key, cfg.max_bad_records
            )
            prepare(files, folder, recipe, show=_lines(say))
        manifest = read_manifest(folder)
    if [source["sha256"] for source in manifest["sources"]] != sha_f:
        raise ValueError(
            f"a file changed while it was read: remove {folder}, try again"
        )
    _judge_bad(manifest, cfg.max_bad_records, say)
    return folder


def _judge_bad(
    manifest: dict[str, Any], max_bad_records: int, say: Callable[[str], None]
) -> None:
    """Raise ValueError for too many bad records: the run that prepared the tokens may
    have allowed more."""
    if not manifest["num_bad"]:
        return
    found = (
        f"{manifest['num_bad']} bad records: {'; '.join(manifest['bad_records'][:3])}"
    )
    if manifest["num_bad"] > max_bad_records:
        raise ValueError(
            f"{found}: more than Data.max_bad_records={max_bad_records}: mend the "
            "files, or raise the limit"
        )
    say(f"skipped {found}")


def _lines(say: Callable[[str], None]) -> Callable[[Progress], None]:
    last_sec = time.monotonic()

    def show(now: Progress) -> None:
        nonlocal last_sec
        if time.monotonic() - last_sec >= _SECONDS_BETWEEN_LINES:
            last_sec = time.monotonic()
            done = f"{now.num_bytes / 1e6:,.0f} of {now.total_bytes / 1e6:,.0f} MB"
            say(f"  {done}, {now.num_documents:,} documents, {now.num_bad} bad")

    return show


def _known(
    what: str, paths: Sequence[Path], read: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """Return the record that `read` gave for these files before, else gives now."""
    stamp = _stamp(paths)
    record_path = _made("hashes") / f"{_key([what, stamp])}.json"
    try:
        return json.loads(record_path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # none, or cut by a power loss
        record = read()
    if _stamp(paths) != stamp:
        raise ValueError(f"'{paths[0]}' has changed while it was read: try again")
    youngest = max(mtime_nsec for *_, mtime_nsec, _ in stamp)
    if time.time_ns() - youngest > _TOO_YOUNG_NSEC:
        _write(record_path, json.dumps(record))
    return record


def _stamp(paths: Sequence[Path]) -> list[list[Any]]:
    stamp = []
    for path in paths:
        try:
            stat = path.stat()
        except OSError as fault:
            raise unreadable(path, fault) from fault
        real = os.path.realpath(path)
        stamp.append([real, stat.st_size, stat.st_mtime_ns, stat.st_ino])
    return stamp


def _key(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _made(name: str) -> Path:
    folder = cache_folder() / name
    with _refusing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(path: Path, text: str) -> None:
    with _refusing(path):
        number, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(number, "w") as file:
            file.write(text)
        os.replace(temporary, path)


@contextlib.contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    with _refusing(path):
        file = path.open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process tokenizes the corpus: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise ValueError(
            f"the cache of data, '{path}', cannot be written: {fault.strerror}: set "
            "MOEJAX_CACHE_DIR to a folder with room"
        ) from fault
