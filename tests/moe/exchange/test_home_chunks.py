"""Rows that stay on their device, in chunks of their own (Layout.home_chunks): rounds
end when all rows are gone, and collectives carry no more than before.
test_equals_reference.py compares the layer with the reference."""

import jax
import numpy as np
import pytest

from moejax.balance.candidates import fullest_pair_by_layer
from moejax.moe.exchange.manifest import fullest_pair
from moejax.moe.exchange.rounds import num_rounds
from moejax.perf.cost_model import NOTES
from moejax.plan.layout import Layout
from tests.support.layers import (
    ALONE,
    BATCH,
    EXPERTS,
    MESHES,
    layer_layout,
    make_layer,
    on_mesh,
    operands,
    placed,
)
from tests.support.manifests import make_manifest
from tests.support.primitives import equations
from tests.support.random_plans import random_plan

EIGHT = MESHES["expert8"]
ROWS, CHUNKS = 2, 3
"""Rows of a chunk, far too few for one round."""


def chunked(topology, chunks: int = CHUNKS, **changes) -> Layout:
    """Return a layout with the store and split of shadows, and small buffers."""
    sizes = {"rows_per_peer": ROWS, "split": "local_first", "home_chunks": chunks}
    return layer_layout(topology, "transient", ALONE, **sizes | changes)


def some_plan(layout: Layout):
    return random_plan(np.random.default_rng(0), layout, num_layers=1)


def rounds_of(pair_uw: np.ndarray, layout: Layout) -> int:
    """Return in how many rounds all rows are gone: in each, a device sends at most a
    chunk to each other one, and keeps `home_chunks` of them."""
    room_uw = np.ones_like(pair_uw)
    np.fill_diagonal(room_uw, layout.home_chunks)
    rounds, rows = 0, layout.rows_per_peer
    while (pair_uw > 0).any():
        pair_uw = pair_uw - room_uw * rows
        rounds, rows = rounds + 1, layout.rows_per_round
    return rounds


@pytest.mark.slow
def test_rounds_end_when_all_rows_are_gone():
    """Also, the host expects as many rows for a chunk as the devices count."""
    layout = chunked(EIGHT, rows_per_peer=8)
    plan = some_plan(layout)

    def tell(sent, used):
        return sent.counts_up, num_rounds(sent, layout), fullest_pair(sent, layout)

    run = make_manifest(EIGHT, layout, tell)
    rng = np.random.default_rng(0)
    seen = set()
    for exponent in (0.0, 1.0, 3.0):
        chance_e = rng.permutation((1.0 + np.arange(EXPERTS)) ** -exponent)
        expert_nk = rng.choice(EXPERTS, (2048, 1), p=chance_e / chance_e.sum())
        args = expert_nk.astype(np.int32), placed(plan, layout)
        counts_up, rounds, pair = (x[0] for x in jax.device_get(run(*args)))
        pair_uw = counts_up.reshape(8, 8, -1).sum(axis=-1)
        assert rounds == rounds_of(pair_uw, layout)
        load_we = np.stack(
            [np.bincount(x, minlength=EXPERTS) for x in expert_nk.reshape(8, -1)]
        )
        (expected,) = fullest_pair_by_layer(load_we[None], plan, layout)
        assert abs(pair - expected) <= layout.slots_per_device
        seen.add(int(rounds))
    assert len(seen) > 1


def test_no_collective_carries_the_chunks_of_rows_that_stay():
    layouts = [chunked(EIGHT, chunks) for chunks in (1, 5)]
    assert layouts[1].num_chunks == 12
    carried = [carried_shapes(layout) for layout in layouts]
    assert carried[0] == carried[1]
    assert len(carried[0]) > 8


def carried_shapes(layout: Layout) -> list[tuple]:
    """Return the shapes of what collectives carry in a layer and its gradients."""
    layer = make_layer(EIGHT, layout)
    args = on_mesh(layer, some_plan(layout), operands(BATCH, "zipf"))
    return [
        (eqn.primitive.name, *(x.aval.shape for x in eqn.invars))
        for eqn, _ in equations(layer.run.trace(*args).jaxpr)
        if eqn.primitive.name in ("all_to_all", "all_gather", "reduce_scatter")
    ]


def test_the_cost_model_counts_a_chunk_as_a_pair():
    """A device keeps 12 rows, in chunks of 4, and sends 2 to each other one."""
    pair_ww = np.full((8, 8), 2.0) + 10 * np.eye(8)
    one, three = (
        NOTES.rows_sec(pair_ww, chunked(EIGHT, n, rows_per_peer=4)) for n in (1, 3)
    )
    rows_sec = 4 * 7 * 4 * NOTES.bytes_per_row / NOTES.bytes_per_sec
    assert np.isclose(three, rows_sec)
    assert np.isclose(one, 3 * rows_sec), "8 later rounds of one row"
