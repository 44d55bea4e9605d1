"""Which rows a capacity drops under schedules of collectives. test_equals_reference.py
compares the layer under each schedule with the reference."""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.plan.layout import Topology
from tests.support.close import assert_close
from tests.support.layers import (
    BATCH,
    EXPERTS,
    SEQ,
    TOP_K,
    config,
    home,
    layer_of,
    on_mesh,
    operands,
)


def run_with_capacity(expert: int, rows_per_slot: int, **changes):
    """Return the output and the number of dropped choices of a layer with a
    capacity."""
    mesh = Topology(expert=expert, tensor=changes.get("expert_shards", 1))
    even = BATCH * SEQ * TOP_K / EXPERTS / expert
    if changes.get("schedule") == "s1":
        even /= changes["expert_shards"]
    changes |= {"buffer_factor": rows_per_slot / even}
    layer = layer_of(config(mesh, exchange="capacity", **changes))
    assert layer.layout.rows_per_slot == rows_per_slot
    args = operands(BATCH, "zipf")
    y_btd, sums = layer.forward(*on_mesh(layer, home(layer), args))
    num_dropped = int(jnp.sum(sums.dropped))
    assert int(jnp.sum(sums.rows)) + num_dropped == args[1].size
    return np.asarray(y_btd), num_dropped


@pytest.mark.long
@pytest.mark.slow
def test_which_rows_a_capacity_drops():
    """In capacity mode s2 drops the rows that one device with all tokens of the tensor
    group would drop. s1 drops those that several devices, each with a part of the
    tokens, would drop, which are others."""
    whole, num_whole = run_with_capacity(4, 4)
    s2, num_s2 = run_with_capacity(4, 4, schedule="s2", expert_shards=2)
    parts, num_parts = run_with_capacity(8, 2)
    s1, num_s1 = run_with_capacity(4, 2, schedule="s1", expert_shards=2)
    assert 0 < num_whole == num_s2
    assert 0 < num_parts == num_s1
    assert_close((s2, s1), (whole, parts))
    assert np.abs(s1 - s2).max() > 0.1 * np.abs(s2).max()
