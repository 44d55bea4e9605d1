"""train/evaluate.py: every token once, loads of those alone, the run's own figures."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from close import assert_close
from flax import nnx
from run_main import corpus, listing
from saved_run import save_run

from moejax.types import Windows
from train import evaluate, held_out
from train.data.tokenizer import load_tokenizer
from train.load import config_of, find, load
from train.prepare import prepare
from train.state import graph_of
from train.step import exact_layout, make_eval_step

pytestmark = pytest.mark.slow
TOKENIZER = load_tokenizer("bytes")
TEXTS = ("a text of more than one window, and of a part of another, long", "a", "short")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Windows of the run are of 32 tokens."""
    return save_run(tmp_path_factory.mktemp("saved"))


@pytest.fixture(scope="module")
def jsonl(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "some texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def measured(run_dir, *words, params=()):
    args = evaluate.parse([str(run_dir), *map(str, words)])
    return evaluate.measure(load(find(run_dir, args.step, params)), args)


def plain_figures(run_dir, line_b):
    """Nats of all tokens but the first, and loads of all but the last: window by window
    on one device, each as long as it is."""
    loaded = load(find(run_dir, params=("Mesh.data = 1", "Mesh.expert = 1")))
    cfg, graph = loaded.cfg, graph_of(loaded.cfg, loaded.mesh)
    nats, tokens_le = 0.0, 0
    for first in range(0, len(line_b) - 1, cfg.data.seq_len):
        window_t = line_b[first : first + cfg.data.seq_len + 1]
        position_t = np.arange(len(window_t))
        for edge in np.flatnonzero(window_t == TOKENIZER.separator):
            position_t[edge:] = np.arange(len(window_t) - edge)
        network = nnx.merge(graph, loaded.params, loaded.router_bias)
        hidden_btd, sums = network(
            window_t[None, :-1],
            position_t[None, :-1],
            loaded.placement,
            exact_layout(cfg, 1, len(window_t) - 1),
        )
        share_tv = jax.nn.log_softmax(hidden_btd[0] @ network.head().T)
        nats -= jnp.take_along_axis(share_tv, window_t[1:, None], axis=1).sum()
        tokens_le = tokens_le + np.sum(sums.tokens_e, axis=1)
    return nats, tokens_le


def test_every_token_of_a_file_is_predicted_once(saved, jsonl):
    """On eight devices, with windows that are not full and rows that are empty; loads
    are those of the text alone."""
    record = measured(saved, "--files", jsonl)
    line_b = np.frombuffer(b"".join(b"\0" + t.encode() for t in TEXTS), np.uint8)
    line_b = line_b.astype(np.int32)
    assert record["num_tokens"] == record["num_bytes"] == len(line_b) - 1
    nats, tokens_le = plain_figures(saved, line_b)
    assert_close(np.float32(record["loss"] * record["num_tokens"]), nats)
    np.testing.assert_array_equal(record["load_le"], tokens_le)
    assert_close(np.float64(record["perplexity"]), np.exp(np.float64(record["loss"])))
    assert math.isclose(record["bits_per_byte"] * math.log(2), record["loss"])


def test_another_mesh_has_the_same_figures(saved, jsonl):
    eight = measured(saved, "--files", jsonl)
    two = measured(saved, "--files", jsonl, params=("Mesh.data=1", "Mesh.expert=2"))
    assert_close(np.float32(two["loss"]), np.float32(eight["loss"]))
    assert two["load_le"] == eight["load_le"]


def test_held_out_text_is_what_the_run_evaluates(saved):
    """The windows of the run's own evaluation: its loss and its loads."""
    loaded = load(find(saved))
    job = prepare(config_of(loaded.meta["config"]))
    step = make_eval_step(job.model)
    expected = held_out.evaluate(
        step, loaded, job.placement, job.held_out, job.window_sharding
    )
    record = measured(saved)
    assert_close(np.float32(record["loss"]), np.float32(expected.loss))
    np.testing.assert_array_equal(record["load_le"], expected.tokens_le)


def test_files_without_two_tokens_are_one_line(saved, tmp_path):
    (tmp_path / "one.txt").write_text("a")
    with pytest.raises(ValueError, match="no token that follows another"):
        measured(saved, "--files", tmp_path / "one.txt")
    with pytest.raises(ValueError, match=r"none\.txt"):
        measured(saved, "--files", tmp_path / "none.txt")


def test_other_held_out_text_is_refused(saved):
    params = (f"Data.corpus = '{corpus(seed=1)}'",)
    with pytest.raises(ValueError, match=r"trained on other data: .*sha256"):
        measured(saved, params=params)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batches", "0"), "--batches=0 must be at least 1"),
        (("--batches", "1", "--files", "x"), "--batches is of held-out text"),
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


def test_bytes_are_those_of_the_text_and_one_for_each_separator():
    """The first token of a window is given."""
    line_b = np.frombuffer("xé\0a".encode(), np.uint8).astype(np.int32)
    for name in ("bytes", "of another name, and so by what its tokens decode to"):
        counted = evaluate.Bytes(dataclasses.replace(TOKENIZER, name=name))
        windows = Windows(line_b[None], np.zeros((1, 5), np.int32))
        assert counted.count(windows) is windows
        assert counted.num == len("é\0a".encode())


def test_shades_stand_for_shares_of_the_mean():
    (line,) = held_out.load_lines(np.array([[0, 10, 20, 30, 40]]))
    assert line == "  layer  0 | :+#@|  min 0.00  max 2.00"
