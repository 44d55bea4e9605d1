"""Test that compiled layers send what the formulas of schedules and domains say.

Kinds, counts and bytes of collectives, forward and backward, are those that
perf/choose_schedule.py predicts; those of domains are in the test.

Buffers hold every row, so that there are no later rounds: each device could get all
tokens of a source. Collectives of at most FEW floats are left out: they carry integers,
losses and the router's gradient. Those of cards are counted by themselves.
"""

import math
import re
from collections import Counter, defaultdict
from typing import NamedTuple

import pytest

from moejax.perf.calibration import leaving_bytes
from moejax.perf.choose_schedule import MicroBatchShape, predict
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


CARD = str(2 * TOP_K)
"""Last dim of what travels beside rows: gates and slots."""


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
        dims_of_arrays = [dims for dims in dims_of_arrays if dims[-1] != CARD]
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


def compile_layer(layer: Layer, is_training: bool = True):
    """Return the compiled forward pass, in training with the backward pass."""
    args = on_mesh(layer, home(layer), operands(layer.batch, "zipf"))
    return (layer.run if is_training else layer.forward).lower(*args).compile()


QUICK = (2, 2, 4, "s1h", True)
GRID = [
    pytest.param(*case, marks=() if case == QUICK else pytest.mark.long)
    for *sizes, schedule in SCHEDULED
    if sizes[0] * sizes[2] == 8
    for case in [(*sizes, schedule, is_training) for is_training in (True, False)]
]


@pytest.mark.slow
@pytest.mark.parametrize(("mp", "esp", "expert", "schedule", "is_training"), GRID)
def test_schedules_send_what_is_predicted(mp, esp, expert, schedule, is_training):
    """The bytes of a compiled layer's large collectives, and how many there are, are
    those of the formulas. In particular the split over the tensor axis causes no
    all_reduce."""
    layer = layer_of(cut(mp, esp, expert, schedule, batch=BATCH, **ALL_ROWS))
    sent = count_collectives(compile_layer(layer, is_training))
    if schedule == "base" and esp > mp and is_training:
        groups = esp // mp  # scores and logits of each group's tokens
        size = BATCH * SEQ // expert * EXPERTS * groups
        sent -= Counter({Sent("all_gather", size, groups): 2})
    shape = MicroBatchShape(
        BATCH * SEQ // expert, WIDTH, HIDDEN, EXPERTS,
        top_k=layer.layout.num_devices,  # rows for a token
        buffer_factor=1.0, itemsize=ITEMSIZE, tensor=mp, expert_shards=esp,
        sizes={"expert": expert}, is_training=is_training,
    )  # fmt: skip
    predicted, leaving = defaultdict(float), defaultdict(float)
    for term in predict(shape, TWO_LEVELS, schedule).terms:
        if term.bytes and not term.name.endswith("counts"):
            predicted[term.name.split()[0]] += term.bytes
            # Of weights, gate beside up is one collective and down another.
            count = term.count * (2 if term.name.endswith("weights") else 1)
            predicted[term.name.split()[0], "count"] += count
    for (kind, elements, w), count in sent.items():
        leaving[kind] += count * leaving_bytes(kind, elements * ITEMSIZE, w)
        leaving[kind, "count"] += count
    assert predicted == pytest.approx(leaving)


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
