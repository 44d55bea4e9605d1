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


def test_no_text_forges_a_separator(bpe):
    assert bpe.separator == 0
    ids = bpe.encode("a<|endoftext|>b")
    assert bpe.separator not in ids
    assert bpe.decode(ids) == "a<|endoftext|>b"


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
    with pytest.raises(ValueError, match=r"Data.end='nothing' is not a token"):
        load_tokenizer(path, 9, "nothing")
    with pytest.raises(ValueError, match=r"Data.end=3: the tokenizer 'bytes' has no"):
        load_tokenizer("bytes", None, 3)


def test_special_tokens_can_be_asked_for(bpe):
    ids = bpe.encode_special("a<|endoftext|>b")
    assert ids.tolist() == [*bpe.encode("a"), bpe.separator, *bpe.encode("b")]
    assert bpe.separator not in bpe.encode("a<|endoftext|>b")


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


def test_settings_of_a_file_do_not_cut_or_pad(tmp_path, bpe):
    record = json.loads(bpe_json())
    record["truncation"] = {
        "direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    record["padding"] = {
        "strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>",
    }  # fmt: skip
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(record))
    assert load_tokenizer(str(path)).encode(TEXTS[1]).tolist() == (
        bpe.encode(TEXTS[1]).tolist()
    )


def test_a_long_text_has_the_ids_of_the_whole(monkeypatch, bpe, tmp_path):
    for name, size in (("WINDOW", 300), ("OVERLAP", 64)):
        monkeypatch.setattr(long_text, name, size)
    for tokenizer in (bpe, load_metaspace(tmp_path), load_tokenizer("bytes")):
        text = "".join(TEXTS) * 50 + WORDS
        (whole,) = tokenizer.encode_texts([text])
        parts = list(tokenizer.encode_long([text]))
        assert np.concatenate(parts).tolist() == whole.tolist()
        assert tokenizer.decode(whole) == text


def test_dropout_draws_no_ids(tmp_path, bpe):
    tree = json.loads(bpe_json())
    tree["model"]["dropout"] = 0.5
    (tmp_path / "t.json").write_text(json.dumps(tree))
    tokenizer = load_tokenizer(str(tmp_path / "t.json"))
    for text in TEXTS:
        assert tokenizer.encode(text).tolist() == bpe.encode(text).tolist()


@pytest.mark.parametrize(
    ("separator", "expected"), [("\n", 10), (7, 7), (255, 255), (None, 0), ("\0", 0)]
)
def test_separator_of_bytes(separator, expected):
    assert load_tokenizer("bytes", separator).separator == expected


@pytest.mark.parametrize("separator", ["ab", "é", "", 256, -1, 0x80, 0xE2])
def test_a_byte_that_is_part_of_text_separates_nothing(separator):
    with pytest.raises(ValueError, match=r"Data\.separator"):
        load_tokenizer("bytes", separator)


def test_separator_of_a_file(tmp_path):
    path = str(write_bpe(tmp_path / "t.json"))
    assert load_tokenizer(path, 9).separator == 9
    assert load_tokenizer(path, "a").separator > 0
    for unknown in ("<pad>", 400_000, -1):
        with pytest.raises(ValueError, match=r"Data\.separator"):
            load_tokenizer(path, unknown)
    (tmp_path / "t.json").write_text(bpe_json().replace("<|endoftext|>", "<other>"))
    with pytest.raises(ValueError, match=r"set Data\.separator"):
        load_tokenizer(path)


def test_a_tokenizer_larger_than_the_model_is_refused(bpe):
    load_tokenizer("bytes").check(256)
    with pytest.raises(ValueError, match=r"256 ids, but Model\.vocab_size=255: use"):
        load_tokenizer("bytes").check(255)
    with pytest.raises(ValueError, match=f"{bpe.vocab_size} ids"):
        bpe.check(256)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1", b"\xff\xfe", b'{"model": 1}'])
def test_what_is_no_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a Hugging Face tokenizers file") as error:
        load_tokenizer(str(path))
    assert "\n" not in str(error.value)


def test_a_missing_tokenizer_is_refused(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match=r"tokenizer\.json"):
            load_tokenizer(str(path))


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_stream_is_the_text_and_never_half_a_character(name, bpe):
    tokenizer = bpe if name == "bpe" else load_tokenizer("bytes")
    for text in TEXTS:
        step = stream_decoder(tokenizer)
        parts = [step([token]) for token in tokenizer.encode(text)]
        assert "".join(parts) == text
        assert not any("\ufffd" in part for part in parts)


@pytest.mark.parametrize("name", ["bytes", "bpe"])
@pytest.mark.parametrize("seed", range(20))
def test_a_stream_of_any_ids_is_their_text(name, bpe, seed):
    """At most three bytes that may still become a character are held back."""
    tokenizer = bpe if name == "bpe" else load_tokenizer("bytes")
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


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
@pytest.mark.parametrize("name", ["bytes", "bpe", "metaspace"])
def test_a_stream_does_not_depend_on_how_ids_are_grouped(name, size, bpe, tmp_path):
    """Groups may cut a character, and the text may contain U+FFFD."""
    tokenizers = {"bytes": lambda: load_tokenizer("bytes"), "bpe": lambda: bpe}
    tokenizer = tokenizers.get(name, lambda: load_metaspace(tmp_path))()
    for text in (WORDS, "\ufffd".join(TEXTS) + "\ufffd" * 3):
        ids = tokenizer.encode(text).tolist()
        step = stream_decoder(tokenizer)
        parts = [step(ids[first : first + size]) for first in range(0, len(ids), size)]
        assert "".join(parts) + step([], is_last=True) == tokenizer.decode(ids) == text


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    with pytest.raises(ValueError, match=r"Git LFS .*: run `git lfs pull`"):
        load_tokenizer(str(path))
