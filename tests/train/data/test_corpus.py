"""Corpora that Data.corpus can name: all kinds of files, splitting, and refusals."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from moejax.config import Data
from tests.support.data_files import write_jsonl, write_parquet
from train import data
from train.data.prepared import prepare
from train.data.token_streams import read_tokens
from train.data.tokenizer import load_tokenizer

SMALL = Data(seq_len=4, held_out_every=3)
TEXTS = [f"text {i} " + "x" * i for i in range(12)]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("MOEJAX_CACHE_DIR", str(folder))
    return folder


def load(corpus, vocab_size=256, **fields):
    names = tuple(map(str, corpus)) if isinstance(corpus, list | tuple) else str(corpus)
    cfg = dataclasses.replace(SMALL, corpus=names, **fields)
    return data.load_corpus(cfg, vocab_size, say=lambda _: None)


def all_tokens(stream):
    return read_tokens(stream, [0], stream.num_tokens)[0].tolist()


def concatenate_texts(texts):
    return [x for text in texts for x in (0, *text.encode())]


def split_texts(texts):
    held_out = texts[2::3]
    return concatenate_texts(
        [t for t in texts if t not in held_out]
    ), concatenate_texts(held_out)


def read_both(corpus):
    (source,) = corpus.sources
    return all_tokens(source.train), all_tokens(source.held_out)


def test_one_text_file_is_one_document_split_at_its_end(tmp_path):
    text = bytes(range(1, 128)) * 8
    (tmp_path / "text.txt").write_bytes(text)
    corpus = load(tmp_path / "text.txt", held_out_every=10)
    train, held_out = read_both(corpus)
    assert (len(train), len(held_out)) == (916, 101)
    assert bytes(train + held_out) == b"\0" + text
    assert corpus.name == "text.txt"
    assert corpus.sources[0].train.start_d.tolist() == [0]


def test_files_of_all_kinds_make_the_same_documents(tmp_path):
    """One JSONL file, its prepared folder, globs of texts, and parquet."""
    folder = tmp_path / "with space [1]"
    folder.mkdir()
    for i, text in enumerate(TEXTS):
        (folder / f"{i:02d}.txt").write_text(text)
    write_parquet(folder / "all.parquet", TEXTS)
    source = write_jsonl(folder / "a.jsonl", TEXTS)
    prepare([source], folder / "shards", load_tokenizer("bytes"))
    (tmp_path / "link").symlink_to(folder)
    for path in (
        source, folder / "shards", tmp_path / "with space ?1?" / "*.txt",
        tmp_path / "link" / "*.txt", folder / "all.parquet",
    ):  # fmt: skip
        corpus = load(path)
        assert read_both(corpus) == split_texts(TEXTS)
        assert corpus.sources[0].train.start_d.size == 8
    assert load(source).sha256 == load(folder / "shards").sha256


def write_tokenizer(path, words):
    import tokenizers as hf

    vocab = {word: i for i, word in enumerate(["[UNK]", "</s>", *words])}
    tokenizer = hf.Tokenizer(hf.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = hf.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
    return str(path)


def test_a_tokenizers_file_makes_the_tokens_and_is_part_of_the_data(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", ["the cat sat"] * 9)
    words = write_tokenizer(tmp_path / "words.json", ["cat", "sat", "the"])
    corpus = load(source, tokenizer=words)
    assert read_both(corpus) == ([1, 4, 2, 3] * 6, [1, 4, 2, 3] * 3)
    assert data.byte_sample(corpus, 100) is None
    (tmp_path / "plain.txt").write_text("the cat sat " * 9)
    (first, *_) = read_both(load(tmp_path / "plain.txt", tokenizer=words))
    assert first[:4] == [1, 4, 2, 3]
    saved = data.identity(corpus, SMALL, 2)
    write_tokenizer(words, ["the", "cat", "sat"])
    other = load(source, tokenizer=words)
    with pytest.raises(ValueError, match="tokenizer_sha256 was"):
        data.check_identity(saved, data.identity(other, SMALL, 2))


def test_several_corpora_have_weights(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    plain = tmp_path / "b.txt"
    plain.write_text("abcdefghij" * 30)
    by_size = load([source, plain])
    assert by_size.weights[1] == 201 / by_size.num_train_tokens
    given = load([source, plain, "pysrc"], weights=(2.0, 1.0, 1.0))
    assert given.weights == (0.5, 0.25, 0.25)
    assert given.name == "a.jsonl + b.txt + pysrc"
    assert len({corpus.sha256 for corpus in (by_size, given)}) == 2


def test_whole_documents_for_evaluation(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS[:1])
    cfg = dataclasses.replace(SMALL, corpus=str(source))
    tokenizer, (stream,) = data.load_unsplit(cfg, 256, lambda _: None)
    assert tokenizer.separator == 0
    assert all_tokens(stream) == concatenate_texts(TEXTS[:1])


def test_the_shortest_file_is_one_window_over_and_over(tmp_path):
    text = b"abcdefghi"
    (tmp_path / "text.txt").write_bytes(text)
    cfg = Data(corpus=str(tmp_path / "text.txt"), seq_len=4, held_out_every=2)
    corpus = data.load_corpus(cfg, 256)
    batches = data.TrainBatches(corpus, cfg, batch_size=3)
    assert batches.rows(7, 0, 3).token_bt.tolist() == [[0, *text[:4]]] * 3
    held_out = data.HeldOut(corpus, cfg, 1, 1).rows(0, 0, 1)
    assert held_out.token_bt.tolist() == [list(text[4:])]


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("none.txt", {}, "' is not a file: check the path"),
        ("empty.txt", {}, r"': the files hold no text \(1 empty"),
        ("x.txt", {}, "' has 10 tokens to train on and 4 held out, but a window of "),
        ("a.[bj]*", {}, ".*a.bin' holds tokens, not text: name a folder"),
        (".", {}, "' is not a folder of prepared tokens: .*name its files, such as"),
        ("*.none", {}, "': the glob .* matches no file"),
        ("bad.jsonl", {}, "': '.*bad.jsonl:2' is not a document: not JSON"),
        ("shards", {"separator": 1}, "': prepared with the tokenizer"),
        ("damaged", {}, "': .*shard-00000.bin' with its .idx differs"),
    ],
)
def test_a_bad_corpus_is_one_line_that_names_it(tmp_path, name, fields, message):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "x.txt").write_text("x" * 13)
    (tmp_path / "a.bin").touch()
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "bad.jsonl").write_text(source.read_text().splitlines()[0] + "\n{\n")
    for folder in ("shards", "damaged"):
        prepare([source], tmp_path / folder, load_tokenizer("bytes"))
    path = tmp_path / "damaged" / "shard-00000.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError) as error:
        load(tmp_path / name, **fields)
    assert "\n" not in str(error.value)
    assert re.match(
        rf"Data.corpus='{re.escape(str(tmp_path / name))}{message}", str(error.value)
    )


def test_a_tokenizer_larger_than_the_model_is_refused():
    with pytest.raises(ValueError, match=r"256 ids, but Model\.vocab_size=255"):
        load("x.txt", vocab_size=255)


def test_a_changed_corpus_is_other_data_and_a_moved_one_is_not(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", TEXTS)

    def identity(path):
        cfg = dataclasses.replace(SMALL, corpus=str(path))
        return data.identity(load(path), cfg, 2)

    saved = json.loads(json.dumps(identity(source)))
    (tmp_path / "far").mkdir()
    moved = source.rename(tmp_path / "far" / "b.jsonl")
    data.check_identity(saved, identity(moved))
    write_jsonl(moved, [*TEXTS[:-1], "another"])
    with pytest.raises(
        ValueError, match=r"other data: name was a.*; sha256 was"
    ) as error:
        data.check_identity(saved, identity(moved))
    assert "\n" not in str(error.value)


def test_a_byte_sample_is_spread_and_shared(tmp_path):
    for name in "ab":
        text = name.encode() * 99_999 + name.upper().encode() * 300_000
        (tmp_path / name).write_bytes(text)
    corpus = load([tmp_path / "a", tmp_path / "b"], weights=(3.0, 1.0))
    sample = data.byte_sample(corpus, 2**18)
    assert sample.size == 2**18
    count = {x: int((sample == ord(x)).sum()) for x in "\0aAbB"}
    assert count["a"] + count["A"] + 1 == 3 * 2**16
    assert count["A"] > 0
    assert count["a"] > 0
    assert data.byte_sample(corpus, 2**26).size == corpus.num_train_tokens
    alone = load(tmp_path / "a")
    assert data.byte_sample(alone, alone.num_train_tokens).size == (
        alone.num_train_tokens
    )


def test_jax_is_not_imported_with_modules_that_tools_use_without_it():
    names = "train.data, train.eval.ngram, train.logs.profile, train.logs.trackers"
    code = f"import sys, {names}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
