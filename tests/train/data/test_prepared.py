"""Prepared folders: their shards, one writer at a time, and damage that is named."""

import hashlib
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.support.data_files import (
    TEXTS,
    write_bpe,
    write_jsonl,
    write_parquet,
    write_text,
)
from tests.support.run_main import ROOT
from train.data import prepared, shards
from train.data.prepared import open_prepared, prepare, prepare_cached
from train.data.shards import ShardWriter, open_shard
from train.data.tokenizer import load_tokenizer

BYTES = load_tokenizer("bytes")


@pytest.fixture
def sources(tmp_path):
    """Return files of every kind; one holds an empty text."""
    folder = tmp_path / "my sources [1]"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [*TEXTS, "", *("x y\n" * i for i in range(200))])
    write_jsonl(folder / "b.jsonl.gz", TEXTS[:2])
    write_parquet(folder / "c.parquet")
    write_text(folder / "d e.txt", "the last one\n" * 4_000)
    (folder / "link.txt").symlink_to("d e.txt")
    return sorted(folder.iterdir())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def read_documents(folder, tokenizer=BYTES) -> list[list[int]]:
    """Return the token ids of each document in a prepared folder."""
    files, _ = open_prepared(folder, tokenizer)
    return [
        part.tolist()
        for file in files
        for part in np.split(file.token_b, file.start_d[1:])
    ]


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_document_is_its_separator_and_its_ids(sources, tmp_path, monkeypatch, name):
    """The batches are small, so that there are many shards and documents are cut."""
    for limit, value in (("SHARD_TOKENS", 1000), ("BATCH_CHARS", 300)):
        monkeypatch.setattr(prepared, limit, value)
    monkeypatch.setattr("train.data.documents.BLOCK_CHARS", 40)
    name = str(write_bpe(tmp_path / "t.json")) if name == "bpe" else name
    tokenizer, out = load_tokenizer(name), tmp_path / "a" / "out"
    assert prepare(sources, out, tokenizer)
    last = "the last one\n" * 4_000
    texts = [*TEXTS, *("x y\n" * i for i in range(1, 200)), *TEXTS[:2], *TEXTS]
    expected = [
        [tokenizer.separator, *tokenizer.encode(text).tolist()]
        for text in [*texts, last, last]
    ]
    assert read_documents(out, tokenizer) == expected
    manifest = json.loads((out / "manifest.json").read_text())
    assert len(manifest["shards"]) > 2
    assert manifest["num_empty"] == 2
    assert manifest["num_documents"] == len(expected)
    assert manifest["num_tokens"] == sum(map(len, expected))
    assert [source["path"] for source in manifest["sources"]] == [*map(str, sources)]
    for shard in manifest["shards"]:
        path = out / shard["file"]
        data = path.read_bytes() + path.with_suffix(".idx").read_bytes()
        assert shard["sha256"] == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_a_shard_that_is_written_in_parts_is_read_whole(tmp_path, monkeypatch, dtype):
    """Documents span several parts, and some are longer than a sequence may be."""
    monkeypatch.setattr(shards, "_MAX_SEQUENCE", 7)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 40)
    token_b = rng.integers(0, 60000, lengths.sum()).astype(np.int32)
    start_d = np.cumsum(lengths) - lengths
    writer = ShardWriter(tmp_path / "a b.bin", np.dtype(dtype))
    cuts = [0, *sorted(rng.choice(token_b.size, 25, replace=False)), token_b.size]
    for a, b in itertools.pairwise(cuts):
        starts = start_d[(start_d >= a) & (start_d < b)] - a
        writer.append(token_b[a:b], starts)
    shard = writer.finish()
    file = open_shard(shard.path, shard.sha256)
    assert np.array_equal(file.token_b, token_b)
    assert np.array_equal(file.start_d, start_d)
    assert file.token_b.dtype == dtype
    assert not file.token_b.flags.owndata
    assert (shard.num_documents, shard.num_tokens) == (40, token_b.size)
    index = shard.path.with_suffix(".idx").read_bytes()
    magic, version, _, num_s, num_d = shards.HEADER.unpack_from(index)
    assert (magic, version, num_d) == (b"MMIDIDX\0\0", 1, 41)
    length_s = np.frombuffer(index, "<i4", num_s, shards.HEADER.size)
    offset_s = np.frombuffer(index, "<i8", num_s, shards.HEADER.size + 4 * num_s)
    assert (length_s.max(), length_s.sum()) == (7, token_b.size)
    first_s = np.cumsum(length_s) - length_s
    assert np.array_equal(offset_s, first_s * np.dtype(dtype).itemsize)


def test_an_error_leaves_nothing(sources, tmp_path):
    bad = write_text(tmp_path / "bad.jsonl", '{"text": "good"}\n{\n')
    empty = write_text(tmp_path / "empty.txt", "")
    cases = {
        r"bad\.jsonl:2' is not a document: not JSON": [*sources, bad],
        r"hold no text \(1 empty documents\)": [empty],
        "is not a file": [tmp_path / "none"],
    }
    before = names(tmp_path)
    for message, files in cases.items():
        with pytest.raises(ValueError, match=message):
            prepare(files, tmp_path / "out", BYTES)
        assert names(tmp_path) == before


def test_a_folder_is_made_once_and_without_leftovers_of_a_killed_process(
    sources, tmp_path
):
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    partial.mkdir()
    (partial / "shard-00000.bin").write_bytes(b"half")
    (partial / "manifest.json").write_bytes(b"{}")
    assert prepare(sources[1:2], out, BYTES)
    assert not prepare(sources, out, BYTES)
    assert len(read_documents(out)) == 2
    assert names(tmp_path) == ["my sources [1]", "out"]


def test_a_source_that_changes_while_it_is_read_is_refused(sources, tmp_path):
    def change(_):
        write_jsonl(sources[1], ["other"])

    with pytest.raises(ValueError, match="changed while it was read"):
        prepare(sources[1:2], tmp_path / "out", BYTES, say=change)


def test_a_lock_file_that_its_holder_has_removed_does_not_count(tmp_path, monkeypatch):
    """This happens when a writer ends after we have opened the lock file and before we
    lock it."""
    path, lock, calls = tmp_path / "out.lock", prepared.fcntl.flock, []

    def remove_first(*args):
        calls.append(args)
        if len(calls) == 1:
            path.unlink()
        lock(*args)

    monkeypatch.setattr(prepared.fcntl, "flock", remove_first)
    assert prepare([write_text(tmp_path / "a.txt")], tmp_path / "out", BYTES)
    assert len(calls) == 2


LOAD = """
import sys
from pathlib import Path
from train.data.prepared import open_prepared, prepare_cached
from train.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer("bytes")
say = lambda text: print(text, flush=True)
folder = prepare_cached([Path(sys.argv[1])], tokenizer, "text", say)
print(open_prepared(folder, tokenizer)[1])
"""


def start(path):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", LOAD, str(path)]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_that_start_together_make_tokens_once(tmp_path, monkeypatch):
    """One of them is killed when it has begun; another takes over."""
    monkeypatch.setenv("MOEJAX_CACHE_DIR", str(tmp_path / "cache"))
    texts = [f"text {i} " * 40 for i in range(20_000)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    killed = start(path)
    assert killed.stdout.readline().startswith("tokenizing")
    processes = [start(path) for _ in range(2)]
    killed.kill()
    killed.communicate()
    outputs = [process.communicate()[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0][-1] == outputs[1][-1]
    lines = [line for lines in outputs for line in lines]
    assert sum(line.startswith("tokenizing") for line in lines) <= 1
    (folder,) = (tmp_path / "cache" / "tokens").iterdir()
    assert len(read_documents(folder)) == len(texts)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "a cache"
    monkeypatch.setenv("MOEJAX_CACHE_DIR", str(folder))
    return folder


def test_cached_tokens_are_made_once_and_again_when_something_changes(tmp_path, cache):
    (tmp_path / "data").mkdir()
    path = write_text(tmp_path / "data" / "a.jsonl", '{"text": "a", "other": "b"}\n')
    messages = []
    args = [[path], BYTES, "text", messages.append]
    first = prepare_cached(*args)
    assert prepare_cached(*args) == first
    assert [message[:18] for message in messages] == ["tokenizing 1 files"]
    assert names(tmp_path / "data") == ["a.jsonl"]
    assert first.parent == cache / "tokens"
    prepare_cached([path], BYTES, "other", messages.append)
    prepare_cached([path], load_tokenizer("bytes", 1), "text", messages.append)
    write_text(path, '{"text": "longer"}\n')
    assert read_documents(prepare_cached(*args)) == [[0, *b"longer"]]
    assert len(names(first.parent)) == len(messages) == 4


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl")
    monkeypatch.setenv("MOEJAX_CACHE_DIR", str(path / "below a file"))
    with pytest.raises(
        ValueError, match=r"cannot be written: .*: set MOEJAX_CACHE_DIR"
    ):
        prepare_cached([path], BYTES, "text", print)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A prepared folder of several shards."""
    monkeypatch.setattr(prepared, "SHARD_DOCUMENTS", 2)
    monkeypatch.setattr(prepared, "BATCH_CHARS", 20)
    prepare([write_jsonl(tmp_path / "a.jsonl")], tmp_path / "out", BYTES)
    assert "shard-00001.bin" in names(tmp_path / "out")
    return tmp_path / "out"


def refusal(folder, tokenizer=BYTES):
    with pytest.raises(ValueError) as error:
        open_prepared(folder, tokenizer)
    message = str(error.value)
    assert message.isprintable()
    assert len(message) < 1000
    return message


@pytest.mark.parametrize("name", ["shard-00001.bin", "shard-00001.idx"])
def test_a_damaged_shard_is_named(folder, name):
    path = folder / name
    whole = path.read_bytes()
    flipped = bytes([whole[-1] ^ 1])
    for data in (whole[:-1], whole + b"a", whole[:-1] + flipped, b""):
        path.write_bytes(data)
        message = refusal(folder)
        assert "shard-00001.bin' with its .idx differs from the sha256" in message
    path.unlink()
    assert f"{name}' cannot be read: No such file" in refusal(folder)


def test_another_tokenizer_than_that_of_the_manifest(folder, tmp_path):
    for tokenizer in (
        load_tokenizer("bytes", 1),
        load_tokenizer(str(write_bpe(tmp_path / "t.json"))),
    ):
        assert "prepared with the tokenizer 'bytes' (sha256 " in refusal(
            folder, tokenizer
        )


def test_a_manifest_that_is_damaged_or_leaves_its_folder_is_refused(folder):
    path = folder / prepared.MANIFEST
    whole = json.loads(path.read_text())

    def refuse(content):
        path.write_text(content, "latin-1")
        return refusal(folder)

    for field in ("format", "tokenizer", "separator", "shards"):
        for value in (None, [], -1, 10**30, "7", [{"file": 3}]):
            message = refuse(json.dumps(whole | {field: value}))
            assert "manifest.json' is damaged or of" in message or field == "separator"
        left = {name: value for name, value in whole.items() if name != field}
        assert "manifest.json' is damaged or of" in refuse(json.dumps(left))
    for content in ("", "[]", "\xff", "[" * 9999):
        assert "manifest.json' is damaged or of" in refuse(content)
    for name in ("../a.bin", "/etc/passwd", "a\0b", ""):
        whole["shards"][0]["file"] = name
        assert "is not a file in the folder" in refuse(json.dumps(whole))
    path.unlink()
    assert "is not a folder of prepared tokens" in refusal(folder)
