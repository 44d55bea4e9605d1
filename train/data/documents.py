"""Read text, JSONL and parquet files as a stream of documents, in constant memory.

    file               a document is          located as
    .txt and others    the file               file
    .jsonl, .ndjson    `text_key` of a line   file:line
    .parquet           `text_key` of a row    file:row
    .txt.gz, .jsonl.gz as without .gz         the same

Lines and rows are counted from 1. A record that cannot be read ends the reading with
a ValueError that names it.
"""

import codecs
import dataclasses
import glob
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from train.messages import one_line

BLOCK_CHARS = 2**18
"""Maximum number of characters of one part of a document."""
MAX_RECORD_BYTES = 16 * 2**20
"""Maximum size of a line or row, which is held in memory."""
MAX_EXPANSION = 200
"""Maximum ratio of the text in a file to the bytes of the file; 64 MiB of text are
always allowed. 1 kB of parquet can hold 8 GB of text."""
_READ_BYTES = 2**20
_BATCH_ROWS = 64
"""Rows of a parquet file that are decoded at a time, so that long rows fit in memory.
1024 rows of 1 kB at a time are no faster."""
_REFUSED = dict.fromkeys(
    (".bin", ".idx", ".npy"),
    "holds tokens, not text: name a folder that tools/prepare.py made, or the texts",
) | dict.fromkeys(
    (".zst", ".xz", ".bz2", ".zip", ".tar", ".7z"),
    "has a compression format that is not supported: unpack it, or use .gz",
)
"""Extensions that are refused, each with the reason and the remedy."""


@dataclasses.dataclass(frozen=True, slots=True)
class TextPart:
    """The first or the next part of a document, of at most BLOCK_CHARS characters.

    It is empty only if the document is.
    """

    text: str
    num_bytes: int
    """Bytes of the file that have been read so far, before decompression."""
    begins: bool = True
    """Whether a document begins with this text."""
    ends: bool = True
    """Whether a document ends with this text."""


def expand(patterns: Iterable[str | Path]) -> list[Path]:
    """Return the files that paths and globs name, each once, in the order given.

    The files of one glob are sorted. A path that exists names itself, even when it
    contains brackets. Raises ValueError for a path or pattern that names no file, and
    for a file whose extension does not stand for text.
    """
    paths = []
    for pattern in map(os.path.expanduser, patterns):
        if os.path.lexists(pattern) or not glob.has_magic(str(pattern)):
            paths.append(Path(pattern))
            continue
        names = sorted(glob.glob(pattern, recursive=True))
        files = [Path(name) for name in names if not os.path.isdir(name)]
        if not files:
            raise ValueError(f"the glob '{pattern}' matches no file: check the path")
        paths += files
    for path in paths:
        if path.is_dir():
            raise ValueError(f"'{path}' is a directory: name its files, '{path}/*.txt'")
        if not path.is_file():
            raise ValueError(f"'{path}' is not a file: check the path")
        _file_format(path)
    return list(dict.fromkeys(paths))


def read(path: Path, text_key: str, forbidden: str | None) -> Iterator[TextPart]:
    """Yield the documents of a file in order, in parts.

    Raises a ValueError of one line for a file that cannot be read to its end, a record
    that is not a document, a text that holds `forbidden`, the separator of documents,
    and a file whose text exceeds MAX_EXPANSION.
    """
    kind, size = _file_format(path), path.stat().st_size
    limit, num_chars = max(64 * 2**20, MAX_EXPANSION * size), 0
    try:
        if kind == "parquet":
            parts = _read_rows(path, text_key)
        elif kind == "jsonl":
            parts = _read_lines(path, text_key)
        else:
            parts = _read_text(path)
        for place, part in parts:
            num_chars += len(part.text)
            if num_chars > limit:
                raise ValueError(
                    f"'{path}' has {size} bytes, but more than {limit} characters of "
                    "text: unpack it if it is not damaged"
                )
            if forbidden is not None and forbidden in part.text:
                reason = f"the text holds {forbidden!r}, which separates documents"
                raise record_error(place, reason)
            yield part
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"'{path}' has damaged gzip data: {one_line(error, 120)}: restore the file"
        ) from error
    except OSError as error:
        raise unreadable_error(path, error) from error


def read_records(path: Path) -> Iterator[tuple[str, Any, int]]:
    """Yield the place of each line of JSONL or row of parquet, what it holds, and the
    bytes of the file that have been read so far.

    Raises a ValueError of one line for a file that cannot be read to its end, and for a
    record that is not JSON.
    """
    kind, size = _file_format(path), path.stat().st_size
    if kind == "text":
        raise ValueError(
            f"'{path}' holds no records: give conversations as .jsonl or .parquet"
        )
    try:
        if kind == "parquet":
            yield from _read_row_records(path, size)
        else:
            for place, line, num_bytes in _lines(path):
                yield place, _parse_json(place, line), num_bytes
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(
            f"'{path}' has damaged gzip data: {one_line(error, 120)}: restore the file"
        ) from error
    except OSError as error:
        raise unreadable_error(path, error) from error


def _read_row_records(path: Path, size: int) -> Iterator[tuple[str, Any, int]]:
    import pyarrow as pa  # not at the top: the import takes half a second
    from pyarrow import parquet

    damage = (pa.ArrowException, OSError, ValueError, OverflowError)
    try:
        with parquet.ParquetFile(path, pre_buffer=False) as file:
            names = [n for n in file.schema_arrow.names if n in OF_CONVERSATIONS]
            row, num_rows = 0, file.metadata.num_rows
            for batch in file.iter_batches(_BATCH_ROWS, columns=names):
                for record in batch.to_pylist():
                    row += 1
                    yield (
                        f"{path}:{row}",
                        _without_nulls(record),
                        size * row // num_rows,
                    )
    except damage as error:
        raise _parquet_error(path, "", error) from error


def _without_nulls(value: Any) -> Any:
    """Return a value without the fields that are null: a column of parquet gives all
    turns the fields of any."""
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def blocks(texts: Iterable[str]) -> Iterator[str]:
    """Join the texts, and yield the result in blocks of BLOCK_CHARS characters. The
    last one may be shorter, and is empty only if the whole text is."""
    pending = ""
    for text in texts:
        pending += text
        start = 0
        while len(pending) - start > BLOCK_CHARS:
            yield pending[start : start + BLOCK_CHARS]
            start += BLOCK_CHARS
        pending = pending[start:]
    yield pending


def unreadable_error(path: Path, error: OSError) -> ValueError:
    """Make the ValueError that tells a user why a file cannot be read."""
    return ValueError(
        f"'{path}' cannot be read: {error.strerror or error}: check the path, its "
        "permissions and its disk"
    )


def _file_format(path: Path) -> str:
    """Return the format of a file, 'text', 'jsonl' or 'parquet', from its extension.

    Raises ValueError for an extension that does not stand for text.
    """
    is_gzip = path.suffix.lower() == ".gz"
    suffix = (path.with_suffix("") if is_gzip else path).suffix.lower()
    if suffix in _REFUSED:
        raise ValueError(f"'{path}' {_REFUSED[suffix]}")
    if suffix == ".parquet" and is_gzip:
        raise ValueError(f"'{path}' is a gzipped .parquet file: unpack it")
    formats = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
    return formats.get(suffix, "text")


def _open(path: Path) -> tuple[BinaryIO, BinaryIO]:
    """Return a file, and the file of its text, decompressed if it is gzipped."""
    raw = path.open("rb")
    return raw, gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw


def _read_text(path: Path) -> Iterator[tuple[str, TextPart]]:
    """Yield the place and the parts of a text file, which is one document."""
    raw, file = _open(path)
    decoder = codecs.getincrementaldecoder("utf-8")()

    def decoded() -> Iterator[str]:
        while data := file.read(_READ_BYTES):
            yield decoder.decode(data)
        yield decoder.decode(b"", True)

    with raw:
        try:
            yield from _parts(str(path), decoded(), raw.tell)
        except UnicodeDecodeError as error:
            raise record_error(str(path), _BROKEN.format(error.reason)) from error


def _read_lines(path: Path, text_key: str) -> Iterator[tuple[str, TextPart]]:
    """Yield the place and the parts of the documents of a JSONL file. Blank lines are
    left out."""
    for place, line, num_bytes in _lines(path):
        text = _parse_line(place, line, text_key)
        yield from _parts(place, [text], lambda num_bytes=num_bytes: num_bytes)


def _lines(path: Path) -> Iterator[tuple[str, bytes, int]]:
    """Yield the place of each line that is not blank, the line, and the bytes of the
    file that have been read so far."""
    raw, file = _open(path)
    with raw:
        number = 0
        while line := file.readline(MAX_RECORD_BYTES + 1):
            number += 1
            place = f"{path}:{number}"
            if len(line) > MAX_RECORD_BYTES:
                raise record_error(place, _TOO_LONG)
            if not line.isspace():
                yield place, line, raw.tell()


def _parse_json(place: str, line: bytes) -> Any:
    """Return what a line of JSON holds. Raises ValueError if it is none."""
    try:
        return json.loads(line.removeprefix(codecs.BOM_UTF8).decode())
    except UnicodeDecodeError as error:
        raise record_error(place, _BROKEN.format(error.reason)) from error
    except (ValueError, RecursionError) as error:
        raise record_error(place, f"not JSON: {error}") from error


def _parse_line(place: str, line: bytes, text_key: str) -> str:
    """Return the text in a line of JSON. Raises ValueError if it has none."""
    record = _parse_json(place, line)
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise record_error(place, f"the line is a {kind}, not an object")
    if text_key not in record:
        fields = one_line(", ".join(sorted(record)[:5]), 80) or "none"
        reason = f"no field '{text_key}' among {fields}"
        raise record_error(place, reason, _advice(record))
    text = record[text_key]
    if not isinstance(text, str):
        kind = type(text).__name__
        raise record_error(place, f"field '{text_key}' is a {kind}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        reason = f"field '{text_key}' is not valid text: {error.reason}"
        raise record_error(place, reason) from error
    return text


def _advice(names: Iterable[str]) -> str:
    """Return what to do with records of these fields, among which is no text."""
    names = set(names)
    if (found := names & OF_CONVERSATIONS) and "text" not in names:
        return (
            f"{', '.join(sorted(found))} hold conversations: prepare them with the "
            "chat template of a model's folder (tools/prepare.py --chat FOLDER), or "
            "name the field of the text by Data.text_key, in tools/prepare.py "
            "--text_key"
        )
    return "name the one with the text by Data.text_key, in tools/prepare.py --text_key"


def _read_rows(path: Path, text_key: str) -> Iterator[tuple[str, TextPart]]:
    """Yield the place and the parts of the documents of a parquet file."""
    import pyarrow as pa  # not at the top: the import takes half a second
    from pyarrow import parquet

    damage = (pa.ArrowException, OSError, ValueError, OverflowError)
    size, row = path.stat().st_size, 0
    try:
        # Without read-ahead, so that memory stays bounded.
        file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES)
        schema, num_rows = file.schema_arrow, file.metadata.num_rows
    except damage as error:
        raise _parquet_error(path, "", error) from error
    with file:
        if schema.names.count(text_key) != 1:
            columns = one_line(", ".join(schema.names[:8]), 120)
            advice = _advice(schema.names)
            raise ValueError(
                f"'{path}' has no column '{text_key}' among {columns}: {advice}"
            )
        type_ = schema.field(text_key).type
        value_type = type_.value_type if pa.types.is_dictionary(type_) else type_
        if value_type not in (pa.string(), pa.large_string(), pa.string_view()):
            raise ValueError(
                f"column '{text_key}' of '{path}' holds {one_line(type_, 120)}, not "
                "strings: set text_key"
            )
        batches = file.iter_batches(_BATCH_ROWS, columns=[text_key], use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except damage as error:
                raise _parquet_error(path, f" after row {row}", error) from error
            if batch is None:
                return
            for scalar in batch.column(0):
                row += 1
                place = f"{path}:{row}"
                try:
                    text = scalar.as_py()
                except UnicodeDecodeError as error:
                    raise record_error(place, _BROKEN.format("in the value")) from error
                except damage as error:
                    raise _parquet_error(path, f" in row {row}", error) from error
                if text is None:
                    raise record_error(place, "the text is null")
                if len(text) > MAX_RECORD_BYTES:
                    raise record_error(place, _TOO_LONG)
                yield from _parts(place, [text], lambda row=row: size * row // num_rows)


def _parts(
    place: str, texts: Iterable[str], num_bytes: Callable[[], int]
) -> Iterator[tuple[str, TextPart]]:
    """Yield the place and the parts of the one document that the texts make."""
    begins, rest = True, blocks(texts)
    block = next(rest)
    for following in rest:
        yield place, TextPart(block, num_bytes(), begins, ends=False)
        begins, block = False, following
    yield place, TextPart(block, num_bytes(), begins)


_BROKEN = "broken UTF-8 ({}; of another encoding: iconv -f latin1 -t utf-8)"
OF_CONVERSATIONS = {"messages", "prompt", "completion", "tools"}
"""Fields of records that are conversations."""
_TOO_LONG = f"it is longer than {MAX_RECORD_BYTES // 2**20} MiB"


def record_error(
    place: str, reason: str, advice: str = "correct or remove it"
) -> ValueError:
    return ValueError(f"'{place}' is not a document: {one_line(reason, 400)}: {advice}")


def _parquet_error(path: Path, where: str, error: Exception) -> ValueError:
    return ValueError(
        f"'{path}' is not parquet, or damaged{where}: {one_line(error, 120)}: restore "
        "the file"
    )
