"""Test an MoE layer under water-filling, top-up and dynamic replication.

The layer equals the reference, the fullest device is at the certified bound, and every
device computes the same split bit for bit.
"""

import jax
import numpy as np
import pytest

from moejax.balance.policies.micromoe.density import densest
from moejax.balance.policies.micromoe.symmetric import symmetric
from moejax.config import Router
from moejax.moe import route
from moejax.moe.exchange.manifest import fullest_pair
from moejax.plan import shadowing, top_up
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Topology
from tests.support.layers import (
    ALONE,
    BATCH,
    EXPERTS,
    MERGED,
    MESHES,
    MOE,
    SMALL,
    check,
    config,
    cut,
    layer_layout,
    layer_of,
    make_layer,
    on_mesh,
    operands,
    placed,
    zipf_choices,
)
from tests.support.manifests import make_manifest
from tests.support.primitives import equations, primitives
from tests.support.random_plans import owners_alone, random_owners, random_plan

EIGHT = MESHES["expert8"]
CASES = [
    (EIGHT, ALONE, "transient", "dynamic", {"align_rows": 64}),
    (MESHES["dc2_data2_expert2"], MERGED, "sharded", "water_filling",
     SMALL),
    (EIGHT, ALONE, "sharded", "top_up", {"halves": True, **SMALL}),
    (MESHES["dc2_data2_expert2"], MERGED, "resident", "top_up", {"gather": "step"}),
]  # fmt: skip
TOP_UP = {"top_up_slack": 205, "top_up_copies": 2, "top_up_offers": 2}
TOPPED_UP = {
    "shards over owners, float64": (cut(2, 4, 4, "s1h"), "float64"),
    "domain with a tensor axis": (
        config(
            Topology(dc=2, expert=2, tensor=2), domain=(2, 1), schedule="s1h",
            group="dc_expert", **SMALL,
        ),
        "float32",
    ),
}  # fmt: skip
"""Configurations, and the dtypes of their layers."""
SIGMOID = Router(kind="sigmoid", gate_scale=2.5, normalise_gates=False)


def split_layout(topology: Topology, axes, store: str, split: str, **changes) -> Layout:
    """Return a layout in which each device has two slots per own expert."""
    own = EXPERTS // (topology.expert * (topology.data if axes == MERGED else 1))
    copies = {} if store == "sharded" else {"copies_per_device": own}
    sizes = {"slots_per_device": 2 * own, "split": split, **copies}
    if split == "top_up":
        sizes |= TOP_UP
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
    layer, plan = make_layer(topology, layout, MOE, SIGMOID), split_plan(layout)
    for seed, zipf in enumerate((0.3, 4.0)):
        assert_bounds(check(layer, zipf_choices(seed, zipf), plan), layout, plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", TOPPED_UP)
def test_top_up_with_domains_and_a_tensor_axis(name, request):
    """The layer is the reference with copies and without, and no device is above the
    limit. The grid of test_equals_reference.py has further schedules and domains."""
    cfg, dtype = TOPPED_UP[name]
    if dtype == "float64":
        request.getfixturevalue("doubles")
    layer = layer_of(cfg, dtype, split="top_up", **TOP_UP)
    exchanged = layer.layout.exchanged.topped_up
    plan = random_plan(np.random.default_rng(0), layer.layout, 1)
    for seed, zipf in enumerate((0.3, 4.0)):
        sums = check(layer, zipf_choices(seed, zipf), plan, dtype)
        total = round(sums.rows.mean() * exchanged.num_devices)  # in each exchange
        assert sums.rows.max() <= top_up.max_rows(total, exchanged)


def test_copies_of_top_up_travel_only_where_there_are_any():
    """Each collective that a layer has beyond water-filling is in a branch, which all
    devices of a group take alike."""
    counts = {}
    for split in ("water_filling", "top_up"):
        layout = split_layout(EIGHT, ALONE, "transient", split)
        layer = make_layer(EIGHT, layout)
        args = on_mesh(layer, split_plan(layout), operands(BATCH, "zipf"))
        jaxpr = layer.run.trace(*args).jaxpr
        branches = [
            branch
            for eqn, _ in equations(jaxpr)
            if eqn.primitive.name == "cond"
            for branch in eqn.params["branches"]
        ]
        inside = sum(primitives(branch)["all_to_all"] for branch in branches)
        counts[split] = primitives(jaxpr)["all_to_all"] - inside, inside
    assert counts["water_filling"][1] == 0
    # Two in each pass.
    assert counts["top_up"] == (counts["water_filling"][0], 4)


@pytest.mark.slow
def test_the_layer_with_shadows_is_its_definition():
    """The layer is the reference, and no device computes more rows than at home."""
    layout = split_layout(EIGHT, ALONE, "transient", "shadow", shadow_price=30)
    plan, w = split_plan(layout), layout.num_devices
    owned_e = plan.owned_le[0]
    owner_e = np.argsort(owned_e) // layout.experts_per_device
    for seed, zipf in enumerate((0.3, 4.0)):
        sums = check(make_layer(EIGHT, layout), zipf_choices(seed, zipf), plan)
        loads_gwe = np.asarray(sums.tokens_e, np.int64).reshape(-1, w, EXPERTS)
        for rows_w, load_we in zip(sums.rows.reshape(-1, w), loads_gwe):
            hot = shadowing.choose(load_we, owned_e, layout)
            home_w = np.bincount(owner_e, load_we.sum(axis=0), w)
            expected_w = home_w + load_we[:, hot].sum(axis=1)
            np.add.at(expected_w, owner_e[hot], -load_we[:, hot].sum(axis=0))
            assert np.array_equal(rows_w, expected_w)
            assert rows_w.max() <= home_w.max()


@pytest.mark.slow
@pytest.mark.parametrize("split", ["water_filling", "top_up", "dynamic"])
def test_every_device_decides_the_same(split):
    """Counts, certified bound and copies are the same bit for bit on all devices. Rows
    that stay on their device need no buffer."""
    layout = split_layout(EIGHT, ALONE, "transient", split)

    topped_up = layout.topped_up

    def tell(sent, used):
        # XLA ends the process at an output without elements, as tables of nodes are.
        filled = [leaf for leaf in jax.tree.leaves(used) if leaf.size]
        return sent.rows_uw, sent.bound, filled, fullest_pair(sent, topped_up)

    run = make_manifest(EIGHT, layout, tell)
    plan = split_plan(layout)
    placement = placed(plan, layout)
    home_w = plan.slot_to_expert_lp[0].reshape(8, -1)[:, 0]
    for seed in range(3):
        # Two experts for each of 1024 tokens, of which the first is on its device.
        first_n = np.repeat(home_w, 128)
        other_n = np.random.default_rng(seed).integers(1, EXPERTS, 1024)
        expert_nk = np.stack([first_n, first_n + other_n], axis=1) % EXPERTS
        results = jax.device_get(run(expert_nk.astype(np.int32), placement))
        for leaf in jax.tree.leaves(results):
            assert (leaf == leaf[0]).all()
            assert len(leaf) == 8
        rows_uw, pair = results[0][0], results[3][0]
        assert pair == (rows_uw * ~np.eye(8, dtype=bool)).max() < rows_uw.max()


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
        elif layout.split == "top_up":
            assert bound <= rows_w.max() <= top_up.max_rows(total, layout)
        else:
            dense = densest(plan.slot_to_expert_lp[0], load_we.sum(axis=0), w)
            optimum = int(np.ceil(dense.rows / dense.is_in_w.sum()))
            assert bound <= optimum
            assert rows_w.max() <= bound + (-(-total // w) >> 9)


@pytest.mark.parametrize("split", ["water_filling", "top_up", "dynamic"])
def test_a_split_is_saved_and_not_computed_again_under_remat(split):
    """The backward pass of a layer gathers no counts and solves no split."""
    counts = [count_splits(split, saved) for saved in ((), (route.ROUTES,))]
    assert counts[0] == counts[1]
    assert counts[0]["all_gather"] > 0
    assert (counts[0]["while"] > 0) == (split != "dynamic")


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
