"""A train step is the plain step in whatever way it is computed: under every store,
split, schedule, domain and plan, in halves, in micro-batches and in later rounds."""

import functools
import math
import re
from collections import Counter

import jax
import numpy as np
import pytest

from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from tests.support.close import are_same_bits, assert_close
from tests.support.primitives import equations
from tests.support.random_plans import odd_plans, policy_plans, random_plan
from tests.support.steps import (
    BATCH,
    ONE_EXPERT,
    STORES,
    TWO_DCS,
    WAYS,
    E,
    L,
    StepCase,
    check_step,
    home,
    in_order,
    make_case,
    make_windows,
    one_step,
    other_plan,
    run,
    warm_state_of,
)
from train.balance.migrate import Mover
from train.step.compiled import on_devices
from train.step.expert_params import is_expert, take

pytestmark = pytest.mark.slow
LONG = pytest.mark.long
OFTEN = (
    "resident, gathered once", "sharded, in halves", "dynamic, later rounds",
    "domain, copies filled",
)  # fmt: skip
"""Ways of `make test`. test_dense_weights.py has a tensor axis, and
tests/train/balance/test_balancing.py water-filling."""
PUBLISHED = [
    ("gpt_oss", "prefetched"), ("gpt_oss", "dynamic, in halves"),
    ("gpt_oss", "tensor, shards over expert"),
    ("deepseek", "sharded, in halves"), ("deepseek", "merged"),
    ("deepseek", "halves, later rounds"),
    ("llama4", "filled"), ("llama4", "domain"), ("llama4", "resident, gathered once"),
    ("llama4", "tensor, halves"),
]  # fmt: skip
"""Ways of the published families, whose steps compile in half a minute."""
ROUTERS = ("shortcut", "losses", "jitter", "recorded", "dense")
OTHERS = [way for way in WAYS if way not in ("owned", *OFTEN)]
CASES = [
    *(("small", way, "float64") for way in ("owned", *OFTEN)),
    *(
        pytest.param(*case, marks=LONG)
        for case in (
            *(("small", way, "float64") for way in OTHERS),
            *(("small", way, "bfloat16") for way in OFTEN),
            *((*case, "float32") for case in PUBLISHED),
            *((family, "halves", "float32") for family in ROUTERS),
        )
    ),
]
"""Families, ways and dtypes of the computation; each router is tried in halves."""


@functools.lru_cache(maxsize=2)
def plain(family: str, dtype: str):
    """Return a state, and the result of the plain step from it: every expert is at
    home, and batches are whole."""
    case = make_case(family, dtype, **WAYS["owned"])
    start = warm_state_of(case.model)
    return start, one_step(case, start, home(case))


def plans_for(case: StepCase, way: str) -> list[ExpertPlan]:
    """Return the home plan, a random one, and extreme ones if the layout has room."""
    layout, num_layers = case.model.layout, case.model.cfg.model.num_moe_layers
    plans = [home(case), other_plan(case, np.random.default_rng(1))]
    own = layout.experts_per_device
    has_room = own < min(layout.slots_per_device, layout.num_devices)
    if has_room and layout.split != "dynamic":
        plans += odd_plans(layout, num_layers).values()
    if way in ("owned", "prefetched"):
        plans += policy_plans(layout, num_layers).values()
    return plans


@pytest.mark.parametrize(("family", "way", "dtype"), CASES)
def test_a_step_is_the_plain_step(request, family, way, dtype):
    """Loss, gradients, moments, parameters and loads agree, also for plans that no good
    policy makes."""
    if dtype == "float64":
        request.getfixturevalue("doubles")
    start, expected = plain(family, dtype)
    case = make_case(family, dtype, **WAYS[way])
    for plan in plans_for(case, way):
        actual = one_step(case, start, plan)
        check_step(actual, expected, dtype)
        routing = actual[1].routing
        assert (routing.rounds_l > 1).all() == ("rounds" in way)
        if case.model.layout.tensor is None:  # else several devices compute a row
            rows = routing.rows_lw, expected[1].routing.rows_lw
            assert np.array_equal(rows[0].sum(axis=1), rows[1].sum(axis=1))
        assert (routing.bound_l <= routing.fullest_device_l).all()
        assert (routing.fullest_device_l >= routing.rows_lw.max(axis=1)).all()
        assert (routing.dropped_l == 0).all()


@LONG
def test_gradients_of_bfloat16_slots_are_summed_in_float32():
    """Experts' gradients of eight equal micro-batches are those of one, bit for bit: a
    sum of equal bfloat16 numbers is exact in float32, and is rounded in bfloat16."""
    parts = {"dispatch": STORES["resident"]}
    copies = {"batch_size": 8 * BATCH, "accumulate_steps": 8}
    one = make_case("small", "bfloat16", **parts)
    eight = make_case("small", "bfloat16", **parts, train=copies)
    start, windows = warm_state_of(one.model), make_windows(one)
    again = jax.tree.map(lambda leaf: np.tile(leaf, (8, 1, 1)), windows)
    states = []
    for case, batch in ((one, windows), (eight, again)):
        state = jax.device_put(start, case.shardings)
        placement = on_devices(home(case), case.model.layout, case.model.mesh)
        grads = case.step(state, placement, batch)[0].opt_state[0]
        states.append(take(grads)[0])
    assert are_same_bits(*map(jax.tree.leaves, states))


def trajectory(dtype: str, ways: tuple[str, ...], num_steps: int):
    """Yield the logical state after every five steps. If ways are given, every five
    steps the run changes to the next one and to another random plan."""
    rng, case = np.random.default_rng(3), make_case("small", dtype, **WAYS["owned"])
    plan, mover = home(case), case.mover
    state = jax.device_put(warm_state_of(case.model), case.shardings)
    for step in range(num_steps):
        if ways and step % 5 == 0:
            old = case, plan
            case = make_case("small", dtype, **WAYS[ways[step // 5 % len(ways)]])
            plan = random_plan(rng, case.model.layout, L)
            state = adopt(state, mover, old, (case, plan))
        state, _ = run(case, state, plan, step)
        if step % 5 == 4:
            yield in_order(jax.device_get(state), np.argsort(plan.owned_le, axis=1))


def adopt(state, mover: Mover, old: tuple, new: tuple):
    """Move master parameters and moments to the store and owners of the new case."""
    (old_case, old_plan), (case, plan) = old, new
    stores = old_case.model.layout.store, case.model.layout.store
    if stores[0] == "sharded":
        state = mover.to_store(state, *stores)
    state = mover.to_owners(state, old_plan, plan)
    if stores[0] != "sharded":
        state = mover.to_store(state, *stores)
    return state


def test_a_trajectory_does_not_depend_on_stores_and_plans(doubles):
    """Stores, plans and owners change every five steps; the states do not differ."""
    ways = ("resident, gathered once", "owned", "sharded, in halves")
    runs = (trajectory(doubles, each, 30) for each in (ways, ()))
    for actual, expected in zip(*runs, strict=True):
        assert_close(actual, expected, factor=1e4, reason="1e-8: rounding grows")


@pytest.mark.parametrize(
    ("mesh", "ways"),
    [
        (TWO_DCS, [("auto", (1, 1)), ("auto", (2, 1))]),
        pytest.param(
            Topology(dc=2, expert=2, tensor=2),
            [("s1h", (1, 1)), ("s2", (2, 1)), ("base", (1, 2))],
            marks=LONG,
        ),
    ],
    ids=str,
)
def test_a_relayout_of_schedule_and_domain_takes_the_state_as_it_is(
    doubles, mesh, ways
):
    """Steps under other schedules and domains take the arrays of the step before, on
    their devices, and compute what they would at home."""
    parts = WAYS["domain, copies filled"] | {"mesh": mesh}
    states = []
    for each in ([*ways, ways[0]], [ways[0]] * (len(ways) + 1)):
        state, rng = None, np.random.default_rng(5)
        for step, (schedule, domain) in enumerate(each):
            dispatch = parts["dispatch"] | {"schedule": schedule, "domain": domain}
            case = make_case("small", doubles, **parts | {"dispatch": dispatch})
            if state is None:
                start = warm_state_of(case.model)
                plan = random_plan(rng, case.model.layout, L)
                start = in_order(start, plan.owned_le)
                state = jax.device_put(start, case.shardings)
            state, _ = run(case, state, plan, step)
        states.append(jax.device_get(state))
    assert_close(*states, factor=1e2, reason="several steps")


def test_nan_of_one_expert_stays_visible(doubles):
    """With NaN in an expert that has replicas, only counters change."""
    case = make_case("small", doubles, **WAYS["resident, gathered once"])

    def poisoned(path, leaf):
        if not is_expert(path):
            return leaf
        return np.where(np.arange(E)[:, None, None] == 0, np.nan, leaf)

    state = warm_state_of(case.model)
    params = jax.tree_util.tree_map_with_path(poisoned, state.params)
    state = state.replace(params=params)
    plan = odd_plans(case.model.layout, L)["hot expert on all devices"]
    after, metrics = one_step(case, state, plan)
    assert metrics.is_skipped
    assert after.skipped_in_a_row == metrics.skipped_in_a_row == 1
    assert after.step == state.step + 1
    for part in ("params", "opt_state", "router_bias"):
        pairs = zip(*(jax.tree.leaves(getattr(s, part)) for s in (state, after)))
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)


NUM_WEIGHT_EXCHANGES = {
    "owned": 0,
    "resident, gathered once": 4 * L,  # once for two micro-batches
}
"""Number of all_to_alls of expert weights and of their gradients over expert in a step:
scatter, gather and their transposes, in each layer."""


@pytest.mark.parametrize("way", NUM_WEIGHT_EXCHANGES)
def test_expert_weights_travel_by_all_to_all_alone(doubles, way):
    """We gather or reduce no expert weights over the expert axis, and XLA's partitioner
    adds no collective of an array as large as one expert."""
    case = make_case("small", doubles, **WAYS[way])
    cfg = case.model.cfg
    rows = cfg.train.batch_size // cfg.train.accumulate_steps
    rows //= cfg.mesh.dc * cfg.mesh.data
    hidden = rows * cfg.data.seq_len * cfg.model.d_model  # of a group's tokens
    result = 0
    for eqn, times in equations(case.traced.jaxpr):
        over = eqn.params.get("axis_name", eqn.params.get("axes", ()))
        if "expert" not in over or eqn.primitive.name in ("pvary", "axis_index"):
            continue
        size = eqn.invars[0].aval.size
        if eqn.primitive.name == "reduce_scatter" and size == hidden:
            continue  # of loss or embedding
        if eqn.primitive.name != "all_to_all":
            assert size < ONE_EXPERT, eqn
        elif "slots" in str(eqn.source_info.name_stack):
            result += times
    assert result == NUM_WEIGHT_EXCHANGES[way]
    for line in case.step.as_text().splitlines():
        named = re.search(r"= (.*) (all-[a-z-]*|reduce-scatter|coll[a-z-]*)\(", line)
        if named and "shard_map" not in line:
            shapes = re.findall(r"\[([0-9,]+)\]", named[1])
            sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
            assert all(size < ONE_EXPERT for size in sizes), line


@pytest.mark.parametrize("way", ["sharded, in halves", "dynamic, later rounds"])
def test_steps_lower_for_cuda(doubles, way):
    """The lowered step has as many all_to_alls as the program."""
    traced = make_case("small", doubles, **WAYS[way]).traced
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    named = Counter(eqn.primitive.name for eqn, _ in equations(traced.jaxpr))
    assert len(re.findall(r"stablehlo.all_to_all", text)) == named["all_to_all"]
