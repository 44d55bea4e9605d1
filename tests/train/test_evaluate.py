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
from tests.support.run_main import corpus, listing
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


def test_files_without_text_are_one_line(saved, tmp_path):
    (tmp_path / "none.md").touch()
    with pytest.raises(ValueError, match="hold no text"):
        measure(saved, "--files", tmp_path / "none.md")
    with pytest.raises(ValueError, match=r"none\.txt"):
        measure(saved, "--files", tmp_path / "none.txt")


def test_other_held_out_text_is_refused(saved):
    params = (f"Data.corpus = '{corpus(seed=1)}'",)
    with pytest.raises(ValueError, match=r"trained on other data: .*sha256"):
        measure(saved, params=params)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batches", "0"), "--batches=0 must be at least 1"),
        (
            ("--batches", "1", "--files", "x"),
            "--batches counts batches of held-out text",
        ),
        (("--gin_param", "Data.seq_len = 'a'"), "must be an int"),
    ],
)
def test_bad_input_is_one_line(saved, capsys, words, message):
    before = listing(saved)
    assert evaluate.main([str(saved), *words]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("error: ")
    assert (out, err.count("\n")) == ("", 1)
    assert listing(saved) == before


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


@pytest.mark.parametrize("seq_len", [5, 40])
def test_bytes_of_windows_leave_out_characters_that_an_edge_cuts(tokenizer, seq_len):
    """A window leaves out at most three bytes, a character that is cut at an end."""
    line, _ = make_line(tokenizer, [WORDS, *DOCUMENTS] * 3)
    num_windows = (line.num_tokens - 1) // seq_len
    start_w = np.arange(num_windows) * seq_len
    token_bt, position_bt = (
        read(line, start_w, seq_len + 1)
        for read in (token_streams.read_tokens, token_streams.read_positions)
    )
    end = int(start_w[-1]) + seq_len + 1
    whole = token_streams.make_token_stream(
        line.files[0].token_b[:end], line.start_d[line.start_d < end]
    )
    expected = evaluate.bytes_of_line(tokenizer, whole)
    count = evaluate.bytes_of_rows(tokenizer, Windows(token_bt, position_bt))
    assert abs(count - expected) <= 3 * num_windows
    if tokenizer is TOKENIZER:
        assert count == expected


def test_a_window_counts_its_own_characters(tmp_path):
    """A window counts the bytes of whole characters after its first token; characters
    that begin before the window or end after it are left out."""
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


def test_shades_stand_for_shares_of_the_mean():
    (line,) = held_out.format_expert_loads(np.array([[0, 10, 20, 30, 40]]))
    assert line == "  layer  0 | :+#@|  min 0.00  max 2.00"
