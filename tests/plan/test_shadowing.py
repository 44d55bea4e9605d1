"""Test FasterMoE's search with current counts, by hand and against brute force."""

import itertools

import numpy as np
import pytest

from moejax.plan import shadowing
from moejax.plan.layout import Layout


def make_layout(w: int, copies: int, own: int = 1, offers: int = 1, **prices) -> Layout:
    """Return a layout of devices with `own` experts and room for `copies`."""
    return Layout(
        w * own, w, own + copies, 8, store="transient", split="shadow",
        offers_per_device=offers, copies_per_device=copies, **prices,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("price", "toll", "expected"),
    [(19, 0, [0]), (20, 0, []), (44, 128, [0]), (45, 128, [])],
)
def test_a_shadow_pays_by_equations_7_and_8(price, toll, expected):
    """Loads 50, 20, 20 from three devices (Pro-Prophet, Fig. 6, times 10): the fullest
    has 50 rows at home and 30 with a shadow, which pays below a price of 20 rows, or
    with a toll of a half (25 rows) below 45."""
    load_we = np.array([[30, 0, 0], [10, 10, 10], [10, 10, 10]])
    layout = make_layout(3, 2, shadow_price=price, exchange_toll=toll)
    assert shadowing.choose(load_we, np.arange(3), layout) == expected


def test_a_toll_is_exact_for_many_rows():
    assert shadowing.toll(50, make_layout(3, 2, exchange_toll=128)) == 25
    assert shadowing.toll(2**20, make_layout(3, 2, exchange_toll=300)) == 300 * 2**12


@pytest.mark.parametrize(
    ("copies", "offers", "expected"), [(2, 2, [0, 1]), (1, 2, [0]), (2, 1, [0])]
)
def test_budgets_bound_what_is_copied(copies, offers, expected):
    """Expert 2 does not relieve device 0."""
    load_we = np.tile([60, 50, 4, 3], (2, 1))
    layout = make_layout(2, copies, own=2, offers=offers)
    assert shadowing.choose(load_we, np.arange(4), layout) == expected


@pytest.mark.parametrize("price", [0, 30, 200])
def test_the_time_is_near_that_of_the_best_set(price):
    """With one expert a device, the time by Eq. 8 is at most 1.1 times that of the best
    of all sets of shadows, and never above that without any."""
    layout, rng = make_layout(4, 4, shadow_price=price), np.random.default_rng(1)

    def time(load_we, shadows) -> int:
        rows_w = load_we.sum(axis=0)
        for expert in shadows:
            rows_w = rows_w + load_we[:, expert]
            rows_w[expert] -= load_we[:, expert].sum()
        return rows_w.max() + price * len(shadows)

    for _ in range(20):
        load_we = rng.poisson(rng.permutation([400, 150, 60, 20]), (4, 4))
        shadows = shadowing.choose(load_we, np.arange(4), layout)
        sets = [s for n in range(5) for s in itertools.combinations(range(4), n)]
        found = time(load_we, shadows)
        assert found <= 1.1 * min(time(load_we, s) for s in sets)
        assert found <= time(load_we, ())
