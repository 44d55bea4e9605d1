"""Compare splits on a device with the planner's model in floats, and test laws that
counts obey."""

import numpy as np
import pytest

from moejax.moe.split.divide import SPLITS
from moejax.perf.traffic import rows_by_slot
from tests.support.split_cases import CASES, E, W, make_counts, quotas

STATIC = [split for split in SPLITS if split not in ("top_up", "dynamic", "shadow")]
"""Splits that do not change the plan's replicas."""


@pytest.mark.parametrize("split", ["even", "local_first"])
def test_device_rounds_the_shares_of_the_planner(split):
    """Each source's quota is the planner's share, rounded up or down."""
    for row_p, counts_we in CASES:
        quota_wp = quotas(counts_we, row_p, split)
        share_wp = rows_by_slot(counts_we.astype(float), row_p, W, split)
        assert np.all(np.abs(quota_wp - share_wp) < 1)
        assert np.all(quota_wp >= 0)


@pytest.mark.parametrize("split", STATIC)
def test_no_row_is_lost_and_none_invented(split):
    """An expert's quotas sum to each source's count; empty slots get none."""
    for row_p, counts_we in CASES:
        quota_wp = quotas(counts_we, row_p, split)
        for expert in range(E):
            sums_w = quota_wp[:, row_p == expert].sum(axis=1)
            assert np.array_equal(sums_w, counts_we[:, expert])
        assert not quota_wp[:, row_p < 0].any()


def test_even_is_even_over_all_sources_too():
    """Replicas of an expert differ by at most one row in total, so that the roundings
    of several sources do not add up."""
    for row_p, counts_we in CASES:
        quota_wp = quotas(counts_we, row_p, "even")
        for expert in range(E):
            quota_wr = quota_wp[:, row_p == expert]
            assert np.ptp(quota_wr, axis=1).max() <= 1
            assert np.ptp(quota_wr.sum(axis=0)) <= 1


def test_local_rows_stay_and_the_others_are_shared_evenly():
    device_p = np.arange(len(CASES[0][0])) // 5
    for row_p, counts_we in CASES:
        quota_wp = quotas(counts_we, row_p, "local_first")
        for expert in range(E):
            slots = np.flatnonzero(row_p == expert)
            is_here_wr = device_p[slots] == np.arange(W)[:, None]
            has_w = is_here_wr.any(axis=1)
            quota_wr = quota_wp[:, slots]
            assert not quota_wr[has_w][~is_here_wr[has_w]].any()
            for source in np.flatnonzero(has_w):
                assert np.ptp(quota_wr[source, is_here_wr[source]]) <= 1
            if not has_w.all():
                assert np.ptp(quota_wr[~has_w].sum(axis=0)) <= 1


def test_without_replicas_all_splits_are_the_plan():
    rng, counts_we = np.random.default_rng(0), make_counts(1)
    slots_p = np.r_[np.arange(E), np.full(5 * W - E, -1)].astype(np.int32)
    row_p = rng.permutation(slots_p)
    expected_wp = np.where(row_p >= 0, counts_we[:, row_p], 0)
    for split in STATIC:
        assert np.array_equal(quotas(counts_we, row_p, split), expected_wp)
