"""Tokenizers: bytes and tokenizers files, separators, and streamed text."""

import hashlib
import json
import random

import numpy as np
import pytest

from tests.support.data_files import TEXTS, bpe_json, write_bpe
from tests.support.metaspace import WORDS, load_metaspace
from train.data import long_text
from train.data.tokenizer import (
    byte_tokenizer_file,
    load_tokenizer,
    stream_decoder,
)


@pytest.fixture
def bpe(tmp_path):
    return load_tokenizer(str(write_bpe(tmp_path / "tokenizer.json")))


def test_bytes_are_bytes():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.separator) == (256, 0)
    for text in TEXTS:
        assert bytes(tokenizer.encode(text).tolist()) == text.encode()
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([0xFF, 65]) == "\ufffdA"
    assert tokenizer.encode("").dtype == np.int32


def test_a_file_is_known_by_its_contents(bpe):
    assert bpe.sha256 == hashlib.sha256(bpe_json().encode()).hexdigest()
    assert bpe.vocab_size == len(json.loads(bpe_json())["model"]["vocab"])
    for text in TEXTS:
        assert bpe.decode(bpe.encode(text)) == text
        assert bpe.encode(text).size < len(text.encode()) or len(text) == 1


def test_no_text_forges_a_separator_unless_it_is_asked_to(bpe):
    text = "a<|endoftext|>b"
    ids = bpe.encode(text)
    assert bpe.separator == 0
    assert bpe.separator not in ids
    assert bpe.decode(ids) == text
    special = bpe.encode_special(text)
    assert special.tolist() == [*bpe.encode("a"), 0, *bpe.encode("b")]
    assert bpe.encode(text).tolist() == ids.tolist()


@pytest.mark.parametrize("is_special", [True, False])
def test_no_text_forges_an_added_separator(tmp_path, is_special):
    """`add_tokens` of transformers writes "special": false. Other added tokens are
    found in text, as the library finds them."""
    tree, size = json.loads(bpe_json()), len(json.loads(bpe_json())["model"]["vocab"])
    rule = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": True}
    for i, content in enumerate(["<|sep|>", "<|tab|>"]):
        token = {"id": size + i, "content": content} | rule
        tree["added_tokens"].append(token | {"special": is_special and i == 0})
    (tmp_path / "t.json").write_text(json.dumps(tree))
    tokenizer = load_tokenizer(str(tmp_path / "t.json"), "<|sep|>")
    assert tokenizer.separator == size
    text = "a<|sep|>b<|tab|>c"
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.decode(ids) == text
    assert size not in ids
    assert size + 1 in ids
    assert size in tokenizer.encode_special(text)


def test_an_end_that_is_the_separator_is_none(tmp_path):
    path = str(write_bpe(tmp_path / "t.json"))
    assert load_tokenizer(path, 9, 9).ends is None
    assert load_tokenizer(path, 9, "a").ends == (9, load_tokenizer(path, "a").separator)


def test_a_tokenizers_file_of_bytes_is_the_tokenizer_bytes(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(byte_tokenizer_file())
    tokenizer, plain = load_tokenizer(str(path), 0), load_tokenizer("bytes")
    every = "".join(map(chr, [*range(0x180), 0x2028, 0xFFFD, 0x1F642]))
    for text in (*TEXTS, every):
        np.testing.assert_array_equal(tokenizer.encode(text), plain.encode(text))
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.vocab_size, tokenizer.separator) == (256, 0)


def test_ids_are_those_of_transformers(repo):
    """Prompts may name special tokens, and then have the ids that transformers gives;
    texts without them have these ids anyway."""
    folder = repo / "tests" / "golden" / "tokenizer"
    tokenizer = load_tokenizer(str(folder / "tokenizer.json"), 0)
    expected = json.loads((folder / "expected.json").read_text())
    assert len(expected) >= 3
    for text, ids in expected.items():
        assert tokenizer.encode_special(text).tolist() == ids
        if "<|" not in text:
            assert tokenizer.encode(text).tolist() == ids


def test_settings_of_a_file_do_not_cut_pad_or_draw_ids(tmp_path, bpe):
    record = json.loads(bpe_json())
    record["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    record["padding"] = {
        "strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    record["model"]["dropout"] = 0.5
    path = tmp_path / "t.json"
    path.write_text(json.dumps(record))
    tokenizer = load_tokenizer(str(path))
    for text in TEXTS:
        assert tokenizer.encode(text).tolist() == bpe.encode(text).tolist()


def test_a_long_text_has_the_ids_of_the_whole(monkeypatch, bpe, tmp_path):
    for name, size in (("WINDOW", 300), ("OVERLAP", 64)):
        monkeypatch.setattr(long_text, name, size)
    for tokenizer in (bpe, load_metaspace(tmp_path), load_tokenizer("bytes")):
        text = "".join(TEXTS) * 50 + WORDS
        (whole,) = tokenizer.encode_texts([text])
        parts = list(tokenizer.encode_long([text]))
        assert np.concatenate(parts).tolist() == whole.tolist()
        assert tokenizer.decode(whole) == text


def test_a_separator_is_a_token_or_its_id(tmp_path):
    for separator in (0, 127, 192, 193, 245, 255):
        assert load_tokenizer("bytes", separator).separator == separator
    assert load_tokenizer("bytes", "\n").separator == 10
    assert load_tokenizer("bytes").separator == 0
    path = str(write_bpe(tmp_path / "t.json"))
    assert load_tokenizer(path, 9).separator == 9
    vocab = json.loads(bpe_json())["model"]["vocab"]
    assert load_tokenizer(path, "a").separator == vocab["a"]


@pytest.mark.parametrize("separator", ["ab", "é", "", 256, -1, 128, 194, 244])
def test_a_byte_that_is_part_of_text_separates_nothing(separator):
    with pytest.raises(ValueError, match=r"Data\.separator"):
        load_tokenizer("bytes", separator)


def test_a_tokenizer_larger_than_the_model_is_refused(bpe):
    load_tokenizer("bytes").check(256)
    with pytest.raises(ValueError, match=r"256 ids, but Model\.vocab_size=255"):
        load_tokenizer("bytes").check(255)
    bpe.check(bpe.vocab_size)
    with pytest.raises(ValueError, match=f"{bpe.vocab_size} ids"):
        bpe.check(bpe.vocab_size - 1)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"", {}, "not a Hugging Face tokenizers file"),
        (b"\xff\xfe", {}, "not a Hugging Face tokenizers file"),
        (b'{"model": 1}', {}, "not a Hugging Face tokenizers file"),
        (None, {}, r"cannot be read: .* or the path of a tokenizer\.json"),
        (LFS, {}, r"Git LFS .*: run `git lfs pull`"),
        ("bpe", {"separator": "<pad>"}, r"Data\.separator='<pad>' is not a token"),
        ("bpe", {"separator": 400_000}, r"Data\.separator=400000 is not an id"),
        ("bpe", {"separator": 9, "end": "no"}, r"Data\.end='no' is not a token"),
        ("bytes", {"end": 3}, r"Data\.end=3: the tokenizer 'bytes' has no"),
        ("no end", {}, r"set Data\.separator to"),
    ],
)
def test_what_is_no_tokenizer_or_token_is_refused(tmp_path, content, options, message):
    path = tmp_path / "t.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "bpe":
        write_bpe(path)
    elif content == "no end":
        path.write_text(bpe_json().replace("<|endoftext|>", "<other>"))
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer("bytes" if content == "bytes" else str(path), **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["bytes", "bpe", "metaspace"])
def test_a_stream_does_not_depend_on_how_ids_are_grouped(name, bpe, tmp_path):
    """Groups may cut a character, which is held back, and the text may contain
    U+FFFD."""
    tokenizers = {"bytes": lambda: load_tokenizer("bytes"), "bpe": lambda: bpe}
    tokenizer = tokenizers.get(name, lambda: load_metaspace(tmp_path))()
    for text in (WORDS, *TEXTS, "\ufffd".join(TEXTS) + "\ufffd" * 3):
        ids = tokenizer.encode(text).tolist()
        for size in (1, 3, 64):
            step = stream_decoder(tokenizer)
            parts = [step(ids[i : i + size]) for i in range(0, len(ids), size)]
            assert "".join(parts).count("\ufffd") <= text.count("\ufffd")
            assert "".join(parts) + step([], is_last=True) == text


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_stream_of_any_ids_is_their_text(name, bpe):
    """At most three bytes that may still become a character are held back."""
    tokenizer = bpe if name == "bpe" else load_tokenizer("bytes")
    for seed in range(10):
        ids = random.Random(seed).choices(range(tokenizer.vocab_size), k=60)
        step = stream_decoder(tokenizer)
        text = "".join(step([token]) for token in ids)
        whole = tokenizer.decode(ids)
        assert whole.startswith(text)
        assert len(whole) - len(text) <= 3
        assert text + step([], is_last=True) == whole


def test_a_stream_goes_on_behind_its_context(tmp_path):
    """The space before a word is lost only at the beginning of a text."""
    tokenizer = load_metaspace(tmp_path)
    prompt, ids = tokenizer.encode("hello world"), tokenizer.encode("the cat")
    step = stream_decoder(tokenizer, context=prompt)
    assert [step([token]) for token in ids] == [" the", " cat"]
    for size in range(ids.size + 1):
        step = stream_decoder(tokenizer, context=ids[:size])
        text = tokenizer.decode(ids[:size])
        assert text + step(ids[size:]) == "the cat"
    *begun, last = "数".encode()
    assert stream_decoder(load_tokenizer("bytes"), context=begun)([last]) == "数"
