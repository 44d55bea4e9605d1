"""Test that compiled layers send what the formulas of schedules and domains say.

Kinds, counts and sizes of collectives, forward and backward, are compared with formulas
and with the bytes that perf/choose_schedule.py predicts.

    n    tokens of a tensor group    T    rows of a full send buffer for them
    EP   owners of experts           w    devices of a collective

Buffers hold every row, so that there are no later rounds. Collectives of at most FEW
floats are left out: they carry integers, losses and the router's gradient.
"""

import math
import re
from collections import Counter
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


def compile_both(layer: Layer):
    """Return the compiled forward and backward passes."""
    args = on_mesh(layer, home(layer), operands(layer.batch, "zipf"))
    return layer.run.lower(*args).compile()


class Sizes(NamedTuple):
    """Arguments of a schedule's formulas: MP, ESP, the size of the expert axis, EP."""

    mp: int
    esp: int
    expert: int
    ep: int
    nd: int
    """Number of tokens of a tensor group, times the width."""
    rows_d: int
    """Number of rows of full buffers for these tokens, times the width."""

    @property
    def tokens(self) -> Sent:
        """The gather of tokens over the tensor axis."""
        return Sent("all_gather", self.nd, self.mp)

    def rows(self) -> Counter:
        """Return the exchanges of rows, there and back, with every shard at once."""
        size = self.rows_d * self.esp // self.mp
        return Counter({Sent("all_to_all", size, self.ep * self.esp): 2})


def _s1(s: Sizes) -> tuple[Counter, Counter]:
    sent = s.rows() + Counter([s.tokens])
    return sent, sent


def _s2(s: Sizes) -> tuple[Counter, Counter]:
    sent = s.rows() + Counter([Sent("all_gather", s.rows_d, s.mp)])
    return sent, sent


def _s1h(s: Sizes) -> tuple[Counter, Counter]:
    shards = (s.rows_d * s.esp // s.mp, s.esp)
    kinds = (Sent("all_gather", *shards), Sent("reduce_scatter", *shards), s.tokens)
    sent = Counter({Sent("all_to_all", s.rows_d // s.mp, s.ep): 2}) + Counter(kinds)
    return sent, sent


def _local(s: Sizes) -> tuple[Counter, Counter]:
    tokens = Counter([Sent("all_reduce", s.nd, s.mp)])
    one = (
        EXPERTS // s.mp * WIDTH * HIDDEN
    )  # one matrix of each expert: gate, up or down
    gathered, scattered = (
        Counter(Sent(kind, times * one, s.expert) for times in (1, 2))
        for kind in ("all_gather", "reduce_scatter")
    )
    return tokens + gathered, tokens + scattered


def _base(s: Sizes) -> tuple[Counter, Counter]:
    outer, inner = max(s.mp // s.esp, 1), max(s.esp // s.mp, 1)
    part = s.esp / outer
    rows = round(s.rows_d * part)
    sent = Counter(
        {Sent("all_to_all", rows, s.ep): 2, Sent("all_reduce", rows, s.esp): 1}
    )
    forward = sent + Counter([Sent("all_gather", round(s.nd * part), s.esp)])
    if outer > 1:  # in the backward pass it is the transpose of the split
        forward[Sent("all_gather", s.nd, outer)] += 1
        sent[Sent("all_gather", s.nd, outer)] += 1
    if inner > 1:  # gradients of the tokens that other devices of an owner took
        sent[Sent("all_gather", s.nd * inner, inner)] += 1
    return forward, sent


SENT = {"base": _base, "s1": _s1, "s2": _s2, "s1h": _s1h, "local": _local}
"""For each schedule, the papers' formulas for what is sent forward and backward."""


def expected_collectives(
    schedule: str, mp: int, esp: int, expert: int
) -> tuple[Counter, Counter]:
    """Return the collectives of the forward pass and those of the backward pass."""
    ep, n = expert * mp // esp, BATCH * SEQ // expert
    return SENT[schedule](Sizes(mp, esp, expert, ep, n * WIDTH, ep * n * TOP_K * WIDTH))


QUICK = (2, 2, 4, "s1h")
GRID = [
    pytest.param(*case, marks=() if case == QUICK else pytest.mark.long)
    for case in SCHEDULED
    if case[0] * case[2] == 8
]


@pytest.mark.slow
@pytest.mark.parametrize(("mp", "esp", "expert", "schedule"), GRID)
def test_schedules_send_what_their_formulas_say(mp, esp, expert, schedule):
    """A layer runs the collectives of its schedule and no others of that size; the
    predicted bytes are those of these collectives.

    In particular the split over the tensor axis causes no all_reduce.
    """
    layer = layer_of(cut(mp, esp, expert, schedule, batch=BATCH, **ALL_ROWS))
    trained = count_collectives(compile_both(layer))
    forward, back = expected_collectives(schedule, mp, esp, expert)
    scores = Counter()
    if schedule == "base" and esp > mp:  # scores and logits of each group's tokens
        groups = esp // mp
        size = BATCH * SEQ // expert * EXPERTS * groups
        scores[Sent("all_gather", size, groups)] = 2
    assert trained == forward + back + scores

    for is_training, sent in ((False, forward), (True, forward + back)):
        shape = MicroBatchShape(
            BATCH * SEQ // expert, WIDTH, HIDDEN, EXPERTS, TOP_K,
            layer.layout.num_devices, ITEMSIZE, mp, esp, {"expert": expert},
            is_training,
        )  # fmt: skip
        terms = predict(shape, TWO_LEVELS, schedule).terms
        predicted, leaving = Counter(), Counter()
        for term in terms:
            if term.bytes and not term.name.endswith("counts"):
                predicted[term.name.split()[0]] += term.bytes
        for (kind, elements, w), count in sent.items():
            leaving[kind] += count * leaving_bytes(kind, elements * ITEMSIZE, w)
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
    trained = count_collectives(compile_both(layer))
    domains = 8 // math.prod(shared)
    forward, back = Counter(), Counter()
    if domains > 1:
        rows = domains * BATCH * SEQ // 8 * TOP_K
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
