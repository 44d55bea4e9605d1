"""Test the router that follows given loads: probabilities, draws, phases and files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Recorded
from moejax.moe import recorded
from tests.support.close import assert_close

L, E, K = 3, 8, 2
SYNTHETIC = {
    "uniform": 1, "zipf": 1, "one_hot": 1,
    "rotating": E, "burst": 2, "wandering": 3 * E,
}  # fmt: skip
"""Sources, and how many samples they have with a period of 3 steps."""
NUM_TOKENS = 40_000
SIGMAS = 4  # exceeded once in 16 000 experts by chance; the seeds below are fixed

choose = jax.jit(recorded.choose, static_argnums=2)


def starts(seed):
    return jax.random.uniform(jax.random.key(seed), (8, NUM_TOKENS // 8))


def assert_follows(chance_e, expert_btk):
    """Assert that the tokens of each expert are within SIGMAS of their expected number.

    Tokens are independent, so that the numbers have a binomial distribution.
    """
    count_e = np.bincount(np.ravel(expert_btk), minlength=len(chance_e))
    chance_e = np.minimum(chance_e.astype(np.float64), 1)
    sigma_e = np.sqrt(NUM_TOKENS * chance_e * (1 - chance_e)) + 1
    wrong_e = np.abs(count_e - NUM_TOKENS * chance_e) / sigma_e
    assert wrong_e.max() < SIGMAS, (np.argmax(wrong_e), wrong_e.max())


def assert_distinct(expert_btk, num_experts):
    """Assert that each token chose different experts, all of them in range."""
    sorted_btk = np.sort(expert_btk, axis=-1)
    assert (np.diff(sorted_btk, axis=-1) > 0).all()
    assert 0 <= sorted_btk.min() <= sorted_btk.max() < num_experts


@pytest.mark.parametrize(("source", "num_samples"), SYNTHETIC.items())
def test_chances_sum_to_k_and_none_exceeds_one(source, num_samples):
    cfg = Recorded(source=source, zipf=1.5, hot_share=0.9, period_steps=3)
    for top_k in (1, 2, 5, 8):
        chance_tle = recorded.loads(cfg, L, E, top_k)
        assert chance_tle.shape == (num_samples, L, E)
        assert chance_tle.dtype == np.float32
        assert chance_tle.min() >= 0
        assert chance_tle.max() <= 1
        sums_tl = np.full(chance_tle.shape[:2], float(top_k))
        assert_close(chance_tle.sum(axis=-1), sums_tl)


def test_chances_are_the_loads_where_none_is_too_large():
    zipf_e = recorded.loads(Recorded(source="zipf", zipf=0.5), L, E, K)[0, 0]
    expected_e = np.arange(1, E + 1) ** -0.5
    assert_close(zipf_e, K * expected_e / expected_e.sum(), dtype=np.float32)
    uniform_e = recorded.loads(Recorded(source="uniform"), L, E, K)[0, 0]
    assert_close(uniform_e, np.full(E, K / E, np.float32))


def test_probability_above_one_goes_to_the_others_in_proportion():
    """Loads of Zipf's law with exponent 2 become valid probabilities for k = 3 of 4
    experts.

    The loads are 1, 1/4, 1/9, 1/16. The first expert gets 1. Of the remaining 2 the
    second gets 1. The last two share 1 in the ratio 16 to 9.
    """
    chance_e = recorded.loads(Recorded(source="zipf", zipf=2.0), 1, 4, 3)[0, 0]
    assert_close(chance_e, np.array([1, 1, 16 / 25, 9 / 25]), dtype=np.float32)


@pytest.mark.parametrize(
    ("source", "top_k"), [("uniform", 4), ("zipf", 2), ("one_hot", 1), ("rotating", 2)]
)
def test_choices_are_distinct_and_follow_the_chances(source, top_k):
    cfg = Recorded(source=source, zipf=1.2, hot_share=0.2)
    chance_e = recorded.loads(cfg, 1, E, top_k)[-1, 0]
    expert_btk = np.asarray(choose(chance_e, starts(top_k), top_k))
    assert_distinct(expert_btk, E)
    assert_follows(chance_e, expert_btk)


@pytest.mark.parametrize("source", SYNTHETIC)
def test_choices_are_distinct_at_every_edge(source):
    """Choices are distinct for starts on and next to the rounded ends of all intervals,
    and of [0, 1)."""
    for num_experts, top_k in [(4, 4), (7, 2), (8, 4), (32, 2), (128, 8)]:
        chance_e = recorded.loads(Recorded(source=source), 1, num_experts, top_k)[-1, 0]
        end_e = np.cumsum(chance_e, dtype=np.float32) % 1
        edge = np.append(end_e, np.float32([0, 1]))
        near = [np.nextafter(edge, np.float32(to)) for to in (-1, 2)]
        start = np.concatenate([edge, *near])
        start = start[(start >= 0) & (start < 1)]
        start = np.resize(start, (1, 3 * 130))
        assert_distinct(np.asarray(choose(chance_e, start, top_k)), num_experts)


def hot(expert: int) -> np.ndarray:
    """Return the chances where one expert has 0.4 of the load."""
    return K * np.where(np.arange(E) == expert, 0.4, 0.6 / (E - 1))


EVEN = np.full(E, K / E)
PHASES = {
    "rotating": {0: hot(0), 2: hot(0), 3: hot(1), 23: hot(7), 24: hot(0)},
    "burst": {0: hot(0), 2: hot(0), 3: EVEN, 5: EVEN, 6: hot(0)},
}
"""Chances at some steps, with a period of 3 steps."""


@pytest.mark.parametrize("source", PHASES)
def test_hot_experts_change_on_each_period(source):
    cfg = Recorded(source=source, period_steps=3, hot_share=0.4)
    chance_te = recorded.loads(cfg, 1, E, K)[:, 0]
    for step, expected_e in PHASES[source].items():
        sample = recorded.sample_index(cfg, len(chance_te), jnp.int32(step))
        assert_close(chance_te[sample], expected_e, dtype=np.float32)


def test_a_hill_of_load_rises_and_then_moves_by_one_expert_a_period():
    cfg = Recorded(source="wandering", period_steps=3, hot_share=0.3)
    chance_te = recorded.loads(cfg, 1, E, 1)[:, 0]
    at = [int(recorded.sample_index(cfg, 3 * E, step)) for step in (0, 3, 6, 3 * E)]
    start_e, risen_e, moved_e, again_e = chance_te[at]
    assert_close(start_e, np.full(E, 1 / E, np.float32))
    assert 0.3 <= risen_e[0] == risen_e.max() < 0.31
    assert np.all(np.diff(chance_te[:4, 0]) > 0)
    assert_close(moved_e, np.roll(risen_e, 1))
    assert_close(again_e, start_e)
    assert_close(risen_e[1:], risen_e[:0:-1])
    flat = Recorded(source="wandering", period_steps=1, hot_share=0.999)
    with pytest.raises(ValueError, match=r"hot_share=0\.999 cannot be reached"):
        recorded.loads(flat, 1, 512, 1)


def write(path, counts, name="tokens"):
    """Write an .npz file with one array and return its path as text."""
    np.savez(path, **{name: counts})
    return str(path)


def test_counts_from_a_file_are_summed_over_the_dims_between(tmp_path):
    """Counts [samples, layers, devices, experts] of a file become probabilities.

    Layers repeat if the model has more than the file. Each sample serves
    steps_per_sample steps, and the first follows the last.
    """
    random = np.random.default_rng(0)
    counts = random.integers(90, 110, (4, 2, 5, E)).astype(np.uint16)
    counts[3] += 60_000  # the sum over devices does not fit uint16
    source = write(tmp_path / "trace.npz", counts, "copies")
    cfg = Recorded(source=source, array="copies", steps_per_sample=10)
    chance_tle = recorded.loads(cfg, L, E, K)
    for sample, layer in np.ndindex(4, L):
        load_e = sum(map(np.int64, counts[sample, layer % 2]))
        expected_e = K * load_e / load_e.sum()
        assert_close(chance_tle[sample, layer], expected_e, dtype=np.float32)
    steps = (0, 9, 10, 39, 40)
    assert [int(recorded.sample_index(cfg, 4, s)) for s in steps] == [0, 0, 1, 3, 0]


def test_every_micro_batch_takes_the_next_sample():
    """There are 7 samples, 2 micro-batches a step, and 2 of these for a sample."""
    cfg = Recorded(source="a.npz", sample_per="micro_batch", steps_per_sample=2)
    index = [
        int(recorded.sample_index(cfg, 7, step, micro_batch, 2))
        for step in range(8)
        for micro_batch in range(2)
    ]
    assert index == [n // 2 % 7 for n in range(16)]
    by_step = Recorded(source="a.npz")
    assert [int(recorded.sample_index(by_step, 7, 3, i, 2)) for i in (0, 1)] == [3, 3]


@pytest.mark.parametrize("source", ["uniform", "zipf"])
def test_spread_points_give_each_device_the_recorded_load(source):
    """Each device has 256 tokens. Where loads are even, and a whole number of rows for
    each expert, its load is exact; else it is off by less than 2 rows."""
    num_devices, num_experts, n = 4, 32, 256
    chance_e = recorded.loads(Recorded(source=source), 1, num_experts, K)[0, 0]
    expected_e = n * chance_e.astype(np.float64)
    shape = (4 * num_devices, n // 4)
    points = [
        recorded.draw_points("spread", jax.random.key(seed), shape) for seed in range(3)
    ]
    assert not np.array_equal(*points[:2])
    for point_bt in points:
        assert 0 <= point_bt.min() <= point_bt.max() < 1
        expert_wx = np.asarray(choose(chance_e, point_bt, K)).reshape(num_devices, -1)
        for expert_x in expert_wx:
            count_e = np.bincount(expert_x, minlength=num_experts)
            limit = 0 if source == "uniform" else 2
            assert np.abs(count_e - expected_e).max() <= limit
        assert_distinct(expert_wx.reshape(-1, 1, K), num_experts)


def test_a_layer_that_nobody_used_is_even(tmp_path):
    source = write(tmp_path / "empty.npz", np.zeros((1, 1, E), np.int32))
    chance_e = recorded.loads(Recorded(source=source), 1, E, K)[0, 0]
    assert_close(chance_e, np.full(E, K / E, np.float32))


COUNTS = np.ones((2, 2, E), np.int32)


@pytest.mark.parametrize(
    ("counts", "num_experts", "words"),
    [
        ({"copies": COUNTS}, E, ["['copies']", "Recorded.array='tokens'"]),
        ({"tokens": COUNTS[0]}, E,
         ["'tokens' has shape [2, 8]", "[samples, layers, ..., 8]"]),
        ({"tokens": COUNTS}, 16,
         ["'tokens' has shape [2, 2, 8]", "Moe.num_experts=16"]),
        ({"tokens": -COUNTS}, E, ["numbers from -1 to -1"]),
        (None, E, ["a.npz' is neither", "one_hot", "nor a file"]),
    ],
)  # fmt: skip
def test_errors_about_files(tmp_path, counts, num_experts, words):
    if counts:
        np.savez(tmp_path / "a.npz", **counts)
    with pytest.raises(ValueError) as error:
        recorded.loads(Recorded(source=str(tmp_path / "a.npz")), L, num_experts, K)
    assert [word for word in words if word not in str(error.value)] == []
