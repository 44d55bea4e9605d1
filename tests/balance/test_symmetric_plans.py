"""Test symmetric plans: small ones are known graphs, and all of them obey laws."""

import numpy as np
import pytest

from moejax.balance.policies.micromoe import symmetric
from moejax.balance.policies.micromoe.density import density, device_holds
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout

SIZES = [
    (8, 8, 2), (16, 8, 4), (32, 16, 3), (32, 16, 4), (64, 16, 8), (14, 7, 3),
    (12, 12, 5), (36, 12, 4), (64, 64, 3), (256, 64, 8), (256, 64, 16), (4, 1, 4),
    (4, 4, 4),
]  # fmt: skip
"""Numbers of experts, devices, and slots per device."""


def shared_experts(row_p, num_experts, w) -> np.ndarray:
    """Return the number of experts that each pair of devices shares, [w, w]."""
    held_we = device_holds(row_p, num_experts, w).astype(int)
    return held_we @ held_we.T * (1 - np.eye(w, dtype=int))


STEPS_WW = (np.arange(8)[:, None] - np.arange(8)) % 8
GRAPHS = {
    "ring": ((8, 8, 2), np.isin(STEPS_WW, [1, 7])),
    "complete bipartite": ((16, 8, 4), STEPS_WW % 2 == 1),
    "complete with a matching": ((32, 8, 8), 1 * (STEPS_WW > 0) + (STEPS_WW == 4)),
}
"""Sizes, and the experts that devices share, by the steps from one to the other."""


@pytest.mark.parametrize("name", GRAPHS)
def test_small_plans_are_known_graphs(name):
    sizes, joined_ww = GRAPHS[name]
    row_p = symmetric.symmetric(*sizes)
    assert np.array_equal(shared_experts(row_p, *sizes[:2]), joined_ww)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_plan_is_valid_full_even_and_alike_on_all_devices(sizes):
    """Shifting all devices and experts by one device does not change the plan."""
    num_experts, w, s = sizes
    row_p = symmetric.symmetric(*sizes)
    layout = Layout(num_experts, w, s, 64, "ragged", store="sharded")
    ExpertPlan(row_p[None], num_experts).validate(layout)
    own = num_experts // w
    for device, held_s in enumerate(row_p.reshape(w, s)):
        assert len(set(held_s.tolist())) == s
        assert held_s[:own].tolist() == list(range(device * own, (device + 1) * own))
    assert np.ptp(np.bincount(row_p)) <= 1
    held_we = device_holds(row_p, num_experts, w)
    assert np.array_equal(held_we, np.roll(held_we, (1, own), axis=(0, 1)))


@pytest.mark.parametrize(
    "sizes", [(16, 8, 4), (32, 16, 4), (256, 64, 8), (64, 64, 4), (64, 64, 3)]
)
def test_no_pair_of_devices_shares_two_experts_if_that_is_possible(sizes):
    assert shared_experts(symmetric.symmetric(*sizes), *sizes[:2]).max() == 1


def test_the_graph_of_a_plan_is_an_expander():
    """The second eigenvalue is far below that of a plan that copies to neighbours."""
    near_p = symmetric.cayley(64, [[1], [2], [3], [4]])
    second = [
        np.linalg.eigvalsh(shared_experts(row_p, 256, 64))[-2]
        for row_p in (symmetric.symmetric(256, 64, 8), near_p)
    ]
    assert second[0] < 0.7 * second[1]


def test_budgets_leave_experts_without_copies():
    row_p = symmetric.symmetric(32, 8, 7, num_offered=2)
    assert np.array_equal(np.bincount(row_p).reshape(8, 4)[0], [3, 2, 1, 1])


@pytest.mark.parametrize("sizes", [(32, 8, 8), (256, 64, 8)])
def test_an_even_load_stays_even_and_zipf_nearly(sizes):
    num_experts, w, _ = sizes
    row_p = symmetric.symmetric(*sizes)
    assert density(row_p, np.ones(num_experts), w) == pytest.approx(num_experts / w)
    zipf_e = 1 / np.arange(1, num_experts + 1) ** 0.4
    for seed in range(3):
        load_e = np.random.default_rng(seed).permutation(zipf_e)
        assert density(row_p, load_e, w) < 1.01 * load_e.sum() / w


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ((10, 4, 3), "divisible by the devices of the group"),
        ((16, 4, 3), "hold fewer than num_experts=16"),
        ((8, 2, 9), "more replicas than the group has devices"),
        ((8, 4, 4, 0), "use at most 2"),
    ],
)
def test_bad_sizes_are_refused_in_one_line(sizes, why):
    with pytest.raises(ValueError, match=why) as error:
        symmetric.symmetric(*sizes)
    assert "\n" not in str(error.value)
