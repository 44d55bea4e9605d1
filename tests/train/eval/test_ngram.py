"""The trigram baseline against its definition."""

import collections
import math

import numpy as np
import pytest

from moejax.config import Data
from train import data
from train.eval import ngram
from train.eval.ngram import trigram_loss


def loss_by_definition(train, bytes_bt):
    """Compute Witten and Bell's recursion byte by byte, with counts in dictionaries."""
    followed = collections.defaultdict(collections.Counter)
    for order in (1, 2, 3):
        for i in range(len(train) - order + 1):
            followed[train[i : i + order - 1]][train[i + order - 1]] += 1

    def prob(context, byte):
        lower = prob(context[1:], byte) if context else 1 / 256
        after = followed.get(context)
        if after is None:
            return lower
        return (after[byte] + len(after) * lower) / (after.total() + len(after))

    nats = [
        -math.log(prob(bytes(row[max(0, t - 2) : t]), row[t]))
        for row in bytes_bt.tolist()
        for t in range(1, len(row))
    ]
    return sum(nats) / len(nats)


@pytest.mark.parametrize("chunk", [7, 1 << 22])
def test_equals_the_definition(monkeypatch, chunk):
    monkeypatch.setattr(ngram, "_CHUNK", chunk)
    rng = np.random.default_rng(0)
    train = bytes(rng.choice([0, 1, 97, 255], size=20, p=[0.5, 0.3, 0.1, 0.1]))
    bytes_bt = rng.choice([0, 1, 97, 254, 255], size=(4, 9))
    actual = trigram_loss(np.frombuffer(train, np.uint8), bytes_bt)
    assert actual == pytest.approx(loss_by_definition(train, bytes_bt))


def test_probabilities_of_a_context_add_up_to_one():
    rng = np.random.default_rng(0)
    count_xv = rng.integers(0, 3, (5, 256)) * (np.arange(5) != 2)[:, None]
    total_x1 = count_xv.sum(1, keepdims=True)
    distinct_x1 = (count_xv > 0).sum(1, keepdims=True)
    lower_v = rng.dirichlet(np.ones(256))
    prob_xv = ngram._witten_bell(count_xv, total_x1, distinct_x1, lower_v)
    assert prob_xv.min() > 0
    assert prob_xv.sum(1) == pytest.approx(np.ones(5))
    assert prob_xv[2] == pytest.approx(lower_v)  # a context that never occurred


def test_pysrc_baseline():
    corpus = data.load_corpus(Data(), 256)
    held_out = data.HeldOut(corpus, Data(), batch_size=32, num_batches=8)
    bytes_bt = np.concatenate([held_out.rows(i, 0, 32).token_bt for i in range(8)])
    train_b = data.byte_sample(corpus, 2**26)
    assert train_b.dtype == np.uint8
    assert train_b.size == corpus.num_train_tokens
    assert round(trigram_loss(train_b, bytes_bt), 4) == 1.9658
