"""Prepare text once as token shards: a folder of .bin and .idx files and a manifest.

    out/manifest.json      sources, tokenizer, counts, sha256 of the shards
    out/shard-00000.bin    ids; each document begins with the separator
    out/shard-00000.idx    where documents begin (shards.py)

Everything is written to the folder `out`.partial, which is renamed to `out` when it is
complete. Only the process that holds the lock `out`.lock writes there. The shards
depend on the texts and the tokenizer alone.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from train.data.conversations import Chat, read_windows
from train.data.documents import TextPart, expand, read, unreadable_error
from train.data.long_text import UndividedError
from train.data.shards import ShardWriter, TokenFile, open_shard
from train.data.tokenizer import Tokenizer
from train.files import path_named, sync_folder
from train.messages import one_line

FORMAT = "moejax tokens 1"
CHAT_FORMAT = "moejax conversations 1"
"""Format of a folder of conversations, whose ids have marks (conversations.py)."""
MANIFEST = "manifest.json"
SHARD_TOKENS = 2**29
SHARD_DOCUMENTS = 2**22
BATCH_CHARS = 2**22
"""Characters of whole documents that are encoded at a time, by the tokenizer's threads.
They take about 100 MB."""
_BATCH_DOCUMENTS = 2**16
_MAX_THREADS = 8
"""Threads that compute checksums, each of one shard."""
_SECONDS_BETWEEN_REPORTS = 10.0


def prepare(
    files: Sequence[str | Path],
    out: str | Path,
    tokenizer: Tokenizer,
    text_key: str = "text",
    say: Callable[[str], None] = print,
    chat: Chat | None = None,
) -> bool:
    """Tokenize the documents of files and globs, or with `chat` the conversations, into
    the folder `out`.

    Returns False, and does nothing, if `out` exists. A process that finds another one
    writing `out` waits for it. `say` prints progress. Raises ValueError for a problem
    that the user can solve, such as a missing file or a line that is not JSON. Raises
    OSError when writing the shards fails. After an error there is no `out`.
    """
    out = Path(out).expanduser().absolute()
    paths = expand(files)
    out.parent.mkdir(parents=True, exist_ok=True)
    with _locked(out, say):
        if out.exists():
            return False
        folder = out.with_name(out.name + ".partial")
        if folder.exists():  # left behind by a process that was killed
            shutil.rmtree(folder)
        folder.mkdir()
        try:
            with path_named(folder):
                manifest = _write_shards(paths, folder, tokenizer, text_key, say, chat)
                with (folder / MANIFEST).open("x") as file:
                    file.write(json.dumps(manifest, indent=1) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
            sync_folder(folder)
            folder.rename(out)
            sync_folder(out.parent)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    return True


def prepare_cached(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    text_key: str,
    say: Callable[[str], None],
) -> Path:
    """Prepare files in the cache, unless they are there; return the prepared folder.

    The cache is $MOEJAX_CACHE_DIR/tokens, or .cache/data/tokens beside the packages.
    The name of a folder is made from the path, size, mtime and inode of the files, the
    tokenizer and the key. Nothing is written beside the data, which may be read-only.
    The cache can be removed at any time.
    """
    stamps = [file_stamp(path) for path in files]
    key = [FORMAT, tokenizer.sha256, tokenizer.separator, text_key, stamps]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    root = os.environ.get("MOEJAX_CACHE_DIR")
    beside = Path(__file__).resolve().parents[2] / ".cache" / "data"
    folder = (Path(root).expanduser().absolute() if root else beside) / "tokens" / name
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.with_name(f"{name}.lock").touch()
    except OSError as error:
        raise ValueError(
            f"the data cache '{folder.parent}' cannot be written: {error.strerror}: "
            "set MOEJAX_CACHE_DIR to a folder that is writable and has space"
        ) from error
    prepare(files, folder, tokenizer, text_key, say)
    return folder


def open_prepared(
    folder: Path, tokenizer: Tokenizer
) -> tuple[list[TokenFile], list[str]]:
    """Open the shards of a folder that prepare() made; return them and their sha256.

    Every shard is read whole once, to compare its sha256. Raises a ValueError of one
    line when the manifest or a shard is missing or damaged, and when the folder was
    prepared with another tokenizer.
    """
    path = folder / MANIFEST
    try:
        record = json.loads(path.read_bytes())
        if record["format"] not in (FORMAT, CHAT_FORMAT):
            raise ValueError(f"its format is {record['format']!r}, not {FORMAT!r}")
        window = None
        if record["format"] == CHAT_FORMAT:
            window = int(record["conversations"]["window"])
        name, sha256 = record["tokenizer"]["name"], record["tokenizer"]["sha256"]
        separator = record["separator"]
        shards = {str(s["file"]): str(s["sha256"]) for s in record["shards"]}
        for shard in shards:
            if not shard or Path(shard).name != shard or "\0" in shard:
                raise ValueError(f"the shard {shard!r} is not a file in the folder")
        if not shards:
            raise ValueError("it names no shards")
    except OSError as error:
        raise ValueError(
            f"'{folder}' is not a folder of prepared tokens: {MANIFEST} cannot be "
            f"read: {error.strerror}: name its files, such as '{folder}/*.jsonl', or a "
            "folder that tools/prepare.py made"
        ) from error
    except (LookupError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"'{path}' is damaged or of another format: {one_line(repr(error), 160)}: "
            f"remove '{folder}' and prepare it again"
        ) from error
    if (sha256, separator) != (tokenizer.sha256, tokenizer.separator):
        raise ValueError(
            f"prepared with the tokenizer '{one_line(name, 120)}' (sha256 "
            f"{one_line(sha256, 120)[:12]}, separator {one_line(separator, 40)}), but "
            f"Data.tokenizer='{tokenizer.name}' has sha256 {tokenizer.sha256[:12]}, "
            f"separator {tokenizer.separator}: use that, or prepare the files again"
        )
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads, "computes checksums") as pool:
        bins = [folder / shard for shard in shards]
        files = list(pool.map(open_shard, bins, shards.values()))
    for file, name in zip(files, shards):
        if window and len(file.token_b) % window:
            raise ValueError(
                f"'{folder / name}' has no whole windows of {window} tokens"
            )
    files = [dataclasses.replace(file, window=window) for file in files]
    return files, list(shards.values())


def file_stamp(path: Path) -> tuple[str, int, int, int]:
    """Return the real path, size, mtime and inode of a file, to detect a change."""
    try:
        stat = path.stat()
    except OSError as error:
        raise unreadable_error(path, error) from error
    return os.path.realpath(path), stat.st_size, stat.st_mtime_ns, stat.st_ino


def _write_shards(
    paths: Sequence[Path],
    folder: Path,
    tokenizer: Tokenizer,
    text_key: str,
    say: Callable[[str], None],
    chat: Chat | None,
) -> dict[str, Any]:
    """Write the documents or conversations of all files as shards, and return the
    manifest.

    After a shard has reached SHARD_TOKENS or SHARD_DOCUMENTS, the next batch that
    begins with a document opens a new shard.
    """
    is_small = tokenizer.vocab_size <= 2**16 and chat is None
    dtype, counts = np.dtype(np.uint16 if is_small else np.int32), Counter()
    stamps = [file_stamp(path) for path in paths]
    total_bytes = sum(size for _, size, _, _ in stamps)
    say(f"tokenizing {len(paths)} files, {total_bytes / 1e6:,.1f} MB, into {folder}")
    shards, done_bytes, num_empty, said_sec = [], 0, 0, time.monotonic()
    num_documents = num_tokens = 0
    with contextlib.ExitStack() as stack:

        def next_writer() -> ShardWriter:
            writer = ShardWriter(folder / f"shard-{len(shards):05d}.bin", dtype)
            stack.callback(writer.close)
            return writer

        writer = next_writer()
        for path, stamp in zip(paths, stamps):
            if chat is None:
                parts = read(path, text_key, tokenizer.forbidden)
                pieces = _encode(path, parts, tokenizer)
            else:
                pieces = read_windows(path, chat, tokenizer)
            for encoded in pieces:
                token_b, start_d = encoded.token_b, encoded.start_d
                if chat is None:
                    num_empty += encoded.num_empty
                else:
                    counts.update(encoded.counts)
                is_full = (
                    writer.num_tokens >= SHARD_TOKENS
                    or writer.num_documents >= SHARD_DOCUMENTS
                )
                if is_full and 0 in start_d[:1]:
                    shards.append(writer.finish())
                    writer = next_writer()
                writer.append(token_b, start_d)
                num_documents += start_d.size
                num_tokens += token_b.size
                if time.monotonic() - said_sec >= _SECONDS_BETWEEN_REPORTS:
                    said_sec = time.monotonic()
                    say(
                        f"  {(done_bytes + encoded.num_bytes) / 1e6:,.0f} of "
                        f"{total_bytes / 1e6:,.0f} MB, {num_documents:,} documents, "
                        f"{num_tokens:,} tokens"
                    )
            if file_stamp(path) != stamp:
                raise ValueError(f"'{path}' changed while it was read: try again")
            done_bytes += stamp[1]
        if not num_documents:
            why = f"no text ({num_empty} empty documents)"
            if chat is not None:
                left_out = counts["num_skipped"]
                why = f"no conversation for a window ({left_out} are too long)"
            raise ValueError(f"the files hold {why}: check the files")
        shards.append(writer.finish())
    conversations = {}
    if chat is not None:
        names = "num_conversations", "num_targets", "num_cut", "num_skipped"
        source = chat.template.source.encode()
        conversations["conversations"] = {
            "window": chat.window,
            "long": chat.long,
            "template_sha256": hashlib.sha256(source).hexdigest(),
            **{name: counts[name] for name in names},
        }
    return {
        "format": FORMAT if chat is None else CHAT_FORMAT,
        **conversations,
        "tokenizer": {
            "name": tokenizer.name,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
        },
        "separator": tokenizer.separator,
        "text_key": text_key,
        "dtype": dtype.name,
        "num_documents": num_documents,
        "num_tokens": num_tokens,
        "num_empty": num_empty,
        "sources": [
            {"path": str(path), "num_bytes": size}
            for path, (_, size, _, _) in zip(paths, stamps)
        ],
        "shards": [
            {
                "file": shard.path.name,
                "sha256": shard.sha256,
                "num_documents": shard.num_documents,
                "num_tokens": shard.num_tokens,
            }
            for shard in shards
        ],
    }


class Encoded(NamedTuple):
    """Tokens that follow those before them in a file."""

    token_b: np.ndarray
    start_d: np.ndarray
    """Indices of the tokens that begin a document."""
    num_empty: int
    """Empty documents, which have no token."""
    num_bytes: int
    """Bytes of the file that have been read so far."""


def _encode(
    path: Path, parts: Iterator[TextPart], tokenizer: Tokenizer
) -> Iterator[Encoded]:
    """Yield the tokens of a file: of some whole documents, or of a part of a long one.

    Raises ValueError for a document that is too long for the tokenizer.
    """
    part, batch, num_chars = None, [], 0

    def texts_to_end() -> Iterator[str]:
        nonlocal part
        while not part.ends:
            yield part.text
            part = next(parts)
        yield part.text

    for part in parts:
        if part.begins and part.ends:
            batch.append(part)
            num_chars += len(part.text)
            if num_chars >= BATCH_CHARS or len(batch) >= _BATCH_DOCUMENTS:
                yield _encode_documents(batch, tokenizer)
                batch, num_chars = [], 0
            continue
        if batch:
            yield _encode_documents(batch, tokenizer)
            batch, num_chars = [], 0
        separator_b = np.array([tokenizer.separator], np.int32)
        yield Encoded(separator_b, np.array([0]), 0, part.num_bytes)
        try:
            for id_b in tokenizer.encode_long(texts_to_end()):
                yield Encoded(id_b, np.zeros(0, int), 0, part.num_bytes)
        except UndividedError as error:
            raise ValueError(f"'{path}': {error}") from error
    if batch:
        yield _encode_documents(batch, tokenizer)


def _encode_documents(documents: list[TextPart], tokenizer: Tokenizer) -> Encoded:
    separator = np.array([tokenizer.separator], np.int32)
    texts = [document.text for document in documents if document.text]
    ids = tokenizer.encode_texts(texts)
    length_d = np.array([1 + id_b.size for id_b in ids], np.int64)
    tokens = [token_b for id_b in ids for token_b in (separator, id_b)]
    token_b = np.concatenate([np.zeros(0, np.int32), *tokens])
    num_empty = len(documents) - len(texts)
    start_d = np.cumsum(length_d) - length_d
    return Encoded(token_b, start_d, num_empty, documents[-1].num_bytes)


@contextlib.contextmanager
def _locked(out: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a folder; wait while another process holds it."""
    path = out.with_name(out.name + ".lock")
    while True:
        with path.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another process is writing '{out}': waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_same_file(lock.fileno(), path):
                continue  # its holder has removed the file that we waited for
            try:
                yield
            finally:
                path.unlink()
            return


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
