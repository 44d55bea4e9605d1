"""The MoE layer equals moe/reference.py: output, router losses and all gradients, in
one table over meshes, groups, stores, splits, schedules, domains, rounds, halves,
alignment, recomputation, routers, dense training, numbers of choices and dtypes.

Each row of QUICK combines several options. The grids of `make test-all` go through each
mesh with each group and store, each schedule at each size, and each domain. The splits
water_filling, dynamic and shadow, and merged groups in `make test`, are in
split/test_splits_in_layer.py.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from moejax.config import Router
from moejax.moe import route
from moejax.moe.exchange import dispatch
from moejax.plan.layout import REPLICATING_SPLITS, Layout, Topology
from tests.support.layers import (
    ALL_ROWS,
    ALONE,
    BATCH,
    EXPERTS,
    MERGED,
    MESHES,
    MOE,
    SCHEDULED,
    SEQ,
    SMALL,
    TOP_K,
    Layer,
    check,
    config,
    cut,
    layer_layout,
    layer_of,
    make_layer,
)
from tests.support.random_plans import odd_plans, random_plan

FULL, DISPATCH = (route.ROUTES,), (route.ROUTES, dispatch.ROWS)
"""Arrays that Model.remat = 'full' and 'dispatch' save."""
COPIES = {"slots_per_device": 6}
SIGMOID = Router(kind="sigmoid", gate_scale=2.5, normalise_gates=False)


class Case(NamedTuple):
    """How a layer is made, and what it is given."""

    make: Callable[..., Layer]
    """make(dtype) -> the compiled layer"""
    choices: tuple = ("zipf", "one_hot")
    """Choices of experts, by name. None: those of the router."""
    has_replicas: bool = False
    """Whether plans are odd and random ones. Otherwise each expert is at home, and then
    at a random owner."""
    dtype: str = "float32"
    has_rounds: bool = False
    """Whether buffers are SMALL. Others hold all rows."""


def grouped(mesh: str, axes, store: str, k: int = TOP_K, router=None, **fields) -> Case:
    """Return a case without a tensor axis, under plans with replicas if the store has
    any."""
    saved = fields.pop("saved", ())
    choices = fields.pop("choices", ("empty", "one_hot"))
    layout = layer_layout(MESHES[mesh], store, axes, k, **fields)
    moe = dataclasses.replace(MOE, top_k=k)
    router = router or Router(normalise_gates=k > 1)  # one normalised gate is constant
    make = functools.partial(make_layer, MESHES[mesh], layout, moe, router, saved=saved)
    is_small = fields.items() >= SMALL.items()
    return Case(
        lambda dtype: make(dtype=dtype), choices, store != "owned", has_rounds=is_small
    )


def scheduled(*sizes_and_schedule, saved=(), dtype="float32", align_rows=1, **changes):
    """Return a case with a tensor axis."""
    cfg = cut(*sizes_and_schedule, **changes)
    make = functools.partial(layer_of, cfg, saved=saved, align_rows=align_rows)
    skews = ("zipf", "one_hot") if dtype == "float32" else ("zipf",)
    has_replicas = "store" in changes
    return Case(
        make, skews, has_replicas, dtype, not changes.items() >= ALL_ROWS.items()
    )


def in_domain(mesh: Topology, shared: tuple[int, int], align_rows=1, **changes) -> Case:
    """Return a case with a domain, and with buffers so small that later rounds run
    between domains."""
    fields = {"group": "dc_expert", "domain": shared, **SMALL} | changes
    make = functools.partial(layer_of, config(mesh, **fields), align_rows=align_rows)
    is_static = "split" not in changes or changes["split"] not in REPLICATING_SPLITS
    has_replicas = "store" in changes and is_static
    is_small = fields.items() >= SMALL.items()
    return Case(make, has_replicas=has_replicas, has_rounds=is_small)


def densely(mesh: Topology, router=None, **fields) -> Case:
    """Return a case of dense training, in which every expert computes every token."""
    router = router or Router(kind="sigmoid", training="dense", jitter=0.1)
    cfg = config(mesh, router=router, **fields)
    return Case(functools.partial(layer_of, cfg), choices=(None,))


def on_one_device(k: int, **fields) -> Case:
    """Return a case of one device."""
    layout = Layout.home(EXPERTS, 1, BATCH * SEQ * k, top_k=k, **fields)
    moe = dataclasses.replace(MOE, top_k=k)
    make = functools.partial(make_layer, Topology(), layout, moe, saved=FULL)
    return Case(lambda dtype: make(dtype=dtype))


PLAIN = Topology(dc=2, expert=4)
DATA = Topology(dc=2, data=2, expert=2)
TENSOR = Topology(dc=2, expert=2, tensor=2)
HIERARCHICAL = {"transport": "hierarchical"}
ALIGNED = {"align_rows": 64}
EIGHT, FOUR, TWO, DCS = MESHES
QUICK = {
    "one device, four choices, aligned, remat": on_one_device(4, align_rows=64),
    "one choice, local first, aligned, rounds": grouped(
        EIGHT, ALONE, "transient", 1, split="local_first", **ALIGNED, **SMALL,
    ),
    "two levels, four choices, replicas, rounds": in_domain(
        PLAIN, (1, 1), top_k=4, store="transient", slots_per_device=4, **HIERARCHICAL,
    ),
    "s1, halves": scheduled(2, 4, 4, "s1", halves=True, **ALL_ROWS),
    "s1h, replicas, shards over owners, whole slots, remat, rounds": scheduled(
        2, 4, 4, "s1h", store="resident", split="local_first", gather="step",
        slots_per_device=10, saved=DISPATCH,
    ),
    "s2 in float64, cut sequences, aligned": scheduled(
        4, 2, 2, "s2", dtype="float64", **ALIGNED, **ALL_ROWS,
    ),
    "base, more shards than devices": scheduled(2, 4, 4, "base", **ALL_ROWS),
    "local": scheduled(2, 2, 4, "local", **ALL_ROWS),
    "domain, hierarchical, rounds": in_domain(PLAIN, (1, 2), **HIERARCHICAL),
    "domain, copies filled": in_domain(
        PLAIN, (2, 1), store="transient", split="water_filling", slots_per_device=4,
    ),
    "domain, dynamic, halves": in_domain(DATA, (2, 1), split="dynamic", halves=True),
    "dense, parameters over data": densely(MESHES[FOUR]),
    "dense, shards of half": densely(TENSOR, schedule="s1h"),
    "dense, local": densely(
        Topology(data=2, tensor=4),
        Router(kind="sigmoid", normalise_gates=False, training="dense"),
        schedule="local",
    ),
}  # fmt: skip
FIELDS = (
    {"align_rows": 64, **SMALL, "halves": True},
    {"align_rows": 128, "overflow": "redo", "kernels": "plain"},
    {**SMALL, "split": "local_first"},
    {"saved": FULL, "router": SIGMOID},
)
WHERE = [
    (mesh, axes, store)
    for mesh in MESHES
    for axes in (ALONE, MERGED)
    for store in ("owned", "transient", "sharded")
    if axes == ALONE or MESHES[mesh].data > 1
]
GRID = {
    f"{mesh}, {' '.join(axes)}, {store}, {i % 4}": grouped(
        mesh, axes, store,
        **{k: v for k, v in FIELDS[i % 4].items() if store != "owned" or k != "split"},
    )
    for i, (mesh, axes, store) in enumerate(WHERE)
} | {
    f"mp={mp}, esp={esp}, expert={expert}, {name}": scheduled(
        mp, esp, expert, name,
        halves=i % 2 == 1, align_rows=(1, 64, 128)[i % 3],
        saved=((), FULL, DISPATCH)[i // 2 % 3],
        batch=6 if expert == 2 and i % 2 == 0 else BATCH,
    )
    for i, (mp, esp, expert, name) in enumerate(SCHEDULED)
} | {
    f"{name} in float64": scheduled(2, 2, 4, name, dtype="float64")
    for name in ("base", "s1", "s2", "local")
} | {
    f"domain {shared} on {mesh}": in_domain(mesh, shared, align_rows=128)
    for mesh, shared in (
        (PLAIN, (1, 1)), (PLAIN, (2, 2)), (PLAIN, (2, 4)), (PLAIN, (1, 4)),
        (DATA, (1, 2)), (DATA, (2, 1)), (DATA, (2, 2)),
    )
} | {
    f"domain {shared} on tensor, {name}": in_domain(TENSOR, shared, schedule=name)
    for shared, name in (((2, 1), "s1h"), ((1, 2), "s1"), ((2, 2), "s2"),
                         ((2, 1), "base"))
} | {
    f"domain {shared}, {store}, {split}": in_domain(
        PLAIN, shared, store=store, split=split, slots_per_device=4
    )
    for store in ("transient", "resident", "sharded")
    for split in ("even", "local_first", "water_filling")
    for shared in ((2, 1), (1, 2))
} | {
    f"domain {shared}, {split}": in_domain(PLAIN, shared, split=split)
    for split in REPLICATING_SPLITS
    for shared in ((2, 1), (1, 2))
} | {
    f"domain on tensor, {split}, {name}": in_domain(
        TENSOR, (2, 1), schedule=name, split=split
    )
    for split in REPLICATING_SPLITS
    for name in ("s1h", "s1", "s2", "base")
} | {
    f"domain, {store}, whole slots": in_domain(
        DATA, (2, 1), store=store, gather="step", **slots
    )
    for store, slots in (("owned", {}), ("resident", {"slots_per_device": 6}))
} | {
    "dense, alone": densely(Topology(), Router(gate_scale=1.5, training="dense")),
    "dense, one shard": densely(Topology(expert=2, tensor=2), expert_shards=1),
    "dense, more shards": densely(
        Topology(expert=4, tensor=2), expert_shards=4, schedule="base"
    ),
    "dense, domain": densely(
        Topology(dc=2, expert=2), group="dc_expert", domain=(2, 1)
    ),
    "dense, merged": densely(Topology(data=2, expert=2), group="data_expert"),
    "s2, sharded": scheduled(2, 2, 4, "s2", store="sharded", slots_per_device=6),
    "s1, replicas in rounds": scheduled(2, 2, 4, "s1", store="transient", **COPIES),
    "s1h, shards of half, whole slots": scheduled(4, 2, 2, "s1h", gather="step"),
    "base, resident, whole slots": scheduled(
        2, 2, 4, "base", store="resident", gather="step", **COPIES,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in GRID)],
)
def test_layer_equals_the_reference(name, request):
    case = (QUICK | GRID)[name]
    if case.dtype == "float64":
        request.getfixturevalue("doubles")
    layer = case.make(case.dtype)
    layout, rng = layer.layout, np.random.default_rng(0)
    plans = [None, random_plan(rng, layout, 1)]
    if case.has_replicas and layout.num_devices > layout.experts_per_device:
        plans = [*odd_plans(layout, 1).values(), *plans[1:]]
    rounds = []
    for choices in case.choices:
        for plan in plans:
            sums = check(layer, choices, plan, case.dtype)
            assert sums.rows_h.shape[1] == layout.num_exchanges
            rounds.append(int(np.max(sums.rounds)))
            if layer.router.training == "dense":
                assert np.all(sums.rows == sums.bound[0])
                if layout.tensor is None:  # own experts, all tokens of the group
                    rows = BATCH * SEQ * EXPERTS // layer.topology.num_devices
                    assert sums.rows[0] == rows
    assert (max(rounds) > 1) == case.has_rounds
