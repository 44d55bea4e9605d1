"""Damage files at random, from a seed: bytes of any file, JSON, gin, .npy and .npz,
.idx, parquet and gzip.

A mutator is a function mutate(whole, other, rng) from the bytes of a valid file and of
another valid file of the same format to the bytes of a damaged one.
"""

import functools
import gzip
import io
import json
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence

import numpy as np

Mutator = Callable[[bytes, bytes, random.Random], bytes]

BOMB_BYTES = 2**29
"""Size of what a bomb, a small file, expands to: 512 MiB."""
HUGE_INTS = (
    2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -1, -(2**63) - 1, 8 * 10**8, 10**30,
    10**400, 0,
)  # fmt: skip
CONTROL_TEXT = "a\x00b\x1b[31mc\r\nd\x07\u202ee\u2028f\x9b"
"""Text that would colour a terminal, break a line and reverse what follows."""


def mutate(
    whole: bytes, other: bytes, mutators: Sequence[Mutator], rng: random.Random
) -> tuple[str, bytes]:
    """Damage a file by one of the mutators and, one time in four, by a second one of
    BYTES. Return the names of the mutators, and the damaged file.

    Names begin with the mutator's own name. A mutator that leaves the file as it was is
    tried again, up to ten times.
    """
    for _ in range(10):
        used = [rng.choice(mutators)]
        if rng.random() < 0.25:
            used.append(rng.choice(BYTES))
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
    start, stop = _range(whole, rng)
    return whole[:start] + whole[stop:]


def splice(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Join the beginning of the file to the end of another valid file."""
    at = rng.randrange(len(whole) + 1)
    from_ = rng.choice((at, rng.randrange(len(other) + 1)))
    return whole[:at] + other[from_:]


def insert_garbage(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Insert random bytes, text or a part of the other file."""
    at = rng.randrange(len(whole) + 1)
    start, stop = _range(other, rng)
    size = rng.choice((1, 8, 60, 5000))
    text = CONTROL_TEXT.encode(errors="surrogatepass")
    new = rng.choice((rng.randbytes(size), text, b"[" * size, other[start:stop]))
    return whole[:at] + new + whole[at:]


def replace_whole(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Replace the file by the other file."""
    return other


BYTES: tuple[Mutator, ...] = (
    flip_bits, truncate, delete_range, splice, insert_garbage, replace_whole,
)  # fmt: skip
"""Mutators of any file."""


def change_json_value(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Replace one value of a JSON document by one of another type or size."""

    def change(holder, key) -> None:
        holder[key] = _MARK

    return _edit_json(whole, rng, change)


def change_json_key(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Remove, rename or add a key of an object, or an item of a list."""
    name = rng.choice(("", CONTROL_TEXT, "k" * 100_000, "__class__", "step"))

    def change(holder, key) -> None:
        kind = rng.randrange(3)
        if isinstance(holder, dict) and kind == 0:
            holder[name] = holder.pop(key)
        elif isinstance(holder, dict) and kind == 1:
            holder[name] = _MARK
        elif isinstance(holder, list) and kind == 0:
            holder.append(_MARK)
        else:
            del holder[key]

    return _edit_json(whole, rng, change)


def replace_json(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Replace the document by another value."""
    return _raw_json(rng)


JSON: tuple[Mutator, ...] = (
    *BYTES, *(change_json_value,) * 8, *(change_json_key,) * 4,
    replace_json,
)  # fmt: skip
"""Mutators of a file that is one JSON document."""


def change_json_line(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Change one line of a file of JSON lines by a mutator of JSON, or replace, repeat,
    move or remove the line."""
    lines = whole.splitlines(keepends=True) or [b""]
    at = rng.randrange(len(lines))
    match rng.randrange(8):
        case 0:
            lines.insert(at, _raw_json(rng) + b"\n")
        case 1:
            lines.append(lines.pop(at))
        case 2:
            lines[at] = lines[at] * 3
        case 3:
            lines[at] = lines[at].rstrip(b"\n")
        case _:
            edit = rng.choice((change_json_value, change_json_key))
            lines[at] = edit(lines[at], b"", rng) + b"\n"
    return b"".join(lines)


JSON_LINES: tuple[Mutator, ...] = (*BYTES, *(change_json_line,) * len(BYTES) * 2)
"""Mutators of a file with one JSON object per line."""

_MARK = "<the place of a raw value>"


def _edit_json(whole: bytes, rng: random.Random, change: Callable) -> bytes:
    """Apply `change(holder, key)` to a random place of a JSON document. A _MARK that it
    leaves there becomes a value that JSON's writer would refuse."""
    try:
        tree = json.loads(whole)
    except (ValueError, RecursionError):
        return flip_bits(whole, b"", rng)  # a damaged line, or a second mutation
    holders: list = []
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, dict | list) and node:
            holders.append(node)
            todo += node.values() if isinstance(node, dict) else node
    if not holders:
        return _raw_json(rng)
    holder = rng.choice(holders[:1] + holders)
    key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    change(holder, key)
    text = json.dumps(tree).encode()
    mark = json.dumps(_MARK).encode()
    return text.replace(mark, _raw_json(rng), 1) if mark in text else text


def _raw_json(rng: random.Random) -> bytes:
    """Return a value as JSON text, often not what a reader expects."""
    depth = rng.choice((50, 900, 100_000))
    text = rng.choice((CONTROL_TEXT, "", "x" * 200_000, "../../up", "\ud800", "NaN"))
    return rng.choice(
        (
            b"null", b"[]", b"{}", b"true", b"[[]]", b"[[1],[1,2]]", b'{"a": 1}',
            b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0.0", b"1e-320", b"0.5",
            b"9" * 5000, json.dumps(text).encode(), json.dumps([text, None]).encode(),
            b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth,
            b"[" + b"0," * 20_000 + b"0]", json.dumps(rng.random()).encode(),
            *(str(number).encode() for number in rng.sample(HUGE_INTS, 5)),
        )
    )  # fmt: skip


def change_gin_value(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Replace what stands after one `=` of a gin text."""
    lines = _lines(whole)
    places = [i for i, line in enumerate(lines) if " = " in line]
    if not places:
        return flip_bits(whole, other, rng)
    at = rng.choice(places)
    name = lines[at].partition(" = ")[0]
    lines[at] = f"{name} = {_gin_value(rng)}\n"
    return _encode("".join(lines))


def change_gin_number(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Replace one or two numbers of a gin text by others, often huge ones."""
    lines = _lines(whole)
    places = [i for i, line in enumerate(lines) if re.search(r" = \d", line)]
    for at in rng.sample(places, min(len(places), rng.choice((1, 1, 2)))):
        name, _, number = lines[at].partition(" = ")
        new = rng.choice((*HUGE_INTS, 2 ** rng.randrange(80), "1e300", "1e-300"))
        if rng.random() < 0.2:
            new = 10 * int(float(number))
        lines[at] = f"{name} = {new}\n"
    return _encode("".join(lines))


def change_gin_name(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Replace what stands before one `=` of a gin text."""
    lines = _lines(whole)
    places = [i for i, line in enumerate(lines) if " = " in line] or [0]
    at = rng.choice(places)
    rest = lines[at].partition(" = ")[2]
    text = "".join(map(chr, (rng.randrange(1, 0x11000) for _ in range(20))))
    name = rng.choice(
        (
            "Model.d_model", "Model." + "x" * 128_000, "x" * 100_000, "a/b/Model.x",
            "Möe.größe", "Model.d_model.x", "Model.", ".d_model", "Model", "1Model.x",
            "__import__('os')", "Data.corpus", text, "Model .d_model", "m.o.d.Model.x",
        )
    )  # fmt: skip
    lines[at] = f"{name} = {rest}"
    return _encode("".join(lines))


def insert_gin_line(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Insert a line that gin knows, or one that would run code."""
    lines = _lines(whole)
    line = rng.choice(
        (
            "import os", "from os import system", "include 'no.gin'", "include '.'",
            "include 'a.gin'", "include '/dev/zero'", f"include '{'../' * 5000}x'",
            "include '\\0'", "Train.num_steps = @print()", "N = %N", "A = %B\nB = %A",
            "Train.num_steps = %N", "Model:\n  d_model = 8", "Model:", "  d_model = 8",
            f"# {CONTROL_TEXT}", "\\", "'''", "((((", f"N = {_gin_value(rng)}", "\x0c",
            "Train.num_steps = __import__('os').system('touch owned')", "\ufeff",
            "".join(f"A{i} = %A{i + 1}\n" for i in range(2000)),
        )
    )  # fmt: skip
    lines.insert(rng.randrange(len(lines) + 1), line + "\n")
    return _encode("".join(lines))


GIN: tuple[Mutator, ...] = (
    *BYTES, *(change_gin_value,) * 9, *(change_gin_name,) * 3,
    *(insert_gin_line,) * 4,
)  # fmt: skip
"""Mutators of a gin file or binding."""


def _lines(whole: bytes) -> list[str]:
    return whole.decode(errors="surrogateescape").splitlines(keepends=True) or [""]


def _encode(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _gin_value(rng: random.Random) -> str:
    """Return the text of a value, often not what a field expects."""
    depth = rng.choice((50, 90, 250, 5000, 100_000))
    return rng.choice(
        (
            "None", "True", "''", "[]", "()", "{}", "1_000", "0x7f", "1j", "b'x'", "-",
            "1e999", "-1e999", "1e-320", "0.5", "9" * 5000, "'" + "x" * 128_000 + "'",
            "[" * depth + "]" * depth, "(" * depth + "1" + ",)" * depth, "%NO", "@f()",
            "@f", "{[]: 1}", "{'a': {'b': None}}", repr(CONTROL_TEXT), "'ä\u202e'",
            "'\\ud800'", "'\ud800'", "('a',\n'b')", "'a' 'b'", "lambda: 0", "1 + 1",
            "[" + "1, " * 20_000 + "]", "'home'", "'auto'", "2", "1.5", "-" * depth,
            *map(str, rng.sample(HUGE_INTS, 8)),
        )
    )  # fmt: skip


def change_npy_header(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Replace the header of an .npy: sizes of 8 TiB and more, types that hold objects,
    other orders, text that is not a header."""
    if len(whole) < 10 or not whole.startswith(b"\x93NUMPY"):
        return flip_bits(whole, other, rng)
    (length,) = struct.unpack("<H", whole[8:10])
    body = whole[10 + length :]
    descr = rng.choice(("<u2", "<i8", "<f4", "|b1", *_STRANGE_TYPES))
    shape = rng.choice(_STRANGE_SHAPES)
    order = rng.choice(("False", "True", "1", "None"))
    written = descr if descr.startswith("[") else repr(descr)
    text = f"{{'descr': {written}, 'fortran_order': {order}, 'shape': {shape}, }}"
    if rng.random() < 0.2:
        text = rng.choice(
            (
                "(" * 5000, "[" * 100 + "]" * 100, "{}", "", "{'descr': ",
                "__import__('os').system('touch owned')", CONTROL_TEXT, "9" * 5000,
                text.replace("'descr'", "'d'"), text[:-3] + "'more': 1}",
            )
        )  # fmt: skip
    version = rng.choice((b"\1\0", b"\1\0", b"\2\0", b"\3\0", b"\x09\0"))
    header = text.encode("utf-8")
    size = struct.pack("<H" if version == b"\1\0" else "<I", len(header) % 2**16)
    if rng.random() < 0.1:
        size = b"\xff" * len(size)
    return b"\x93NUMPY" + version + size + header + body


_STRANGE_TYPES = (
    "|O", "<c16", "<M8[ns]", "|V8", "<U4000000", "|S0", ">i4", "<f2", "<f16", "no",
    "[('a', '<i4'), ('b', '|O')]", "[('a', '<f8', (100000, 100000))]", "[]",
)  # fmt: skip
_STRANGE_SHAPES = (
    "(1099511627776,)", "(8796093022208,)", "(18446744073709551616,)", "(-1,)", "()",
    "(0,)", "(0, 99999999999)", "(1, 1, 1, 1, 1)", "(4294967296, 4294967296)", "1",
    "(2, 3, 8)", "(3, 2, 1000000000000, 8)", "(True, 2)", "(1.5,)", "None", "'x'",
    "(" + "1, " * 70 + ")", "(20, 2, 8)", "(9223372036854775807, 2)",
)  # fmt: skip

NPY: tuple[Mutator, ...] = (*BYTES, *(change_npy_header,) * len(BYTES))
"""Mutators of an .npy file."""


def change_npz_member(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Damage one array of an .npz, whose zip file stays whole."""

    def change(members: dict[str, bytes]) -> None:
        name = rng.choice(list(members))
        members[name] = rng.choice(NPY)(members[name], b"", rng)

    return _edit_zip(whole, rng, change)


def change_npz_array(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Replace one array of an .npz by a valid array that a reader does not expect."""

    def change(members: dict[str, bytes]) -> None:
        name = rng.choice(list(members))
        members[name] = _strange_npy(rng)

    return _edit_zip(whole, rng, change)


def change_npz_names(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Rename, remove or add members of an .npz."""

    def change(members: dict[str, bytes]) -> None:
        name = rng.choice(list(members))
        new = rng.choice(
            (
                "../../owned.npy",
                "/tmp/owned.npy",
                CONTROL_TEXT[2:],
                "x" * 60_000,
                ".npy",
            )
        )
        data = members[name] if rng.random() < 0.5 else members.pop(name)
        members[new] = rng.choice((data, b"", b"no array"))

    return _edit_zip(whole, rng, change)


def make_npz_bomb(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Return an .npz of half a MiB that expands to BOMB_BYTES."""
    return _npz_bomb(rng.choice((8, 32)))


@functools.cache
def _npz_bomb(num_experts: int) -> bytes:
    shape = (BOMB_BYTES // 16 // num_experts, 2, num_experts)
    header = io.BytesIO()
    record = {"descr": "<f8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, record)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        with file.open("tokens.npy", "w", force_zip64=True) as member:
            member.write(header.getvalue())
            for _ in range(BOMB_BYTES // 2**24):
                member.write(bytes(2**24))
        file.writestr("layer.npy", _npy(np.arange(2)))
    return out.getvalue()


NPZ: tuple[Mutator, ...] = (
    *BYTES, *(change_npz_member,) * 6, *(change_npz_array,) * 4, change_npz_names,
    change_npz_names,
)  # fmt: skip
"""Mutators of an .npz file, without bombs."""


def _edit_zip(whole: bytes, rng: random.Random, change: Callable) -> bytes:
    try:
        with zipfile.ZipFile(io.BytesIO(whole)) as file:
            members = {name: file.read(name) for name in file.namelist()}
        change(members)
    except (zipfile.BadZipFile, zlib.error, EOFError, IndexError, NotImplementedError):
        return flip_bits(whole, b"", rng)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", rng.choice((0, zipfile.ZIP_DEFLATED))) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return out.getvalue()


def _strange_npy(rng: random.Random) -> bytes:
    shape = rng.choice(((20, 2, 8), (5, 2, 2, 8), (0, 2, 8), (8,), (), (3, 0, 8)))
    number = rng.choice((np.nan, np.inf, -1, 0, 1e300, 5))
    dtype = rng.choice(("f4", "f8", "i4", "u1", "?", "c8", "U3", "S2", "M8[s]", ">f8"))
    with np.errstate(all="ignore"):
        try:
            array = np.full(shape, number).astype(dtype)
        except (ValueError, TypeError, OverflowError):
            array = np.full(shape, number)
    return _npy(np.asfortranarray(array) if rng.random() < 0.3 else array)


def _npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def make_parquet_bomb(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Return a parquet file of a few KiB whose texts have BOMB_BYTES."""
    return _parquet_bomb()


@functools.cache
def _parquet_bomb() -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    num_rows, text = 2**14, "ab c" * (BOMB_BYTES // 2**16)
    index_n = pa.array(np.zeros(num_rows, np.int32))
    texts = pa.DictionaryArray.from_arrays(index_n, pa.array([text]))
    out = io.BytesIO()
    parquet.write_table(pa.table({"text": texts}), out, compression="zstd")
    return out.getvalue()


def change_gzipped(mutators: Sequence[Mutator]) -> Mutator:
    """Return a mutator that damages what a gzip file holds, by one of `mutators`."""

    def change_gzipped_content(whole: bytes, other: bytes, rng: random.Random) -> bytes:
        try:
            content = gzip.decompress(whole)
            second = gzip.decompress(other)
        except (OSError, EOFError, zlib.error):
            return flip_bits(whole, other, rng)
        return gzip.compress(rng.choice(mutators)(content, second, rng), 1, mtime=0)

    return change_gzipped_content


def make_gzip_bomb(whole: bytes, other: bytes, rng: random.Random) -> bytes:
    """Return a gzip file of half a MiB that expands to BOMB_BYTES: one line, or
    many.

    Lines of few characters expand less than a corpus may, so they are text to read.
    """
    line = '{"text": "' + "a" * 1000 + '"}\n'
    return _gzip_bomb(rng.choice(("a" * 2**24, line * 2**14)))


@functools.cache
def _gzip_bomb(part: str) -> bytes:
    out = io.BytesIO()
    with gzip.GzipFile(fileobj=out, mode="wb", compresslevel=6, mtime=0) as file:
        for _ in range(max(1, BOMB_BYTES // len(part))):
            file.write(part.encode())
    return out.getvalue()


def _range(whole: bytes, rng: random.Random, longest: int | None = None):
    """Return the bounds of a range; long ranges are as likely as short ones."""
    start = rng.randrange(len(whole) + 1)
    rest = len(whole) - start
    size = min(rest, rng.choice((1, 4, 8, 60, rest if rest < 2**20 else 4096)))
    return start, start + (min(size, longest) if longest else size)
