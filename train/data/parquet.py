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
    find_problem,
    unreadable_error,
)

_BATCH_BYTES = 2**20
_MAX_BATCH_ROWS = 1024
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
        columns = ", ".join(schema.names[:8])
        raise ValueError(
            f"'{path}' has no column '{text_key}' among {columns}: set text_key"
        )
    type_ = schema.field(text_key).type
    value_type = type_.value_type if pa.types.is_dictionary(type_) else type_
    if value_type not in (pa.string(), pa.large_string(), pa.string_view()):
        raise ValueError(
            f"column '{text_key}' of '{path}' holds {type_}, not strings: set text_key"
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

    Where a row group is damaged, the rest of its rows is lost.
    """
    try:
        file = _open(file_range.path)
    except _DAMAGE as error:
        yield BadRecord(None, f"not parquet, or damaged: {_one_line(error)}")
        yield EndOfRange(0)
        return
    num_rows = 0
    with file:
        for group in range(file_range.start, file_range.stop):
            count = 0
            try:
                for text in _read_texts(file, group, text_key):
                    count += 1
                    yield _make_event(num_rows + count, text, forbidden)
            except _DAMAGE as error:
                yield BadRecord(
                    num_rows + count + 1,
                    f"damaged parquet, the row group ends here: {_one_line(error)}",
                )
            num_rows += file.metadata.row_group(group).num_rows
    yield EndOfRange(num_rows)


def _read_texts(
    file: parquet.ParquetFile, group: int, text_key: str
) -> Iterator[str | bytes | None]:
    """Yield the text of each row: None for null, bytes for text that is not UTF-8."""
    row_bytes = _mean_text_bytes(file.metadata.row_group(group), text_key)
    batches = file.iter_batches(
        batch_size=max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // row_bytes)),
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


def _mean_text_bytes(group: parquet.RowGroupMetaData, text_key: str) -> int:
    """Return the mean size of a text in a row group, uncompressed, at least 1."""
    columns = [group.column(i) for i in range(group.num_columns)]
    size = sum(
        c.total_uncompressed_size for c in columns if c.path_in_schema == text_key
    )
    return max(1, size // max(1, group.num_rows))


def _open(path: Path) -> parquet.ParquetFile:
    """Open a parquet file without read-ahead, so that memory stays bounded."""
    try:
        source = pa.OSFile(str(path))
    except OSError as error:
        raise unreadable_error(path, error) from error
    return parquet.ParquetFile(source, pre_buffer=False, buffer_size=2**20)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:120]
