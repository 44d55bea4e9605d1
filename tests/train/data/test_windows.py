"""Windows of one corpus: each once per epoch, the same for any cut of a batch."""

import dataclasses
import itertools

import numpy as np
import pytest

from moejax.config import Data
from tests.support.corpora import make_corpus, random_documents
from train import data
from train.data.token_streams import read_tokens

SEQ_LEN = 16
SMALL = Data(seq_len=SEQ_LEN, held_out_every=4)


@pytest.fixture(scope="module")
def documents():
    """Ids below 60000, random, so that the content of a window of 17 is unique."""
    return random_documents(0, 300, largest=60_000)


@pytest.fixture(scope="module")
def corpus(documents):
    return make_corpus([documents[:100], documents[100:]], held_out_every=4)


def all_tokens(stream):
    return read_tokens(stream, np.zeros(1, int), stream.num_tokens)[0]


def first_tokens(stream, rows_bt):
    """Return the index in the stream at which each row begins."""
    text_b = all_tokens(stream)
    windows = np.lib.stride_tricks.sliding_window_view(text_b, rows_bt.shape[1])
    start_by_content = {window.tobytes(): start for start, window in enumerate(windows)}
    assert len(start_by_content) == len(windows)
    return np.array([start_by_content[row.tobytes()] for row in rows_bt])


def document_starts(documents, is_in):
    sizes = [d.size for i, d in enumerate(documents) if is_in(i)]
    return set(np.cumsum([0, *sizes])[:-1].tolist())


def check_positions(windows, starts, edges):
    """Compare with the definition, from the starts of windows and documents."""
    for start, position_t in zip(starts, windows.position_bt):
        expected, since = [], 0
        for at in range(start, start + position_t.size):
            since = 0 if at == start or at in edges else since + 1
            expected.append(since)
        assert position_t.tolist() == expected


def test_every_epoch_visits_each_window_once_with_its_own_phase(corpus, documents):
    batches = data.TrainBatches(corpus, SMALL, batch_size=1)
    (num_windows,) = batches.num_windows
    stream = corpus.sources[0].train
    assert num_windows == (stream.num_tokens - 1) // SEQ_LEN - 1
    edges = document_starts(documents, lambda i: i % 4 != 3)
    phases, orders = set(), set()
    for epoch in range(3):
        steps = range(epoch * num_windows, (epoch + 1) * num_windows)
        rows = [batches.rows(step, 0, 1) for step in steps]
        starts = first_tokens(stream, np.concatenate([row.token_bt for row in rows]))
        phase = int(starts.min())
        assert phase + num_windows * SEQ_LEN < stream.num_tokens
        expected = phase + SEQ_LEN * np.arange(num_windows)
        np.testing.assert_array_equal(np.sort(starts), expected)
        for row, start in zip(rows, starts):
            check_positions(row, [start], edges)
        ids = [batches.sample_ids(step, 0, 1)[0] for step in steps]
        named = [f"corpus0:epoch{epoch}:window{w}" for w in (starts - phase) // SEQ_LEN]
        assert ids == named
        phases.add(phase)
        orders.add(tuple(starts - phase))
    assert len(phases) == len(orders) == 3


def test_an_epoch_leaves_tokens_of_a_window_for_its_phase():
    cfg = dataclasses.replace(SMALL, seq_len=4)
    for num_tokens, num_windows in ((5, 1), (12, 1), (13, 2), (16, 2), (17, 3)):
        corpus = make_corpus([[np.arange(2 * num_tokens)]], held_out_every=2)
        assert data.TrainBatches(corpus, cfg, 1).num_windows == [num_windows]


def test_joined_documents_have_the_positions_of_the_window(corpus):
    cfg = dataclasses.replace(SMALL, documents="joined")
    joined = data.TrainBatches(corpus, cfg, batch_size=8).rows(3, 0, 8)
    separate = data.TrainBatches(corpus, SMALL, batch_size=8).rows(3, 0, 8)
    np.testing.assert_array_equal(joined.token_bt, separate.token_bt)
    assert (joined.position_bt == np.arange(SEQ_LEN + 1)).all()
    assert (joined.position_bt != separate.position_bt).any()


def test_a_batch_depends_on_seed_and_step_alone(corpus):
    """Batches of 32 from fewer than 100 windows: many batches span two epochs."""
    forward = data.TrainBatches(corpus, SMALL, batch_size=32)
    backward = data.TrainBatches(corpus, SMALL, batch_size=32)
    steps = [0, 2, 10**9]
    first = {step: forward.rows(step, 0, 32) for step in steps}
    second = {step: backward.rows(step, 0, 32) for step in reversed(steps)}
    for step in steps:
        assert first[step].token_bt.shape == (32, SEQ_LEN + 1)
        assert first[step].token_bt.dtype == first[step].position_bt.dtype == np.int32
        np.testing.assert_array_equal(first[step].token_bt, second[step].token_bt)
        np.testing.assert_array_equal(first[step].position_bt, second[step].position_bt)
    assert len({rows.token_bt.tobytes() for rows in first.values()}) == len(steps)
    cfg = dataclasses.replace(SMALL, seed=1)
    other = data.TrainBatches(corpus, cfg, batch_size=32)
    assert not np.array_equal(other.rows(0, 0, 32).token_bt, first[0].token_bt)


def test_parts_of_a_batch_make_the_batch(corpus):
    cuts = (0, 1, 1, 7, 8)
    train = data.TrainBatches(corpus, SMALL, batch_size=8)
    held_out = data.HeldOut(corpus, SMALL, batch_size=8, num_batches=2)
    for batches, step in ((train, 0), (train, 7), (held_out, 0), (held_out, 1)):
        parts = [batches.rows(step, *cut) for cut in itertools.pairwise(cuts)]
        whole = batches.rows(step, 0, 8)
        for name in ("token_bt", "position_bt"):
            joint = np.concatenate([getattr(part, name) for part in parts])
            np.testing.assert_array_equal(joint, getattr(whole, name))
    ids = [train.sample_ids(7, *cut) for cut in itertools.pairwise(cuts)]
    assert list(itertools.chain(*ids)) == train.sample_ids(7, 0, 8)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 5)])
def test_rows_outside_the_batch_are_refused(corpus, start, stop):
    train = data.TrainBatches(corpus, SMALL, 4)
    held_out = data.HeldOut(corpus, SMALL, 4, 2)
    for read in (train.rows, train.sample_ids, held_out.rows):
        with pytest.raises(AssertionError):
            read(0, start, stop)
    with pytest.raises(AssertionError):
        held_out.rows(2, 0, 4)


@pytest.mark.parametrize(("batch_size", "num_batches"), [(4, 2), (1, 17)])
def test_held_out_windows_are_disjoint_and_spread(
    corpus, documents, batch_size, num_batches
):
    held_out = data.HeldOut(corpus, SMALL, batch_size, num_batches)
    rows = [held_out.rows(i, 0, batch_size) for i in range(num_batches)]
    stream = corpus.sources[0].held_out
    starts = first_tokens(stream, np.concatenate([row.token_bt for row in rows]))
    gaps = np.diff([*starts, stream.num_tokens])
    assert starts[0] == 0
    assert gaps.min() >= SEQ_LEN + 1
    assert gaps.max() - gaps.min() <= 1
    edges = document_starts(documents, lambda i: i % 4 == 3)
    for i, row in enumerate(rows):
        check_positions(row, starts[i * batch_size : (i + 1) * batch_size], edges)


def test_too_few_held_out_windows_are_counted():
    corpus = make_corpus([[np.arange(301)]], held_out_every=2)
    message = (
        r"eval_batches=3 .* need 18 .* 150 held-out tokens of 'part0' have 8 of .*: low"
    )
    with pytest.raises(ValueError, match=message):
        data.HeldOut(corpus, SMALL, batch_size=6, num_batches=3)


def test_identity_names_each_difference(corpus):
    saved = data.identity(corpus, SMALL, batch_size=8)
    data.check_identity(saved, dict(saved))
    data.check_identity(saved | {"name": "before it was moved"}, saved)
    other = dataclasses.replace(SMALL, seed=5, held_out_every=9, documents="joined")
    with pytest.raises(ValueError, match="other data") as error:
        data.check_identity(saved, data.identity(corpus, other, batch_size=4))
    message = str(error.value)
    for part in (
        "seed was 0, is 5", "batch_size was 8, is 4", "held_out_every was 4, is 9",
        "documents was separate, is joined",
    ):  # fmt: skip
        assert part in message
    assert "sha256" not in message
    assert "\n" not in message
    with pytest.raises(ValueError, match="seq_len was None, is 16"):
        data.check_identity({k: v for k, v in saved.items() if k != "seq_len"}, saved)
