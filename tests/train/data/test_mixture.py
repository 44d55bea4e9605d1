"""Mixtures of corpora: exact shares, spread evenly, and direct access to any row."""

import numpy as np
import pytest

from moejax.config import Data
from tests.support.corpora import make_corpus, random_documents
from train.data import HeldOut, TrainBatches
from train.data.mixture import PERIOD, apportion, find_row, make_mixture

WEIGHTS = [(1.0,), (0.7, 0.2, 0.1), (1e6, 1.0, 3e5)]
CFG = Data(seq_len=8, held_out_every=4)


@pytest.fixture(scope="module")
def corpus():
    parts = [[random_documents(seed, 200)] for seed in range(3)]
    return make_corpus(*parts, held_out_every=4, weights=(6, 3, 1))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_period_has_the_shares_spread_evenly(weights):
    mixture = make_mixture(weights)
    expected_c = np.array(weights) / sum(weights) * PERIOD
    # No share is 0: the largest shares give one row each to those below one row.
    assert np.abs(mixture.share_c - expected_c).max() < len(weights)
    assert mixture.share_c.min() >= 1
    assert mixture.share_c.sum() == PERIOD
    for corpus, share in enumerate(mixture.share_c):
        is_own_j = mixture.corpus_j == corpus
        np.testing.assert_array_equal(mixture.item_j[is_own_j], np.arange(share))
        even_j = np.arange(1, PERIOD + 1) * share / PERIOD
        assert np.abs(np.cumsum(is_own_j) - even_j).max() <= max(1, len(weights) - 1)


def test_items_go_on_from_period_to_period():
    mixture = make_mixture((3, 1), period=4)
    pairs = [find_row(mixture, row) for row in range(12)]
    assert [item for corpus, item in pairs if corpus == 0] == list(range(9))
    assert [item for corpus, item in pairs if corpus == 1] == list(range(3))
    assert find_row(mixture, 4 * 10**12)[1] == 3 * 10**12


def test_shares_by_hand():
    assert apportion((0.5, 0.3, 0.2), 4).tolist() == [2, 1, 1]
    assert apportion((98, 1, 1), 10).tolist() == [8, 1, 1]
    assert apportion((98, 1, 1), 2).tolist() == [2, 0, 0]


def corpus_numbers(ids):
    return [int(name.split(":")[0].removeprefix("corpus")) for name in ids]


def test_batches_are_mixed_by_weight_and_each_corpus_has_epochs(corpus):
    batches = TrainBatches(corpus, CFG, batch_size=50)
    num_steps = 8
    ids = [name for i in range(num_steps) for name in batches.sample_ids(i, 0, 50)]
    assert len(set(ids)) == len(ids)
    counts = np.bincount(corpus_numbers(ids))
    assert np.abs(counts - np.array([0.6, 0.3, 0.1]) * len(ids)).max() <= 2
    for number, num_windows in enumerate(batches.num_windows):
        own = [name for name in ids if name.startswith(f"corpus{number}:")]
        for epoch in range(len(own) // num_windows):
            part = own[epoch * num_windows : (epoch + 1) * num_windows]
            assert set(part) == {
                f"corpus{number}:epoch{epoch}:window{i}" for i in range(num_windows)
            }


def test_a_corpus_gives_the_windows_that_it_gives_alone(corpus):
    batches = TrainBatches(corpus, CFG, batch_size=20)
    alone = make_corpus([random_documents(0, 200)], held_out_every=4)
    first = TrainBatches(alone, CFG, batch_size=1)
    rows = batches.rows(0, 0, 20)
    number = 0
    for name, token_t in zip(batches.sample_ids(0, 0, 20), rows.token_bt):
        if name.startswith("corpus0:"):  # the same as without the other corpora
            np.testing.assert_array_equal(first.rows(number, 0, 1).token_bt[0], token_t)
            assert first.sample_ids(number, 0, 1) == [name]
            number += 1
    assert number == 12


def test_two_corpora_of_the_same_text_are_shuffled_apart():
    documents = random_documents(0, 200)
    twice = make_corpus([documents], [documents], held_out_every=4)
    batches = TrainBatches(twice, CFG, batch_size=40)
    token_bt = batches.rows(0, 0, 40).token_bt
    assert len({row.tobytes() for row in token_bt}) > 35


def test_held_out_windows_are_shared_out(corpus):
    held_out = HeldOut(corpus, CFG, batch_size=10, num_batches=2)
    windows = [held_out.rows(i, 0, 10).token_bt for i in range(2)]
    expected = {0: 12, 1: 6, 2: 2}
    for number, source in enumerate(corpus.sources):
        count = expected[number]
        alone = make_corpus([random_documents(number, 200)], held_out_every=4)
        own = HeldOut(alone, CFG, batch_size=count, num_batches=1).rows(0, 0, count)
        mixed = {row.tobytes() for rows in windows for row in rows}
        assert {row.tobytes() for row in own.token_bt} <= mixed
        assert source.held_out.num_tokens == alone.num_held_out_tokens
