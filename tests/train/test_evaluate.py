"""Test train/evaluate.py: each token of a text is predicted once, loads are those of
the text alone, and held-out text has the run's own figures."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.moe.types import Windows
from tests.support.close import assert_close
from tests.support.data_files import TEXTS as DOCUMENTS
from tests.support.data_files import write_bpe
from tests.support.metaspace import WORDS, load_metaspace
from tests.support.run_main import corpus
from tests.support.saved_run import saved_run
from train import evaluate
from train.checkpoint.load import find_checkpoints, load_model
from train.config.names import config_from_record
from train.data import token_streams
from train.data.tokenizer import load_tokenizer
from train.eval import held_out
from train.job import prepare
from train.step.state import model_graph
from train.step.step import make_eval_step

pytestmark = pytest.mark.slow
TOKENIZER = load_tokenizer("bytes")
TEXTS = ("a text of more than one window, and of a part of another, long", "a", "short")


@pytest.fixture(scope="module")
def saved():
    """The directory of a saved run whose windows have 32 tokens."""
    return saved_run()


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    """A file of JSON lines with TEXTS."""
    path = tmp_path_factory.mktemp("files") / "some texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def measure(run_dir, *words, params=()):
    """Return the record of train/evaluate.py with these arguments."""
    args = evaluate.parse([str(run_dir), *map(str, words)])
    return evaluate.measure(
        load_model(find_checkpoints(run_dir, args.step, params)), args
    )


def plain_figures(run_dir, line_b):
    """Return the nats of all tokens but the first and the loads of all but the last.

    The windows are computed one by one on one device, without padding.
    """
    loaded = load_model(
        find_checkpoints(run_dir, params=("Mesh.data = 1", "Mesh.expert = 1"))
    )
    graph, seq_len = model_graph(loaded.run), loaded.cfg.data.seq_len
    weights = loaded.params, loaded.router_bias, loaded.placement

    @jax.jit
    def window_figures(weights, token_t, position_t):
        *params, placement = weights
        network = nnx.merge(graph, *params)
        layout = loaded.run.exact_layout(1, len(token_t))
        hidden_btd, sums = network(token_t[None], position_t[None], placement, layout)
        share_tv = jax.nn.log_softmax(hidden_btd[0] @ network.whole_head().T)
        return share_tv, sums.tokens_e.sum(axis=1)

    nats, tokens_le = 0.0, 0
    for first in range(0, len(line_b) - 1, seq_len):
        window_t = line_b[first : first + seq_len + 1]
        position_t = np.arange(len(window_t))
        for edge in np.flatnonzero(window_t == TOKENIZER.separator):
            position_t[edge:] = np.arange(len(window_t) - edge)
        share_tv, more_le = window_figures(weights, window_t[:-1], position_t[:-1])
        nats -= jnp.take_along_axis(share_tv, window_t[1:, None], axis=1).sum()
        tokens_le = tokens_le + more_le
    return nats, tokens_le


def test_every_token_of_a_file_is_predicted_once(saved, jsonl):
    """Loss and loads on eight devices equal the plain figures, with windows that are
    not full and rows that are empty."""
    record = measure(saved, "--files", jsonl)
    line_b = np.frombuffer(b"".join(b"\0" + t.encode() for t in TEXTS), np.uint8)
    line_b = line_b.astype(np.int32)
    assert record["num_tokens"] == record["num_bytes"] == len(line_b) - 1
    nats, tokens_le = plain_figures(saved, line_b)
    assert_close(np.float32(record["loss"] * record["num_tokens"]), nats)
    np.testing.assert_array_equal(record["load_le"], tokens_le)
    assert_close(np.float64(record["perplexity"]), np.exp(np.float64(record["loss"])))
    assert math.isclose(record["bits_per_byte"] * math.log(2), record["loss"])


def test_held_out_text_is_what_the_run_evaluates(saved):
    """Loss and loads of held-out text equal those of the run's own evaluation."""
    loaded = load_model(find_checkpoints(saved))
    job = prepare(config_from_record(loaded.meta["config"]))
    step = make_eval_step(job.model)
    expected = held_out.evaluate(
        step, loaded, loaded.placement, job.held_out, job.window_sharding
    )
    record = measure(saved)
    assert_close(np.float32(record["loss"]), np.float32(expected.loss))
    np.testing.assert_array_equal(record["load_le"], expected.tokens_le)


@pytest.mark.parametrize(
    ("words", "param", "match"),
    [
        (("--files", "{folder}/none.md"), "", "hold no text"),
        (("--files", "{folder}/none.txt"), "", r"none\.txt"),
        ((), "Data.corpus = '{other}'", r"trained on other data: .*sha256"),
    ],
)
def test_text_that_cannot_be_evaluated_is_refused(saved, tmp_path, words, param, match):
    (tmp_path / "none.md").touch()
    params = [param.format(other=corpus(seed=1))] if param else []
    with pytest.raises(ValueError, match=match):
        measure(saved, *(word.format(folder=tmp_path) for word in words), params=params)


def make_line(tokenizer, texts):
    """Return the documents as a line, and the number of bytes that are predicted: those
    of the texts and of all separators but the first."""
    documents = [np.append(tokenizer.separator, tokenizer.encode(t)) for t in texts]
    start_d = np.cumsum([0, *map(len, documents[:-1])])
    num_bytes = sum(len(text.encode()) + 1 for text in texts) - 1
    return token_streams.make_token_stream(
        np.concatenate(documents).astype(np.int32), start_d
    ), num_bytes


@pytest.fixture(params=["bytes", "bpe", "metaspace"])
def tokenizer(request, tmp_path):
    if request.param == "metaspace":
        return load_metaspace(tmp_path)
    if request.param == "bpe":
        return load_tokenizer(str(write_bpe(tmp_path / "t.json")))
    return TOKENIZER


@pytest.mark.parametrize("size", [1, 3, 2**16])
def test_bytes_of_files_are_those_of_the_texts(tokenizer, size, monkeypatch):
    """The number of bytes does not depend on how many tokens are decoded at a time."""
    monkeypatch.setattr(evaluate, "PART_TOKENS", size)
    texts = [WORDS, *DOCUMENTS, "\ufffd" * 5, "a", WORDS * 9]
    line, num_bytes = make_line(tokenizer, texts)
    assert evaluate.bytes_of_line(tokenizer, line) == num_bytes


def test_a_window_counts_its_own_characters(tmp_path):
    """A window counts the bytes of whole characters after its first token, and one for
    each separator; characters that begin before the window or end after it are left
    out."""
    tokenizer = load_metaspace(tmp_path)
    ids = tokenizer.encode("world the 数据 cat").tolist()
    for first, stop, text in (
        (0, len(ids), " the 数据 cat"),
        (0, 2, " the"),
        (2, 5, ""),
        (2, 6, "数"),
        (3, 6, "数"),
        (4, 5, ""),
        (4, 6, ""),
        (4, 8, ""),
        (4, 9, "据"),
        (4, len(ids), "据 cat"),
    ):
        rows = np.array([ids[first:stop]]), np.arange(1, stop - first + 1)[None]
        count = evaluate.bytes_of_rows(tokenizer, Windows(*rows))
        assert count == len(text.encode()), (first, stop)
    line, num_bytes = make_line(tokenizer, ["world the cat", "数据", ""])
    width = line.num_tokens
    rows = (
        read(line, np.zeros(1, int), width)
        for read in (token_streams.read_tokens, token_streams.read_positions)
    )
    assert evaluate.bytes_of_rows(tokenizer, Windows(*rows)) == num_bytes
    rows = np.arange(10).reshape(2, 5), np.arange(10).reshape(2, 5)
    assert evaluate.bytes_of_rows(TOKENIZER, Windows(*rows)) == 8
