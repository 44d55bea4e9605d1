"""Laws of what a traced step contains: what travels how often, what exists once, and
what waits for what. Nothing is compiled."""

from typing import NamedTuple

import pytest
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

from moejax.plan.layout import Layout
from tests.support.primitives import equations, primitives
from tests.support.resolved import make_run
from tests.support.steps import (
    BATCH,
    HIDDEN,
    ONE_EXPERT,
    SEQ,
    STORES,
    TENSOR,
    TWO_DCS,
    WIDTH,
    E,
    L,
    configure,
    model_from,
)
from train.step.compiled import trace_train_step

MICRO_BATCHES = 2
ACCUMULATED = {
    "model": {"remat": "full"}, "train": {"accumulate_steps": MICRO_BATCHES},
}  # fmt: skip


def trace(is_exact: bool = False, **parts):
    """Return the jaxpr of the step of SMALL with these parts."""
    model = model_from(configure(**parts), "float32")
    return trace_train_step(model._replace(is_exact=is_exact)).jaxpr


@pytest.mark.parametrize(
    ("gather", "store"), [("step", "resident"), ("layer", "owned")]
)
def test_experts_travel_over_data_once_a_step(gather, store):
    """A layer gathers two arrays (gate with up, and down) and scatters their gradients.
    With remat it gathers twice in each micro-batch, if the step does not."""
    jaxpr = trace(dispatch=STORES[store] | {"gather": gather}, **ACCUMULATED)
    num_over_data = sum(
        trips
        for eqn, trips in equations(jaxpr)
        if eqn.primitive.name.startswith(("all_gather", "reduce_scatter"))
        and eqn.params["axis_name"] == ("data",)
        and eqn.invars[0].aval.size >= ONE_EXPERT
    )
    per_layer = 2 if gather == "step" else 3 * MICRO_BATCHES
    assert num_over_data == 2 * L * per_layer


def test_a_merged_group_gathers_no_expert_over_data():
    """Experts lie on one device of data x expert, and travel by all_to_all."""
    jaxpr = trace(dispatch=STORES["transient"] | {"group": "data_expert"})
    sizes = [
        eqn.invars[0].aval.size
        for eqn, _ in equations(jaxpr)
        if eqn.primitive.name.startswith(("all_gather", "reduce_scatter"))
        and "data" in eqn.params["axis_name"]
    ]
    assert sizes
    assert max(sizes) < ONE_EXPERT


@pytest.mark.parametrize("store", ["owned", "sharded"])
def test_loops_over_layers_return_no_gradients_of_experts(store):
    """Gradients of all layers' experts exist once, where they are summed: the loops
    over layers add to them there."""
    model = model_from(configure(dispatch=STORES[store], **ACCUMULATED), "float32")
    slots = model.layout.num_slots
    shapes = {
        (L, E, WIDTH, HIDDEN), (L, E, HIDDEN, WIDTH),
        (L, slots, WIDTH, 2, HIDDEN), (L, slots, HIDDEN, WIDTH),
    }  # fmt: skip
    loops = [
        eqn
        for eqn, times in equations(trace_train_step(model).jaxpr)
        if eqn.primitive.name == "scan"
        and eqn.params["length"] == L
        and times == MICRO_BATCHES
    ]
    read, returned = (
        [var.aval.shape for eqn in loops for var in getattr(eqn, name)]
        for name in ("invars", "outvars")
    )
    assert shapes & set(read)
    assert not shapes & set(returned)


@pytest.mark.parametrize(("is_exact", "num_loops"), [(True, 2), (False, 0)])
def test_loop_free_steps_have_no_loops_of_unknown_length(is_exact, num_loops):
    """The exact step has two in each layer, forward and backward. Layers are a scan, so
    that each is traced once."""
    jaxpr = trace(is_exact, dispatch={"rows_per_peer": 12, "overflow": "redo"})
    loops = [
        eqn
        for eqn, _ in equations(jaxpr)
        if eqn.primitive.name == "while"
        and primitives(eqn.params["body_jaxpr"])["all_to_all"] > 0
    ]
    assert len(loops) == num_loops


def test_capacity_mode_runs_nothing_again():
    with pytest.raises(ValueError, match="use overflow='rounds' or 'exact'"):
        Layout(8, 4, 2, 64, exchange="capacity", overflow="redo")


def test_a_batch_of_another_size_is_scored_without_a_domain():
    """The placement is the owners' own (train.step.compiled.home_placement)."""
    dispatch = {"group": "dc_expert", "domain": (2, 2)}
    run = make_run(configure(mesh=TWO_DCS, dispatch=dispatch))
    assert run.layout.domain is not None
    assert run.exact_layout(8, 16).domain is run.owning.domain is None


def test_a_token_at_a_time_is_routed_whole():
    run = make_run(configure(mesh=TENSOR, dispatch={"schedule": "s1h"}))
    assert run.exact_layout(4, 1).tensor.schedule == "s2"
    assert run.exact_layout(4, 2).tensor.schedule == "s1h"


@pytest.mark.parametrize(
    "parts",
    [
        {"model": {"remat": "full"}},
        pytest.param(
            {
                "model": {"remat": "dispatch", "block": "shortcut"},
                "moe": {"num_shared_experts": 1},
            },
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"model": {"remat": "none"}, "dispatch": {"prefetch": True}},
            marks=pytest.mark.long,
        ),
    ],
    ids=str,
)
def test_nothing_joins_the_halves(parts):
    """In the loops over layers, forward and backward, the activations or gradients of
    each half depend on that half alone, and so does every exchange of rows. So nothing
    that a half computes waits for the other half."""
    moe = parts.get("moe", {}) | {"halves": True}
    loops = find_loops(trace(**parts | {"moe": moe}))
    assert len(loops) == 2, "one forward, one backward"
    again = 2 if parts["model"]["remat"] == "full" else 0
    for loop, num_exchanges in zip(loops, (2, 2 + again)):
        assert loop.results == [{0}, {1}]
        of_rows = [sources for sources in loop.exchanges if sources]
        assert all(len(sources) == 1 for sources in of_rows)
        for half in range(2):
            assert of_rows.count(frozenset({half})) == num_exchanges


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
