"""The choice between loop-free and exact steps, from the overflows that were seen."""

import itertools

import pytest

from moejax.balance import codec, overflows
from moejax.balance.overflows import Prices, State
from moejax.perf.cost_model import NOTES
from moejax.resolve.speeds import LOOP_SEC
from tests.support.resolved import make_run
from train.config import gin_reader

PRICES = Prices(step_sec=0.5, loops_sec=0.005)
LIMIT = PRICES.loops_sec / (2 * PRICES.step_sec + PRICES.loops_sec)
"""Share of overflowing steps at which both steps cost the same."""
HALF_LIFE_STEPS = 10.0


START = State()


def follow(flags, state=START):
    """Return which steps are loop-free, as a run chooses them, and the last state. A
    loop-free step that overflows runs again."""
    chosen = []
    for overflowed in flags:
        is_loop_free = state.runs_loop_free[0]
        chosen.append(is_loop_free)
        is_redone = is_loop_free and overflowed
        state = overflows.observe(
            state, PRICES, HALF_LIFE_STEPS, overflowed=overflowed, is_redone=is_redone
        )
    return chosen, state


def test_the_cheaper_step_changes_at_the_share_at_which_both_cost_the_same():
    assert PRICES.prefers_loop_free(0.999 * LIMIT)
    assert not PRICES.prefers_loop_free(1.001 * LIMIT)


def test_without_overflows_all_steps_are_loop_free_and_a_burst_is_redone_once():
    """The step behind an overflow is dispatched again as the exact one."""
    assert follow([False] * 30) == ([True] * 30, State())
    flags = [False, True] + [True] * 30 + [False] * 100
    chosen, _ = follow(flags)
    assert chosen[:4] == [True, True, False, False]
    assert sum(x and y for x, y in zip(chosen, flags)) == 1
    assert chosen[-1]


def test_loop_free_steps_come_back_when_the_moving_share_is_below_the_limit():
    chosen, _ = follow([True] + [False] * 99)
    back = chosen.index(True, 1)
    assert all(chosen[back:])
    share = 1 - 0.5 ** (1 / HALF_LIFE_STEPS)
    seen = next(
        i for i in itertools.count(1) if share * 0.5 ** (i / HALF_LIFE_STEPS) < LIMIT
    )
    # Step `seen` is the last one that counts, and one is dispatched before it is read.
    assert back == seen + 2


def test_an_exact_step_that_is_seen_late_does_not_change_the_one_behind_it():
    """The step behind is in flight already when an exact one is observed."""
    before = State(share=0.0, runs_loop_free=(False, True))
    after = overflows.observe(before, PRICES, 10, overflowed=True, is_redone=False)
    assert after.runs_loop_free == (True, False)
    assert codec.loads(codec.dumps(after)) == after


def test_prices_count_two_loops_in_each_layer_of_each_micro_batch():
    cfg = gin_reader.load(["configs/olmoe_1b_7b.gin"], [])
    prices = make_run(cfg).overflow_prices
    assert prices.loops_sec == pytest.approx(2 * 16 * 8 * LOOP_SEC)
    assert NOTES.loops_sec(16) == 0
    assert prices.step_sec == pytest.approx(10.3, abs=0.1), "at presumed speeds"
