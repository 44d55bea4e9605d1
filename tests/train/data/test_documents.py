"""Documents of files: their texts, the location of bad ones, and cuts into ranges."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from tests.support.data_files import TEXTS, write_jsonl, write_parquet, write_text
from train.data import documents, jsonl
from train.data.documents import blocks, expand, file_format, read, split_file
from train.data.records import BadRecord, EndOfRange, TextPart


def read_all(path: Path, text_key: str = "text", forbidden: str | None = "\0"):
    """Return the texts of a file, and its bad records by their number in the file."""
    texts, bad, first = [], {}, 0
    for file_range in split_file(path, text_key):
        events = list(read(file_range, text_key, forbidden))
        assert [type(event) is EndOfRange for event in events].index(True) == len(
            events
        ) - 1
        for event in events:
            match event:
                case TextPart(text, True):
                    texts.append(text)
                case TextPart(text, False):
                    texts[-1] += text
                case BadRecord(record, reason):
                    bad[record and first + record] = reason
                case EndOfRange(num_records):
                    first += num_records
    return texts, bad


@pytest.mark.parametrize("name", ["a b.jsonl", "a.ndjson", "a.JSONL.gz", "a.parquet"])
def test_records_come_back_as_they_were(tmp_path, name):
    write = write_parquet if name.endswith("parquet") else write_jsonl
    assert read_all(write(tmp_path / name)) == (list(TEXTS), {})
    path = write(tmp_path / name, key="body")
    assert read_all(path, "body") == (list(TEXTS), {})


@pytest.mark.parametrize("name", ["a.txt", "a.py", "no_extension", "a.txt.gz"])
def test_a_text_file_is_one_document(tmp_path, name):
    whole = "\n".join(TEXTS) * 9
    assert read_all(write_text(tmp_path / name, whole)) == ([whole], {})
    assert read_all(write_text(tmp_path / name, "")) == ([""], {})


@pytest.mark.parametrize("seed", range(4))
def test_cuts_of_a_jsonl_file_do_not_show(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    path = tmp_path / "a.jsonl"
    lines = [
        rng.choice([json.dumps({"text": "é" * rng.randrange(30)}), "", "{", " 1 "])
        for _ in range(60)
    ]
    path.write_text("\n".join(lines) + rng.choice(["", "\n", "\r\n"]))
    whole = read_all(path)
    assert len(whole[0]) + len(whole[1]) == sum(line != "" for line in lines)
    assert set(whole[1]) == {i + 1 for i, s in enumerate(lines) if s in ("{", " 1 ")}
    for size in (1, 2, 7, 64, 200):
        monkeypatch.setattr(documents, "RANGE_BYTES", size)
        assert read_all(path) == whole


@pytest.mark.parametrize("size", [1, 40, 10**6])
def test_a_line_over_the_cap_is_skipped(tmp_path, monkeypatch, size):
    monkeypatch.setattr(jsonl, "MAX_RECORD_BYTES", 100)
    monkeypatch.setattr(jsonl, "READ_BYTES", 16)
    monkeypatch.setattr(documents, "RANGE_BYTES", size)
    path = write_jsonl(tmp_path / "a.jsonl", ["a", "b" * 1000, "c", "d" * 300])
    texts, bad = read_all(path)
    assert texts == ["a", "c"]
    assert list(bad) == [2, 4]
    assert "longer than" in bad[2]


BAD_LINES = {
    b'{"text": "\xff"}': "broken UTF-8",
    b'{"text": "a"': "not JSON",
    b"[" * 20000: "not JSON",
    b'["text"]': "is a list, not an object",
    b'{"body": "a", "id": 1}': "no field 'text' among body, id",
    b'{"text": 1}': "is a int, not a string",
    b'{"text": null}': "is a NoneType, not a string",
    rb'{"text": "\ud800"}': "surrogates not allowed",
    rb'{"text": "a\u0000"}': "holds '\\x00', which separates documents",
    b'{"text": "a", "n": %s}' % (b"1" * 5000): "not JSON",
}


@pytest.mark.parametrize(("line", "reason"), BAD_LINES.items(), ids=BAD_LINES.values())
def test_a_bad_line_is_located_and_skipped(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "first"}\n\n' + line + b'\n{"text": "b"}')
    texts, bad = read_all(path)
    assert texts == ["first", "b"]
    assert list(bad) == [3]
    assert reason in bad[3]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_broken_text_file_is_one_bad_record(tmp_path, name):
    path = write_text(tmp_path / name, "x" * 3_000_000)
    path.write_bytes(path.read_bytes()[:-5] + b"\xff" * 9)
    texts, bad = read_all(path)
    assert texts == []
    assert list(bad) == [None]


def test_a_cut_gzip_gives_what_can_be_read(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl.gz", [f"{i}" * 50 for i in range(5000)])
    path.write_bytes(path.read_bytes()[:-2000])
    texts, bad = read_all(path)
    assert 0 < len(texts) < 5000
    assert list(bad) == [len(texts) + 1]
    assert "damaged gzip" in bad[len(texts) + 1]


def test_rows_that_are_no_text_are_located(tmp_path):
    path = tmp_path / "a.parquet"
    raw = pa.array([b"a", None, b"\xff", b"b\0", b"c"], pa.binary())
    text = pa.StringArray.from_buffers(5, *raw.buffers()[1:], raw.buffers()[0])
    pq.write_table(pa.table({"text": text}), path, row_group_size=2)
    texts, bad = read_all(path)
    assert texts == ["a", "c"]
    assert list(bad) == [2, 3, 4]


@pytest.mark.parametrize(
    "kind",
    [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())],
)
def test_every_type_of_string_is_read(tmp_path, kind):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.array(TEXTS).cast(kind)}), path)
    assert read_all(path) == (list(TEXTS), {})


def test_a_column_that_is_no_text_is_refused(tmp_path):
    path = write_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="no column 'body' among id, text"):
        split_file(path, "body")
    with pytest.raises(ValueError, match="holds int64, not strings"):
        split_file(path, "id")


def test_a_truncated_parquet_file_is_one_bad_record(tmp_path):
    path = write_parquet(tmp_path / "a.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    texts, bad = read_all(path)
    assert texts == []
    assert list(bad) == [None]


def test_a_damaged_row_group_costs_no_other(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", ["x" * 99, "y" * 99, "z" * 99], rows=1)
    data = path.read_bytes()
    start = pq.ParquetFile(path).metadata.row_group(1).column(1).dictionary_page_offset
    path.write_bytes(data[:start] + b"\xff" * 8 + data[start + 8 :])
    texts, bad = read_all(path)
    assert texts == ["x" * 99, "z" * 99]
    assert list(bad) == [2]


def test_globs_are_sorted_and_a_path_is_itself(tmp_path):
    for name in ("b 1.txt", "a[1].txt", "a1.txt", "c.jsonl"):
        (tmp_path / name).write_text("x")
    (tmp_path / "link.txt").symlink_to(tmp_path / "c.jsonl")
    assert [path.name for path in expand([f"{tmp_path}/*.txt"])] == [
        "a1.txt", "a[1].txt", "b 1.txt", "link.txt",
    ]  # fmt: skip
    assert expand([tmp_path / "a[1].txt"]) == [tmp_path / "a[1].txt"]
    names = [tmp_path / "c.jsonl", f"{tmp_path}/?.jsonl", tmp_path / "b 1.txt"]
    assert [path.name for path in expand(names)] == ["c.jsonl", "b 1.txt"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.txt", "is not a file"),
        ("*.csv", "matches no file"),
        (".", "is a directory"),
    ],
)
def test_what_names_no_file_is_refused(tmp_path, name, message):
    with pytest.raises(ValueError, match=message):
        expand([f"{tmp_path}/{name}"])


def test_files_that_are_no_streams_are_refused():
    for name in (
        "a.npy",
        "a.bin",
        "a.idx",
        "a.jsonl.zst",
        "a.zip",
        "a.tar.gz",
        "a.bin.gz",
    ):
        with pytest.raises(ValueError, match=r"Data\.corpus|unpack"):
            file_format(Path(name))


@pytest.mark.parametrize("seed", range(3))
def test_blocks_join_to_the_text_however_it_comes(monkeypatch, seed):
    monkeypatch.setattr(documents, "BLOCK_CHARS", 20)
    rng = random.Random(seed)
    text = "".join(rng.choices("ab \né", k=500)) + "x" * 70
    whole = list(blocks([text]))
    assert "".join(whole) == text
    assert max(map(len, whole)) <= 20
    cuts = sorted(rng.choices(range(len(text)), k=30))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert list(blocks(parts)) == whole
