"""Bytes that a disk has altered are noticed when they are used, not trained on."""

import concurrent.futures
import dataclasses
import os
import threading

import numpy as np
import pytest

from moejax.config import Data
from tests.support import run_main
from tests.support.corpora import random_documents, write_bin
from train import data
from train.data import windows
from train.data.block_sums import BLOCK_BYTES, BlockCheck, BlockSums, open_mapped
from train.data.prepared import prepare

CFG = Data(seq_len=64, held_out_every=10)
NUM_BYTES = 5 * BLOCK_BYTES + 1000


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("MOEJAX_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


def random_text(num_bytes=NUM_BYTES):
    letters = np.random.default_rng(0).integers(97, 123, num_bytes)
    letters[::40] = 10
    return letters.astype(np.uint8).tobytes()


def write_text(folder):
    path = folder / "a.txt"
    path.write_bytes(random_text())
    return path, path


def write_npy(folder):
    path = folder / "a.npy"
    np.save(path, np.frombuffer(random_text(NUM_BYTES // 2), np.uint8).astype("u2"))
    return path, path


def write_megatron(folder):
    documents = random_documents(0, 4000, longest=80)
    path = write_bin(folder / "a.bin", documents)
    return path, path


def write_folder(folder):
    lines = folder / "a.jsonl"
    texts = random_text(NUM_BYTES // 2).decode().splitlines()
    lines.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    prepare([lines], folder / "shards")
    return folder / "shards", folder / "shards" / "shard-00000.bin"


WRITERS = {
    "text": write_text, "npy": write_npy, "bin": write_megatron, "folder": write_folder,
}  # fmt: skip


def make_old(folder):
    """Give all files an old mtime: the scan of a young file is not cached."""
    for path in folder.rglob("*.*"):
        os.utime(path, (1, 1))


def flip(path, at):
    """Flip a bit as a disk does: size, mtime and inode stay."""
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def load(corpus):
    cfg = dataclasses.replace(CFG, corpus=str(corpus))
    return data.load_corpus(cfg, 256, say=lambda _: None)


def batches(corpus, batch_size=8):
    return data.TrainBatches(load(corpus), CFG, batch_size)


def read_epoch(source, num_epochs=1):
    (num_windows,) = source.num_windows
    read_all(source, num_epochs * num_windows // source.batch_size + 1)


def read_all(source, num_batches):
    for index in range(num_batches):
        source.rows(index, 0, source.batch_size)


@pytest.mark.parametrize("kind", WRITERS)
def test_damage_is_noticed_when_its_block_is_used(tmp_path, kind):
    corpus, path = WRITERS[kind](tmp_path)
    make_old(tmp_path)
    read_epoch(batches(corpus))
    flip(path, 2 * BLOCK_BYTES + 99)
    with pytest.raises(ValueError) as error:
        read_epoch(batches(corpus))
    message = str(error.value)
    first, last = 2 * BLOCK_BYTES, 3 * BLOCK_BYTES - 1
    named = f"'{path}' is damaged: block 2 (bytes {first} to {last}) differs"
    assert named in message
    assert "\n" not in message
    flip(path, 2 * BLOCK_BYTES + 99)
    read_epoch(batches(corpus))


def test_damage_in_held_out_text_is_noticed(tmp_path):
    corpus, path = write_text(tmp_path)
    make_old(tmp_path)
    load(corpus)
    flip(path, NUM_BYTES - 1)
    held_out = data.HeldOut(load(corpus), CFG, 8, 60)
    with pytest.raises(ValueError, match=r"block 5 \(bytes"):
        read_all(held_out, 60)


@pytest.mark.parametrize("at", [9, 30, -1])
def test_damage_in_an_index_is_noticed_when_it_is_opened(tmp_path, at):
    corpus, path = write_folder(tmp_path)
    make_old(tmp_path)
    load(corpus)
    index = path.with_suffix(".idx")
    flip(index, at % index.stat().st_size)
    with pytest.raises(ValueError, match=rf"'{index}' is damaged: block \d"):
        load(corpus)


def test_damage_in_an_array_header_is_noticed_when_it_is_opened(tmp_path):
    corpus, _ = write_npy(tmp_path)
    make_old(tmp_path)
    load(corpus)
    flip(corpus, 24)
    with pytest.raises(ValueError, match=r"a.npy' is damaged: block 0 \(bytes 0 to"):
        load(corpus)


def test_a_run_notices_damage_in_its_next_epoch(tmp_path):
    corpus, path = write_text(tmp_path)
    source = batches(corpus)
    read_epoch(source)
    flip(path, 70_000)
    with pytest.raises(ValueError, match="block 1"):
        read_epoch(source, 3)


def test_a_file_that_is_cut_short_is_refused_and_does_not_kill_the_process(tmp_path):
    corpus, path = write_text(tmp_path)
    source = batches(corpus)
    source.rows(0, 0, 8)
    os.truncate(path, BLOCK_BYTES)
    with pytest.raises(ValueError, match="was cut short while it was in use"):
        source.rows(1, 0, 8)


def test_sums_do_not_depend_on_how_the_bytes_come():
    text, rng = random_text(), np.random.default_rng(1)
    whole = BlockSums()
    whole.update(text)
    assert whole.sums().size == 6
    for _ in range(5):
        parts = BlockSums()
        cuts = np.sort(rng.integers(0, NUM_BYTES, 9)).tolist()
        for a, b in zip([0, *cuts], [*cuts, NUM_BYTES]):
            parts.update(text[a:b])
        np.testing.assert_array_equal(parts.sums(), whole.sums())


def test_sums_of_another_size_are_refused(tmp_path):
    _, path = write_text(tmp_path)
    with pytest.raises(ValueError, match="changed while it was read"):
        BlockCheck(path, open_mapped(path), np.zeros(5, np.uint32))


def verify_used(source, num_steps, rows=range(8), is_stopped=lambda: False):
    with source.used_verified(num_steps, rows, is_stopped):
        pass


def test_a_resume_verifies_the_blocks_that_its_steps_have_used(tmp_path):
    corpus, path = write_text(tmp_path)
    make_old(tmp_path)
    verify_used(batches(corpus), 10**6)
    flip(path, 3 * BLOCK_BYTES)
    verify_used(batches(corpus), 0)
    with pytest.raises(ValueError, match="block 3"):
        verify_used(batches(corpus), 1000)
    verify_used(batches(corpus), 1000, is_stopped=lambda: True)


def test_the_thread_pauses_after_several_blocks(tmp_path, monkeypatch):
    """A pause of 1 ms after every block would hold up a run for 16 s in each GB."""
    corpus, _ = write_text(tmp_path)
    source, pauses = batches(corpus), []
    wait = threading.Event.wait

    def counted(event, timeout=None):
        if threading.current_thread().name.startswith("verifies used data"):
            pauses.append(timeout)
        return wait(event, timeout)

    monkeypatch.setattr(windows, "_CHECKS_BETWEEN_PAUSES", 4)
    monkeypatch.setattr(threading.Event, "wait", counted)
    verify_used(source, 1000)
    assert pauses == [0, 0, 0, windows._PAUSE_SEC, 0, 0]


def test_a_run_that_waits_for_the_thread_says_so(tmp_path, monkeypatch):
    corpus, _ = write_text(tmp_path)
    source, lines, is_ending = batches(corpus), [], threading.Event()
    verify = BlockCheck.verify_blocks

    def wait_and_verify(*args):
        is_ending.wait(60)
        verify(*args)

    def say(line):
        lines.append(line)
        is_ending.set()

    monkeypatch.setattr(BlockCheck, "verify_blocks", wait_and_verify)
    with source.used_verified(1000, range(8), lambda: False, say):
        pass
    assert len(lines) == 1
    assert "still verifying the data" in lines[0]


def test_long_windows_are_verified_as_blocks(tmp_path):
    """Four windows of two blocks each fill a file of six blocks, which is read once."""
    corpus, path = write_text(tmp_path)
    make_old(tmp_path)
    cfg = Data(corpus=str(corpus), seq_len=2 * BLOCK_BYTES, held_out_every=2)
    source = data.TrainBatches(data.load_corpus(cfg, 256), cfg, 1)
    flip(path, NUM_BYTES - 1)  # in the held-out half, which no window reads
    with pytest.raises(ValueError, match="block 5"):
        verify_used(source, 4, [0])
    verify_used(source, 2, [0])


def test_each_process_verifies_its_share(tmp_path):
    corpus, path = write_text(tmp_path)
    make_old(tmp_path)
    load(corpus)
    flip(path, 5 * BLOCK_BYTES)
    noticed = []
    for row in range(8):
        try:
            verify_used(batches(corpus), 1000, [row])
        except ValueError:
            noticed.append(row)
    assert noticed == [5]


def test_a_short_run_verifies_its_windows_alone(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(random_text(200 * BLOCK_BYTES))
    make_old(tmp_path)
    source = batches(path)
    block = first_token(source, 1, 3) // BLOCK_BYTES
    flip(path, block * BLOCK_BYTES + 7)
    verify_used(batches(path), 1, range(8))
    verify_used(batches(path), 2, [2])
    with pytest.raises(ValueError, match=rf"block {block} "):
        verify_used(batches(path), 2, [3])


def first_token(source, step, row):
    """Return the index in the corpus of the first token of a row."""
    (name,) = source.sample_ids(step, row, row + 1)
    window = int(name.rpartition("window")[2])
    text = np.frombuffer(random_text(200 * BLOCK_BYTES), np.uint8)
    (token_t,) = source.rows(step, row, row + 1).token_bt
    for phase in range(2 * CFG.seq_len):
        start = window * CFG.seq_len + phase
        if np.array_equal(text[start : start + token_t.size], token_t):
            return start
    raise AssertionError(name)


def test_the_next_read_raises_what_the_thread_has_found(tmp_path):
    corpus, path = write_text(tmp_path)
    make_old(tmp_path)
    load(corpus)
    flip(path, 4 * BLOCK_BYTES)
    source = batches(corpus)

    def read_on():
        with source.used_verified(1000, range(8), lambda: False):
            concurrent.futures.wait([source._check_of_used])
            source.rows(0, 0, 0)
            raise AssertionError("rows() has not raised")

    with pytest.raises(ValueError, match="block 4"):
        read_on()


@pytest.mark.long
def test_a_run_ends_with_2_and_the_name_of_the_block(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(random_text())
    make_old(tmp_path)
    run_dir, params = tmp_path / "run", [f"Data.corpus = '{path}'"]
    assert run_main.run(run_dir, *params, "Train.num_steps = 2").code == 0
    flip(path, 4 * BLOCK_BYTES)
    for directory in (run_dir, tmp_path / "fresh"):
        ended = run_main.run(directory, *params, "Train.num_steps = 400")
        assert ended.code == 2
        assert f"'{path}' is damaged: block 4" in ended.err
        assert "Traceback" not in ended.err
