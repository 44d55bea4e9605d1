"""Exact exchange: as many rounds as it takes until every row has been computed.

Round 0 is ordinary differentiable code; later rounds are a loop. With
`Layout.overflow` = 'redo' there is no loop: the statistics of the step say that more
rounds are needed (`num_rounds`), and the trainer runs the batch again.

Buffers are static and bounded: round 0 carries what fits into its buffers, each later
round the same number of rows for every destination (`rows_per_round`), whatever number
of choices they carry. All devices of a group know all counts, so they agree on the
number of rounds without a reduction. Later rounds save nothing for the backward pass,
which sends their rows again. A loop of zero rounds computes nothing, but on a GPU the
host waits until it knows that.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.kernels import zeros_varying_as
from moejax.moe.exchange.dispatch import Experts, Window, compute_window
from moejax.moe.exchange.manifest import Manifest
from moejax.moe.mesh_roles import MeshLayout
from moejax.plan.layout import Layout


def num_rounds(sent: Manifest, layout: Layout) -> Int[Array, ""]:
    """Return the number of rounds that an exchange needs.

    It is 1 if round 0 carries everything. With overflow 'redo' round 0 is the only one
    that runs, and the number says what the batch needs.
    """
    rest = jnp.max(sent.rows_uf - sent.first_uf)
    return 1 + -(-rest // layout.rows_per_round)


def exchange(
    x_nd: Float[Array, "n d"],
    gate_nk: Float[Array, "n k"],
    weights: dict[str, Array],
    sent: Manifest,
    experts: Experts,
    mesh_layout: MeshLayout,
    gates_input: bool = False,
) -> Float[Array, "n d"]:
    """Return the layer's output: rows sent to their slots, computed and sent back.

    The results of a token's choices are weighted with its gates and summed; with
    `gates_input` the rows are weighted, before experts compute them. `weights` are the
    slots' weights, varying over all mesh axes as x does. In capacity mode the manifest
    holds no more rows than round 0 carries. With overflow 'redo' the output is wrong
    where `num_rounds` is above 1.
    """
    options = {"experts": experts, "gates_input": gates_input}
    window = partial(compute_window, mesh_layout=mesh_layout, **options)
    layout, rest_nd = mesh_layout.layout, None
    if layout.has_loops(gate_nk.size):
        rest_nd, x_nd, gate_nk, weights = later_rounds(
            window, layout, x_nd, gate_nk, weights, sent
        )
    out_nd = window(x_nd, gate_nk, weights, sent, _first_window(layout, sent))
    return out_nd if rest_nd is None else out_nd + rest_nd


def _first_window(layout: Layout, sent: Manifest) -> Window:
    """Return the window of round 0."""
    rows = (layout.rows_per_peer,)
    if layout.has_levels:
        rows = (layout.rows_per_node, layout.rows_per_peer)
    begin_uf = jnp.zeros_like(sent.first_uf)
    return Window(begin_uf, sent.first_uf, rows, layout.rows_per_device)


def _later_window(layout: Layout, sent: Manifest, r) -> Window:
    """Return the window of round r >= 1."""
    each = layout.rows_per_round
    begin_uf = sent.first_uf + (r - 1) * each
    # A device passes on the rows of one source of each node, to all devices of its own.
    rows = (each, layout.num_relayed * each) if layout.has_levels else (each,)
    return Window(begin_uf, begin_uf + each, rows, layout.computed_per_round)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def later_rounds(window, layout: Layout, x_nd, gate_nk, weights, sent: Manifest):
    """Run rounds 1, 2, .. Return their output, and the operands for round 0 to use.

    Round 0 must read its operands from this function. Its gradients are then the values
    from which the loop of the backward pass starts, so that no second accumulator is
    needed.
    """

    @jax.named_scope("later_rounds")
    def body(r, out_nd):
        own = _later_window(layout, sent, r)
        return out_nd + window(x_nd, gate_nk, weights, sent, own)

    zero_nd = zeros_varying_as(x_nd, x_nd.shape, x_nd.dtype)
    out_nd = jax.lax.fori_loop(1, num_rounds(sent, layout), body, zero_nd)
    return out_nd, x_nd, gate_nk, weights


def _forward(window, layout, x_nd, gate_nk, weights, sent):
    out = later_rounds(window, layout, x_nd, gate_nk, weights, sent)
    return out, (x_nd, gate_nk, weights, sent)


def _backward(window, layout, saved, cotangents):
    *operands, sent = saved
    d_out_nd, *d_operands = cotangents

    @jax.named_scope("later_rounds")
    def body(r, sums):
        def recompute(*operands):
            return window(*operands, sent, _later_window(layout, sent, r))

        _, vjp = jax.vjp(recompute, *operands)
        return jax.tree.map(jnp.add, sums, vjp(d_out_nd))

    sums = jax.lax.fori_loop(1, num_rounds(sent, layout), body, tuple(d_operands))
    return *sums, None


later_rounds.defvjp(_forward, _backward)
