"""Test what is kept of a long run: bins of numbers, and items dropped evenly."""

import numpy as np
import pytest

from tests.support.close import assert_close
from tools.run_page.thin import BATCH, Binned, Bins, Thinned


def drawn(num_steps: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw rising steps with gaps, two numbers of each, some of them not finite, and
    which of them a step has."""
    rng = np.random.default_rng(seed)
    step_n = 1 + np.sort(rng.choice(2 * num_steps, num_steps, replace=False))
    number_nc = rng.normal(size=(num_steps, 2)) * 10.0 ** rng.integers(-3, 4)
    number_nc[rng.random(number_nc.shape) < 0.1] = np.nan
    number_nc[rng.random(number_nc.shape) < 0.05] = np.inf
    return step_n, number_nc, rng.random(number_nc.shape) < 0.8


def binned(step_n, number_nc, has_nc, max_bins: int, *, looks: bool = False) -> Binned:
    bins = Bins(number_nc.shape[1], max_bins)
    for step, number_c, has_c in zip(step_n, number_nc, has_nc):
        bins.take(int(step), number_c, has_c)
        if looks and step % 7 == 0:
            bins.binned()
    return bins.binned()


@pytest.mark.parametrize("num_steps", [1, 15, BATCH, 3 * BATCH + 11])
@pytest.mark.parametrize("max_bins", [2, 16, 200])
def test_bins_are_those_of_the_definition(num_steps, max_bins):
    step_n, number_nc, has_nc = drawn(num_steps)
    result = binned(step_n, number_nc, has_nc, max_bins)
    width = 1
    while (step_n[-1] - step_n[0]) // width >= max_bins:
        width *= 2
    assert result.width == width
    bin_n = (step_n - step_n[0]) // width
    assert len(result.step_b) == len(set(bin_n)) <= max_bins
    for b, index in enumerate(sorted(set(bin_n))):
        in_bin_n = bin_n == index
        assert result.step_b[b] == np.rint(step_n[in_bin_n].mean())
        for c in range(2):
            has_n = in_bin_n & has_nc[:, c]
            assert result.has_bc[b, c] == has_n.any()
            good = number_nc[has_n & np.isfinite(number_nc[:, c]), c]
            found = [x[b, c] for x in (result.min_bc, result.mean_bc, result.max_bc)]
            if good.size:
                expected = np.array([good.min(), good.mean(), good.max()])
                assert_close(np.array(found), expected)
                assert found[0] <= found[1] <= found[2]
            else:
                assert np.isnan(found).all()


def test_bins_have_the_mean_of_the_whole():
    step_n = np.arange(1, 1001)
    number_nc = np.random.default_rng(1).normal(size=(1000, 1))
    result = binned(step_n, number_nc, np.ones((1000, 1), bool), 64)
    assert result.width == 16
    num_b = np.bincount((step_n - 1) // 16)
    assert_close((result.mean_bc[:, 0] * num_b).sum() / 1000, number_nc.mean())
    assert result.min_bc.min() == number_nc.min()
    assert result.max_bc.max() == number_nc.max()


def test_looking_changes_nothing():
    parts = drawn(900, seed=2)
    seen, unseen = (binned(*parts, 32, looks=looks) for looks in (True, False))
    for name in ("step_b", "has_bc", "min_bc", "mean_bc", "max_bc"):
        assert np.array_equal(getattr(seen, name), getattr(unseen, name), True), name


def test_numbers_beyond_belief_are_left_out():
    bins = Bins(1, 2)
    for step, number in enumerate([1e308, -1e308, 3.0], 1):
        bins.take(step, [number], [True])
    result = bins.binned()
    assert result.mean_bc.ravel().tolist() == pytest.approx([np.nan, 3.0], nan_ok=True)


@pytest.mark.parametrize("num_items", [1, 2, 9, 10, 11, 500, 1023])
def test_items_are_dropped_evenly(num_items):
    made = []
    thinned = Thinned(10)
    for item in range(num_items):
        thinned.take(lambda item=item: made.append(item) or item)
    kept = thinned.items()
    assert (kept[0], kept[-1]) == (0, num_items - 1)
    assert len(kept) <= 11
    assert len(kept) >= min(num_items, 6)
    distances = set(np.diff(kept[:-1]).tolist())
    assert len(distances) <= 1
    assert len(made) <= 12 + 6 * np.log2(max(1, num_items / 5))


def test_items_of_any_size_leave_the_first_and_the_last():
    thinned = Thinned(10, size_of=lambda item: 100)
    for item in range(50):
        thinned.take(lambda item=item: item)
        assert thinned.items()[0] == 0
        assert thinned.items()[-1] == item
    assert len(thinned.items()) <= 3


def test_items_that_are_none_are_counted():
    thinned = Thinned(10)
    for item in (None, 1, None):
        thinned.take(lambda item=item: item)
    assert (thinned.items(), thinned.num_taken, thinned.num_bad) == ([1], 3, 2)
