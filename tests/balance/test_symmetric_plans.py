"""Test symmetric plans: named graphs equal their definitions, and general plans obey
laws."""

import numpy as np
import pytest

from moejax.balance.policies.micromoe import symmetric
from moejax.balance.policies.micromoe.density import density, device_holds
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout

SIZES = [
    (8, 8, 2), (16, 8, 4), (32, 16, 3), (32, 16, 4), (64, 16, 8), (14, 7, 3),
    (12, 12, 5), (36, 12, 4), (256, 64, 8), (256, 64, 16), (4, 1, 4), (4, 4, 4),
]  # fmt: skip
"""Numbers of experts, devices, and slots per device."""


def edges(row_p, num_experts, w) -> list[tuple[int, ...]]:
    """Return the devices of each expert."""
    held_we = device_holds(row_p, num_experts, w)
    return [tuple(np.flatnonzero(held_e).tolist()) for held_e in held_we.T]


def shared_experts(row_p, num_experts, w) -> np.ndarray:
    """Return the number of experts that each pair of devices shares, [w, w]."""
    held_we = device_holds(row_p, num_experts, w).astype(int)
    return held_we @ held_we.T * (1 - np.eye(w, dtype=int))


def test_the_ring():
    ring = edges(symmetric.ring(8), 8, 8)
    assert ring == [tuple(sorted((v, (v + 1) % 8))) for v in range(8)]


def test_the_torus():
    """Every device shares one expert with each of its four neighbours in a 4 x 4
    grid."""
    joined_ww = shared_experts(symmetric.torus(4, 4), 32, 16)
    coordinates = np.stack(np.divmod(np.arange(16), 4), axis=1)
    distance = (coordinates[:, None] - coordinates) % 4
    steps = np.minimum(distance, 4 - distance).sum(axis=-1)
    assert np.array_equal(joined_ww, steps == 1)


@pytest.mark.parametrize("w", [4, 8, 16])
def test_the_complete_bipartite_graph(w):
    joined_ww = shared_experts(symmetric.complete_bipartite(w), w * w // 4, w)
    is_odd = np.arange(w) % 2
    assert np.array_equal(joined_ww, is_odd[:, None] != is_odd)


@pytest.mark.parametrize("w", [4, 8, 10])
def test_the_complete_graph_and_a_matching(w):
    joined_ww = shared_experts(symmetric.complete_with_matching(w), w * w // 2, w)
    is_opposite = (np.arange(w)[:, None] - np.arange(w)) % w == w // 2
    assert np.array_equal(joined_ww, 1 - np.eye(w) + is_opposite)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ((8, 8, 2), symmetric.ring),
        ((16, 8, 4), symmetric.complete_bipartite),
        ((32, 8, 8), symmetric.complete_with_matching),
    ],
)
def test_the_general_search_finds_the_named_graphs(sizes, named):
    row_p = symmetric.symmetric(*sizes)
    assert sorted(edges(row_p, *sizes[:2])) == sorted(edges(named(8), *sizes[:2]))


@pytest.mark.parametrize("sizes", SIZES)
def test_a_general_plan_is_valid_full_and_even(sizes):
    num_experts, w, s = sizes
    row_p = symmetric.symmetric(*sizes)
    layout = Layout(num_experts, w, s, 64, "ragged", store="sharded")
    ExpertPlan(row_p[None], num_experts).validate(layout)
    own = num_experts // w
    for device, held_s in enumerate(row_p.reshape(w, s)):
        assert len(set(held_s.tolist())) == s
        assert held_s[:own].tolist() == list(range(device * own, (device + 1) * own))
    assert np.ptp(np.bincount(row_p)) <= 1


@pytest.mark.parametrize("sizes", SIZES)
def test_all_devices_look_alike(sizes):
    """Shifting all devices and experts by one device does not change the plan."""
    num_experts, w, _ = sizes
    held_we = device_holds(symmetric.symmetric(*sizes), num_experts, w)
    rolled_we = np.roll(held_we, (1, num_experts // w), axis=(0, 1))
    assert np.array_equal(held_we, rolled_we)


@pytest.mark.parametrize("sizes", [(16, 8, 4), (32, 16, 4), (256, 64, 8), (64, 64, 4)])
def test_no_pair_of_devices_shares_two_experts_if_that_is_possible(sizes):
    assert shared_experts(symmetric.symmetric(*sizes), *sizes[:2]).max() == 1


def test_the_graph_of_a_plan_is_an_expander():
    """The second eigenvalue is far below that of a plan that copies to neighbours."""
    near_p = symmetric.cayley((64,), [[(1,)], [(2,)], [(3,)], [(4,)]])
    second = [
        np.linalg.eigvalsh(shared_experts(row_p, 256, 64))[-2]
        for row_p in (symmetric.symmetric(256, 64, 8), near_p)
    ]
    assert second[0] < 0.7 * second[1]


def test_budgets_leave_experts_without_copies():
    row_p = symmetric.symmetric(32, 8, 7, num_offered=2)
    assert np.array_equal(np.bincount(row_p).reshape(8, 4)[0], [3, 2, 1, 1])


def test_an_even_load_stays_even_and_zipf_nearly():
    for num_experts, w, s in ((32, 8, 8), (256, 64, 8)):
        row_p = symmetric.symmetric(num_experts, w, s)
        assert density(row_p, np.ones(num_experts), w) == pytest.approx(num_experts / w)
        for seed in range(5):
            zipf_e = 1 / np.arange(1, num_experts + 1) ** 0.4
            load_e = np.random.default_rng(seed).permutation(zipf_e)
            assert density(row_p, load_e, w) < 1.01 * load_e.sum() / w


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda: symmetric.symmetric(10, 4, 3),
            "divisible by the devices of the group",
        ),
        (lambda: symmetric.symmetric(16, 4, 3), "hold fewer than num_experts=16"),
        (
            lambda: symmetric.symmetric(8, 2, 9),
            "more replicas than the group has devices",
        ),
        (lambda: symmetric.symmetric(8, 4, 4, 0), "use at most 2"),
        (lambda: symmetric.cayley((4,), [[(1,), (5,)]]), "twice on a device"),
        (lambda: symmetric.cayley((2, 2), [[(2, 0)]]), "twice on a device"),
        (lambda: symmetric.complete_bipartite(6), "multiple of 4"),
        (lambda: symmetric.complete_with_matching(7), "must be even"),
    ],
)
def test_bad_sizes_are_named_in_one_line(make, why):
    with pytest.raises(ValueError, match=why) as error:
        make()
    assert "\n" not in str(error.value)


def test_replicas_of_three_are_on_three_devices():
    row_p = symmetric.symmetric(64, 64, 3)
    assert {len(devices) for devices in edges(row_p, 64, 64)} == {3}
    assert shared_experts(row_p, 64, 64).max() == 1
