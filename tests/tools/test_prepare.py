"""Test tools/prepare.py: it writes the same shards with any number of workers, and all
of them or none."""

import hashlib
import json
import multiprocessing
import os
import signal
import threading
import types

import numpy as np
import pytest

from tests.support.data_files import (
    TEXTS,
    write_bpe,
    write_jsonl,
    write_parquet,
    write_text,
)
from tools import prepare as tool
from train.data import documents, encoding, prepared
from train.data.encoding import Recipe
from train.data.indexed import file_sha256, open_tokens, scan
from train.data.prepared import prepare, read_manifest
from train.data.tokenizer import load_tokenizer


@pytest.fixture
def sources(tmp_path):
    """Return the files of a folder: one of every kind, one bad record, one empty
    text."""
    folder = tmp_path / "my sources [1]"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", [*TEXTS, "", *("x y\n" * i for i in range(200))])
    with (folder / "a.jsonl").open("a") as file:
        file.write("{\n")
    write_jsonl(folder / "b.jsonl.gz", TEXTS[:2])
    write_parquet(folder / "c.parquet")
    write_text(folder / "d e.txt", "the last one\n" * 40_000)
    (folder / "link.txt").symlink_to("d e.txt")
    return sorted(folder.iterdir())


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def read_documents(folder) -> list[list[int]]:
    """Return the token ids of each document in a folder of shards."""
    ids = []
    for record in read_manifest(folder)["shards"]:
        shard = open_tokens(folder / record["file"])
        ids += [part.tolist() for part in np.split(shard.token_b, shard.start_d[1:])]
    return ids


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_document_is_its_separator_and_its_ids(sources, tmp_path, monkeypatch, name):
    monkeypatch.setattr(prepared, "SHARD_TOKENS", 1000)
    recipe = Recipe(str(write_bpe(tmp_path / "t.json")) if name == "bpe" else "bytes")
    manifest = prepare(sources, tmp_path / "out", recipe)
    tokenizer = load_tokenizer(recipe.tokenizer)
    last = "the last one\n" * 40_000
    texts = [*TEXTS, *("x y\n" * i for i in range(1, 200)), *TEXTS[:2], *TEXTS]
    assert read_documents(tmp_path / "out") == [
        [tokenizer.separator, *tokenizer.encode(text).tolist()]
        for text in [*texts, last, last]
    ]
    assert manifest["num_empty"] == 2
    assert manifest["num_bad"] == 1
    assert "a.jsonl:208: not JSON" in manifest["bad_records"][0]
    assert len(manifest["shards"]) > 2


def test_the_manifest_describes_the_sources_and_shards(sources, tmp_path):
    manifest = prepare(sources, tmp_path / "out")
    assert read_manifest(tmp_path / "out") == manifest
    for shard in manifest["shards"]:
        assert scan(tmp_path / "out" / shard["file"]).sha256 == shard["sha256"]
    for path, source in zip(sources, manifest["sources"], strict=True):
        data = path.read_bytes()
        assert source["sha256"] == hashlib.sha256(data).hexdigest()
        assert source["num_bytes"] == len(data)
    assert manifest["dtype"] == "uint16"
    assert manifest["tokenizer"]["sha256"] == load_tokenizer("bytes").sha256
    assert sum(s["num_tokens"] for s in manifest["shards"]) == manifest["num_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_the_result_does_not_depend_on_the_number_of_workers(
    sources, tmp_path, monkeypatch, name
):
    """The pieces are small, so that there are more of them than the workers may have in
    flight."""
    monkeypatch.setattr(documents, "RANGE_BYTES", 500)
    recipe = Recipe(str(write_bpe(tmp_path / "t.json")) if name == "bpe" else "bytes")
    before = contents(sources[0].parent)
    folders = []
    for num_workers in (1, 2, 3):
        out = tmp_path / f"out {num_workers}"
        prepare(sources, out, recipe, num_workers)
        folders.append(contents(out))
    assert folders[0] == folders[1] == folders[2]
    assert contents(sources[0].parent) == before


def test_too_many_bad_records_end_the_program(sources, tmp_path):
    with pytest.raises(ValueError, match=r"max_bad_records=0 .*a\.jsonl:208: not JSON"):
        prepare(sources, tmp_path / "out", Recipe(max_bad_records=0))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my sources [1]"]


def test_files_without_documents_are_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", key="body")
    with pytest.raises(ValueError, match=r"hold no documents.*no field 'text' among"):
        prepare([path], tmp_path / "out")
    with pytest.raises(ValueError, match="hold no documents: 1 are empty"):
        prepare([write_text(tmp_path / "a.txt", "")], tmp_path / "out")


def test_an_existing_folder_is_not_touched(sources, tmp_path):
    out = tmp_path / "out"
    prepare(sources, out)
    before = contents(out)
    with pytest.raises(ValueError, match="exists"):
        prepare(sources[:1], out)
    with pytest.raises(ValueError, match="bad"):
        prepare(sources, out, Recipe(max_bad_records=0), overwrite=True)
    assert contents(out) == before
    prepare(sources[1:2], out, overwrite=True)
    assert len(read_documents(out)) == 2
    with pytest.raises(ValueError, match="is not a folder of prepared tokens"):
        prepare(sources, sources[0].parent, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my sources [1]", "out"]


def test_the_leftovers_of_a_killed_run_are_not_used(sources, tmp_path):
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "shard-00000.bin").write_bytes(b"half")
    (partial / "manifest.json").write_bytes(b"{}")
    with pytest.raises(ValueError, match="is not a folder of prepared tokens"):
        read_manifest(tmp_path / "out")
    prepare(sources[1:2], tmp_path / "out")
    assert len(read_documents(tmp_path / "out")) == 2
    assert not partial.exists()


def test_two_writers_of_the_same_folder_do_not_mix(sources, tmp_path):
    def again(_):
        with pytest.raises(ValueError, match="another process is writing"):
            prepare(sources, tmp_path / "out")

    prepare(sources[1:2], tmp_path / "out", show=again)
    assert len(read_documents(tmp_path / "out")) == 2


def test_a_source_that_changes_while_it_is_read_is_refused(sources, tmp_path):
    def change(_):
        write_jsonl(sources[1], ["other"])

    with pytest.raises(ValueError, match="changed while it was read"):
        prepare(sources[1:2], tmp_path / "out", show=change)


def test_writers_that_start_together_leave_one_whole_folder(sources, tmp_path):
    """One writer writes. Each of the others is refused, or comes later and
    overwrites."""
    out, outcomes, barrier = tmp_path / "out", [], threading.Barrier(4)
    prepare(sources[1:2], out)

    def write():
        barrier.wait()
        for _ in range(10):
            try:
                prepare(sources[1:2], out, overwrite=True)
                outcomes.append("written")
            except ValueError as fault:
                outcomes.append(str(fault))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 40
    assert "written" in outcomes
    refusals = [outcome for outcome in outcomes if outcome != "written"]
    assert all("another process is writing" in text for text in refusals), refusals
    assert len(read_documents(out)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my sources [1]", "out"]


def test_a_folder_made_meanwhile_is_not_overwritten(sources, tmp_path, monkeypatch):
    """The process that may write checks again whether the folder exists."""
    out = tmp_path / "out"
    load = prepared.load_tokenizer

    def load_late(*args):
        monkeypatch.setattr(prepared, "load_tokenizer", load)
        prepare(sources[1:2], out)
        return load(*args)

    monkeypatch.setattr(prepared, "load_tokenizer", load_late)
    with pytest.raises(ValueError, match="exists"):
        prepare(sources, out)
    assert len(read_documents(out)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["my sources [1]", "out"]


def test_a_lock_file_that_its_holder_has_removed_does_not_count(tmp_path, monkeypatch):
    """This happens when a writer ends after we have opened the lock file and before we
    lock it."""
    path = tmp_path / "out.partial.lock"
    monkeypatch.setattr(prepared.fcntl, "flock", lambda *_: path.unlink())
    with pytest.raises(ValueError, match="another process is writing"):
        prepare([write_text(tmp_path / "a.txt")], tmp_path / "out")


def test_a_refusal_does_not_wait_for_a_long_file(tmp_path):
    """The file is sparse and has 64 GiB, which take half a minute or more to hash."""
    with (tmp_path / "long").open("wb") as file:
        file.truncate(64 * 2**30)
    paths = [tmp_path / "long"] * 2
    with pytest.raises(ValueError, match="refused"), prepared._hash_sources(paths):
        raise ValueError("refused")


def test_a_hash_stops_when_it_is_told_to(tmp_path):
    path = write_text(tmp_path / "a", "a" * (3 * 2**20))
    answers = iter([False, False, True])
    part = hashlib.sha256(b"a" * (2 * 2**20)).hexdigest()
    assert file_sha256(path, lambda: next(answers)) == part


@pytest.mark.parametrize("sent", [b"", b"\0\0", b"\0\0\0\x63half"])
def test_a_worker_killed_within_a_message_is_an_error(sent):
    receiver, sender = multiprocessing.Pipe(duplex=False)
    os.write(sender.fileno(), sent)
    sender.close()
    dead = types.SimpleNamespace(join=lambda: None, exitcode=-9)
    with pytest.raises(
        ChildProcessError, match=r"a worker process died \(exit code -9"
    ):
        encoding._receive(dead, receiver)


@pytest.mark.slow
def test_a_worker_that_dies_is_an_error(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "RANGE_BYTES", 50)

    def kill(_):
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(
        ChildProcessError, match=r"a worker process died \(exit code -9"
    ):
        prepare(sources * 50, tmp_path / "out", num_workers=2, show=kill)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"format": 1}', "\xff", "[" * 9999]
)
def test_a_damaged_manifest_is_refused(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content, "latin-1")
    with pytest.raises(ValueError, match="is damaged"):
        read_manifest(tmp_path)


def test_a_manifest_may_only_name_files_of_its_own_folder(sources, tmp_path):
    prepare(sources, tmp_path / "out")
    path = tmp_path / "out" / prepared.MANIFEST
    record = json.loads(path.read_text())
    for name in ("../a.bin", "/etc/passwd", 3, "a\0b"):
        record["shards"][0]["file"] = name
        path.write_text(json.dumps(record))
        with pytest.raises(ValueError, match="not that of a file in the folder"):
            read_manifest(tmp_path / "out")


def run(capsys, *args):
    code = tool.main([*map(str, args), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]), err


def test_the_program_reports_its_results(sources, tmp_path, capsys):
    out = tmp_path / "a" / "b"
    code, record, err = run(capsys, f"{tmp_path}/*/?.*", "--out", out)
    assert (code, record["exit_code"], err) == (0, 0, "")
    assert record["num_bad"] == 1
    assert record["num_tokens"] == sum(map(len, read_documents(out)))
    assert {"wall_sec", "cpu_sec", "peak_rss_mib"} <= set(record)


def test_the_program_refuses_in_one_line(sources, tmp_path, capsys):
    out = tmp_path / "out"
    cases = [
        ["none.jsonl", "--out", out],
        [sources[0], "--out", tmp_path],
        [sources[0], "--out", out, "--max_bad_records", 0],
        [sources[0], "--out", out, "--tokenizer", sources[0]],
        [sources[0], "--out", out, "--separator", "300"],
        [sources[2], "--out", out, "--text_key", "id"],
    ]
    for case in cases:
        code, record, err = run(capsys, *case)
        assert (code, record["exit_code"]) == (2, 2)
        assert err == f"error: {record['error']}\n"
        assert not out.exists()
