"""Documents of a parquet file, one batch of rows at a time."""

import os
from collections.abc import Iterator
from pathlib import Path

# Arrow's own allocator keeps pages that it has freed: 40 MB more after 450 MB of rows.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")

import pyarrow as pa
from pyarrow import parquet

from train.data.records import (
    MAX_RECORD_BYTES,
    Bad,
    End,
    Event,
    Piece,
    Text,
    find_fault,
    unreadable,
)

_BATCH_BYTES = 2**20
_MAX_BATCH_ROWS = 1024
_DAMAGE = (pa.ArrowException, OSError, ValueError, OverflowError)
"""Errors of pyarrow for bytes that are no parquet."""


def pieces(path: Path, text_key: str, size: int) -> list[Piece]:
    """Return a piece for each row group; an empty one for a file that is damaged.

    Raises ValueError when the file has no column `text_key` of strings.
    """
    try:
        with _opened(path) as file:
            count, schema = file.metadata.num_row_groups, file.schema_arrow
    except _DAMAGE:
        return [Piece(path, "parquet", 0, 0, size, True)]
    if schema.names.count(text_key) != 1:
        found = ", ".join(schema.names[:8])
        raise ValueError(
            f"'{path}' has no column '{text_key}' among {found}: set text_key"
        )
    type_ = schema.field(text_key).type
    value_type = type_.value_type if pa.types.is_dictionary(type_) else type_
    if value_type not in (pa.string(), pa.large_string(), pa.string_view()):
        raise ValueError(
            f"column '{text_key}' of '{path}' holds {type_}, not strings: set text_key"
        )
    cuts = [size * i // max(count, 1) for i in range(count + 1)]
    return [
        Piece(path, "parquet", i, i + 1, cuts[i + 1] - cuts[i], i + 1 == count)
        for i in range(count)
    ]


def read(piece: Piece, text_key: str, forbidden: str | None) -> Iterator[Event]:
    """The rows of the row groups of a piece; damage loses the rest of a row group."""
    try:
        file = _opened(piece.path)
    except _DAMAGE as fault:
        yield Bad(None, f"no parquet, or damaged: {_one_line(fault)}")
        yield End(0)
        return
    num_rows = 0
    with file:
        for group in range(piece.start, piece.stop):
            count = 0
            try:
                for text in _texts(file, group, text_key):
                    count += 1
                    yield _event(num_rows + count, text, forbidden)
            except _DAMAGE as fault:
                yield Bad(
                    num_rows + count + 1,
                    f"damaged parquet, the row group ends here: {_one_line(fault)}",
                )
            num_rows += file.metadata.row_group(group).num_rows
    yield End(num_rows)


def _texts(
    file: parquet.ParquetFile, group: int, text_key: str
) -> Iterator[str | bytes | None]:
    """Text of each row; None for null, bytes for what is not UTF-8."""
    row_bytes = _row_bytes(file.metadata.row_group(group), text_key)
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
            except UnicodeDecodeError as fault:
                text = fault.object
            yield text


def _event(row: int, text: str | bytes | None, forbidden: str | None) -> Event:
    if text is None:
        return Bad(row, "the text is null")
    if isinstance(text, bytes):
        return Bad(row, "broken UTF-8")
    if len(text) > MAX_RECORD_BYTES:
        return Bad(row, f"the text is longer than {MAX_RECORD_BYTES // 2**20} MiB")
    fault = find_fault(text, forbidden)
    return Bad(row, fault) if fault else Text(text)


def _row_bytes(group: parquet.RowGroupMetaData, text_key: str) -> int:
    """Mean size of a text, uncompressed; at least 1."""
    columns = [group.column(i) for i in range(group.num_columns)]
    size = sum(
        c.total_uncompressed_size for c in columns if c.path_in_schema == text_key
    )
    return max(1, size // max(1, group.num_rows))


def _opened(path: Path) -> parquet.ParquetFile:
    """Read in parts as they are needed, not ahead, so that memory stays bounded."""
    try:
        source = pa.OSFile(str(path))
    except OSError as fault:
        raise unreadable(path, fault) from fault
    return parquet.ParquetFile(source, pre_buffer=False, buffer_size=2**20)


def _one_line(fault: BaseException) -> str:
    return " ".join(str(fault).split())[:120]
