"""Test the load tracker: its averages, its forecast, and its JSON."""

import base64
import dataclasses
import json

import numpy as np
import pytest

from moejax.balance import codec, loads
from tests.support.close import assert_close

L, W, E = 2, 4, 8
NO_PAIR_L = np.zeros(L, np.int64)


def random_loads(seed, steps, scale=1000):
    """Return random loads of several steps, [t, l, w, e]."""
    return np.random.default_rng(seed).integers(0, scale, (steps, L, W, E))


def watch(load_tlwe, half_life_steps, first_step=0, pair_tl=None):
    """Return a tracker that has observed these loads, one step after the other."""
    tracker = loads.init(L, W, E, half_life_steps)
    for step, load_lwe in enumerate(load_tlwe, first_step):
        pair_l = NO_PAIR_L if pair_tl is None else pair_tl[step - first_step]
        tracker = loads.observe(tracker, step, load_lwe, pair_l)
    return tracker


def test_the_average_weighs_a_step_by_half_for_each_half_life():
    """The average has weights 2^(-age / half life), divided by their sum."""
    load_tlwe = random_loads(1, 40)
    age_t = np.arange(40)[::-1]
    weight_t = 2.0 ** (-age_t / 6.0)
    expected_lwe = np.einsum("t,tlwe->lwe", weight_t / weight_t.sum(), load_tlwe)
    assert_close(watch(load_tlwe, 6.0).mean_lwe, expected_lwe)


def test_missed_steps_age_earlier_observations():
    old_lwe, new_lwe = random_loads(2, 2)
    tracker = watch([old_lwe], 4.0, first_step=7)
    tracker = loads.observe(tracker, 7 + 8, new_lwe, NO_PAIR_L)
    assert_close(tracker.mean_lwe, (old_lwe / 4 + new_lwe) / (1 + 1 / 4))


@pytest.mark.parametrize(("steps", "drift"), [(1, 0), (2, 0), (30, 0), (150, 3)])
def test_a_constant_load_and_a_linear_change_are_forecast(steps, drift):
    """In every step, `drift` of each source's thousand rows move from expert 0 to
    expert 1. In the long run the forecast is right."""
    moved_t = drift * np.arange(steps + 4)
    load_tlwe = np.zeros((steps + 4, L, W, E), np.int64)
    load_tlwe[..., 0] = (1000 - moved_t)[:, None, None]
    load_tlwe[..., 1] = moved_t[:, None, None]
    tracker = watch(load_tlwe[:steps], 5.0)
    assert np.allclose(loads.forecast(tracker, 4), load_tlwe[-1], atol=1e-3)


def test_no_drift_reaches_further_than_a_half_life():
    tracker = watch(random_loads(3, 20), 5.0)
    near, at, beyond = (loads.forecast(tracker, ahead) for ahead in (1, 5.0, 500))
    assert np.array_equal(at, beyond)
    assert not np.array_equal(near, at)


def test_a_forecast_is_never_negative_and_keeps_each_layers_rows():
    """The forecast of a load that drops within a few steps is not negative, although
    linear extrapolation would be. A layer without rows has a forecast of none."""
    load_tlwe = np.zeros((12, L, W, E), np.int64)
    load_tlwe[:8, 0, :, 0] = 512
    load_tlwe[8:, 0, :, 5] = 512
    tracker = watch(load_tlwe, 2.0)
    assert (2 * tracker.mean_lwe - tracker.mean_of_means_lwe).min() < 0
    load_lwe = loads.forecast(tracker, 2)
    assert load_lwe.min() >= 0
    assert_close(load_lwe.sum(axis=(1, 2)), np.array([512.0 * W, 0.0]))


@pytest.mark.trace
def test_on_the_recorded_trace_the_drift_helps(trace):
    """On a recorded trace the forecast with drift is closer to the next sample than the
    average: a total variation of 2.3 % against 2.6 %."""
    tokens_tlwe = np.load(trace)["tokens"]
    tracker = loads.init(*tokens_tlwe.shape[1:], 5.0)
    pair_l = np.zeros(tokens_tlwe.shape[1], np.int64)
    with_drift, without = [], []
    for step in range(len(tokens_tlwe) - 1):
        tracker = loads.observe(tracker, step, tokens_tlwe[step], pair_l)
        next_le = tokens_tlwe[step + 1].sum(axis=1, dtype=float)
        guesses = loads.forecast(tracker, 1), tracker.mean_lwe
        for guess_lwe, errors in zip(guesses, (with_drift, without)):
            errors.append(np.abs(guess_lwe.sum(axis=1) - next_le).sum())
    assert np.mean(with_drift[20:]) < 0.95 * np.mean(without[20:])


def test_a_jumping_load_says_how_many_steps_meet_another_one():
    """A steady load has no other one, and one that drifts comes from a load next to it.
    Of one that jumps every 20 steps it is the load of the 20 steps before, met for as
    long as an average with a half life of 2 needs to follow."""
    steady_lwe, other_lwe = np.zeros((2, L, W, E), np.int64)
    steady_lwe[..., 0], other_lwe[..., 1] = 1000, 1000
    assert loads.stale(watch([steady_lwe] * 40, 2.0), steady_lwe) == (0.0, None)
    moved_t = np.arange(1000)
    drift_tlwe = np.zeros((1000, L, W, E), np.int64)
    drift_tlwe[..., 0] = (1000 - moved_t)[:, None, None]
    drift_tlwe[..., 1] = moved_t[:, None, None]
    _, before_lwe = loads.stale(watch(drift_tlwe, 2.0), drift_tlwe[-1])
    assert np.allclose(before_lwe, drift_tlwe[-1], atol=10)
    jumping = ([steady_lwe] * 20 + [other_lwe] * 20) * 4
    share, before_lwe = loads.stale(watch(jumping, 2.0), other_lwe)
    assert 0.1 < share < 0.3
    assert np.allclose(before_lwe, steady_lwe, atol=5)


def test_the_fullest_pair_is_a_percentile_of_the_last_steps():
    """Forgetting the pairs does not change the loads."""
    steps = loads.WINDOW_STEPS + 30
    pair_tl = np.random.default_rng(4).integers(0, 10_000, (steps, L))
    pair_tl[:30] = 1_000_000  # older than the window
    tracker = watch(random_loads(5, steps), 5.0, pair_tl=pair_tl)
    p95_l = loads.fullest_pair(tracker, 95)
    above_l = (pair_tl[30:] > p95_l).sum(axis=0)
    assert (above_l == loads.WINDOW_STEPS // 20).all(), above_l
    assert p95_l.max() < 10_000
    without_pairs = loads.forget_pairs(tracker)
    assert (loads.fullest_pair(without_pairs, 95) == 0).all()
    assert np.array_equal(loads.forecast(without_pairs, 2), loads.forecast(tracker, 2))


@pytest.mark.parametrize("steps", [0, 130])
def test_json_keeps_every_bit_in_little_endian_order(steps):
    pair_tl = np.random.default_rng(6).integers(0, 99, (max(steps, 1), L))
    tracker = watch(random_loads(7, steps), 3.3, pair_tl=pair_tl)
    again = codec.loads(codec.dumps(tracker))
    record = json.loads(codec.dumps(tracker))["fields"]
    for field in dataclasses.fields(tracker):
        before, after = getattr(tracker, field.name), getattr(again, field.name)
        if isinstance(before, np.ndarray):
            assert (before.dtype, before.shape) == (after.dtype, after.shape)
            raw = base64.b64decode(record[field.name]["base64"])
            little = before.astype(before.dtype.newbyteorder("<"))
            assert raw == little.tobytes() == after.tobytes()
        else:
            assert before == after
    assert again.is_empty == (steps == 0)


@pytest.mark.parametrize(
    ("step", "shape", "words"),
    [
        (9, (L, W, E + 1), "use a tracker of this run's shape"),
        (9, (L + 1, W, E), "use a tracker of this run's shape"),
        (2, (L, W, E), "step 2 was observed after step 2: steps must rise"),
    ],
)
def test_bad_observations_are_refused_in_one_line(step, shape, words):
    tracker = watch(random_loads(10, 3), 5.0)
    with pytest.raises(ValueError, match=words) as info:
        loads.observe(tracker, step, np.zeros(shape, np.int64), NO_PAIR_L)
    assert "\n" not in str(info.value)
