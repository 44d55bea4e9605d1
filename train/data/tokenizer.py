"""Text to token ids and back: bytes, or a Hugging Face tokenizers file.

A separator is the token that starts every document. No text can forge one: names of
special tokens within a text are encoded as plain text, and bytes that hold the
separator are refused by the readers (`forbidden`).
"""

import codecs
import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from train.data.documents import blocks

END_OF_TEXT = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>",
    "[EOS]", "[SEP]",
)  # fmt: skip
"""Names of a separator, the first that a tokenizers file has, unless one is given."""
_NEVER_IN_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """`vocab_size` is the largest id and one; `sha256` of the file, or of 'bytes'."""

    name: str
    sha256: str
    vocab_size: int
    separator: int
    forbidden: str | None
    """No text may hold it, or None."""
    encode_blocks: Callable[[list[str]], list[np.ndarray]]
    """Ids of each of several texts, none longer than BLOCK_CHARS."""
    decode: Callable[[Sequence[int]], str]
    """Text of ids; U+FFFD for bytes that are not UTF-8."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, int32 [b], without a separator. A text of more than
        BLOCK_CHARS is encoded block by block."""
        ids = self.encode_blocks(list(blocks([text])))
        return np.concatenate([np.zeros(0, np.int32), *ids])

    def check(self, vocab_size: int) -> None:
        """Raises ValueError when a model of so many tokens lacks some of these."""
        if self.vocab_size > vocab_size:
            raise ValueError(
                f"the tokenizer '{self.name}' has {self.vocab_size} ids, and "
                f"Model.vocab_size={vocab_size}: set Model.vocab_size to "
                f"{self.vocab_size} or more, or use a smaller tokenizer"
            )


def load_tokenizer(name: str, separator: str | int | None = None) -> Tokenizer:
    """'bytes', or the path of a tokenizers file (tokenizer.json).

    The separator is a token or its id; None: 0x00 for bytes, else the first of
    END_OF_TEXT that the file has. Raises ValueError in one line for a file that is
    missing or damaged, and for a separator that the tokenizer lacks.
    """
    return _bytes(separator) if name == "bytes" else _from_file(name, separator)


class StreamDecoder(Protocol):
    """Takes the ids that follow, and returns the text that they complete; with
    `is_last` all that is left, where an unfinished character is U+FFFD."""

    def __call__(self, ids: Sequence[int], is_last: bool = False) -> str: ...


def stream_decoder(tokenizer: Tokenizer, context: Sequence[int] = ()) -> StreamDecoder:
    """A decoder of ids that come a few at a time, behind those of `context`.

    Bytes of an unfinished character are held back; what can no longer become one comes
    out as U+FFFD. The joined texts are what `decode` of all ids has more than whole
    characters of the context, up to what is held back. Memory does not grow.
    """
    if tokenizer.name == "bytes":
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(map(int, context[-_MAX_UNFINISHED:])))
        return lambda ids, is_last=False: decoder.decode(bytes(map(int, ids)), is_last)
    decode = tokenizer.decode
    held: list[int] = []  # what the next text depends on
    num_out = 0  # characters of their text that are out

    def step(ids: Sequence[int], is_last: bool = False) -> str:
        nonlocal held, num_out
        held += map(int, ids)
        num, text = len(held), decode(held)
        num_settled = len(text)
        if text.endswith("\ufffd") and not is_last:
            num, text, num_settled = _settled(tokenizer, held, text)
        piece = text[num_out:num_settled]
        num_out += len(piece)
        is_clean = num_settled == len(text)
        if num > _NUM_CONTEXT * (2 if is_clean else 4):
            num_left = len(text) - num_out
            first, text = _last(tokenizer, held[:num], text)
            held, num_out = held[first:], max(0, len(text) - num_left)
        return piece

    step(context[-_NUM_CONTEXT:])
    return step


def _settled(tokenizer: Tokenizer, ids: list[int], text: str) -> tuple[int, str, int]:
    """How many of the first ids end with a whole character, their text, and how many
    characters of it no further id can change. `text` is that of all, and ends with
    U+FFFD."""
    texts = [text]
    for num in range(len(ids) - 1, max(-1, len(ids) - 1 - _MAX_UNFINISHED), -1):
        texts.append(tokenizer.decode(ids[:num]))
        if not texts[-1].endswith("\ufffd"):
            return num, texts[-1], len(texts[-1])
    # Bytes that are not UTF-8, or a U+FFFD that was encoded.
    most = max(len(text.rstrip("\ufffd")), len(text) - _MAX_UNFINISHED)
    return len(ids), text, min(most, _num_common(texts))


def _num_common(texts: list[str]) -> int:
    """Characters with which all of them begin."""
    columns = zip(*texts)
    return sum(1 for _ in itertools.takewhile(lambda c: len(set(c)) == 1, columns))


def _last(tokenizer: Tokenizer, ids: list[int], text: str) -> tuple[int, str]:
    """An id from which on the text of the last ids is the end of all their text, so
    that it begins no id within a character, and that text."""
    least = len(ids) - _NUM_CONTEXT
    for first in range(least, least - 8, -1):
        last = tokenizer.decode(ids[first:])
        if text.endswith(last):
            return first, last
    return least, tokenizer.decode(ids[least:])


_MAX_UNFINISHED = 3
"""Bytes of a character without its last, and so its tokens."""
_NUM_CONTEXT = 16


def _bytes(separator: str | int | None) -> Tokenizer:
    if separator is None:
        separator = 0
    if isinstance(separator, str):
        if len(separator.encode()) != 1:
            raise ValueError(
                f"Data.separator={separator!r} must be one byte for the tokenizer "
                "'bytes': give one character of ASCII, or a number"
            )
        separator = separator.encode()[0]
    if not (0 <= separator < 0x80 or separator in _NEVER_IN_UTF8):
        raise ValueError(
            f"Data.separator={separator} must be a byte that is ASCII (0 to 127) or "
            "never part of UTF-8 (192, 193, 245 to 255): 0 is usual"
        )
    return Tokenizer(
        name="bytes",
        sha256=hashlib.sha256(b"bytes").hexdigest(),
        vocab_size=256,
        separator=separator,
        forbidden=chr(separator) if separator < 0x80 else None,
        encode_blocks=_encode_bytes,
        decode=lambda ids: bytes(map(int, ids)).decode(errors="replace"),
    )


def _encode_bytes(texts: Iterable[str]) -> list[np.ndarray]:
    return [np.frombuffer(t.encode(), np.uint8).astype(np.int32) for t in texts]


def _from_file(name: str, separator: str | int | None) -> Tokenizer:
    try:
        content = Path(name).expanduser().read_bytes()
    except OSError as fault:
        raise ValueError(
            f"Data.tokenizer='{name}' cannot be read: {fault.strerror}: give 'bytes' "
            "or the path of a tokenizer.json"
        ) from fault
    encoder = _parse(name, content)
    ids = encoder.get_vocab(with_added_tokens=True)
    if not ids:
        raise ValueError(f"Data.tokenizer='{name}' has no tokens: give another file")
    return Tokenizer(
        name=name,
        sha256=hashlib.sha256(content).hexdigest(),
        vocab_size=max(ids.values()) + 1,
        separator=_find_separator(name, ids, separator),
        forbidden=None,
        encode_blocks=functools.partial(_encode_batch, encoder),
        decode=functools.partial(_decode, encoder),
    )


def _parse(name: str, content: bytes) -> Any:
    """A tokenizers.Tokenizer that does not cut, pad or look for special tokens."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Its threads do not survive a fork, and each worker has a core of its own.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import tokenizers

    try:
        encoder = tokenizers.Tokenizer.from_buffer(content)
    except Exception as fault:  # the library promises no narrower one
        raise ValueError(
            f"Data.tokenizer='{name}' is no Hugging Face tokenizers file: "
            f"{' '.join(str(fault).split())[:160]}: give the path of a tokenizer.json"
        ) from fault
    encoder.no_truncation()
    encoder.no_padding()
    encoder.encode_special_tokens = True
    return encoder


def _find_separator(name: str, ids: dict[str, int], separator: str | int | None) -> int:
    if separator is None:
        separator = next((token for token in END_OF_TEXT if token in ids), None)
        if separator is None:
            raise ValueError(
                f"Data.tokenizer='{name}' has no token for the end of a text "
                f"({', '.join(END_OF_TEXT)}): set Data.separator to a token or an id"
            )
    if isinstance(separator, str):
        if separator not in ids:
            raise ValueError(
                f"Data.separator='{separator}' is no token of '{name}': name another, "
                "or an id"
            )
        return ids[separator]
    if separator not in ids.values():
        raise ValueError(
            f"Data.separator={separator} is no id of '{name}', which has "
            f"{len(ids)} up to {max(ids.values())}: name another"
        )
    return separator


def _encode_batch(encoder: Any, texts: list[str]) -> list[np.ndarray]:
    encodings = encoder.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in encodings]


def _decode(encoder: Any, ids: Sequence[int]) -> str:
    return encoder.decode([int(i) for i in ids], skip_special_tokens=False)
