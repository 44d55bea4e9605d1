"""The data cache: tokens are made once, not beside the sources, and never stale."""

import dataclasses
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from moejax.config import Data
from tests.support.corpora import random_documents, write_bin
from tests.support.run_main import ROOT
from train import data
from train.data import cache, indexed

LOAD = """
import sys
from moejax.config import Data
from train.data.corpus import load_corpus
corpus = load_corpus(Data(corpus=sys.argv[1], seq_len=4), 256)
print(corpus.sha256)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    folder = tmp_path / "a cache"
    monkeypatch.setenv("MOEJAX_CACHE_DIR", str(folder))
    return folder


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    os.utime(path, (1, 1))  # the hash of a young file is not cached
    return path


def load(path, messages, **fields):
    cfg = dataclasses.replace(
        Data(seq_len=4, held_out_every=3), corpus=str(path), **fields
    )
    return data.load_corpus(cfg, 256, messages.append)


def test_tokens_are_made_once_and_not_beside_the_sources(tmp_path, folder):
    (tmp_path / "data").mkdir()
    path = write_lines(tmp_path / "data" / "a.jsonl", ["some text"] * 9)
    messages = []
    first = load(path, messages)
    assert len(messages) == 1
    assert messages[0].startswith("tokenizing 1 files")
    assert load(path, messages).sha256 == first.sha256
    assert len(messages) == 1
    assert [x.name for x in (tmp_path / "data").iterdir()] == ["a.jsonl"]
    assert len(list(folder.glob("tokens/*/manifest.json"))) == 1


@pytest.mark.parametrize(
    "change", [{"text_key": "other"}, {"separator": 1}, {"corpus": "b.ndjson"}]
)
def test_other_settings_are_other_tokens(tmp_path, folder, change):
    lines = [json.dumps({"text": "text", "other": "else"})] * 9
    for name in ("a.jsonl", "b.ndjson"):
        (tmp_path / name).write_text("\n".join(lines))
    load(tmp_path / "a.jsonl", [])
    name = change.pop("corpus", "a.jsonl")
    load(tmp_path / name, [], **change)
    # The same contents under another name are the same data.
    expected = 1 if name == "b.ndjson" else 2
    assert len(list(folder.glob("tokens/*/manifest.json"))) == expected


def start(path):
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-u", "-c", LOAD, str(path)]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_processes_at_once_make_tokens_once(tmp_path, folder):
    path = write_lines(tmp_path / "a.jsonl", [f"text {i} " * 20 for i in range(3000)])
    processes = [start(path) for _ in range(3)]
    outputs = [process.communicate()[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({lines[-1] for lines in outputs}) == 1
    lines = [line for lines in outputs for line in lines]
    assert sum(line.startswith("tokenizing") for line in lines) == 1
    assert len(list(folder.glob("tokens/*/manifest.json"))) == 1


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_that_is_taken_for_whole(tmp_path, folder):
    path = write_lines(tmp_path / "a.jsonl", [f"text {i} " * 40 for i in range(60_000)])
    killed = start(path)
    assert killed.stdout.readline().startswith("tokenizing")
    waits = start(path)
    while killed.poll() is None and not list(folder.glob("tokens/*.partial/*.bin")):
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    assert waits.communicate()[0].splitlines()[-1] == load(path, []).sha256
    assert waits.returncode == 0


def test_bad_records_of_an_earlier_run_count_again(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good text"}\n' * 9 + "bad\n" * 3)
    messages = []
    load(path, messages)
    load(path, messages)
    assert messages[1] == messages[2]
    assert messages[1].startswith(f"skipped 3 bad records: {path}:10: ")
    with pytest.raises(ValueError, match=r"3 bad records: .*max_bad_records=2"):
        load(path, [], max_bad_records=2)


def test_a_file_is_hashed_again_when_it_has_changed(tmp_path):
    path = write_bin(tmp_path / "a.bin", random_documents(0, 20))
    index = path.with_suffix(".idx")
    count = 0

    def scan(path):
        nonlocal count
        count += 1
        return indexed.scan(path)

    first = cache.cached_scan(path, scan)
    cache.cached_scan(path, scan)
    assert count == 2  # too young to be cached by its mtime
    for when, expected in ((1, 3), (1, 3), (2, 4)):
        os.utime(path, (when, when))
        os.utime(index, (1, 1))
        found = cache.cached_scan(path, scan)
        assert (found.sha256, found.largest_id) == (first.sha256, first.largest_id)
        np.testing.assert_array_equal(found.sums.data_k, first.sums.data_k)
        np.testing.assert_array_equal(found.sums.index_k, first.sums.index_k)
        assert count == expected
    os.utime(index, (3, 3))
    cache.cached_scan(path, scan)
    assert count == 5


def test_a_link_to_another_file_is_another_file(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(name * 9)
        os.utime(tmp_path / name, (1, 1))
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    first = cache.cached_sha256(link)
    link.unlink()
    link.symlink_to(tmp_path / "b")
    assert cache.cached_sha256(link) != first


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"sha256": "0"}',
        b"[" * 100_000,
        b"\xff",
        b"1" * 9999,
    ],
)
def test_a_damaged_record_is_read_again_and_said_to_be(
    tmp_path, folder, caplog, content
):
    path = write_lines(tmp_path / "a.jsonl", ["text"])
    sha256 = cache.cached_sha256(path)
    (record,) = folder.glob("hashes/*.json")
    whole = record.read_bytes()
    for damaged in (content, whole.replace(b"sha256", b"sha255"), whole[:-1]):
        caplog.clear()
        record.write_bytes(damaged)
        assert cache.cached_sha256(path) == sha256
        assert record.read_bytes() == whole
        (message,) = caplog.messages
        assert message.endswith("is damaged: its file is read again")


@pytest.mark.parametrize("content", ["", "[]", "null", "[" * 100_000, '{"format": 1}'])
def test_a_damaged_manifest_of_cached_tokens_is_set_aside(tmp_path, folder, content):
    path = write_lines(tmp_path / "a.jsonl", ["some text"] * 9)
    sha256 = load(path, []).sha256
    (manifest,) = folder.glob("tokens/*/manifest.json")
    for _ in range(2):
        messages = []
        manifest.write_text(content)
        assert load(path, messages).sha256 == sha256
        assert "is damaged" in messages[0]
        assert messages[0].endswith(f"the folder is now {manifest.parent}.damaged")
        assert messages[1].startswith("tokenizing 1 files")


def test_a_file_that_changes_while_it_is_read(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", ["text"])

    def change(path):
        path.write_text("other")
        return "0" * 64

    monkeypatch.setattr(cache, "file_sha256", change)
    with pytest.raises(ValueError, match="changed while it was read"):
        cache.cached_sha256(path)


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    path = write_lines(tmp_path / "a.jsonl", ["text"])
    monkeypatch.setenv("MOEJAX_CACHE_DIR", str(path / "below a file"))
    with pytest.raises(
        ValueError, match=r"cannot be written: .*: set MOEJAX_CACHE_DIR"
    ):
        load(path, [])


def test_the_default_folder(monkeypatch, repo):
    monkeypatch.delenv("MOEJAX_CACHE_DIR")
    assert cache.cache_folder() == repo / ".cache" / "data"
