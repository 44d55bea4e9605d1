"""What compiled layers send is what moejax.moe.exchange.schedules and .domains say, and
what the selector reckons with: kinds, counts and sizes of collectives, forward and
trained.

    n    tokens of a tensor group    T    rows of a full send buffer for them
    EP   owners of experts           w    devices of a collective

Buffers hold every row, so that there are no later rounds. Integers, losses and the
router's gradient are left out: of all floats here they alone are so few.
"""

import math
import re
from collections import Counter
from typing import NamedTuple

import pytest

from moejax.perf.calibration import leaving_bytes
from moejax.perf.choose_schedule import Shape, predict
from moejax.plan.layout import Topology
from tests.support.calibrations import TWO_LEVELS
from tests.support.configured_layers import (
    ALL_ROWS,
    BATCH,
    CUTS,
    HIDDEN,
    SCHEDULES,
    TOP_K,
    Case,
    config,
    cut,
    home,
    make_case,
    on_mesh,
    operands,
)
from tests.support.layers import EXPERTS, SEQ, WIDTH

ITEMSIZE = 4
FEW = EXPERTS * WIDTH
LINE = re.compile(
    r"= (.*?) (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)"
    r"(?:-start)?\((.*)"
)
FLOATS = re.compile(r"f32\[([\d,]*)\]")
SIZES, ALONG = re.compile(r"'(\w+)'=(\d+)"), re.compile(r"'(\w+)'[,}]")


class Sent(NamedTuple):
    kind: str
    elements: int
    """As balance.calibration counts: what an all_to_all sends, what an all_gather
    returns, what others take."""
    w: int


def counted(compiled) -> Counter:
    """How often each is sent; one device alone sends nothing."""
    found = Counter()
    for arrays, kind, rest in LINE.findall(compiled.as_text()):
        dims_of = [dims.split(",") for dims in FLOATS.findall(arrays)]
        sizes = [math.prod(int(n) for n in dims if n) for dims in dims_of]
        if kind == "all-to-all":
            sizes = [sum(sizes)]
        if max(sizes, default=0) <= FEW:
            continue
        mesh, along = re.search(
            r"replica_groups=mesh\[(.*?)\] (\{.*?\})", rest
        ).groups()
        of_axis = dict(SIZES.findall(mesh))
        w = math.prod(int(of_axis[axis]) for axis in ALONG.findall(along))
        for size in sizes if w > 1 else ():
            elements = w * size if kind == "reduce-scatter" else size
            if elements > FEW:
                found[Sent(kind.replace("-", "_"), elements, w)] += 1
    return found


def compiled(case: Case) -> tuple:
    """Forward alone, and forward and back."""
    args = on_mesh(case, home(case), operands(case.cfg.train.batch_size, "zipf"))
    return tuple(run.lower(*args).compile() for run in (case.forward, case.run))


def sent_by(schedule: str, mp: int, esp: int, expert: int) -> tuple[Counter, Counter]:
    """By the formulas: forward, and back."""
    ep, n = expert * mp // esp, BATCH * SEQ // expert
    nd, rows_d = n * WIDTH, ep * n * TOP_K * WIDTH
    everyone, tokens = ep * esp, Sent("all_gather", nd, mp)
    if schedule == "s1":
        sent = Counter({Sent("all_to_all", rows_d * esp // mp, everyone): 2, tokens: 1})
        return sent, sent
    if schedule == "s2":
        rows = Sent("all_gather", rows_d, mp)
        sent = Counter({Sent("all_to_all", rows_d * esp // mp, everyone): 2, rows: 1})
        return sent, sent
    if schedule == "s1h":
        shards = (rows_d * esp // mp, esp)
        kinds = (Sent("all_gather", *shards), Sent("reduce_scatter", *shards), tokens)
        sent = Counter({Sent("all_to_all", rows_d // mp, ep): 2}) + Counter(kinds)
        return sent, sent
    if schedule == "local":
        tokens = Counter([Sent("all_reduce", nd, mp)])
        one = EXPERTS // mp * WIDTH * HIDDEN  # of gate, up and down
        gathered, scattered = (
            Counter(Sent(kind, times * one, expert) for times in (1, 2))
            for kind in ("all_gather", "reduce_scatter")
        )
        return tokens + gathered, tokens + scattered
    outer, inner = max(mp // esp, 1), max(esp // mp, 1)
    part = esp / outer
    rows = round(rows_d * part)
    sent = Counter({Sent("all_to_all", rows, ep): 2, Sent("all_reduce", rows, esp): 1})
    forward = sent + Counter([Sent("all_gather", round(nd * part), esp)])
    if outer > 1:  # back it is that of the split
        forward[Sent("all_gather", nd, outer)] += 1
        sent[Sent("all_gather", nd, outer)] += 1
    if inner > 1:  # of gradients, that owners' other devices took of their tokens
        sent[Sent("all_gather", nd * inner, inner)] += 1
    return forward, sent


QUICK = [(2, 2, 4, schedule) for schedule in ("s1h", "local")]
GRID = [
    pytest.param(
        *sizes, schedule, marks=() if (*sizes, schedule) in QUICK else pytest.mark.long
    )
    for sizes in CUTS
    if sizes[0] * sizes[2] == 8
    for schedule in (*SCHEDULES, "local")
    if schedule != "local" or sizes[0] == sizes[1]
]


@pytest.mark.slow
@pytest.mark.parametrize(("mp", "esp", "expert", "schedule"), GRID)
def test_schedules_send_what_their_formulas_say(mp, esp, expert, schedule):
    """Nothing else of that size: no all_reduce comes of the tensor axis's split."""
    case = make_case(cut(mp, esp, expert, schedule, batch=BATCH, **ALL_ROWS))
    found, trained = map(counted, compiled(case))
    forward, back = sent_by(schedule, mp, esp, expert)
    assert found == forward
    scores = Counter()
    if schedule == "base" and esp > mp:  # of each group's tokens, and logits
        groups = esp // mp
        size = BATCH * SEQ // expert * EXPERTS * groups
        scores[Sent("all_gather", size, groups)] = 2
    assert trained == forward + back + scores

    for is_training, sent in ((False, forward), (True, forward + back)):
        shape = Shape(
            BATCH * SEQ // expert, WIDTH, HIDDEN, EXPERTS, TOP_K,
            case.layout.num_devices, ITEMSIZE, mp, esp, {"expert": expert}, is_training,
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
    """Each of two arrays of weights over the slow axis first; rows between domains."""
    mesh = Topology(dc=2, expert=4)
    case = make_case(config(mesh, group="dc_expert", domain=shared, **ALL_ROWS))
    found, trained = map(counted, compiled(case))
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
    assert found == forward
    assert trained == forward + back
