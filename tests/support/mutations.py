"""Damage files at random, from a seed: the bytes of any file, and tokens of a text.

A mutator is a function mutate(whole, other, rng) from the bytes of a valid file and of
another valid file of the same format to the bytes of a damaged one.
"""

import random
import re
from collections.abc import Callable, Sequence

Mutator = Callable[[bytes, bytes, random.Random], bytes]

CONTROL_TEXT = "a\x00b\x1b[31mc\r\nd\x07\u202ee\u2028f\x9b"
"""Text that would colour a terminal, break a line and reverse what follows."""
TOKEN = re.compile(rb'"[^"\n]*"|' + rb"'[^'\n]*'|[\w.+-]+")
"""A word, a number or a quoted text, in JSON and in gin."""
VALUES = (
    b"null", b"None", b"true", b"False", b"[]", b"{}", b"[[1], [1, 2]]", b'{"a": 1}',
    b"0", b"1", b"2", b"-1", b"0.5", b"-0.0", b"1e999", b"1e-320", b"NaN", b"Infinity",
    b"2147483648", b"9223372036854775808", b"10000000000000000000000", b"9" * 5000,
    b'""', b"''", b'"8"', b"'home'", b'"../../up"', b'"\\ud800"', b"'\xff'", b"@f()",
    b'"' + b"x" * 100_000 + b'"', b"'" + b"x" * 100_000 + b"'", b"%NO", b"1 + 1",
    b"[" * 100_000, b'{"a":' * 100_000, b"[" + b"0," * 20_000 + b"0]",
    b'"a\\u0000b\\u001b[31mc\\r\\nd\\u202ee\\u2028f"', CONTROL_TEXT.encode(),
)  # fmt: skip
"""Values that a reader of a text often does not expect."""


def mutate(
    whole: bytes, other: bytes, mutators: Sequence[Mutator], rng: random.Random
) -> tuple[str, bytes]:
    """Damage a file by one of the mutators and, one time in four, by a second one.
    Return the names of the mutators, and the damaged file.

    Mutators that leave the file as it was are tried again, up to ten times.
    """
    for _ in range(10):
        used = rng.choices(mutators, k=rng.choice((1, 1, 1, 2)))
        data = whole
        for mutator in used:
            data = mutator(data, other, rng)
        if data != whole:
            break
    return "+".join(mutator.__name__ for mutator in used), data


def flip_bits(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Flip one to eight bits."""
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 8)) if data else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def truncate(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Cut off the end, sometimes all of the file."""
    return whole[: rng.choice((0, rng.randrange(len(whole) + 1)))]


def delete_range(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Take out a range of the file."""
    start = rng.randrange(len(whole) + 1)
    return whole[:start] + whole[start + rng.choice((1, 4, 60, 5000)) :]


def splice(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Join the beginning of the file to the end of another valid file."""
    at = rng.randrange(len(whole) + 1)
    return whole[:at] + other[rng.choice((at, rng.randrange(len(other) + 1))) :]


def insert_garbage(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Insert random bytes, text or a part of the other file."""
    at, start = rng.randrange(len(whole) + 1), rng.randrange(len(other) + 1)
    size = rng.choice((1, 8, 60, 5000))
    part = other[start : start + size]
    new = rng.choice((rng.randbytes(size), CONTROL_TEXT.encode(), b"[" * size, part))
    return whole[:at] + new + whole[at:]


def replace_whole(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Replace the file by the other file."""
    return other


BYTES: tuple[Mutator, ...] = (
    flip_bits, truncate, delete_range, splice, insert_garbage, replace_whole,
)  # fmt: skip
"""Mutators of any file."""


def replace_token(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Replace a word, a number or a quoted text by a hostile value or by another token
    of either file."""
    found, others = (list(TOKEN.finditer(text)) for text in (whole, whole + other))
    if not found:
        return flip_bits(whole, other, rng)
    token = rng.choice(found)
    new = rng.choice(VALUES) if rng.random() < 0.7 else rng.choice(others)[0]
    return whole[: token.start()] + new + whole[token.end() :]


def change_line(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Repeat, move or remove a line, or insert a hostile one."""
    lines = whole.splitlines(keepends=True) or [b""]
    line = lines.pop(rng.randrange(len(lines)))
    new = rng.choice(([], [line], [line] * 3, [line, rng.choice(VALUES) + b"\n"]))
    at = rng.randrange(len(lines) + 1)
    return b"".join([*lines[:at], *new, *lines[at:]])


TEXT: tuple[Mutator, ...] = (*BYTES, *(replace_token,) * 12, change_line, change_line)
"""Mutators of a text with values, such as JSON, JSON lines and gin."""
