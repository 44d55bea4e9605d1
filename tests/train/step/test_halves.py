"""A train step in halves (Moe.halves) is the step without them, and nothing joins the
halves between the embedding and the final norm."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

from moejax.config import Balance, Config, Recorded, Router
from moejax.moe.types import Windows
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from tests.support.expert_fields import parts_with
from tests.support.random_plans import owners_alone, random_plan
from tests.support.steps import (
    BATCH,
    SEQ,
    SMALL,
    STORES,
    WIDTH,
    E,
    L,
    StepCase,
    case_maker,
    check_step,
    in_order,
    model_from,
    warm_state_of,
)
from train.step.compiled import on_devices, trace_train_step
from train.step.step import window_sharding

ALSO = pytest.mark.long
TENSOR = {"mesh": Topology(data=2, expert=2, tensor=2)}
CHOICE = Router(
    kind="expert_choice", allow_expert_choice_in_decoder=True, balance_loss=0.0
)
CASES = {
    "prefetched": STORES["prefetched"] | {"slots_per_device": 3},
    "documents and jitter": {
        "documents": "separate", "remat": "none",
        "router": Router(jitter=0.3, balance_loss=0.0),
    },
    "odd": {
        "accumulate_steps": 2, "rows_per_peer": 4, "overflow": "rounds",
        "router": Router(balance_loss=0.1, z_loss=0.1, kind="sigmoid"),
    },
    "recorded and sharded": STORES["sharded"]
    | {"split": "local_first", "slots_per_device": 3}
    | {"router": Router(kind="recorded")},
    "shared experts behind a dense layer": {
        "num_shared_experts": 1, "first_k_dense": 1, "num_layers": 3,
        "remat": "dispatch",
    },
    "shortcut": {"num_shared_experts": 1, "block": "shortcut", "qk_norm": "full"},
    "gathered once and prefetched": {
        "gather": "step", "prefetch": True, "rows_per_peer": 8, "overflow": "rounds",
    },
    "water filling": STORES["resident"]
    | {"slots_per_device": 3, "split": "water_filling"},
    "dynamic": STORES["dynamic"] | {"split": "dynamic"},
    "expert choice": {"router": CHOICE, "remat": "none"},
    "odd with tensor": TENSOR | {"accumulate_steps": 4, "schedule": "s1"},
    "s1h": TENSOR | {"schedule": "s1h"},
    "base": TENSOR | {"schedule": "base"},
    "dense training": {"router": Router(training="dense", balance_loss=0.0)},
    "s2": TENSOR | {"schedule": "s2"},
    "local": TENSOR | {"schedule": "local"},
    "prefetched over data": {"prefetch": True, "remat": "none"},
    "domain": {
        "mesh": Topology(dc=2, expert=4), "group": "dc_expert", "domain": (2, 2),
    },
}  # fmt: skip


def configure(fields: dict, *, halves: bool) -> Config:
    """Return SMALL with the fields of a case, each in the class that has it."""
    cfg, rest = SMALL, dict(fields)
    for part in ("mesh", "router"):
        cfg = dataclasses.replace(cfg, **{part: rest.pop(part, getattr(cfg, part))})
    if cfg.router.kind == "recorded":
        cfg = dataclasses.replace(cfg, recorded=Recorded(source="zipf"))
    if "documents" in rest:
        data = dataclasses.replace(cfg.data, documents=rest.pop("documents"))
        cfg = dataclasses.replace(cfg, data=data)
    for part in ("model", "train"):
        value = getattr(cfg, part)
        named = {field.name for field in dataclasses.fields(value)} & set(rest)
        own = {name: rest.pop(name) for name in named}
        cfg = dataclasses.replace(cfg, **{part: dataclasses.replace(value, **own)})
    if rest.get("split") == "water_filling":
        cfg = dataclasses.replace(cfg, balance=Balance(policy="micromoe"))
    return dataclasses.replace(cfg, **parts_with(rest | {"halves": halves}, cfg))


@functools.cache
def compiled(name: str, halves: bool, dtype: str) -> StepCase:
    return case_maker(model_from(configure(CASES[name], halves=halves), dtype))


def make_windows(case: StepCase) -> Windows:
    """Return windows whose documents begin at other places in each sequence."""
    train = case.model.cfg.train
    rng, shape = np.random.default_rng(4), (train.batch_size, SEQ + 1)
    place_t, begin_b1 = np.arange(SEQ + 1), rng.integers(0, SEQ, (shape[0], 1))
    position_bt = np.where(place_t < begin_b1, place_t, place_t - begin_b1)
    windows = Windows(rng.integers(0, 16, shape), position_bt)
    shape = (train.accumulate_steps, -1, SEQ + 1)
    windows = jax.tree.map(lambda x: x.astype(np.int32).reshape(shape), windows)
    return jax.device_put(windows, window_sharding(case.model.mesh))


def make_plan(case: StepCase) -> ExpertPlan:
    """Return a plan with random owners and replicas, if the layout has room."""
    layout = case.model.layout
    if case.model.cfg.router.training == "dense" or layout.domain is not None:
        return case.model.run.home_plan()
    if layout.split == "dynamic":
        return owners_alone(layout, np.tile(np.arange(E, dtype=np.int32), (L, 1)))
    return random_plan(np.random.default_rng(1), layout, L)


def one_step(case: StepCase, state, plan: ExpertPlan):
    """Return the state after a step, with experts in logical order, and its metrics."""
    state = jax.device_put(in_order(state, plan.owned_le), case.shardings)
    placement = on_devices(plan, case.model.layout, case.model.mesh)
    state, metrics = jax.device_get(case.step(state, placement, make_windows(case)))
    return in_order(state, np.argsort(plan.owned_le, axis=1)), metrics


def check_case(name: str, dtype: str) -> None:
    """Assert that a step in halves equals the step without, in the state after it and
    in its statistics."""
    whole, halved = (compiled(name, halves, dtype) for halves in (False, True))
    assert halved.model.layout.num_exchanges == 2
    start, plan = warm_state_of(whole.model), make_plan(whole)
    expected, actual = one_step(whole, start, plan), one_step(halved, start, plan)
    check_step(actual, expected, dtype)
    of_whole, of_halves = expected[1].routing, actual[1].routing
    assert np.array_equal(of_whole.tokens_lwe, of_halves.tokens_lwe)
    assert np.array_equal(of_whole.dropped_l, of_halves.dropped_l)
    assert (of_whole.rows_lw.sum(axis=1) == of_halves.rows_lw.sum(axis=1)).all()
    assert (of_halves.bound_l <= of_halves.fullest_device_l).all()
    assert (of_halves.fullest_device_l >= of_halves.rows_lw.max(axis=1)).all()
    assert (of_halves.fullest_pair_l <= of_whole.fullest_pair_l).all()
    if "rows_per_peer" in CASES[name]:  # too few for the whole, and for a half
        assert (of_halves.rounds_l > 1).all()
        assert (of_halves.rounds_l < of_whole.rounds_l).all()


FIRST = "prefetched"


@ALSO
@pytest.mark.slow
def test_a_step_in_float64(doubles):
    check_case(FIRST, doubles)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name == FIRST else pytest.param(name, marks=ALSO) for name in CASES],
)
def test_a_step_in_halves_is_a_whole_step(name):
    check_case(name, "float32")


def activations(variables) -> list[int]:
    """Return the places of the variables that are a half of the batch's activations."""
    shape = (BATCH // 2, SEQ, WIDTH)
    return [i for i, v in enumerate(variables) if v.aval.shape == shape]


class Loop(NamedTuple):
    """A scan over MoE layers. Sources are the halves whose activations or gradients, as
    they enter an iteration, a value depends on."""

    results: list[frozenset]
    """Sources of each half, as it leaves an iteration."""
    exchanges: list[frozenset]
    """Sources of what each exchange of rows sends."""


def find_loops(jaxpr) -> list[Loop]:
    """Return the loops over MoE layers of a program, in program order."""
    loops: list[Loop] = []
    _sources(jaxpr.jaxpr, [frozenset()] * len(jaxpr.jaxpr.invars), loops, None)
    return loops


def _sources(jaxpr, sources: list, loops: list, exchanges: list | None) -> list:
    """Return the sources of each output of a jaxpr, from those of its inputs.

    Outside of a loop, where `exchanges` is None, only what an iteration kept for the
    backward pass has sources: losses depend on both halves.
    """
    of = dict(zip(jaxpr.invars, sources)) | dict.fromkeys(jaxpr.constvars, frozenset())
    for eqn in jaxpr.eqns:
        given = [frozenset() if isinstance(v, Literal) else of[v] for v in eqn.invars]
        union = frozenset().union(*given) if exchanges is not None else frozenset()
        results = [union] * len(eqn.outvars)
        if eqn.primitive.name == "all_to_all" and exchanges is not None:
            exchanges.append(union)
        if _is_loop(eqn):
            results = _loop_results(eqn, given, loops)
        elif eqn.primitive.name in ("while", "scan", "cond") and exchanges is not None:
            for body in jaxprs_in_params(eqn.params):
                inner = body.jaxpr if isinstance(body, ClosedJaxpr) else body
                _sources(inner, [union] * len(inner.invars), loops, exchanges)
        else:
            for body in jaxprs_in_params(eqn.params):
                inner = body.jaxpr if isinstance(body, ClosedJaxpr) else body
                if len(inner.invars) == len(given):
                    made = _sources(inner, given, loops, exchanges)
                    results = made if len(made) == len(results) else results
        of |= dict(zip(eqn.outvars, results))
    return [frozenset() if isinstance(v, Literal) else of[v] for v in jaxpr.outvars]


def _is_loop(eqn) -> bool:
    """Return whether an equation is a scan whose iterations carry two halves."""
    if eqn.primitive.name != "scan":
        return False
    first, last = _carry(eqn)
    return len(activations(eqn.invars[first:last])) == 2


def _carry(scan) -> tuple[int, int]:
    """Return the place of the first input of a scan that its iterations carry, and of
    the first after these."""
    consts, carry, _ = (len(list(part)) for part in scan.params["ft_in"].unpack())
    return consts, consts + carry


def _loop_results(eqn, given: list, loops: list) -> list:
    """Return the sources of each output of a loop, and list the loop."""
    body, (first, last) = eqn.params["jaxpr"].jaxpr, _carry(eqn)
    halves = activations(body.invars[first:last])
    assert halves == activations(body.outvars[: last - first])
    sources = [*given[:first], *[frozenset()] * (last - first), *given[last:]]
    for number, i in enumerate(halves):
        sources[first + i] = frozenset({number})
    exchanges: list = []
    results = _sources(body, sources, loops, exchanges)
    loops.append(Loop([results[i] for i in halves], exchanges))
    return results


@pytest.mark.parametrize(
    "fields",
    [
        {"remat": "full"},
        pytest.param(
            {"remat": "dispatch", "num_shared_experts": 1, "block": "shortcut"},
            marks=ALSO,
        ),
        pytest.param({"remat": "none", "prefetch": True}, marks=ALSO),
        pytest.param({"remat": "full", "prefetch": True, "gather": "step"}, marks=ALSO),
    ],
    ids=str,
)
def test_nothing_joins_the_halves(fields):
    """In the loops over layers, forward and backward, the activations or gradients of
    each half depend on that half alone, and so does every exchange of rows. So nothing
    that a half computes waits for the other half."""
    cfg = configure(fields, halves=True)
    loops = find_loops(trace_train_step(model_from(cfg, "float32")).jaxpr)
    assert len(loops) == 2, "one forward, one backward"
    again = 2 if fields["remat"] == "full" else 0
    for loop, num_exchanges in zip(loops, (2, 2 + again)):
        assert loop.results == [{0}, {1}]
        of_rows = [sources for sources in loop.exchanges if sources]
        assert all(len(sources) == 1 for sources in of_rows)
        for half in range(2):
            assert of_rows.count(frozenset({half})) == num_exchanges
