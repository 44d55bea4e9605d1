"""The shuffle of windows: a permutation for every size and seed, always the same."""

import hashlib

import pytest

from train.data.permutation import permute


@pytest.mark.parametrize("size", [1, 3, 257, 2**16 + 1])
def test_every_value_occurs_once(size):
    seed = 2**32 - 1
    assert sorted(permute(i, size, seed) for i in range(size)) == list(range(size))


def test_values_stay_what_they_are():
    """Checkpoints hold a step number only. These are the values of grain 0.2.18."""
    text = ",".join(
        str(permute(i, size, seed))
        for size in (2, 100, 257, 1000, 65_536, 1_048_579, 2**31 - 5, 2**31 + 7)
        for seed in (0, 1, 1234567, 2**31, 2**32 - 1)
        for i in range(0, size, -(-size // 17))
    )
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert digest == "a59e4055e39cea99"
