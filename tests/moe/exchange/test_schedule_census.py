"""Test that compiled layers send what the formulas of schedules and domains say.

Kinds, counts and bytes of collectives, forward and backward, are those that the cost
model predicts; those of domains are in the test.

Buffers hold every row, so that there are no later rounds: each device could get all
tokens of a source. Collectives of at most FEW floats are left out: they carry integers,
losses and the router's gradient. Those of cards are counted by themselves.
"""

import dataclasses
import math
import re
from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np
import pytest

from moejax.perf.calibration import leaving_bytes
from moejax.perf.cost_model import cost_model
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from tests.support.calibrations import TWO_LEVELS
from tests.support.layers import (
    ALL_ROWS,
    BATCH,
    EXPERTS,
    HIDDEN,
    SCHEDULED,
    SEQ,
    TOP_K,
    WIDTH,
    Layer,
    config,
    cut,
    home,
    layer_of,
    on_mesh,
    operands,
)

ITEMSIZE = 4
FEW = EXPERTS * WIDTH
LINE = re.compile(
    r"= (.*?) (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)"
    r"(?:-start)?\((.*)"
)
FLOATS = re.compile(r"f32\[([\d,]*)\]")
SIZES, ALONG = re.compile(r"'(\w+)'=(\d+)"), re.compile(r"'(\w+)'[,}]")


CARDS = str(2 * TOP_K), str(TOP_K)
"""Last dims of what travels beside rows: gates and slots, and gradients of gates."""


class Sent(NamedTuple):
    """Kind and size of one collective, and the number of devices in it."""

    kind: str
    elements: int
    """Number of floats as perf.calibration counts them: those that an all_to_all sends,
    that an all_gather returns, and that other kinds take."""
    w: int


def count_collectives(compiled) -> Counter:
    """Return how often a program runs each large collective of more than one device."""
    counts = Counter()
    for arrays, kind, rest in LINE.findall(compiled.as_text()):
        dims_of_arrays = [dims.split(",") for dims in FLOATS.findall(arrays)]
        dims_of_arrays = [dims for dims in dims_of_arrays if dims[-1] not in CARDS]
        sizes = [math.prod(int(n) for n in dims if n) for dims in dims_of_arrays]
        if kind == "all-to-all":
            sizes = [sum(sizes)]
        if max(sizes, default=0) <= FEW:
            continue
        mesh, along = re.search(
            r"replica_groups=mesh\[(.*?)\] (\{.*?\})", rest
        ).groups()
        axis_sizes = dict(SIZES.findall(mesh))
        w = math.prod(int(axis_sizes[axis]) for axis in ALONG.findall(along))
        for size in sizes if w > 1 else ():
            elements = w * size if kind == "reduce-scatter" else size
            if elements > FEW:
                counts[Sent(kind.replace("-", "_"), elements, w)] += 1
    return counts


def compile_layer(layer: Layer):
    """Return the compiled forward and backward pass."""
    args = on_mesh(layer, home(layer), operands(layer.batch, "zipf"))
    return layer.run.lower(*args).compile()


QUICK = (2, 2, 4, "s1h")
GRID = [
    pytest.param(*case, marks=() if case == QUICK else pytest.mark.long)
    for *sizes, schedule in SCHEDULED
    if sizes[0] * sizes[2] == 8
    for case in [(*sizes, schedule)]
]


@pytest.mark.slow
@pytest.mark.parametrize(("mp", "esp", "expert", "schedule"), GRID)
def test_schedules_send_what_is_predicted(mp, esp, expert, schedule):
    """The bytes of a compiled layer's large collectives, and how many there are, are
    those of the formulas. In particular the split over the tensor axis causes no
    all_reduce."""
    layer = layer_of(cut(mp, esp, expert, schedule, batch=BATCH, **ALL_ROWS))
    layout, sent = layer.layout, count_collectives(compile_layer(layer))
    if schedule == "base" and esp > mp:
        groups = esp // mp  # scores and logits of each group's tokens
        size = BATCH * SEQ // expert * EXPERTS * groups
        sent -= Counter({Sent("all_gather", size, groups): 2})
    mesh = {"dc": 1, "data": 1, "expert": expert, "tensor": mp}
    cost = cost_model(
        dataclasses.replace(TWO_LEVELS, mesh=mesh), d_model=WIDTH,
        d_expert=HIDDEN // esp, itemsize=ITEMSIZE, micro_batches=1,
        other_flops_per_device=0.0, tokens=BATCH * SEQ // expert,
    )  # fmt: skip
    row_p = ExpertPlan.home_in(layout, 1).slot_to_expert_lp[0]
    few_we = np.ones((layout.num_devices, EXPERTS))  # one round
    predicted, leaving = defaultdict(float), defaultdict(float)
    for term in cost.predict(few_we, row_p, layout).terms:
        if term.bytes and not term.name.endswith("cards"):
            predicted[term.name.split()[0]] += term.bytes
            # Of weights, gate beside up is one collective and down another.
            cargo = term.name.split()[-1]
            count = term.count * (2 if cargo == "weights" or is_local(term) else 1)
            predicted[term.name.split()[0], "count"] += count
    for (kind, elements, w), count in sent.items():
        leaving[kind] += count * leaving_bytes(kind, elements * ITEMSIZE, w)
        leaving[kind, "count"] += count
    assert predicted == pytest.approx(leaving)


def is_local(term) -> bool:
    """Return whether a term has the gradients of whole experts, under 'local'."""
    return term.name.startswith("reduce_scatter") and term.name.endswith("gradients")


DOMAINS = [
    (2, 2),
    *(
        pytest.param(s, marks=pytest.mark.long)
        for s in ((2, 1), (1, 2), (1, 4), (2, 4))
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("shared", DOMAINS)
def test_domains_gather_experts_and_scatter_their_gradients(shared):
    """A domain gathers two arrays of weights, over the slow axis first, and rows travel
    between domains; the backward pass scatters gradients."""
    mesh = Topology(dc=2, expert=4)
    layer = layer_of(config(mesh, group="dc_expert", domain=shared, **ALL_ROWS))
    trained = count_collectives(compile_layer(layer))
    domains = 8 // math.prod(shared)
    forward, back = Counter(), Counter()
    if domains > 1:
        rows = domains * BATCH * SEQ // 8
        forward[Sent("all_to_all", rows * WIDTH, domains)] += 2
        back[Sent("all_to_all", rows * WIDTH, domains)] += 2
    size = EXPERTS // 8 * WIDTH * HIDDEN
    for w in shared:
        size *= w
        for elements in (size, 2 * size):  # down; gate and up
            if w > 1:
                forward[Sent("all_gather", elements, w)] += 1
                back[Sent("reduce_scatter", elements, w)] += 1
    assert trained == forward + back
