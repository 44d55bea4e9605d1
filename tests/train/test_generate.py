"""Test train/generate.py: tokens depend on neither batch nor mesh; printed texts.
tests/train/eval/test_greedy.py compares tokens with passes without a cache."""

import functools

import numpy as np
import pytest

from tests.support.metaspace import load_metaspace
from tests.support.saved_run import saved_run
from train import generate
from train.checkpoint.load import find_checkpoints, load_model
from train.data.tokenizer import load_tokenizer, stream_decoder
from train.eval.decoding import Sampling, decode, make_decoder

pytestmark = pytest.mark.slow
PROMPTS = ("the ", "a", "", "nothing here is as long as this is")
MAX_TOKENS = 12
TOKENIZER = load_tokenizer("bytes")
ONE = ("Mesh.data = 1", "Mesh.expert = 1")


@pytest.fixture(scope="module")
def saved():
    """The directory of a saved run whose windows have 32 tokens, fewer than the longest
    prompt and its continuation."""
    return saved_run()


def encode_prompts():
    """Return the token ids of each prompt."""
    return [generate.encode(TOKENIZER, prompt) for prompt in PROMPTS]


@functools.cache
def load_decoder(run_dir, params=()):
    """Return a decoder of the saved run with these parameters."""
    loaded = load_model(find_checkpoints(run_dir, params=params))
    return make_decoder(loaded, TOKENIZER.vocab_size, TOKENIZER.separator)


def decode_prompts(run_dir, how, *params, prompts=None):
    """Return the tokens that follow the prompts, [b, t]."""
    decoder = load_decoder(run_dir, params)
    tokens = decode(decoder, prompts or encode_prompts(), MAX_TOKENS, how)
    return np.stack(list(tokens), axis=1)


def test_tokens_depend_on_neither_batch_nor_mesh(saved):
    """Neither the likeliest tokens do nor drawn ones, also beyond the length of a
    training window. Another way of drawing compiles nothing."""
    decoder, sizes, seen = load_decoder(saved), [], []
    for how in (
        Sampling(),
        Sampling(temperature=1.0, top_p=0.95, seed=3),
        Sampling(temperature=1.0, top_p=0.95, seed=4),
    ):
        together = decode_prompts(saved, how)
        alone = decode_prompts(saved, how, *ONE, prompts=encode_prompts()[:1])
        np.testing.assert_array_equal(alone, together[:1])
        seen.append(together.tolist())
        sizes.append((decoder.prefill._cache_size(), decoder.step._cache_size()))
    assert len(set(map(tuple, seen[0]))) == len(PROMPTS)
    assert seen[0] != seen[1] != seen[2]
    assert len(set(sizes)) == 1


def test_prompts_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff")
    for path, message in (("bytes", "byte 0 is not UTF-8"), ("none", "No such file")):
        args = generate.parse(["run", "--prompt_file", str(tmp_path / path)])
        with pytest.raises(ValueError, match=message):
            generate.load_prompts(args)
    with pytest.raises(ValueError, match="which separates documents"):
        generate.encode(TOKENIZER, "a\0b")


def test_a_text_ends_at_the_separator():
    """The separator and the tokens after it are not shown."""
    text = generate.Continuation("p", lambda ids: chr(*ids))
    ends = frozenset((0, 3))
    assert [text.add(ord(c), ends) for c in "ab"] == ["a", "b"]
    assert text.add(0, ends) == ""
    assert (text.text, text.num_tokens, text.is_ended) == ("ab", 3, True)


def test_a_text_goes_on_behind_its_prompt(tmp_path):
    """The space between prompt and continuation is kept, although the decoder strips a
    space at the beginning."""
    tokenizer = load_metaspace(tmp_path)
    for prompt, expected in (("hello world", "hello world the cat"), ("", "the cat")):
        text = generate.new_continuation(
            tokenizer, prompt, generate.encode(tokenizer, prompt)
        )
        for token in tokenizer.encode("the cat").tolist():
            text.add(token, frozenset([tokenizer.separator]))
        assert text.prompt + text.text == expected


def test_control_characters_do_not_reach_the_terminal(capsys):
    texts = [generate.Continuation("a\x1b[2J\n", stream_decoder(TOKENIZER))]
    screen = generate.Screen(texts)
    screen.add(0, "\x07b\té", is_last=True)
    screen.end()
    assert capsys.readouterr().out == "a\ufffd[2J\n\ufffdb\té\n"
