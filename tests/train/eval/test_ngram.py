"""The trigram baseline against its definition."""

import collections
import math

import numpy as np
import pytest

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
