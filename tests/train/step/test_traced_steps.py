"""Laws of what a traced step contains: what travels how often, what exists once, and
what waits for what. Nothing is compiled."""

from unittest import mock

import pytest
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

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
from train.step import compiled
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
    jaxpr = trace(is_exact, dispatch={"buffer_factor": 1.0, "overflow": "redo"})
    loops = [
        eqn
        for eqn, _ in equations(jaxpr)
        if eqn.primitive.name == "while"
        and primitives(eqn.params["body_jaxpr"])["all_to_all"] > 0
    ]
    assert len(loops) == num_loops


@pytest.mark.parametrize(("overflow", "is_exact"), [("redo", [0, 1]), ("rounds", [1])])
def test_a_run_compiles_the_exact_step_and_before_it_a_loop_free_one(
    monkeypatch, overflow, is_exact
):
    """A step that overflows runs again by the exact step, which then carries every
    row. Steps are not compiled here."""
    made = []

    def make_step(context):
        made.append(context.is_exact)
        step = mock.Mock()
        step.trace.return_value = step
        step.lower.return_value = step
        return step

    monkeypatch.setattr(compiled, "make_train_step", make_step)
    monkeypatch.setattr(compiled, "make_eval_step", lambda context: mock.Mock())
    monkeypatch.setattr(compiled.Lowered, "compile", lambda lowered, **_: lowered)
    dispatch = {"buffer_factor": 1.0, "overflow": overflow}
    model = model_from(configure(dispatch=dispatch, **ACCUMULATED), "float32")
    steps = compiled.compile_steps(model)
    assert made == is_exact
    assert (steps.loop_free is None) == (overflow == "rounds")


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


def test_nothing_joins_the_halves():
    """In the loops over layers, forward and backward, the activations or gradients that
    leave an iteration depend on those of the same half alone that enter it, and so does
    every exchange of rows. So nothing that a half computes waits for the other half."""
    jaxpr = trace(model={"remat": "full"}, moe={"halves": True})
    scans = [eqn for eqn, _ in equations(jaxpr) if eqn.primitive.name == "scan"]
    num_loops = 0
    for scan in scans:
        body, (first, last) = scan.params["jaxpr"].jaxpr, carried(scan)
        halves = activations(body.invars[first:last])
        if len(halves) != 2:
            continue
        num_loops += 1
        assert halves == activations(body.outvars[: last - first])
        sources, exchanges = [frozenset()] * len(body.invars), []
        for half, i in enumerate(halves):
            sources[first + i] = frozenset({half})
        results = sources_of_outputs(body, sources, exchanges)
        assert [results[i] for i in halves] == [{0}, {1}]
        of_rows = [each for each in exchanges if each]
        assert sorted(map(sorted, of_rows)) == [
            [half] for half in (0, 1) for _ in range(3)
        ]
    assert num_loops == 2, "one forward, one backward"


def carried(scan) -> tuple[int, int]:
    """Return the place of the first input of a scan that its iterations carry, and of
    the first after these."""
    consts, carry, _ = (len(list(part)) for part in scan.params["ft_in"].unpack())
    return consts, consts + carry


def activations(variables) -> list[int]:
    """Return the places of the variables that are a half of the batch's activations."""
    shape = (BATCH // 2, SEQ, WIDTH)
    return [i for i, v in enumerate(variables) if v.aval.shape == shape]


def sources_of_outputs(jaxpr, sources: list, exchanges: list) -> list:
    """Return the halves that each output of a jaxpr depends on, from those of its
    inputs; append those that each exchange depends on."""
    of = dict(zip(jaxpr.invars, sources)) | dict.fromkeys(jaxpr.constvars, frozenset())
    for eqn in jaxpr.eqns:
        given = [frozenset() if isinstance(v, Literal) else of[v] for v in eqn.invars]
        union = frozenset().union(*given)
        results = [union] * len(eqn.outvars)
        if eqn.primitive.name == "all_to_all":
            exchanges.append(union)
        is_loop = eqn.primitive.name in ("while", "scan", "cond")
        for body in jaxprs_in_params(eqn.params):
            inner = body.jaxpr if isinstance(body, ClosedJaxpr) else body
            if is_loop:
                sources_of_outputs(inner, [union] * len(inner.invars), exchanges)
            elif len(inner.invars) == len(given):
                made = sources_of_outputs(inner, given, exchanges)
                results = made if len(made) == len(results) else results
        of |= dict(zip(eqn.outvars, results))
    return [frozenset() if isinstance(v, Literal) else of[v] for v in jaxpr.outvars]
