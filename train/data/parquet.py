"""Read documents from a parquet file, one batch of rows at a time."""

import os
from collections.abc import Iterator
from pathlib import Path

# Arrow's own allocator does not return freed pages: 40 MB more after 450 MB of rows.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

import pyarrow as pa
from pyarrow import parquet

from train.data.records import (
    MAX_RECORD_BYTES,
    BadRecord,
    EndOfRange,
    Event,
    FileRange,
    TextPart,
    expansion_error,
    find_problem,
    max_text_bytes,
    unreadable_error,
)
from train.messages import one_line

_BATCH_BYTES = 2**20
_MAX_BATCH_ROWS = 1024
_MAX_BATCH_BYTES = 16 * 2**20
_PAGE_HEADER_BYTES = 8
_DICTIONARY_PAGE = b"\x15\x04\x15"
"""First bytes of the header of a dictionary page, up to its uncompressed size."""
_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError)
"""Exceptions that pyarrow raises for bytes that are not valid parquet."""


def split_file(path: Path, text_key: str, size: int) -> list[FileRange]:
    """Return one range for each row group.

    A damaged file gets one empty range, whose reader reports the damage. Raises
    ValueError when the file has no column `text_key` of strings.
    """
    try:
        with _open(path) as file:
            count, schema = file.metadata.num_row_groups, file.schema_arrow
    except _DAMAGE:
        return [FileRange(path, "parquet", 0, 0, size, True)]
    if schema.names.count(text_key) != 1:
        columns = one_line(", ".join(schema.names[:8]), 120)
        raise ValueError(
            f"'{path}' has no column '{text_key}' among {columns}: set text_key"
        )
    type_ = schema.field(text_key).type
    value_type = type_.value_type if pa.types.is_dictionary(type_) else type_
    if value_type not in (pa.string(), pa.large_string(), pa.string_view()):
        raise ValueError(
            f"column '{text_key}' of '{path}' holds {one_line(type_, 120)}, not "
            "strings: set text_key"
        )
    cuts = [size * i // max(count, 1) for i in range(count + 1)]
    return [
        FileRange(path, "parquet", i, i + 1, cuts[i + 1] - cuts[i], i + 1 == count)
        for i in range(count)
    ]


def read(
    file_range: FileRange, text_key: str, forbidden: str | None
) -> Iterator[Event]:
    """Yield the documents and bad records of a range of row groups, then an EndOfRange.

    Where a row group is damaged, the rest of its rows is lost. Raises ValueError when
    the file says that it holds more text than its size allows.
    """
    try:
        file = _open(file_range.path)
    except _DAMAGE as error:
        yield BadRecord(None, f"not parquet, or damaged: {one_line(error, 120)}")
        yield EndOfRange(0)
        return
    num_rows = 0
    with file:
        _check_expansion(file, file_range, text_key)
        for group in range(file_range.start, file_range.stop):
            count = 0
            try:
                batch_rows = _batch_rows(
                    file_range.path, file.metadata, group, text_key
                )
                for text in _read_texts(file, group, text_key, batch_rows):
                    count += 1
                    yield _make_event(num_rows + count, text, forbidden)
            except _DAMAGE as error:
                yield BadRecord(
                    num_rows + count + 1,
                    f"damaged parquet, the row group ends here: {one_line(error, 120)}",
                )
            num_rows += file.metadata.row_group(group).num_rows
    yield EndOfRange(num_rows)


def _read_texts(
    file: parquet.ParquetFile, group: int, text_key: str, batch_rows: int
) -> Iterator[str | bytes | None]:
    """Yield the text of each row: None for null, bytes for text that is not UTF-8."""
    batches = file.iter_batches(
        batch_size=batch_rows,
        row_groups=[group],
        columns=[text_key],
        use_threads=False,
    )
    for batch in batches:
        for scalar in batch.column(0):
            try:
                text = scalar.as_py()
            except UnicodeDecodeError as error:
                text = error.object
            yield text


def _make_event(row: int, text: str | bytes | None, forbidden: str | None) -> Event:
    if text is None:
        return BadRecord(row, "the text is null")
    if isinstance(text, bytes):
        return BadRecord(row, "broken UTF-8")
    if len(text) > MAX_RECORD_BYTES:
        return BadRecord(
            row, f"the text is longer than {MAX_RECORD_BYTES // 2**20} MiB"
        )
    problem = find_problem(text, forbidden)
    return BadRecord(row, problem) if problem else TextPart(text)


def _check_expansion(
    file: parquet.ParquetFile, file_range: FileRange, text_key: str
) -> None:
    """Raise ValueError if the metadata promise more text than the file may hold.

    This comes before any page is decompressed, because a page is held as a whole.
    Metadata that lie are found out by what is read.
    """
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    size = sum(max(_column_bytes(group, text_key), group.num_rows) for group in groups)
    if size > max_text_bytes(file_range.path, file_range.max_expansion):
        raise expansion_error(file_range.path, file_range.max_expansion)


def _batch_rows(
    path: Path, metadata: parquet.FileMetaData, group: int, text_key: str
) -> int:
    """Return the number of rows whose texts take about _BATCH_BYTES, or at the worst
    _MAX_BATCH_BYTES."""
    size = _column_bytes(metadata.row_group(group), text_key)
    max_size = max(
        _repeated_bytes(path, column)
        for column in _columns(metadata.row_group(group), text_key)
    )
    mean_size = size // max(1, metadata.row_group(group).num_rows)
    mean_rows = _BATCH_BYTES // max(1, mean_size)
    return max(1, min(_MAX_BATCH_ROWS, mean_rows, _MAX_BATCH_BYTES // max(1, max_size)))


def _repeated_bytes(path: Path, column: parquet.ColumnChunkMetaData) -> int:
    """Return a bound on the size of a text that is stored once for many rows; 0 if
    there is none.

    A dictionary holds such texts. With deltas, a text repeats the beginning of the one
    before it.
    """
    size = column.total_uncompressed_size
    if "DELTA_BYTE_ARRAY" in column.encodings:
        return size
    if not any(encoding.endswith("_DICTIONARY") for encoding in column.encodings):
        return 0
    with path.open("rb") as file:
        file.seek(max(0, column.dictionary_page_offset or column.data_page_offset))
        header = file.read(_PAGE_HEADER_BYTES)
    # Fields 1 and 2 of the header in Thrift's compact protocol: the type of the page,
    # and its uncompressed size, each an i32 as a zigzag varint.
    if not header.startswith(_DICTIONARY_PAGE):
        return size
    zigzag = 0
    for i, byte in enumerate(header[len(_DICTIONARY_PAGE) :]):
        zigzag |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            break
    return zigzag // 2


def _column_bytes(group: parquet.RowGroupMetaData, text_key: str) -> int:
    """Return the uncompressed size of a column's pages in a row group."""
    return sum(c.total_uncompressed_size for c in _columns(group, text_key))


def _columns(
    group: parquet.RowGroupMetaData, text_key: str
) -> list[parquet.ColumnChunkMetaData]:
    columns = [group.column(i) for i in range(group.num_columns)]
    return [column for column in columns if column.path_in_schema == text_key]


def _open(path: Path) -> parquet.ParquetFile:
    """Open a parquet file without read-ahead, so that memory stays bounded."""
    try:
        source = pa.OSFile(str(path))
    except OSError as error:
        raise unreadable_error(path, error) from error
    return parquet.ParquetFile(source, pre_buffer=False, buffer_size=2**20)
