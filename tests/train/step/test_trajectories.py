"""A plan never changes the function: single steps and whole trajectories under every
store agree with plain expert parallelism."""

import math
import re
from collections import Counter

import jax
import numpy as np
import pytest

from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from tests.support.close import assert_close
from tests.support.primitives import equations
from tests.support.random_plans import odd_plans, policy_plans, random_plan
from tests.support.steps import (
    ONE_EXPERT,
    SPLITS,
    STORES,
    E,
    L,
    StepCase,
    check_step,
    home,
    in_order,
    make_case,
    one_step,
    run,
    warm_state,
)
from train.balance.migrate import Mover
from train.step.expert_params import is_expert


def plans_for(case: StepCase, seeds) -> dict[str, ExpertPlan]:
    layout = case.model.layout
    plans = {"home": home(case)}
    if layout.split != "dynamic":
        plans |= policy_plans(layout, L)
    if layout.split != "dynamic" and layout.store != "owned":
        plans |= odd_plans(layout, L)
    rngs = {f"random {seed}": np.random.default_rng(seed) for seed in seeds}
    return plans | {n: random_plan(rng, layout, L) for n, rng in rngs.items()}


def check_all_plans(store, dtype, seeds=range(3), **changes):
    start = warm_state(dtype)
    expected = one_step(make_case("owned", dtype), start, ExpertPlan.home(L, E))
    case = make_case(store, dtype, **changes)
    for plan in plans_for(case, seeds).values():
        check_step(one_step(case, start, plan), expected, dtype)


def trajectory(dtype: str, stores: tuple[str, ...], num_steps: int):
    """Yield the logical state after every five steps. If stores are given, every five
    steps the run changes to the next store and to another random plan."""
    rng, plain = np.random.default_rng(3), make_case("owned", dtype)
    case, plan = plain, ExpertPlan.home(L, E)
    state = jax.device_put(warm_state(dtype), plain.shardings)
    for step in range(num_steps):
        if stores and step % 5 == 0:
            old, case = case, make_case(stores[step // 5 % len(stores)], dtype)
            old_plan, plan = plan, random_plan(rng, case.model.layout, L)
            state = adopt(state, plain.mover, (old, old_plan), (case, plan))
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


DOUBLES = ("owned", "prefetched", "filled", "dynamic")
STEPS = (
    *DOUBLES[:2],
    *(pytest.param(store, marks=pytest.mark.long) for store in DOUBLES[2:]),
)


@pytest.mark.slow
@pytest.mark.parametrize("store", STEPS)
def test_one_step_in_float64(doubles, store):
    check_all_plans(store, doubles)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stores", "num_steps"),
    [(DOUBLES[1::-1], 40), pytest.param(tuple(STORES), 100, marks=pytest.mark.long)],
)
def test_trajectory_in_float64(doubles, stores, num_steps):
    """Stores, plans and owners change every five steps; the states do not differ."""
    runs = (trajectory(doubles, each, num_steps) for each in (stores, ()))
    pairs = zip(*runs, strict=True)
    for actual, expected in pairs:
        assert_close(actual, expected, factor=1e4, reason="1e-8: rounding grows")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plain", "stores", "num_steps"),
    [
        pytest.param("sharded", ["sharded"], 20, marks=pytest.mark.long),
        pytest.param("owned", list(STORES), 100, marks=pytest.mark.long),
    ],
)
def test_every_step_of_a_run_in_float32(plain, stores, num_steps):
    """Each step under the home plan equals one from the same state under another."""
    plain, rng = make_case(plain, "float32"), np.random.default_rng(4)
    state = warm_state("float32")
    for step in range(num_steps):
        expected = one_step(plain, state, home(plain), step)
        case = make_case(stores[step % len(stores)], "float32")
        plan = random_plan(rng, case.model.layout, L)
        check_step(one_step(case, state, plan, step), expected, "float32")
        state = expected[0]


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("store", STORES)
def test_one_step_in_narrower_types(store, dtype):
    check_all_plans(store, dtype, seeds=range(6))


@pytest.mark.long
@pytest.mark.parametrize("store", ["prefetched", "resident", "sharded"])
def test_other_splits(store):
    split = {"even": "local_first", "local_first": "even"}[SPLITS.get(store, "even")]
    check_all_plans(store, "float32", split=split)


@pytest.mark.long
@pytest.mark.parametrize("store", ["prefetched", "resident", "sharded"])
def test_two_data_centres(store):
    check_all_plans(store, "float32", mesh=Topology(dc=2, expert=4))


@pytest.mark.long
@pytest.mark.parametrize("store", ["transient", "prefetched"])
def test_recomputed_slots(store):
    check_all_plans(store, "float32", remat="full")


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prefetched_copies_are_the_same_bits(dtype):
    """Copies fetched a layer ahead equal those that the layer itself would fetch."""
    cases = [make_case(s, dtype, "local_first") for s in ("transient", "prefetched")]
    for plan in plans_for(cases[0], range(3)).values():
        results = [one_step(case, warm_state(dtype), plan) for case in cases]
        pairs = zip(*map(jax.tree.leaves, results))
        assert all(np.array_equal(a, b) for a, b in pairs)


REST = (pytest.param(s, marks=pytest.mark.long) for s in ("sharded", "transient"))
CASES = (*STEPS, *REST)


def compiled_dtype(store: str, request) -> str:
    """Return the dtype for which this store's step has already been compiled."""
    return request.getfixturevalue("doubles") if store in DOUBLES else "float32"


@pytest.mark.slow
@pytest.mark.parametrize("store", CASES[1:])
def test_nan_of_one_expert_stays_visible(store, request):
    """With NaN in an expert that has replicas, only counters change."""
    dtype = compiled_dtype(store, request)
    case = make_case(store, dtype)

    def poisoned(path, leaf):
        if not is_expert(path):
            return leaf
        return np.where(np.arange(E)[:, None, None] == 0, np.nan, leaf)

    state = warm_state(dtype)
    params = jax.tree_util.tree_map_with_path(poisoned, state.params)
    state = state.replace(params=params)
    plan = odd_plans(case.model.layout, L)["hot expert on all devices"]
    after, metrics = one_step(case, state, plan)
    assert metrics.is_skipped
    assert after.skipped_in_a_row == 1
    for before, now in zip(
        *(jax.tree.leaves((s.params, s.opt_state)) for s in (state, after))
    ):
        assert np.array_equal(before, now, equal_nan=True)


# Number of all_to_alls of expert weights and of their gradients over expert in a step.
NUM_WEIGHT_EXCHANGES = {
    "owned": 0,
    "transient": 4 * L,  # scatter, gather and their transposes, in each layer
    "prefetched": 4 * (L + 1),  # those of the first layer run twice
    "resident": 4 * L,  # once for two micro-batches
    "filled": 4 * L,
    "dynamic": 4 * L,
    "sharded": 4 * L,  # two arrays and their transposes
}


@pytest.mark.slow
@pytest.mark.parametrize("store", CASES)
def test_expert_weights_travel_by_all_to_all_alone(store, request):
    """We gather or reduce no expert weights over the expert axis, and XLA's partitioner
    adds no collective of an array as large as one expert."""
    case = make_case(store, compiled_dtype(store, request))
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
    assert result == NUM_WEIGHT_EXCHANGES[store]
    for line in case.step.as_text().splitlines():
        named = re.search(r"= (.*) (all-[a-z-]*|reduce-scatter|coll[a-z-]*)\(", line)
        if named and "shard_map" not in line:
            shapes = re.findall(r"\[([0-9,]+)\]", named[1])
            sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
            assert all(size < ONE_EXPERT for size in sizes), line


@pytest.mark.slow
@pytest.mark.parametrize("store", CASES)
def test_steps_lower_for_cuda(store, request):
    """The lowered step has as many all_to_alls as the program."""
    traced = make_case(store, compiled_dtype(store, request)).traced
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    named = Counter(eqn.primitive.name for eqn, _ in equations(traced.jaxpr))
    assert len(re.findall(r"stablehlo.all_to_all", text)) == named["all_to_all"]
