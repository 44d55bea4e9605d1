"""Documents of files: their texts, and one line that names a bad file or record."""

import gzip
import random
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from tests.support.data_files import TEXTS, write_jsonl, write_parquet, write_text
from train.data import documents
from train.data.documents import blocks, expand, read


def read_all(path: Path, text_key: str = "text", forbidden: str | None = "\0"):
    """Return the texts of a file."""
    texts = []
    for part in read(path, text_key, forbidden):
        assert len(part.text) <= documents.BLOCK_CHARS
        if part.begins:
            texts.append([])
        texts[-1].append(part.text)
    return ["".join(parts) for parts in texts]


@pytest.mark.parametrize("name", ["a b.jsonl", "a.ndjson", "a.JSONL.gz", "a.parquet"])
def test_records_come_back_as_they_were(tmp_path, monkeypatch, name):
    write = write_parquet if name.endswith("parquet") else write_jsonl
    for size in (documents.BLOCK_CHARS, 10):
        monkeypatch.setattr(documents, "BLOCK_CHARS", size)
        for texts in ([], ["", *TEXTS]):
            assert read_all(write(tmp_path / name, texts)) == texts
        path = write(tmp_path / name, key="body")
        assert read_all(path, "body") == list(TEXTS)


@pytest.mark.parametrize("name", ["a.txt", "a.py", "no_extension", "a.txt.gz"])
def test_a_text_file_is_one_document(tmp_path, monkeypatch, name):
    monkeypatch.setattr(documents, "_READ_BYTES", 7)  # cuts characters
    whole = "\n".join(TEXTS) * 9
    assert read_all(write_text(tmp_path / name, whole)) == [whole]
    assert read_all(write_text(tmp_path / name, "")) == [""]


BAD_LINES = {
    b'{"text": "\xff"}': "broken UTF-8",
    b'{"text": "a"': "not JSON",
    b"[" * 20000: "not JSON",
    b'["text"]': "is a list, not an object",
    b'{"body": "a", "id": 1}': "no field 'text' among body, id: .* by Data.text_key",
    b'{"messages": [{"role": "user"}]}': "hold conversations: .* --chat FOLDER",
    rb'{"\ud800\u001b[2J": 1}': r"no field 'text' among .*",
    b'{"text": 1}': "is a int, not a string",
    rb'{"text": "\ud800"}': "surrogates not allowed",
    rb'{"text": "a\u0000"}': r"holds '\\x00', which separates documents",
    b'{"text": "%s"}' % (b"1" * 17 * 2**20): "is longer than 16 MiB",
}


@pytest.mark.parametrize(
    ("line", "reason"), BAD_LINES.items(), ids=map(str, range(len(BAD_LINES)))
)
def test_a_bad_line_is_named(tmp_path, line, reason):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "first"}\n\n' + line + b'\n{"text": "b"}')
    parts = read(path, "text", "\0")
    assert next(parts).text == "first"
    with pytest.raises(ValueError, match=rf"a\.jsonl:3' is not .*{reason}") as error:
        next(parts)
    assert str(error.value).isprintable()


def test_a_row_without_text_is_named(tmp_path):
    raw = pa.array([b"a", None, b"a", b"\xff", b"b\0"], pa.binary())
    text = pa.StringArray.from_buffers(5, *raw.buffers()[1:], raw.buffers()[0])
    path = tmp_path / "a.parquet"
    for first, row, reason in ((0, 2, "null"), (2, 2, "broken UTF-8"), (4, 1, "x00")):
        pq.write_table(pa.table({"text": text[first:]}), path)
        with pytest.raises(ValueError, match=rf"a\.parquet:{row}' .*{reason}"):
            read_all(path)


def test_every_type_of_string_is_read(tmp_path):
    kinds = (
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
    )
    path = tmp_path / "a.parquet"
    for kind in kinds:
        pq.write_table(pa.table({"text": pa.array(TEXTS).cast(kind)}), path)
        assert read_all(path) == list(TEXTS)


def broken_text(path):
    write_text(path, "x" * 3_000_000)
    path.write_bytes(path.read_bytes()[:-5] + b"\xff" * 9)


def cut_gzip(path):
    write_jsonl(path, [f"{i}" * 50 for i in range(5000)])
    path.write_bytes(path.read_bytes()[:-2000])


def cut_parquet(path):
    write_parquet(path)
    path.write_bytes(path.read_bytes()[:-20])


def damaged_parquet(path):
    write_parquet(path, ["x" * 99, "y" * 99, "z" * 99], rows=1)
    data = path.read_bytes()
    start = pq.ParquetFile(path).metadata.row_group(1).column(1).dictionary_page_offset
    path.write_bytes(data[:start] + b"\xff" * 8 + data[start + 8 :])


def write_numbers(path):
    pq.write_table(pa.table({"text": [1, 2]}), path)


def gzip_bomb(path):
    path.write_bytes(gzip.compress(b"a" * 70 * 2**20))


def parquet_bomb(path):
    text = "x" * (16 * 2**20 - 1)
    column = pa.DictionaryArray.from_arrays(pa.array([0] * 500), pa.array([text]))
    pq.write_table(pa.table({"text": column}), path, compression="zstd")


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("a.txt", broken_text, "broken UTF-8"),
        ("a.txt.gz", broken_text, "damaged gzip"),
        ("a.jsonl.gz", cut_gzip, "damaged gzip"),
        ("a.parquet", cut_parquet, "not parquet, or damaged"),
        ("a.parquet", damaged_parquet, "damaged after row"),
        ("a.parquet", lambda p: write_parquet(p, key="b"), "no column 'text' among id"),
        ("a.parquet", write_numbers, "holds int64, not strings"),
        ("a.txt.gz", gzip_bomb, "more than 67108864 characters"),
        ("a.parquet", parquet_bomb, "more than 67108864 characters"),
        ("a.txt", Path.mkdir, "Is a directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, write, message):
    path = tmp_path / name
    write(path)
    with pytest.raises(ValueError, match=rf"'{path}'.*{message}") as error:
        read_all(path)
    assert "\n" not in str(error.value)


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
        ("none.txt", "is not a file"), ("*.csv", "matches no file"),
        (".", "is a directory"), ("a.npy", "holds tokens, not text"),
        ("a.bin", "holds tokens"), ("a.idx", "holds tokens"),
        ("a.jsonl.zst", "unpack"), ("a.tar.gz", "unpack"), ("a.parquet.gz", "unpack"),
    ],
)  # fmt: skip
def test_what_names_no_text_is_refused(tmp_path, name, message):
    if name.startswith("a."):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=message):
        expand([f"{tmp_path}/{name}"])


def test_blocks_join_to_the_text_however_it_comes(monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_CHARS", 20)
    rng = random.Random(0)
    text = "".join(rng.choices("ab \né", k=490)) + "x" * 70
    whole = list(blocks([text]))
    assert "".join(whole) == text
    assert {len(block) for block in whole} == {20}
    cuts = sorted(rng.choices(range(len(text)), k=30))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    assert list(blocks(parts)) == whole
