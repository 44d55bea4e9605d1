"""Test the router that follows given loads: probabilities, draws, phases and files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Recorded
from moejax.moe import recorded
from tests.support import cut_routing
from tests.support.close import assert_close

L, E, K = 3, 8, 2
SYNTHETIC = ("uniform", "zipf", "one_hot", "rotating", "burst")
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


@pytest.mark.parametrize("top_k", [1, 2, 5, 8])
@pytest.mark.parametrize("source", SYNTHETIC)
def test_chances_sum_to_k_and_none_exceeds_one(source, top_k):
    cfg = Recorded(source=source, zipf=1.5, hot_share=0.9)
    chance_tle = recorded.loads(cfg, L, E, top_k)
    assert chance_tle.shape == ({"rotating": E, "burst": 2}.get(source, 1), L, E)
    assert chance_tle.dtype == np.float32
    assert chance_tle.min() >= 0
    assert chance_tle.max() <= 1
    assert_close(chance_tle.sum(axis=-1), np.full(chance_tle.shape[:2], float(top_k)))


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


def test_one_hot_gives_the_first_expert_every_token():
    chance_e = recorded.loads(Recorded(source="one_hot"), 1, E, 1)[0, 0]
    expert_btk = choose(chance_e, starts(0), 1)
    assert (np.asarray(expert_btk) == 0).all()


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("source", ["uniform", "zipf", "one_hot", "rotating"])
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


def test_rotating_moves_its_hot_expert_on_each_period():
    cfg = Recorded(source="rotating", period_steps=5, hot_share=0.4)
    chance_te = recorded.loads(cfg, 1, E, K)[:, 0]
    for step in (0, 4, 5, 39, 40):
        sample = recorded.sample_index(cfg, E, jnp.int32(step))
        hot = step // 5 % E
        expected_e = np.where(np.arange(E) == hot, 0.4, 0.6 / (E - 1))
        assert_close(chance_te[sample], K * expected_e, dtype=np.float32)


def test_burst_is_hot_and_even_in_turn():
    cfg = Recorded(source="burst", period_steps=3, hot_share=0.4)
    chance_te = recorded.loads(cfg, 1, E, K)[:, 0]
    even_e = np.full(E, K / E)
    hot_e = K * np.where(np.arange(E) == 0, 0.4, 0.6 / (E - 1))
    phases = [hot_e, hot_e, hot_e, even_e, even_e, even_e, hot_e]
    for step, expected_e in enumerate(phases):
        sample = recorded.sample_index(cfg, 2, jnp.int32(step))
        assert_close(chance_te[sample], expected_e, dtype=np.float32)


def test_constant_loads_have_one_sample():
    cfg = Recorded(source="zipf")
    assert [int(recorded.sample_index(cfg, 1, step)) for step in (0, 1, 99)] == [0] * 3


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
    """Of 7 samples, with 2 micro-batches a step and two of these on each sample."""
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
    for seed in range(3):
        point_bt = recorded.draw_points("spread", jax.random.key(seed), shape)
        assert 0 <= point_bt.min() <= point_bt.max() < 1
        expert_wx = np.asarray(choose(chance_e, point_bt, K)).reshape(num_devices, -1)
        for expert_x in expert_wx:
            count_e = np.bincount(expert_x, minlength=num_experts)
            limit = 0 if source == "uniform" else 2
            assert np.abs(count_e - expected_e).max() <= limit
        assert_distinct(expert_wx.reshape(-1, 1, K), num_experts)


def test_spread_points_move_from_draw_to_draw():
    a, b = (recorded.draw_points("spread", jax.random.key(s), (2, 8)) for s in (0, 1))
    assert not np.array_equal(a, b)


def test_a_layer_that_nobody_used_is_even(tmp_path):
    source = write(tmp_path / "empty.npz", np.zeros((1, 1, E), np.int32))
    chance_e = recorded.loads(Recorded(source=source), 1, E, K)[0, 0]
    assert_close(chance_e, np.full(E, K / E, np.float32))


def test_errors_about_files(tmp_path):
    counts = np.ones((2, 2, E), np.int32)
    source = write(tmp_path / "a.npz", counts, "copies")
    flat = write(tmp_path / "b.npz", counts[0])
    objects = write(tmp_path / "c.npz", np.array([[[None] * E]], object))
    cut = tmp_path / "cut.npz"
    cut.write_bytes((tmp_path / "a.npz").read_bytes()[:-40])
    wrong = [
        (Recorded(source="zipff"), E, ["source='zipff'", "one_hot", "nor a file"]),
        (Recorded(source=source), E, ["['copies']", "Recorded.array='tokens'"]),
        (
            Recorded(source=flat),
            E,
            ["'tokens' has shape [2, 8]", "[samples, layers, ..., 8]"],
        ),
        (
            Recorded(source=source, array="copies"),
            16,
            ["'copies' has shape [2, 2, 8]", "Moe.num_experts=16"],
        ),
        (Recorded(source=objects), E, ["'tokens' holds object", "numbers"]),
        (Recorded(source=str(cut)), E, ["cut.npz is damaged", "np.savez"]),
    ]
    for cfg, num_experts, words in wrong:
        with pytest.raises(ValueError) as error:
            recorded.loads(cfg, L, num_experts, K)
        for word in words:
            assert word in str(error.value)


def test_draws_follow_the_recorded_run():
    """Draws follow the recorded loads of 32 experts on 16 devices, in a few samples and
    in the first and the last layer."""
    with np.load(cut_routing.PATH) as arrays:
        load_tle = arrays["tokens"].sum(axis=2, dtype=np.int64)
    cfg = Recorded(source=str(cut_routing.PATH))
    num_samples, num_layers, num_experts = load_tle.shape
    chance_tle = recorded.loads(cfg, num_layers, num_experts, K)
    num_skewed = 0
    for sample in range(0, num_samples, 9):
        for layer in (0, num_layers - 1):
            chance_e, load_e = chance_tle[sample, layer], load_tle[sample, layer]
            expert_btk = np.asarray(choose(chance_e, starts(sample + layer), K))
            assert_distinct(expert_btk, num_experts)
            assert_follows(chance_e, expert_btk)
            share_e = load_e / load_e.sum()
            free_e = chance_e < 1
            rest = (K - (~free_e).sum()) / share_e[free_e].sum()
            assert_close(chance_e[free_e], rest * share_e[free_e], dtype=np.float32)
            num_skewed += share_e.max() * num_experts > 4
    assert num_skewed > 0, "the record is skewed"
