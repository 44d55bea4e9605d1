"""Encode ranges of files as chunks of token ids, in order, with worker processes.

    parent            takes the chunks of range 0, 1, 2, .. from the workers in turn
    worker w of n     reads and encodes ranges w, w + n, w + 2n, .. and is at most
                      _MAX_CHUNKS_AHEAD chunks ahead of the parent

A chunk is a function of its range alone. So the order and the contents of the chunks do
not depend on the number of workers, and memory does not depend on the size of the
files.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import numpy as np

from train.data.documents import BLOCK_CHARS, blocks, read
from train.data.records import (
    MAX_EXPANSION,
    BadRecord,
    EndOfRange,
    FileRange,
    TextPart,
)
from train.data.tokenizer import Tokenizer, load_tokenizer

_MAX_CHUNKS_AHEAD = 32
_MAX_BAD_PER_CHUNK = 100
_MAX_EMPTY_PER_CHUNK = 2**18


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings that decide how texts become token ids.

    The fields have the names that they have in moejax.config.Data.
    """

    tokenizer: str = "bytes"
    separator: str | int | None = None
    text_key: str = "text"
    max_bad_records: int = 100
    max_expansion: int = MAX_EXPANSION


@dataclasses.dataclass
class Chunk:
    """Consecutive token ids of a range, and the bad records found among them."""

    token_b: np.ndarray
    start_d: np.ndarray
    """Indices into `token_b` where documents start, each with a separator. Ids before
    the first start continue the last document of the previous chunk."""
    bad_records: list[BadRecord]
    num_empty: int
    """Number of empty documents, which are left out."""
    num_chars: int
    """Number of characters of text."""
    num_records: int | None
    """Number of records in the whole range, given by its last chunk; None before."""


def encode(
    ranges: Sequence[FileRange], recipe: Recipe, num_workers: int
) -> Iterator[tuple[FileRange, Chunk]]:
    """Yield the chunks of all ranges in order, each with its range.

    With one worker, this process encodes; with more, processes are started.
    Raises ValueError for a file that cannot be read, and ChildProcessError when a
    worker dies.
    """
    num_workers = min(num_workers, len(ranges))
    if num_workers > 1:
        return _encode_in_workers(ranges, recipe, num_workers)
    return _encode_here(ranges, recipe)


def _encode_here(
    ranges: Sequence[FileRange], recipe: Recipe
) -> Iterator[tuple[FileRange, Chunk]]:
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.separator)
    for file_range in ranges:
        for chunk in _read_chunks(file_range, recipe.text_key, tokenizer):
            yield file_range, chunk


def _encode_in_workers(
    ranges: Sequence[FileRange], recipe: Recipe, num_workers: int
) -> Iterator[tuple[FileRange, Chunk]]:
    # Spawn, because the parent may have threads, whose locks a fork would leave held.
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(_start_worker(context, ranges[w::num_workers], recipe))
            for w in range(num_workers)
        ]
        for i, file_range in enumerate(ranges):
            process, connection = workers[i % num_workers]
            num_records = None
            while num_records is None:
                chunk = _receive(process, connection)
                num_records = chunk.num_records
                yield file_range, chunk
        for process, _ in workers:
            process.join()


@contextlib.contextmanager
def _start_worker(
    context, ranges: Sequence[FileRange], recipe: Recipe
) -> Iterator[tuple]:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_run_worker, args=(sender, ranges, recipe), daemon=True
    )
    process.start()
    sender.close()  # then the receiver sees the end of the stream when a worker dies
    try:
        yield process, receiver
    finally:
        process.kill()
        process.join()
        receiver.close()


def _receive(process: multiprocessing.Process, connection: Connection) -> Chunk:
    try:
        message = connection.recv()
    except (EOFError, OSError) as error:  # it died between messages, or within one
        process.join()
        raise ChildProcessError(
            f"a worker process died (exit code {process.exitcode}; -9 often means out "
            "of memory): try again with fewer workers"
        ) from error
    if isinstance(message, ValueError):
        raise message
    return message


def _run_worker(
    sender: Connection, ranges: Sequence[FileRange], recipe: Recipe
) -> None:
    """Encode ranges in a worker process, while a thread sends the finished chunks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its workers
    waiting: queue.Queue[Chunk | ValueError | None] = queue.Queue(_MAX_CHUNKS_AHEAD)
    thread = threading.Thread(target=_send_chunks, args=(sender, waiting), daemon=True)
    thread.start()
    try:
        for _, chunk in _encode_here(ranges, recipe):
            waiting.put(chunk)
    except ValueError as error:
        waiting.put(ValueError(str(error)))
    waiting.put(None)
    thread.join()


def _send_chunks(sender: Connection, waiting: queue.Queue) -> None:
    try:
        while (message := waiting.get()) is not None:
            sender.send(message)
        sender.close()
    except BrokenPipeError:  # the parent is gone, so nobody can receive an error
        os._exit(1)


def _read_chunks(
    file_range: FileRange, text_key: str, tokenizer: Tokenizer
) -> Iterator[Chunk]:
    batch: list[tuple[str, bool]] = []
    bad_records: list[BadRecord] = []
    num_empty = num_chars = 0
    for event in read(file_range, text_key, tokenizer.forbidden):
        match event:
            case TextPart("", _):
                num_empty += 1
            case TextPart(text, begins):
                for block in blocks([text]):
                    batch.append((block, begins))
                    num_chars += len(block)
                    begins = False
                    if num_chars >= BLOCK_CHARS:
                        yield _make_chunk(batch, tokenizer, bad_records, num_empty)
                        batch, bad_records, num_empty, num_chars = [], [], 0, 0
            case BadRecord():
                bad_records.append(event)
            case EndOfRange(num_records):
                yield _make_chunk(batch, tokenizer, bad_records, num_empty, num_records)
                return
        if len(bad_records) >= _MAX_BAD_PER_CHUNK or num_empty >= _MAX_EMPTY_PER_CHUNK:
            yield _make_chunk(batch, tokenizer, bad_records, num_empty)
            batch, bad_records, num_empty, num_chars = [], [], 0, 0


def _make_chunk(
    batch: list[tuple[str, bool]],
    tokenizer: Tokenizer,
    bad_records: list[BadRecord],
    num_empty: int,
    num_records: int | None = None,
) -> Chunk:
    ids = tokenizer.encode_blocks([text for text, _ in batch]) if batch else []
    separator = np.array([tokenizer.separator], np.int32)
    parts, starts, size = [np.zeros(0, np.int32)], [], 0
    for (_, begins), id_b in zip(batch, ids):
        if begins:
            starts.append(size)
            parts.append(separator)
        parts.append(id_b)
        size += id_b.size + begins
    start_d = np.array(starts, np.int64)
    num_chars = sum(len(text) for text, _ in batch)
    return Chunk(
        np.concatenate(parts), start_d, bad_records, num_empty, num_chars, num_records
    )
