"""Streams of text made into token shards once: a folder of .bin, .idx and a manifest.

    out/manifest.json      sources, tokenizer, counts, bad records, sha256 of the shards
    out/shard-00000.bin    ids; each document begins with the separator
    out/shard-00000.idx    where documents begin (indexed.py)

All is written to `out`.partial, which gets its name when it is whole, by the one
process that holds the lock of `out`.partial.lock. What is written depends on the files
and the recipe alone, not on the number of workers.
"""

import contextlib
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from train.data.documents import expand, pieces
from train.data.encoding import Recipe, encode
from train.data.indexed import file_sha256
from train.data.records import unreadable
from train.data.shards import Progress, Shards
from train.data.tokenizer import load_tokenizer

FORMAT = "moejax tokens 1"
MANIFEST = "manifest.json"


def prepare(
    files: Sequence[str | Path],
    out: str | Path,
    recipe: Recipe | None = None,
    num_workers: int = 1,
    show: Callable[[Progress], None] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Writes the documents of files and globs to the folder `out`; its manifest.

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
        with Shards(folder, dtype, work, recipe.max_bad_records, show) as shards:
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


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a folder that prepare() made. Raises ValueError in one line."""
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
    """What is wrong with what readers of a manifest rely on, or None."""
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
    """`out`.partial, empty and this process's alone; gone unless it is published."""
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
    """Holds the lock of the folder; raises ValueError while another writer has it."""
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
    """Gives the folder its name; one that has it is removed once this one is there."""
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
    """The sources for the manifest, hashed in a thread while they are encoded."""
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
