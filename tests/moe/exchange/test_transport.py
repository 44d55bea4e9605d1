"""Test the transports: where rows arrive, and on which devices a transport declines."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax.axes import DATA, DC, EXPERT, make_mesh
from moejax.moe.exchange.transport import hierarchical, padded, ragged
from moejax.moe.layer import check_device
from moejax.plan.layout import Layout, Topology

DEVICES, ROWS, WIDTH = 8, 3, 2
EIGHT = Topology(expert=DEVICES)


def make_exchange(transport, rows, counts_ww, topology=EIGHT, axes=(EXPERT,)):
    """Return a jitted exchange of rows [sender, receiver, row, d] by one transport on
    eight devices, and its arguments."""
    mesh = make_mesh(topology)

    def body(rows_wcd, count_w, incoming_w):
        return transport(rows_wcd[0], count_w[0], incoming_w[0], axes)[None]

    shard = P(axes)
    run = jax.shard_map(body, mesh=mesh, in_specs=(shard,) * 3, out_specs=shard)
    return jax.jit(run), (rows, counts_ww, counts_ww.T)


def random_rows():
    """Return random rows [sender, receiver, row, d] and the counts that are valid."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(DEVICES, DEVICES, ROWS, WIDTH)).astype(np.float32)
    counts_ww = rng.integers(0, ROWS + 1, (DEVICES, DEVICES)).astype(np.int32)
    return rows, counts_ww


@pytest.mark.parametrize(
    ("topology", "axes"),
    [
        (Topology(dc=2, expert=4), (DC, EXPERT)),
        (Topology(data=4, expert=2), (DATA, EXPERT)),
        (Topology(dc=2, data=2, expert=2), (DC, DATA, EXPERT)),
    ],
)
def test_hierarchical_is_padded_and_both_swap_sender_and_receiver(topology, axes):
    """Results and gradients equal those of the padded transport bit for bit."""
    rows, counts_ww = random_rows()
    results = []
    for transport in (hierarchical, padded):
        run, args = make_exchange(transport, rows, counts_ww, topology, axes)
        out, pull = jax.vjp(lambda rows, run=run, args=args: run(rows, *args[1:]), rows)
        results.append((out, *pull(2 * out + 1)))
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert np.array_equal(results[0][0], rows.swapaxes(0, 1))


def test_ragged_lowers_for_cuda():
    """Forward and backward use ragged exchanges, and no dense all_to_all."""
    forward, args = make_exchange(ragged, *random_rows())
    run = jax.jit(jax.grad(lambda *args: jnp.sum(forward(*args) ** 2)))
    text = run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("ragged_all_to_all") >= 2
    assert "stablehlo.all_to_all" not in text


def test_what_needs_a_gpu_declines_on_the_cpu():
    layout, here = Layout(4, 2, 2, 8, transport="ragged"), jax.devices()[0]
    with pytest.raises(NotImplementedError, match=r"use Dispatch\.transport"):
        check_device(layout, here)
    check_device(layout, types.SimpleNamespace(platform="gpu"))
    check_device(Layout(4, 2, 2, 8), here)
