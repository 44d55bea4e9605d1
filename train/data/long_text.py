"""Encode a long text window by window, with the ids that it has as a whole.

    text       |........................................................|
    windows    |...............====|
                              |====...............====|
                                                 |====..................|

Neighbours share an overlap (=). Where both have the same tokens in its middle half, the
ids of the left one are taken up to a word that begins there, and those of the right one
from there on. Where they differ, or where a rule of the tokenizer may read farther than
an overlap, the left window grows, at the limit to the whole text.

What a tokenizer puts before a text (`Prepend`, `Metaspace`, `add_prefix_space`) it puts
before each window. Only that of the first window is not in an overlap, and stays.
"""

import bisect
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from re import _constants as op  # names of the nodes that _parser makes
from re import _parser
from typing import Any

import numpy as np

from train.data.documents import MAX_RECORD_BYTES

WINDOW = 2**18
"""Characters of a window that belong to no other; shorter texts are encoded whole."""
OVERLAP = 2**12
"""Characters that two windows share."""
MAX_WINDOW = MAX_RECORD_BYTES
"""Maximum number of characters that are encoded at once."""
_NUM_TOGETHER = 8
"""Windows that the library's threads encode at the same time."""
_WITHIN_WORDS = frozenset(
    ("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt",
     "Precompiled", "Prepend", "Replace", "Strip", "StripAccents", "BertPreTokenizer",
     "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation", "Split", "Whitespace",
     "WhitespaceSplit")
)  # fmt: skip
"""Normalizers and pre-tokenizers whose result at a character depends on the word or run
of characters around it, apart from regular expressions. `FixedLength` counts from the
beginning of a text, and `UnicodeScripts` remembers a script over any distance."""


class UndividedError(ValueError):
    """A text that must be encoded as a whole, and is too long for that."""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """One alternative of a regular expression: how far an attempt to match can read.

    It reads at most `bound` characters that no repeated class contains.
    """

    bound: int
    repeated: str
    """Regular expression of one character that an unbounded repeat takes; '' if the
    alternative has none."""

    def stops_in(self, text: str) -> bool:
        """Whether no attempt that begins before `text` can read beyond it."""
        return sum(not _matches(self.repeated, c) for c in text) > self.bound


def encode_long(
    encoder: Any, patterns: Sequence[Pattern] | None, blocks: Iterable[str]
) -> Iterator[np.ndarray]:
    """Yield the ids of one text, int32, that comes in blocks of any size.

    `patterns` is `cut_patterns` of the tokenizers.Tokenizer `encoder`. The ids, joined,
    are those of the whole text. Raises UndividedError if more than MAX_WINDOW
    characters would have to be encoded at once.
    """
    left, can_cut = _Window("", 0), patterns is not None
    for group in itertools.batched(_windows(blocks), _NUM_TOGETHER):
        if can_cut:  # several at once, by the library's threads
            texts = [window.text for window in group]
            encodings = encoder.encode_batch(texts, add_special_tokens=False)
            for window, encoding in zip(group, encodings):
                window.set_tokens(encoding)
        for right in group:
            if right.start == 0:
                left = right
                continue
            cut = None
            if can_cut and left.num_encoded == len(left.text):
                cut = _find_cut(encoder, patterns, left, right)
            if cut is not None:
                left_row, right.first = cut
                yield left.ids[left.first : left_row]
                left = right
                continue
            left.text += right.text[OVERLAP:]
            if len(left.text) > MAX_WINDOW:
                raise UndividedError(
                    f"a document has no place within {MAX_WINDOW} characters where the "
                    "tokenizer surely gives its parts the ids of the whole: divide it "
                    "into several documents"
                )
            if can_cut and len(left.text) >= 2 * left.num_encoded:
                left.encode(encoder)
    left.encode(encoder)
    yield left.ids[left.first :]


class _Window:
    """A part of a text with its tokens, some of which are not yielded yet."""

    def __init__(self, text: str, start: int) -> None:
        self.text, self.start = text, start
        self.num_encoded = 0
        """Characters of the text for which there are tokens."""
        self.ids = np.zeros(0, np.int32)
        self.first = 0
        """Index of the first token that no window before this one has yielded."""

    def encode(self, encoder: Any) -> None:
        """Encode the text, unless it has not grown since the last time."""
        if self.num_encoded < len(self.text):
            (encoding,) = encoder.encode_batch([self.text], add_special_tokens=False)
            self.set_tokens(encoding)

    def set_tokens(self, encoding: Any) -> None:
        """Take the tokens of a tokenizers.Encoding of the text. Raises UndividedError
        if those that were yielded are not among them."""
        yielded, self.ids = self.ids[: self.first], np.array(encoding.ids, np.int32)
        if not np.array_equal(yielded, self.ids[: self.first]):
            raise UndividedError(
                f"the tokens of a text at character {self.start} depend on text more "
                f"than {self.num_encoded} characters later: divide it into several "
                "documents"
            )
        self._encoding, self.num_encoded = encoding, len(self.text)

    def tokens_between(self, low: int, high: int) -> tuple[int, list[tuple]]:
        """Return the index of the first token that begins in a range of characters of
        the whole text; and the id, the place and whether a word begins, of each that
        does so."""

        def start_of(i: int) -> int:
            return self._encoding.token_to_chars(i)[0] + self.start

        every = range(len(self.ids))
        begin, end = (bisect.bisect_left(every, x, key=start_of) for x in (low, high))
        word = [self._encoding.token_to_word(i) for i in range(max(begin - 1, 0), end)]
        begins = [a != b for a, b in itertools.pairwise([None] * (begin == 0) + word)]
        places = map(self._encoding.token_to_chars, range(begin, end))
        rows = zip(self.ids[begin:end].tolist(), places, begins)
        return begin, [(i, a + self.start, b + self.start, w) for i, (a, b), w in rows]


def _find_cut(
    encoder: Any, patterns: Sequence[Pattern], left: _Window, right: _Window
) -> tuple[int, int] | None:
    """Return the indices in both windows of the token from which on the right one's
    tokens are taken; None if the windows do not agree, or if a pattern may read beyond
    the overlap."""
    low, high = right.start + OVERLAP // 4, right.start + 3 * OVERLAP // 4
    first_left, tokens = left.tokens_between(low, high)
    first_right, others = right.tokens_between(low, high)
    if not tokens or tokens != others:
        return None
    candidates = [i for i, (*_, begins_word) in enumerate(tokens) if begins_word]
    if not candidates and type(encoder.model).__name__ != "BPE":
        return None  # one word: a unigram's choice depends on all of it
    after = right.text[3 * OVERLAP // 4 : OVERLAP]
    texts = [after]
    if encoder.normalizer is not None:
        texts.append(encoder.normalizer.normalize_str(after))
    if not all(pattern.stops_in(text) for pattern in patterns for text in texts):
        return None
    candidates = candidates or range(len(tokens))
    middle = candidates[len(candidates) // 2]
    return first_left + middle, first_right + middle


def _windows(blocks: Iterable[str]) -> Iterator[_Window]:
    """Yield the windows of a text. Each has WINDOW characters and those of the overlap
    with the next one; the last has between two overlaps and a window more."""
    pending, position = "", 0
    for block in blocks:
        pending += block
        start = 0
        while len(pending) - start > WINDOW + 2 * OVERLAP:
            yield _Window(pending[start : start + WINDOW + OVERLAP], position)
            start, position = start + WINDOW, position + WINDOW
        pending = pending[start:]
    if pending:
        yield _Window(pending, position)


def cut_patterns(content: bytes | str) -> list[Pattern] | None:
    """Return the patterns that limit where texts of a tokenizer.json can be cut.

    None if the file has a part that may depend on the whole text before or after.
    """
    tree = json.loads(content)
    parts = [*_parts(tree.get("normalizer")), *_parts(tree.get("pre_tokenizer"))]
    if any(part["type"] not in _WITHIN_WORDS for part in parts):
        return None
    patterns, are_bytes = [], False
    for part in parts:
        regex = (part.get("pattern") or {}).get("Regex")
        if part["type"] == "ByteLevel" and part.get("use_regex", True):
            regex = _GPT2
        if regex is not None:
            if are_bytes:
                return None  # the expression sees names of bytes, not the text
            try:
                patterns += read_patterns(regex)
            except (ValueError, re.error):
                return None
        are_bytes |= part["type"] == "ByteLevel"
    return patterns


def _parts(tree: dict[str, Any] | None) -> list[dict[str, Any]]:
    """List the parts of a normalizer or pre-tokenizer, with those of sequences."""
    if tree is None:
        return []
    if tree["type"] != "Sequence":
        return [tree]
    inner = tree.get("normalizers") or tree.get("pretokenizers") or []
    return list(itertools.chain.from_iterable(map(_parts, inner)))


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Expression within `ByteLevel` (GPT-2's)."""
_PROPERTY = re.compile(r"\\[pP]\{\^?\w+\}")
_FIRST_NAME = 0xE000
"""Beginning of the private-use characters, which stand for properties while Python,
which does not know \\p{L}, reads an expression."""
_OTHER_SYNTAX = re.compile(r"\[\[|&&|\{[\d,]+\}\+|\\[KG]")
"""What Oniguruma reads in another way than Python."""


def read_patterns(regex: str) -> list[Pattern]:
    """Return the alternatives of a regular expression in Oniguruma's syntax.

    Raises ValueError or re.error for what is not understood.
    """
    if _OTHER_SYNTAX.search(regex):
        raise ValueError(f"unknown syntax in {regex!r}")
    properties = list(dict.fromkeys(_PROPERTY.findall(regex)))
    names = {p: chr(_FIRST_NAME + i) for i, p in enumerate(properties)}
    tree = _parser.parse(_PROPERTY.sub(lambda m: names[m.group()], regex))
    reader = _Reader({name: p for p, name in names.items()})
    is_choice = len(tree) == 1 and tree[0][0] is op.BRANCH
    choices = tree[0][1][1] if is_choice else [tree]
    return [Pattern(*reader.sequence(items, tree.state.flags)) for items in choices]


class _Reader:
    """Reader of syntax trees: the bound and the repeated classes of each."""

    def __init__(self, properties: dict[str, str]) -> None:
        self._properties = properties

    def sequence(self, items: Iterable[tuple], flags: int) -> tuple[int, str]:
        bounds, classes = zip((0, ""), *(self.item(*item, flags) for item in items))
        return sum(bounds), _either(classes)

    def item(self, code: Any, value: Any, flags: int) -> tuple[int, str]:
        bound, repeated = 1, ""
        match code:
            case op.LITERAL | op.NOT_LITERAL | op.IN | op.ANY:
                pass
            case op.AT if value not in (op.AT_BEGINNING_STRING, op.AT_END_STRING):
                pass
            case op.SUBPATTERN:
                _, added, removed, items = value
                bound, repeated = self.sequence(items, (flags | added) & ~removed)
            case op.ATOMIC_GROUP:
                bound, repeated = self.sequence(value, flags)
            case op.ASSERT | op.ASSERT_NOT:
                bound, repeated = self.sequence(value[1], flags)
            case op.BRANCH:
                bounds, classes = zip(*(self.sequence(s, flags) for s in value[1]))
                bound, repeated = max(bounds), _either(classes)
            case op.MAX_REPEAT | op.MIN_REPEAT | op.POSSESSIVE_REPEAT:
                _, maximum, items = value
                bound, repeated = self.sequence(items, flags)
                if maximum is op.MAXREPEAT:
                    repeated = _either([repeated, *self.classes(items, flags)])
                    bound = 0
                else:
                    bound *= maximum
            case _:
                raise ValueError(f"{code} can look at any distance")
        return bound, repeated

    def classes(self, items: Iterable[tuple], flags: int) -> Iterator[str]:
        """Yield an expression of one character for each place in the items."""
        for code, value in items:
            match code:
                case op.LITERAL:
                    yield self.character(value, flags)
                case op.NOT_LITERAL:
                    yield self.character(value, flags, negated=True)
                case op.ANY:
                    yield "."
                case op.IN:
                    yield self.set(value, flags)
                case op.SUBPATTERN:
                    _, added, removed, inner = value
                    yield from self.classes(inner, (flags | added) & ~removed)
                case op.ATOMIC_GROUP:
                    yield from self.classes(value, flags)
                case op.BRANCH:
                    for inner in value[1]:
                        yield from self.classes(inner, flags)
                case op.MAX_REPEAT | op.MIN_REPEAT | op.POSSESSIVE_REPEAT:
                    yield from self.classes(value[2], flags)
                case _:
                    raise ValueError(f"{code} within an unbounded repeat")

    def character(self, value: int, flags: int, negated: bool = False) -> str:
        return self.set([(op.NEGATE, None)] * negated + [(op.LITERAL, value)], flags)

    def set(self, items: Iterable[tuple], flags: int) -> str:
        text = ""
        for code, value in items:
            match code:
                case op.NEGATE:
                    text += "^"
                case op.LITERAL:
                    text += self._properties.get(chr(value)) or _escaped(value)
                case op.RANGE:
                    text += "-".join(map(_escaped, value))
                case op.CATEGORY:
                    text += _CATEGORIES[value]
        return f"(?i:[{text}])" if flags & re.IGNORECASE else f"[{text}]"


_CATEGORIES = {
    op.CATEGORY_DIGIT: r"\d", op.CATEGORY_NOT_DIGIT: r"\D",
    op.CATEGORY_SPACE: r"\s", op.CATEGORY_NOT_SPACE: r"\S",
    op.CATEGORY_WORD: r"\w", op.CATEGORY_NOT_WORD: r"\W",
}  # fmt: skip


def _escaped(code: int) -> str:
    return f"\\x{{{code:x}}}"


def _either(classes: Iterable[str]) -> str:
    return "|".join(dict.fromkeys(c for c in classes if c))


@functools.lru_cache(2**16)
def _matches(regex: str, character: str) -> bool:
    """Whether the tokenizers library's engine matches this one character."""
    if not regex:
        return False
    return not _splitter(regex).pre_tokenize_str(character)


@functools.cache
def _splitter(regex: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Split(Regex(regex), "removed")
