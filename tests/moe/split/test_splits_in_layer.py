"""Test an MoE layer under water-filling and dynamic replication.

The layer equals the reference, the fullest device is at the certified bound, and every
device computes the same split bit for bit.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from moejax.balance.policies.micromoe.density import densest
from moejax.balance.policies.micromoe.symmetric import symmetric
from moejax.choice import Choice
from moejax.moe import route
from moejax.moe.exchange.manifest import fullest_pair, pair_to_fit
from moejax.moe.split import water_filling
from moejax.plan import shadowing
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Topology
from tests.support.layers import (
    ALONE,
    BATCH,
    EXPERTS,
    MERGED,
    MESHES,
    check,
    layer_layout,
    make_layer,
    on_mesh,
    operands,
    placed,
    zipf_choices,
)
from tests.support.manifests import make_manifest
from tests.support.primitives import equations
from tests.support.random_plans import owners_alone, random_owners

EIGHT = MESHES["expert8"]
SMALL = {"rows_per_peer": 2, "align_rows": 64}
ALSO = pytest.mark.long
CASES = [
    (EIGHT, ALONE, "transient", "dynamic", {}),
    (MESHES["dc2_data2_expert2"], MERGED, "sharded", "water_filling", {}),
    pytest.param(EIGHT, ALONE, "resident", "water_filling", SMALL, marks=ALSO),
    pytest.param(
        MESHES["data2_expert4"], MERGED, "transient", "dynamic", SMALL, marks=ALSO
    ),
    pytest.param(
        MESHES["data2_expert4"], ALONE, "sharded", "water_filling",
        {"home_chunks": 3, **SMALL}, marks=ALSO,
    ),
]  # fmt: skip


def split_layout(topology: Topology, axes, store: str, split: str, **changes) -> Layout:
    """Return a layout in which each device has two slots per own expert."""
    own = EXPERTS // (topology.expert * (topology.data if axes == MERGED else 1))
    copies = {} if store == "sharded" else {"copies_per_device": own}
    sizes = {"slots_per_device": 2 * own, "split": split, **copies}
    return layer_layout(topology, store, axes, **sizes | changes)


def split_plan(layout: Layout) -> ExpertPlan:
    """Return a plan with two replicas of each expert; for splits that make replicas, a
    plan with permuted owners and none."""
    if layout.makes_replicas:
        owned_le = random_owners(np.random.default_rng(0), EXPERTS, 1)
        return owners_alone(layout, owned_le)
    row_p = symmetric(EXPERTS, layout.num_devices, layout.slots_per_device)
    return ExpertPlan(row_p[None].astype(np.int32), EXPERTS)


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "axes", "store", "split", "changes"), CASES)
def test_the_layer_is_its_definition_and_the_fullest_device_at_its_bound(
    topology, axes, store, split, changes
):
    layout = split_layout(topology, axes, store, split, **changes)
    layer, plan = make_layer(topology, layout), split_plan(layout)
    for seed, zipf in enumerate((0.3, 4.0)):
        assert_bounds(check(layer, zipf_choices(seed, zipf), plan), layout, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "price"),
    [(EIGHT, 30), pytest.param(MESHES["data2_expert4"], 0, marks=ALSO)],
)
def test_the_layer_with_shadows_is_its_definition(topology, price):
    """The layer is the reference, and no device computes more rows than at home; with
    free copies all devices of a hot expert's layer have about their own rows."""
    layout = split_layout(topology, ALONE, "transient", "shadow", shadow_price=price)
    plan, w = split_plan(layout), layout.num_devices
    owned_e = plan.owned_le[0]
    owner_e = np.argsort(owned_e) // layout.experts_per_device
    for seed, zipf in enumerate((0.3, 4.0)):
        sums = check(make_layer(topology, layout), zipf_choices(seed, zipf), plan)
        loads_gwe = np.asarray(sums.tokens_e, np.int64).reshape(-1, w, EXPERTS)
        for rows_w, load_we in zip(sums.rows.reshape(-1, w), loads_gwe):
            hot = shadowing.choose(load_we, owned_e, layout)
            home_w = np.bincount(owner_e, load_we.sum(axis=0), w)
            expected_w = home_w + load_we[:, hot].sum(axis=1)
            np.add.at(expected_w, owner_e[hot], -load_we[:, hot].sum(axis=0))
            assert np.array_equal(rows_w, expected_w)
            assert rows_w.max() <= home_w.max()


@functools.cache
def make_split(split: str, rows_per_peer: int):
    """Return run(expert_nk, placement) and a placement.

    The function returns each device's counts, certified bound and copies, the rows of
    the fullest pair, and the rows that buffers must have.
    """
    layout = split_layout(EIGHT, ALONE, "transient", split)
    layout = dataclasses.replace(layout, rows_per_peer=rows_per_peer)

    def tell(sent, used):
        pairs = fullest_pair(sent, layout), pair_to_fit(sent, layout)
        return (sent.counts_up, sent.bound, used, *pairs)

    return make_manifest(EIGHT, layout, tell), placed(split_plan(layout), layout)


def many_choices(seed: int) -> np.ndarray:
    """Return two neighbouring experts for each of 1024 tokens."""
    first_n1 = np.random.default_rng(seed).integers(0, EXPERTS, (1024, 1))
    expert_nk = np.concatenate([first_n1, first_n1 + 1], axis=1) % EXPERTS
    return expert_nk.astype(np.int32)


@pytest.mark.long
@pytest.mark.slow
def test_large_buffers_do_not_raise_the_size_that_is_reported_as_needed():
    """The size that buffers need does not grow in a buffer that is four times as large,
    although more rows stay at home there."""
    reported = []
    for rows_per_peer in (32, 128):
        run, placement = make_split("water_filling", rows_per_peer)
        *_, pair_w, fit_w = jax.device_get(run(many_choices(0), placement))
        reported.append((pair_w[0], fit_w[0]))
    (small, small_fit), (large, large_fit) = reported
    assert large > 1.2 * small
    assert large_fit <= small_fit


@pytest.mark.slow
@pytest.mark.parametrize("split", ["water_filling", "dynamic"])
def test_every_device_decides_the_same(split):
    """Counts, certified bound and copies are the same bit for bit on all devices."""
    run, placement = make_split(split, 32)
    for seed in range(3):
        results = jax.device_get(run(many_choices(seed), placement))
        for leaf in jax.tree.leaves(results):
            assert (leaf == leaf[0]).all()
            assert len(leaf) == 8


@pytest.mark.slow
def test_the_fused_split_is_one_kernel_in_the_layer(monkeypatch):
    """A train step lowered for CUDA contains the fused kernel once, forward and
    backward together."""
    layout = split_layout(EIGHT, ALONE, "resident", "water_filling")
    hopper = Choice("hopper", "as on a Hopper GPU")
    monkeypatch.setattr(water_filling, "choose_water_fill", lambda *_: hopper)
    layer = make_layer.__wrapped__(EIGHT, layout)
    args = on_mesh(layer, split_plan(layout), operands(BATCH, "zipf"))
    text = layer.run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 1


def assert_bounds(sums, layout: Layout, plan: ExpertPlan) -> None:
    """Assert that each group's fullest device is at the certified bound, and that the
    bound is at most the exact optimum."""
    w = layout.num_devices
    for rows_w, bound_w, load_we in zip(
        sums.rows.reshape(-1, w),
        sums.bound.reshape(-1, w),
        sums.tokens_e.reshape(-1, w, EXPERTS),
    ):
        total, bound = int(rows_w.sum()), int(bound_w[0])
        assert (bound_w == bound).all()
        assert total == load_we.sum()
        if layout.split == "dynamic":
            assert rows_w.max() == bound == -(-total // w)
            assert np.ptp(rows_w) <= 1
        else:
            dense = densest(plan.slot_to_expert_lp[0], load_we.sum(axis=0), w)
            optimum = int(np.ceil(dense.rows / dense.is_in_w.sum()))
            assert bound <= optimum
            assert rows_w.max() <= bound + (-(-total // w) >> 9)


@pytest.mark.parametrize("split", ["water_filling", "dynamic"])
def test_a_split_is_saved_and_not_computed_again_under_remat(split):
    """The backward pass of a layer gathers no counts and solves no split."""
    counts = [count_splits(split, saved) for saved in ((), (route.ROUTES,))]
    assert counts[0] == counts[1]
    assert counts[0]["all_gather"] > 0
    assert (counts[0]["while"] > 0) == (split == "water_filling")


def count_splits(split: str, saved: tuple[str, ...]) -> dict[str, int]:
    """Return how many gathers of the manifest and loops of water-filling a layer runs
    with its gradients, if it saves only the arrays that `saved` names."""
    layout = split_layout(EIGHT, ALONE, "transient", split)
    layer = make_layer(EIGHT, layout, saved=saved)
    args = on_mesh(layer, split_plan(layout), operands(BATCH, "zipf"))
    counts = {"all_gather": 0, "while": 0}
    for eqn, times in equations(layer.run.trace(*args).jaxpr):
        scope, name = str(eqn.source_info.name_stack), eqn.primitive.name
        if name == "while" and "water" in scope:
            counts["while"] += times
        if name.startswith("all_gather") and "manifest" in scope:
            counts["all_gather"] += times
    return counts
