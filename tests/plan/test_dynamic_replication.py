"""Dynamic replication: every device computes the mean load, and no row is lost."""

import numpy as np
import pytest

from moejax.plan import dynamic_replication
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout


def make_layout(w: int, own: int, offers: int, copies: int) -> Layout:
    return Layout(
        w * own, w, own + copies, 8, transport="padded" if w > 1 else "local",
        store="transient", split="dynamic", offers_per_device=offers,
        copies_per_device=copies,
    )  # fmt: skip


def make_case(seed: int):
    """Return loads, owners and a number of devices: Zipf loads, one hot expert, many
    empty ones."""
    rng = np.random.default_rng(seed)
    w, own = int(rng.choice([1, 2, 3, 4, 8, 16, 32])), int(rng.choice([1, 2, 3, 8]))
    chance_e = np.arange(1.0, w * own + 1) ** -rng.uniform(0.0, 2.5)
    total = int(rng.choice([0, 5, 300, 100_000]))
    load_e = rng.multinomial(total, rng.permutation(chance_e / chance_e.sum()))
    if seed % 4 == 0:
        load_e[rng.random(w * own) < 0.6] = 0
    if seed % 10 == 0:
        load_e = np.where(np.arange(w * own) == seed % (w * own), total, 0)
    return load_e, rng.permutation(w * own).astype(np.int32), w


def rows_by_device(paired, w: int) -> np.ndarray:
    """Return the number of rows of each device, [w]."""
    return paired.rows_p.reshape(w, -1).sum(axis=1)


def check_is_sound(paired, load_e, owned_e, layout) -> None:
    """Check that a plan keeps its budgets and the order of its slots, and that each
    device takes rows from one sender.

    A device has its own experts first, then copies with rows, by position, then empty
    slots. All rows of each expert are in its slots.
    """
    w, own = layout.num_devices, layout.experts_per_device
    ExpertPlan(paired.row_p[None], len(load_e), owned_e[None]).validate(layout)
    assert paired.rows_p.min() >= 0
    row_ws, rows_ws = paired.row_p.reshape(w, -1), paired.rows_p.reshape(w, -1)
    assert np.array_equal(row_ws[:, :own].reshape(-1), owned_e)
    position_e = np.argsort(owned_e)
    for row_s, rows_s in zip(row_ws[:, own:], rows_ws[:, own:]):
        count = np.count_nonzero(row_s >= 0)
        assert (row_s[count:] == -1).all()
        assert (rows_s[:count] > 0).all()
        assert not rows_s[count:].any()
        position_c = position_e[row_s[:count]]
        assert (np.diff(position_c) > 0).all()
        assert len(np.unique(position_c // own)) <= 1
    used_p = paired.row_p >= 0
    summed_e = np.bincount(
        paired.row_p[used_p], paired.rows_p[used_p], minlength=len(load_e)
    )
    assert np.array_equal(summed_e, load_e)


def test_every_device_has_the_mean_and_small_budgets_never_harm():
    """The first (total mod w) devices have one row more than the others. With smaller
    budgets no device is fuller than the fullest at home."""
    for seed in range(120):
        load_e, owned_e, w = make_case(seed)
        own = len(load_e) // w
        layout = make_layout(w, own, own, own)
        paired = dynamic_replication.pair(load_e, owned_e, layout)
        check_is_sound(paired, load_e, owned_e, layout)
        share, left = divmod(int(load_e.sum()), w)
        expected = [share + (d < left) for d in range(w)]
        assert rows_by_device(paired, w).tolist() == expected
        offers, copies = np.random.default_rng(seed).integers(1, own + 1, 2).tolist()
        layout = make_layout(w, own, offers, copies)
        paired = dynamic_replication.pair(load_e, owned_e, layout)
        check_is_sound(paired, load_e, owned_e, layout)
        home_w = load_e[owned_e].reshape(w, own).sum(axis=1)
        assert rows_by_device(paired, w).max() <= home_w.max()


def test_nothing_moves_where_budgets_would_leave_a_device_fuller_than_home():
    """Device 0 should give 40 of its 60 rows and take 30 of another device. With one
    copy on each device it could give only 15."""
    hot = [60, 0, 0, 0]
    load_e, owned_e = np.ravel([[15] * 4, hot, hot, hot, [10, 0, 0, 0]]), np.arange(20)
    for copies, expected in ((4, [50] * 5), (1, [60, 60, 60, 60, 10])):
        layout = make_layout(5, 4, 4, copies)
        paired = dynamic_replication.pair(load_e, owned_e.astype(np.int32), layout)
        assert rows_by_device(paired, 5).tolist() == expected


@pytest.mark.parametrize(
    ("load_e", "w", "offers", "copies", "row_p", "rows_p"),
    [
        # The example in the module's docstring.
        ([9, 1, 2, 0], 2, 2, 2, [0, 1, -1, -1, 2, 3, 0, -1], [5, 1, 0, 0, 2, 0, 4, 0]),
        # Device 1 gets 5 rows of expert 0; 5 of expert 1 stay, as only 0 is offered.
        (
            [6, 5, 4, 0, 0, 0, 0, 0, 0], 3, 1, 1,
            [0, 1, 2, -1, 3, 4, 5, 0, 6, 7, 8, -1],
            [1, 5, 4, 0, 0, 0, 0, 5, 0, 0, 0, 0],
        ),
        # Device 1 should get 3 rows of expert 0 and 1 of expert 1; it gets the larger.
        (
            [3, 3, 2, 0, 0, 0], 2, 3, 1,
            [0, 1, 2, -1, 3, 4, 5, 0], [0, 3, 2, 0, 0, 0, 0, 3],
        ),
    ],
)  # fmt: skip
def test_by_hand(load_e, w, offers, copies, row_p, rows_p):
    own = len(load_e) // w
    owned_e = np.arange(len(load_e), dtype=np.int32)
    layout = make_layout(w, own, offers, copies)
    paired = dynamic_replication.pair(np.array(load_e), owned_e, layout)
    assert paired.row_p.tolist() == row_p
    assert paired.rows_p.tolist() == rows_p


def test_the_one_with_most_too_many_gives_first_and_may_take_then():
    """Excesses are 10, 4, -12 and -2: the first device gives 12, then takes 2."""
    quota_or = dynamic_replication.quotas(np.array([30, 24, 8, 18]))
    expected_or = np.zeros((4, 4), int)
    expected_or[0, 2], expected_or[1, 0], expected_or[1, 3] = 12, 2, 2
    assert np.array_equal(quota_or, expected_or)
