"""Test that the layer is the same under every schedule.

Outputs, router losses and all gradients are compared with moe/reference.py. Only in
capacity mode does a schedule change which rows are dropped.

    MP    devices of the tensor axis        ESP    expert shards (moejax.plan.parallel)

The tests choose each token's experts, so that one compiled layer serves all skews.
Buffers are small, so that later rounds run.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.config import Router
from moejax.moe import route
from moejax.moe.exchange import dispatch, schedules
from moejax.perf import choose_schedule
from moejax.plan import schedule_rules
from moejax.plan.layout import Topology
from tests.support.close import assert_close
from tests.support.configured_layers import (
    ALL_ROWS,
    BATCH,
    CUTS,
    SCHEDULES,
    SKEWS,
    check,
    config,
    cut,
    home,
    make_case,
    on_mesh,
    operands,
)
from tests.support.layers import EXPERTS
from tests.support.random_plans import odd_plans, random_plan

ALSO = pytest.mark.long
FULL, DISPATCH = (route.ROUTES,), (route.ROUTES, dispatch.ROWS)


FIRST = {(2, 2, 4): ("s1",), (2, 4, 4): ("s1h",)}
GRID = [
    pytest.param(*sizes, name, marks=() if name in FIRST.get(sizes, ()) else ALSO)
    for sizes in CUTS
    for name in (*SCHEDULES, "local")
    if name != "local" or 1 < sizes[0] == sizes[1]
]


def test_every_schedule_has_rules_a_record_and_a_time():
    assert set(schedule_rules.SCHEDULES) == set(choose_schedule.TIMES)
    assert {None, *schedule_rules.SCHEDULES} == set(schedules.SCHEDULES)


@pytest.mark.slow
@pytest.mark.parametrize(("mp", "esp", "expert", "schedule"), GRID)
def test_every_schedule_equals_the_reference(mp, esp, expert, schedule):
    case = make_case(cut(mp, esp, expert, schedule))
    rounds = [int(jnp.max(check(case, skew).rounds)) for skew in SKEWS]
    assert max(rounds) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mp", "esp", "expert", "schedule"),
    [
        (2, 2, 4, "local"),
        (4, 2, 2, "s2"),
        pytest.param(2, 4, 4, "base", marks=ALSO),
        pytest.param(4, 2, 2, "base", marks=ALSO),
    ],
)
def test_one_round_equals_the_reference(mp, esp, expert, schedule):
    case = make_case(cut(mp, esp, expert, schedule, **ALL_ROWS))
    assert {int(jnp.max(check(case, skew).rounds)) for skew in SKEWS} == {1}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mp", "esp", "expert", "schedule"),
    [(4, 2, 2, "s1h"), *(pytest.param(2, 2, 4, s, marks=ALSO) for s in SCHEDULES)],
)
def test_in_float64(doubles, mp, esp, expert, schedule):
    """In float64 the layer equals the reference to 1e-12, so that nothing is rounded to
    float32, in router and combine either."""
    case = make_case(cut(mp, esp, expert, schedule), doubles)
    for skew in ("uniform", "zipf"):
        check(case, skew, dtype=doubles)


COPIES = {"offers_per_device": 4, "copies_per_device": 6}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "store", "split", "rows_per_peer"),
    [
        ("s1h", "resident", "water_filling", 512),
        pytest.param("s1", "transient", "even", 4, marks=ALSO),
        pytest.param("s1", "transient", "water_filling", 4, marks=ALSO),
        pytest.param("s1h", "transient", "local_first", 4, marks=ALSO),
        pytest.param("s2", "sharded", "water_filling", 4, marks=ALSO),
    ],
)
def test_replicas_change_nothing(schedule, store, split, rows_per_peer):
    """The layer equals the reference with replicas too. s1 and s1h have twice as many
    sources as owners, because each owner has two devices with half of the tokens."""
    changes = {"store": store, "split": split, "rows_per_peer": rows_per_peer}
    changes |= COPIES if store != "sharded" else {}
    case = make_case(cut(2, 2, 4, schedule, slots_per_device=6, **changes))
    assert case.layout.num_sources == (8 if schedule != "s2" else 4)
    odd, rng = odd_plans(case.layout, 1).values(), np.random.default_rng(0)
    for plan in (*odd, *(random_plan(rng, case.layout, 1) for _ in range(2))):
        check(case, plan=plan)


@pytest.mark.slow
@pytest.mark.parametrize("saved", [FULL, pytest.param(DISPATCH, marks=ALSO)], ids=str)
def test_recomputed_layers_are_the_same(saved):
    """A layer equals the reference if it saves only the arrays that Model.remat =
    'full' or 'dispatch' saves."""
    check(make_case(cut(2, 2, 4, "s1h", **ALL_ROWS), saved=saved))


def run_with_capacity(expert: int, rows_per_slot: int, **changes):
    """Return the output and the number of dropped choices of a layer with a
    capacity."""
    changes |= {"rows_per_peer": rows_per_slot * EXPERTS // expert}
    mesh = Topology(expert=expert, tensor=changes.get("expert_shards", 1))
    case = make_case(config(mesh, exchange="capacity", **changes))
    assert case.layout.rows_per_slot == rows_per_slot
    args = operands(BATCH, "zipf")
    y_btd, sums = case.forward(*on_mesh(case, home(case), args))
    num_dropped = int(jnp.sum(sums.dropped))
    assert int(jnp.sum(sums.rows)) + num_dropped == args[1].size
    return np.asarray(y_btd), num_dropped


@pytest.mark.long
@pytest.mark.slow
def test_which_rows_a_capacity_drops():
    """In capacity mode s2 drops the rows that one device with all tokens of the tensor
    group would drop. s1 drops those that several devices, each with a part of the
    tokens, would drop, which are others."""
    whole, num_whole = run_with_capacity(4, 4)
    s2, num_s2 = run_with_capacity(4, 4, schedule="s2", expert_shards=2)
    parts, num_parts = run_with_capacity(8, 2)
    s1, num_s1 = run_with_capacity(4, 2, schedule="s1", expert_shards=2)
    assert 0 < num_whole == num_s2
    assert 0 < num_parts == num_s1
    assert_close((s2, s1), (whole, parts))
    assert np.abs(s1 - s2).max() > 0.1 * np.abs(s2).max()


def test_expert_choice_wants_whole_sequences():
    """Expert choice chooses among the tokens of one sequence, so that s1 refuses to cut
    sequences."""
    router = Router(kind="expert_choice", allow_expert_choice_in_decoder=True)
    case = make_case(cut(4, 4, 2, "s1", router=router))
    x_btd, _ = operands(6, "zipf")
    with pytest.raises(ValueError, match="schedule") as error:
        case.forward(*on_mesh(case, home(case), (x_btd, None)))
    assert "\n" not in str(error.value)
