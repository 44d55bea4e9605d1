"""Pieces of files to chunks of token ids, in order, by any number of processes.

    parent            takes chunks of piece 0, 1, 2, .. from the process that has it
    process w of n    reads and encodes pieces w, w + n, w + 2n, .. and may be
                      _AHEAD chunks ahead of the parent, no more

A chunk is a function of its piece alone, so the order and the contents of chunks do not
depend on the number of processes, and memory does not depend on the size of files.
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
from train.data.records import Bad, End, Piece, Text
from train.data.tokenizer import Tokenizer, load_tokenizer

_AHEAD = 32
_MAX_BAD_IN_CHUNK = 100


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How texts become token ids: fields of moejax.config.Data, by their names."""

    tokenizer: str = "bytes"
    separator: str | int | None = None
    text_key: str = "text"
    max_bad_records: int = 100


@dataclasses.dataclass
class Chunk:
    """Some ids, and where in them documents start with a separator.

    Ids before the first start go on with the document of the chunk before. The last
    chunk of a piece has `num_records`.
    """

    token_b: np.ndarray
    start_d: np.ndarray
    bad: list[Bad]
    num_empty: int
    num_records: int | None


def encode(
    pieces: Sequence[Piece], recipe: Recipe, num_workers: int
) -> Iterator[tuple[Piece, Chunk]]:
    """Yield the chunks of every piece in order; one worker is this process.

    Raises ValueError for a file that cannot be read, and ChildProcessError when a
    worker dies.
    """
    num_workers = min(num_workers, len(pieces))
    if num_workers > 1:
        return _encode_in_workers(pieces, recipe, num_workers)
    return _encode_here(pieces, recipe)


def _encode_here(
    pieces: Sequence[Piece], recipe: Recipe
) -> Iterator[tuple[Piece, Chunk]]:
    tokenizer = load_tokenizer(recipe.tokenizer, recipe.separator)
    for piece in pieces:
        for chunk in _chunks(piece, recipe.text_key, tokenizer):
            yield piece, chunk


def _encode_in_workers(
    pieces: Sequence[Piece], recipe: Recipe, num_workers: int
) -> Iterator[tuple[Piece, Chunk]]:
    # Spawned, because the parent may have threads, which a fork would leave locked.
    context = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(_worker(context, pieces[w::num_workers], recipe))
            for w in range(num_workers)
        ]
        for i, piece in enumerate(pieces):
            process, connection = workers[i % num_workers]
            num_records = None
            while num_records is None:
                chunk = _receive(process, connection)
                num_records = chunk.num_records
                yield piece, chunk
        for process, _ in workers:
            process.join()


@contextlib.contextmanager
def _worker(context, pieces: Sequence[Piece], recipe: Recipe) -> Iterator[tuple]:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(sender, pieces, recipe), daemon=True)
    process.start()
    sender.close()  # so that the death of the worker is the end of the stream
    try:
        yield process, receiver
    finally:
        process.kill()
        process.join()
        receiver.close()


def _receive(process: multiprocessing.Process, connection: Connection) -> Chunk:
    try:
        message = connection.recv()
    except (EOFError, OSError) as fault:  # between messages, or within one
        process.join()
        raise ChildProcessError(
            f"a worker died (exit code {process.exitcode}; -9 is often a lack of "
            "memory): try again, with fewer workers"
        ) from fault
    if isinstance(message, ValueError):
        raise message
    return message


def _work(sender: Connection, pieces: Sequence[Piece], recipe: Recipe) -> None:
    """A worker: encodes while a thread sends what is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    waiting: queue.Queue[Chunk | ValueError | None] = queue.Queue(_AHEAD)
    thread = threading.Thread(target=_send, args=(sender, waiting), daemon=True)
    thread.start()
    try:
        for _, chunk in _encode_here(pieces, recipe):
            waiting.put(chunk)
    except ValueError as fault:
        waiting.put(ValueError(str(fault)))
    waiting.put(None)
    thread.join()


def _send(sender: Connection, waiting: queue.Queue) -> None:
    try:
        while (message := waiting.get()) is not None:
            sender.send(message)
        sender.close()
    except BrokenPipeError:  # the parent has gone, and none is left to be told
        os._exit(1)


def _chunks(piece: Piece, text_key: str, tokenizer: Tokenizer) -> Iterator[Chunk]:
    batch: list[tuple[str, bool]] = []
    bad: list[Bad] = []
    num_empty = num_chars = 0
    for event in read(piece, text_key, tokenizer.forbidden):
        match event:
            case Text("", _):
                num_empty += 1
            case Text(text, begins):
                for block in blocks([text]):
                    batch.append((block, begins))
                    num_chars += len(block)
                    begins = False
                    if num_chars >= BLOCK_CHARS:
                        yield _chunk(batch, tokenizer, bad, num_empty)
                        batch, bad, num_empty, num_chars = [], [], 0, 0
            case Bad():
                bad.append(event)
                if len(bad) >= _MAX_BAD_IN_CHUNK:
                    yield _chunk(batch, tokenizer, bad, num_empty)
                    batch, bad, num_empty, num_chars = [], [], 0, 0
            case End(num_records):
                yield _chunk(batch, tokenizer, bad, num_empty, num_records)


def _chunk(
    batch: list[tuple[str, bool]],
    tokenizer: Tokenizer,
    bad: list[Bad],
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
    return Chunk(np.concatenate(parts), start_d, bad, num_empty, num_records)
