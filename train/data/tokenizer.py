"""Tokenizers from text to ids and back: bytes, or a Hugging Face tokenizers file.

The separator is the token that starts every document. The last token of a document
predicts it, or another one, the end. No text can forge a separator: names of special
tokens within a text are encoded as plain text, and for the tokenizer 'bytes', readers
refuse a text that holds the separator (`forbidden`).
"""

import codecs
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moejax.interop.strict_json import refuse_lfs_pointer
from train.data.long_text import WINDOW, cut_patterns, encode_long

END_OF_TEXT = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>",
    "[EOS]", "[SEP]",
)  # fmt: skip
"""Default separators: the first of these tokens that a tokenizers file has is used."""
_NEVER_IN_UTF8 = (0xC0, 0xC1, *range(0xF5, 0x100))
"""Bytes that do not occur in UTF-8."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and its separator."""

    name: str
    sha256: str
    """Hash of the tokenizers file, or of the word 'bytes'."""
    vocab_size: int
    """Largest id plus 1."""
    separator: int
    """Id of the token that starts every document."""
    end: int | None
    """Id of the token that the last token of a document predicts; None: the
    separator."""
    forbidden: str | None
    """String that no text may hold, or None."""
    encode_texts: Callable[[list[str]], list[np.ndarray]]
    """Function from texts, held in memory with their encodings, to the ids of each."""
    encode_long: Callable[[Iterable[str]], Iterator[np.ndarray]]
    """Function from the blocks of one long text to ids that are, joined, those of the
    whole text; in bounded memory. Raises ValueError if a tokenizer cannot do so."""
    decode: Callable[[Sequence[int]], str]
    """Function from ids to their text, with U+FFFD for bytes that are not UTF-8."""

    encode_special: Callable[[str], np.ndarray]
    """Function from a text to ids, int32 [b], in which names of special tokens stand
    for these tokens; as `encode` for bytes, which have none."""
    encoder: Any = None
    """The tokenizers.Tokenizer of a tokenizers file; None for bytes."""

    @property
    def text_end(self) -> int:
        """Id of the token that ends a text."""
        return self.separator if self.end is None else self.end

    @property
    def ends(self) -> tuple[int, int] | None:
        """The separator, and the token that takes its place as a target; None: it is a
        target itself."""
        return None if self.end is None else (self.separator, self.end)

    def encode(self, text: str) -> np.ndarray:
        """Encode a text as ids, int32 [b], without a separator."""
        if len(text) <= WINDOW:
            return self.encode_texts([text])[0]
        return np.concatenate(list(self.encode_long([text])))

    def check(self, vocab_size: int) -> None:
        """Raise ValueError if a model of this vocabulary size lacks some of the ids."""
        if self.vocab_size > vocab_size:
            raise ValueError(
                f"the tokenizer '{self.name}' has {self.vocab_size} ids, but "
                f"Model.vocab_size={vocab_size}: with Model.from_hf, bind "
                "Data.tokenizer to the tokenizer that this model was trained with; for "
                f"a new model, set Model.vocab_size to {self.vocab_size} or more"
            )


def load_tokenizer(
    name: str, separator: str | int | None = None, end: str | int | None = None
) -> Tokenizer:
    """Load the tokenizer 'bytes', or one from a tokenizers file (tokenizer.json).

    The separator is a token or its id. If it is None, it is 0x00 for bytes, else the
    first of END_OF_TEXT that the file has. `end` is another token, or None. Raises a
    ValueError of one line for a file that is missing or damaged, and for a separator or
    an end that the tokenizer lacks.
    """
    if name != "bytes":
        return _file_tokenizer(name, separator, end)
    if end is not None:
        raise ValueError(
            f"Data.end={end!r}: the tokenizer 'bytes' has no token that ends a text: "
            "leave it out, so that the separator does"
        )
    return _byte_tokenizer(separator)


class StreamDecoder(Protocol):
    """Function that takes the next ids, and returns the text that they complete.

    With `is_last`, it returns all the remaining text, in which an unfinished character
    is U+FFFD.
    """

    def __call__(self, ids: Sequence[int], is_last: bool = False) -> str: ...


def stream_decoder(tokenizer: Tokenizer, context: Sequence[int] = ()) -> StreamDecoder:
    """Return a decoder of ids that come a few at a time, after the ids of `context`.

    Bytes of an unfinished character are held back; bytes that can no longer become one
    come out as U+FFFD. The texts, joined, are the text of all ids after that of the
    context, up to the bytes held back. Memory does not grow.
    """
    if tokenizer.encoder is None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(map(int, context[-_MAX_UNFINISHED:])))
        return lambda ids, is_last=False: decoder.decode(bytes(map(int, ids)), is_last)
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(ids=list(map(int, context)), skip_special_tokens=False)
    pending: list[int] = []  # ids whose text has not come out

    def step(ids: Sequence[int], is_last: bool = False) -> str:
        nonlocal pending
        pending += map(int, ids)
        text = stream.step(tokenizer.encoder, list(map(int, ids))) if len(ids) else None
        if text:
            pending = []
        return (text or "") + (tokenizer.decode(pending) if is_last else "")

    return step


_MAX_UNFINISHED = 3
"""Maximum number of bytes of an unfinished character."""


def _byte_tokenizer(separator: str | int | None) -> Tokenizer:
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
            f"Data.separator={separator} must be a byte of ASCII (0 to 127) or one "
            "that UTF-8 never uses (192, 193, 245 to 255): 0 is usual"
        )
    return Tokenizer(
        name="bytes",
        sha256=hashlib.sha256(b"bytes").hexdigest(),
        vocab_size=256,
        separator=separator,
        end=None,
        forbidden=chr(separator) if separator < 0x80 else None,
        encode_texts=lambda texts: list(_encode_bytes(texts)),
        encode_long=_encode_bytes,
        encode_special=lambda text: next(_encode_bytes([text])),
        decode=lambda ids: bytes(map(int, ids)).decode(errors="replace"),
    )


def byte_tokenizer_file() -> bytes:
    """Return a tokenizers file (tokenizer.json) that has one id for each byte, as the
    tokenizer 'bytes' has."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    names = _names_of_bytes()
    model = models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[])
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    encoder.decoder = decoders.ByteLevel()
    return encoder.to_str(pretty=True).encode()


def _names_of_bytes() -> list[str]:
    """Return the character by which tokenizers files name each byte: its own in Latin-1
    if that is visible, else one from U+0100 on (GPT-2)."""
    names, num_hidden = [], 0
    for byte in range(256):
        is_visible = 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174
        names.append(chr(byte) if is_visible else chr(256 + num_hidden))
        num_hidden += not is_visible
    return names


def _encode_bytes(texts: Iterable[str]) -> Iterator[np.ndarray]:
    return (np.frombuffer(t.encode(), np.uint8).astype(np.int32) for t in texts)


def _file_tokenizer(
    name: str, separator: str | int | None, end: str | int | None
) -> Tokenizer:
    try:
        content = Path(name).expanduser().read_bytes()
    except OSError as error:
        raise ValueError(
            f"Data.tokenizer='{name}' cannot be read: {error.strerror}: give 'bytes' "
            "or the path of a tokenizer.json"
        ) from error
    refuse_lfs_pointer(content, f"Data.tokenizer='{name}'")
    encoder = _parse(name, content)
    ids = encoder.get_vocab(with_added_tokens=True)
    if not ids:
        raise ValueError(f"Data.tokenizer='{name}' has no tokens: give another file")
    separator_id = _find_separator(name, ids, separator)
    end_id = None if end is None else _find_token(name, ids, "Data.end", end)
    if end_id == separator_id:
        end_id = None
    added = encoder.get_added_tokens_decoder().get(separator_id)
    if added is not None and not added.special:
        # The library finds an added token in text unless it is special: a text that
        # spells this one would forge a separator.
        tree = json.loads(content)
        for token in tree["added_tokens"]:
            token["special"] |= token["id"] == separator_id
        encoder = _parse(name, json.dumps(tree).encode())
    if getattr(encoder.model, "dropout", None) is not None:
        encoder.model.dropout = None  # it would draw the ids of a text at random
    return Tokenizer(
        name=name,
        sha256=hashlib.sha256(content).hexdigest(),
        vocab_size=max(ids.values()) + 1,
        separator=separator_id,
        end=end_id,
        forbidden=None,
        encode_texts=functools.partial(_encode_batch, encoder),
        encode_long=functools.partial(encode_long, encoder, cut_patterns(content)),
        encode_special=functools.partial(_encode_special, encoder),
        decode=functools.partial(_decode, encoder),
        encoder=encoder,
    )


def _parse(name: str, content: bytes) -> Any:
    """Return a tokenizers.Tokenizer without truncation, padding or special tokens."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Named, so that the library does not warn when a process with its threads forks.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    import tokenizers

    try:
        encoder = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library documents no narrower exception
        raise ValueError(
            f"Data.tokenizer='{name}' is not a Hugging Face tokenizers file: "
            f"{' '.join(str(error).split())[:160]}: give the path of a tokenizer.json"
        ) from error
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
    return _find_token(name, ids, "Data.separator", separator)


def _find_token(name: str, ids: dict[str, int], field: str, token: str | int) -> int:
    """Return the id of a token, or of an id itself. Raises ValueError where the
    tokenizer lacks it."""
    if isinstance(token, str):
        if token not in ids:
            raise ValueError(
                f"{field}='{token}' is not a token of '{name}': give another token, or "
                "an id"
            )
        return ids[token]
    if token not in ids.values():
        raise ValueError(
            f"{field}={token} is not an id of '{name}', which has {len(ids)} ids up to "
            f"{max(ids.values())}: give another"
        )
    return token


def _encode_batch(encoder: Any, texts: list[str]) -> list[np.ndarray]:
    encodings = encoder.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, np.int32) for encoding in encodings]


def _encode_special(encoder: Any, text: str) -> np.ndarray:
    encoder.encode_special_tokens = False
    try:
        return _encode_batch(encoder, [text])[0]
    finally:
        encoder.encode_special_tokens = True


def _decode(encoder: Any, ids: Sequence[int]) -> str:
    return encoder.decode([int(i) for i in ids], skip_special_tokens=False)
