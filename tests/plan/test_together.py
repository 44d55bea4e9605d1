"""Estimate the rows that travel from the experts that tokens choose together."""

import numpy as np
import pytest

from moejax.plan.distinct import Choosing, distinct_share
from moejax.plan.layout import Layout
from moejax.plan.together import Shares, met_bounds, met_share, row_ratios
from tests.support.chosen import (
    clique_choices,
    count_together,
    home_devices,
    met_of_choices,
    topic_choices,
)
from tests.support.close import assert_close

N, E, W = 4096, 64, 8


def estimate(expert_nk: np.ndarray, expert_we: np.ndarray):
    """Return the estimated share of tokens that meet each device, and its bounds."""
    k, e = expert_nk.shape[1], expert_we.size
    shares = Shares.of(count_together(expert_nk, e), k)
    first_w = shares.first_e[expert_we].sum(axis=1)
    pairs = expert_we[:, :, None], expert_we[:, None, :]
    both_w = shares.both_ee[pairs].sum(axis=(1, 2))
    most = min(k, expert_we.shape[1])
    share_w = met_share(first_w, both_w, k, most)
    return share_w, *met_bounds(first_w, both_w, most)


@pytest.mark.parametrize("make", [clique_choices, topic_choices])
@pytest.mark.parametrize("top_k", [1, 2])
def test_the_estimate_is_exact_for_two_choices(make, top_k):
    expert_nk, expert_we = make(N, E, top_k, seed=1), home_devices(E, W)
    found_w, *_ = estimate(expert_nk, expert_we)
    assert_close(found_w, met_of_choices(expert_nk, expert_we).mean(axis=0))


@pytest.mark.parametrize("num_devices", [2, 8, 64])
@pytest.mark.parametrize("make", [clique_choices, topic_choices])
def test_the_estimate_is_near_for_eight_choices(make, num_devices):
    """The truth lies within the bounds that two moments allow, and the estimate within
    a tenth of the tokens of it, and half of that on the mean of devices; where every
    device has one expert, no two choices meet and it is exact."""
    expert_nk, expert_we = make(N, E, 8, seed=2), home_devices(E, num_devices)
    true_w = met_of_choices(expert_nk, expert_we).mean(axis=0)
    found_w, low_w, high_w = estimate(expert_nk, expert_we)
    assert (low_w <= true_w + 1e-9).all()
    assert (true_w <= high_w + 1e-9).all()
    assert np.abs(found_w - true_w).max() < 0.1
    assert np.abs(found_w - true_w).mean() < 0.05
    if num_devices == E:
        assert_close(found_w, true_w)


@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
@pytest.mark.parametrize("num_devices", [2, 8, 64])
def test_independent_choices_are_those_of_even_loads(top_k, num_devices):
    shares = Shares.independent(np.full(E, 7.0), top_k)
    expert_we = home_devices(E, num_devices)
    first_w = shares.first_e[expert_we].sum(axis=1)
    pairs = expert_we[:, :, None], expert_we[:, None, :]
    both_w = shares.both_ee[pairs].sum(axis=(1, 2))
    found_w = met_share(first_w, both_w, top_k, min(top_k, E // num_devices))
    assert_close(
        found_w,
        np.full(num_devices, distinct_share(1 / num_devices, Choosing(top_k, E))),
    )


def test_ratios_are_of_devices_and_of_nodes():
    """Where the choices of each token share a device, one row goes where independent
    choices send several."""
    layout = Layout(
        E, W, E // W, 64, "hierarchical", top_k=8, num_nodes=2, rows_per_node=64,
        axes=("dc", "expert"),
    )  # fmt: skip
    expert_we = home_devices(E, W)
    expert_nk = np.tile(expert_we, (16, 1))
    ratios = row_ratios(count_together(expert_nk, E), expert_we, layout)
    assert_close(
        ratios.device_w, (1 / W) / distinct_share(np.full(W, 1 / W), Choosing(8, E))
    )
    assert_close(
        ratios.node_f, (1 / 2) / distinct_share(np.full(2, 1 / 2), Choosing(8, E))
    )
