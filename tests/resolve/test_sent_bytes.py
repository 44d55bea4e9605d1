"""Test the bytes by collective against the times of the cost model, which are bytes
over one speed where nothing has a latency."""

import dataclasses
import math

import numpy as np
import pytest

from moejax.config import Config, Dispatch, Model, Moe, Router, Train
from moejax.plan.layout import Topology
from moejax.resolve.sent_bytes import sent_bytes
from tests.support.close import assert_close
from tests.support.resolved import make_run

MESH = Topology(data=2, expert=4)


def make(
    mesh: Topology = MESH, remat: str = "none", training: str = "sparse", **dispatch
):
    """Return a run of two layers and two micro-batches, its layout and its cost model
    without latencies."""
    cfg = Config(
        mesh, model=Model(d_model=32, num_layers=2, remat=remat),
        moe=Moe(num_experts=8, top_k=2, d_expert=32), router=Router(training=training),
        dispatch=Dispatch(**dispatch), train=Train(batch_size=16, accumulate_steps=2),
    )  # fmt: skip
    run = make_run(cfg)
    cost = dataclasses.replace(run.cost, latency_sec=0.0, overlaps=False)
    return run.cfg, run.layout, cost


def total(found: dict[str, float], *words: str) -> float:
    """Return the bytes of the collectives whose names end in one of these words."""
    return sum(x for name, x in found.items() if name.split()[-1] in words)


COPIES = {"slots_per_device": 3}


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize(
    "dispatch",
    [
        {},
        {"store": "transient", **COPIES},
        {"store": "resident", **COPIES},
        {"store": "sharded", "slots_per_device": 3},
        {"group": "data_expert", "store": "transient", **COPIES},
    ],
    ids=lambda dispatch: "_".join(map(str, dispatch.values())) or "owned",
)
def test_bytes_are_the_cost_models_times(dispatch, remat):
    """Rows of round 0, weights and gradients: each time is bytes over speed."""
    cfg, layout, cost = make(remat=remat, **dispatch)
    found = sent_bytes(cfg, cost, layout)
    w, layers = layout.num_devices, cfg.model.num_moe_layers
    rows_sec = cost.rows_sec(np.zeros((w, w)), layout)
    assert_close(total(found, "rows", "cards"), layers * rows_sec * cost.bytes_per_sec)
    num_rows = w * layout.rows_per_peer * (1 - 1 / w) * cost.micro_batches * layers
    sent = 2 + (remat == "full")  # results return twice
    assert_close(total(found, "rows"), (sent + 2) * num_rows * cost.bytes_per_row)
    # A gate and a slot, 4 bytes each, for each of two choices.
    assert_close(total(found, "cards"), sent * num_rows * 16)
    sync_sec = cost.sync_sec(layout)
    moved = total(found, "weights", "gradients", "experts")
    assert_close(moved, layers * sync_sec * cost.bytes_per_sec)


def test_ragged_rows_are_those_of_an_even_load():
    cfg, layout, cost = make(transport="ragged")
    (rows,) = [x for n, x in sent_bytes(cfg, cost, layout).items() if "rows" in n]
    tokens = 16 * cfg.data.seq_len
    share = 1 - 6 * 5 / (8 * 7)  # tokens with one of their two experts on a device
    assert_close(rows, 4 * 2 * tokens / 8 * share * 3 * cost.bytes_per_row)


def test_hierarchical_rows_travel_on_each_axis():
    mesh = Topology(dc=2, expert=4)
    cfg, layout, cost = make(mesh, group="dc_expert", transport="hierarchical")
    found = sent_bytes(cfg, cost, layout)
    far, near = (4 * 2 * 2 * n * cost.bytes_per_row
                 for n in (layout.rows_per_node, 3 * layout.rows_per_peer))  # fmt: skip
    assert_close(found["all_to_all dc rows"], far)
    assert_close(found["all_to_all expert rows"], near)


def test_copies_cross_to_a_node_once():
    """Each device sends and receives slices of its own copies inside its node, and a
    quarter of those that its node of four devices exchanges with the other."""
    cfg, layout, cost = make(group="data_expert", store="resident", **COPIES)
    assert (layout.num_copy_nodes, layout.offers_per_node, layout.copies_per_node) == (
        2, 4, 4,
    )  # fmt: skip
    found = sent_bytes(cfg, cost, layout)
    near = 2 * (layout.offers_per_device + layout.copies_per_device) * 3 / 4
    far = 2 * (4 + 4) / 4 / 2
    for axis, experts in (("expert", near), ("data", far)):
        for cargo in ("weights", "gradients"):
            moved = found[f"all_to_all {axis} {cargo}"]
            assert_close(moved, experts * cost.bytes_per_expert)


@pytest.mark.parametrize(
    ("mesh", "fields", "names"),
    [
        (Topology(expert=2, tensor=2), {"schedule": "s1"},
         {"all_to_all expert_tensor rows", "all_gather tensor tokens"}),
        (Topology(dc=2, expert=2), {"group": "dc_expert", "domain": (2, 1)},
         {"all_gather dc experts", "reduce_scatter dc gradients",
          "all_to_all expert rows"}),
        (Topology(), {}, None),  # one device sends nothing
        (MESH, {"training": "dense"}, None),
    ],
)  # fmt: skip
def test_predictions_of_schedules_and_domains_are_used(mesh, fields, names):
    cfg, layout, cost = make(mesh, **fields)
    found = sent_bytes(cfg, cost, layout)
    assert found == {} if names is None else names <= found.keys()
    assert all(size > 0 and math.isfinite(size) for size in found.values())
