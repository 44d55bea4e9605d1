"""Test train/generate.py: tokens depend on neither batch nor mesh; printed texts, and
errors. tests/train/eval/test_greedy.py compares them with passes without a cache."""

import functools
import json
import subprocess
import sys

import numpy as np
import pytest

from tests.support.metaspace import load_metaspace
from tests.support.run_main import ROOT, environment, listing
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


def test_drawn_tokens_depend_on_neither_batch_nor_mesh(saved):
    """Likeliest tokens do not, either, also beyond the length of a training window."""
    greedy = decode_prompts(saved, Sampling())
    assert len({tuple(row) for row in greedy.tolist()}) == len(PROMPTS)
    np.testing.assert_array_equal(decode_prompts(saved, Sampling(), *ONE), greedy)
    how = Sampling(temperature=1.0, top_p=0.95, seed=3)
    together = decode_prompts(saved, how)
    np.testing.assert_array_equal(decode_prompts(saved, how, *ONE), together)
    alone = decode_prompts(saved, how, prompts=encode_prompts()[:1])
    np.testing.assert_array_equal(alone, together[:1])
    other = Sampling(temperature=1.0, top_p=0.95, seed=4)
    assert (decode_prompts(saved, other) != together).any()


def test_no_token_compiles_anything(saved):
    """Nothing is compiled after the second token, for other ways of drawing either."""
    decoder = load_decoder(saved)
    decode_prompts(saved, Sampling())
    sizes = decoder.prefill._cache_size(), decoder.step._cache_size()
    for how in (Sampling(), Sampling(0.7, 0.9, 5)):
        decode_prompts(saved, how)
    assert (decoder.prefill._cache_size(), decoder.step._cache_size()) == sizes


def run(*words, **options):
    """Run train/generate.py in a process of its own."""
    return subprocess.run(
        [sys.executable, str(ROOT / "train" / "generate.py"), *map(str, words)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


@pytest.mark.long
def test_the_program_streams_and_ends_with_a_record(saved, tmp_path):
    file = tmp_path / "a prompt.txt"
    file.write_text(PROMPTS[3])
    before = listing(saved)
    done = run(saved, "--prompt_file", file, "--max_tokens", MAX_TOKENS, "--json")
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()
    (text,) = json.loads(last)["texts"]
    expected = decode_prompts(saved, Sampling())[3]
    assert text["prompt"] == PROMPTS[3]
    assert text["num_tokens"] == MAX_TOKENS
    assert not text["is_ended"]
    whole = TOKENIZER.decode(expected)
    assert whole.startswith(text["text"])
    assert len(whole) <= len(text["text"]) + 3, "all but an unfinished character"
    assert done.stdout.startswith(PROMPTS[3])
    note, speed = done.stderr.splitlines()
    assert note.startswith(
        "note: up to 47 tokens, and the run has seen Data.seq_len=32"
    )
    assert speed.startswith(f"{MAX_TOKENS} tokens; the first after ")
    assert listing(saved) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max_tokens", "0"), "--max_tokens=0 must be at least 1"),
        (("--temperature", "-1"), "--temperature=-1.0 must be 0 or more"),
        (("--top_p", "0"), "--top_p=0.0 must be above 0, and at most 1"),
        (("--step", "4"), "has no checkpoint of step 4: it has 3, 7"),
    ],
)
def test_bad_input_is_one_line(saved, capsys, words, message):
    assert generate.main([str(saved), "--json", *words]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert json.loads(out.splitlines()[-1]) == {"error": line[7:], "exit_code": 2}


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
