"""Long texts: encoded in parts, they have the ids that they have as a whole."""

import functools
import itertools
import json
import random

import numpy as np
import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from train.data import long_text
from train.data.long_text import (
    UndividedError,
    cut_patterns,
    encode_long,
    read_patterns,
)

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
NORMALIZERS = {
    "none": lambda: None,
    "prepend": lambda: normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    ),
    "nfkc": lambda: normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    ),
    "bert": normalizers.BertNormalizer,
    "strip": normalizers.Strip,
    "tags": lambda: normalizers.Replace(Regex("<[^>]*>"), "!"),
    "quotes": lambda: normalizers.Replace(Regex('"[\\s\\S]*?"'), "!"),
}
PRE_TOKENIZERS = {
    "none": lambda: None,
    "metaspace": pre_tokenizers.Metaspace,
    "metaspace first": lambda: pre_tokenizers.Metaspace(prepend_scheme="first"),
    "metaspace whole": lambda: pre_tokenizers.Metaspace(split=False),
    "bytes": lambda: pre_tokenizers.ByteLevel(add_prefix_space=True),
    "bytes whole": lambda: pre_tokenizers.ByteLevel(use_regex=False),
    "llama": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
    "digits": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
    ),
    "bert": pre_tokenizers.BertPreTokenizer,
    "scripts": pre_tokenizers.UnicodeScripts,
    "fixed": lambda: pre_tokenizers.FixedLength(7),
    "tags": lambda: pre_tokenizers.Split(Regex("<[^>]*>"), "isolated"),
}
MODELS = {
    "bpe": (models.BPE, trainers.BpeTrainer),
    "unigram": (models.Unigram, trainers.UnigramTrainer),
    "wordpiece": (models.WordPiece, trainers.WordPieceTrainer),
    "wordlevel": (models.WordLevel, trainers.WordLevelTrainer),
}
PIECES = (
    "the cat sat on the mat", "größer als", "数据并行、专家并行。", "1234567", "0" * 9,
    "  ", "\n", "\n\n", " ", " ", ", ", ".\n", "it's ", "\t", "aaaa", "ab" * 9, "<b>",
    "</b>", '"', "e\u0301", "\U0001f600", "<tok>", " <tok> ", "naïve ﬁne ", "HELLO",
    "▁x ",
)  # fmt: skip


def a_text(rng: random.Random, num_chars: int) -> str:
    """Return a random text in which some pieces are repeated many times."""
    text, pieces = "", rng.sample(PIECES, rng.randint(4, len(PIECES)))
    while len(text) < num_chars:
        times = rng.randint(20, 60) if rng.random() < 0.02 else 1
        text += rng.choice(pieces) * times
    return text


@functools.cache
def a_tokenizer(normalizer: str, pre_tokenizer: str, model: str, seed: int):
    """Return a tokenizer that is trained on random text, with an added token."""
    rng = random.Random(seed)
    make, trainer = MODELS[model]
    encoder = Tokenizer(make() if model == "unigram" else make(unk_token="<unk>"))
    for name, part in (
        ("normalizer", NORMALIZERS[normalizer]()),
        ("pre_tokenizer", PRE_TOKENIZERS[pre_tokenizer]()),
    ):
        if part is not None:
            setattr(encoder, name, part)
    options = {"vocab_size": 400, "special_tokens": ["<unk>"], "show_progress": False}
    if model == "unigram":
        options["unk_token"] = "<unk>"
    encoder.train_from_iterator(
        [a_text(rng, 60) for _ in range(100)], trainer(**options)
    )
    flags = {name: rng.random() < 0.5 for name in ("lstrip", "rstrip", "normalized")}
    encoder.add_tokens([AddedToken("<tok>", **flags)])
    return encoder


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(long_text, "WINDOW", 600)
    monkeypatch.setattr(long_text, "OVERLAP", 256)


def in_parts(encoder: Tokenizer, text: str, rng: random.Random) -> list[np.ndarray]:
    """Return the ids of each part of a text that comes in random blocks."""
    edges = sorted(rng.choices(range(len(text) + 1), k=5))
    blocks = [text[a:b] for a, b in itertools.pairwise([0, *edges, len(text)])]
    return list(encode_long(encoder, cut_patterns(encoder.to_str()), blocks))


CASES = [
    (seed, n, p, m)
    for seed, (n, p, m) in enumerate(
        itertools.product(NORMALIZERS, PRE_TOKENIZERS, MODELS)
    )
]


@pytest.mark.parametrize(("seed", "normalizer", "pre_tokenizer", "model"), CASES[::7])
def test_parts_have_the_ids_of_the_whole(small, seed, normalizer, pre_tokenizer, model):
    encoder, rng = (
        a_tokenizer(normalizer, pre_tokenizer, model, seed),
        random.Random(seed),
    )
    for size in (0, 300, 5_000, 9_000):
        text = a_text(rng, size)
        parts = in_parts(encoder, text, rng)
        whole = encoder.encode(text, add_special_tokens=False).ids
        assert np.concatenate(parts).tolist() == whole


def test_most_tokenizers_cut_a_text(small):
    """Tokenizers of published models cut a text at nearly every overlap."""
    rng = random.Random(0)
    text = "\n".join(" ".join(rng.sample(PIECES[:3], 2)) for _ in range(600))
    for normalizer, pre_tokenizer, model in (
        ("none", "bytes", "bpe"),
        ("none", "llama", "bpe"),
        ("prepend", "none", "bpe"),
        ("nfkc", "metaspace", "unigram"),
        ("bert", "bert", "wordpiece"),
    ):
        encoder = a_tokenizer(normalizer, pre_tokenizer, model, 0)
        assert len(in_parts(encoder, text, rng)) >= len(text) // 900


def test_what_may_look_far_is_encoded_whole(small, monkeypatch):
    """Neither window sees both ends of the quotation, so that they agree within it."""
    encoder = a_tokenizer("quotes", "metaspace", "bpe", 0)
    text = '"' + "the cat sat on the mat " * 100 + '" and so on'
    whole = encoder.encode(text, add_special_tokens=False).ids
    assert np.concatenate(list(encode_long(encoder, [], [text]))).tolist() != whole
    (ids,) = in_parts(encoder, text, random.Random(0))
    assert ids.tolist() == whole
    monkeypatch.setattr(long_text, "MAX_WINDOW", 2_000)
    with pytest.raises(UndividedError, match="divide it into several documents"):
        in_parts(encoder, text, random.Random(0))


@pytest.mark.parametrize(
    ("regex", "text", "stops"),
    [
        (LLAMA_3, "the cat sat on the mat.\n1 2\n", True),
        (LLAMA_3, "thecatsatonthemat", False),
        (LLAMA_3, " " * 20, False),
        ("<[^>]*>", "the cat sat on the mat", False),
        ("<[^>]*>", "a > b > c > d", True),
        ("(?i:a)+", "AaAaAa", False),
        ("(?i:a)+", "AaAaBa", True),
        ("(ab|c*)+", "abcab", False),
        ("(ab|c*)+", "abdab", True),
        ('"[\\s\\S]*?"', 'a "b" c', False),
        ("a{2,5}", "aaaaa", False),
        ("a{2,5}", "aaaaaa", True),
    ],
)
def test_how_far_an_expression_reads(regex, text, stops):
    assert all(pattern.stops_in(text) for pattern in read_patterns(regex)) == stops


@pytest.mark.parametrize("regex", [r"\Aa", r"(a)\1", r"[[:alpha:]]+", r"a{1,2}+", "("])
def test_expressions_that_are_not_understood_cut_nothing(regex):
    tree = {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": regex}}}
    assert cut_patterns(json.dumps(tree)) is None
    assert cut_patterns('{"pre_tokenizer": {"type": "NewOne"}}') is None
    assert cut_patterns("{}") == []
