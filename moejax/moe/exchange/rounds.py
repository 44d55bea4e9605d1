"""Exact exchange: as many rounds as it takes until every row has been computed.

Round 0 is ordinary differentiable code; later rounds are a loop. With
`Layout.overflow` = 'redo' there is no loop: the statistics of the step say that more
rounds are needed (`num_rounds`), and the trainer runs the batch again.

Buffers are static and bounded: round 0 carries `rows_per_peer` rows per peer, each
later round a quarter of that (`rows_per_round`). All devices of a group know all
counts, so they agree on the number of rounds without a reduction. Later rounds save
nothing for the backward pass, which dispatches their rows again. A loop of zero rounds
computes nothing, but on a GPU the host waits until it knows that.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moejax.kernels import zeros_varying_as
from moejax.moe.exchange.dispatch import Window, combine, dispatch
from moejax.moe.exchange.manifest import Manifest, fullest_pair
from moejax.moe.mesh_roles import MeshLayout
from moejax.plan.layout import Layout

Experts = Callable[..., Array]
"""Signature of experts(x_md, rows_s, weights) -> y_md, which computes rows by slot."""


def num_rounds(sent: Manifest, layout: Layout) -> Int[Array, ""]:
    """Return the number of rounds that the group's fullest pair of devices needs.

    It is 1 if round 0 carries everything. With overflow 'redo' round 0 is the only one
    that runs, and the number says what the batch needs.
    """
    rest = jnp.maximum(fullest_pair(sent, layout) - layout.rows_per_peer, 0)
    return 1 + -(-rest // layout.rows_per_round)


def exchange(
    x_nd: Float[Array, "n d"],
    gate_nk: Float[Array, "n k"],
    weights: dict[str, Array],
    sent: Manifest,
    experts: Experts,
    mesh_layout: MeshLayout,
) -> Float[Array, "n d"]:
    """Return the layer's output: rows sent to their slots, computed and sent back.

    The results of a token's rows are weighted with its gates and summed. `weights` are
    the slots' weights, varying over all mesh axes as x does. In capacity mode the
    manifest holds no more rows than round 0 carries. With overflow 'redo' the output is
    wrong where `num_rounds` is above 1.
    """
    window = partial(_window, experts=experts, mesh_layout=mesh_layout)
    layout, rest_nd = mesh_layout.layout, None
    if layout.has_loops(gate_nk.size):
        rest_nd, x_nd, gate_nk, weights = later_rounds(
            window, layout, x_nd, gate_nk, weights, sent
        )
    first = Window(0, layout.rows_per_peer)
    out_nd = window(first, x_nd, gate_nk, weights, sent)
    return out_nd if rest_nd is None else out_nd + rest_nd


def _window(window, x_nd, gate_nk, weights, sent, *, experts, mesh_layout):
    """Return the contribution of one window's rows to the layer's output, which is the
    sum over windows."""
    x_md, rows_s, receipt = dispatch(x_nd, sent, window, mesh_layout)
    return combine(experts(x_md, rows_s, weights), gate_nk, receipt, mesh_layout)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def later_rounds(window, layout: Layout, x_nd, gate_nk, weights, sent: Manifest):
    """Run rounds 1, 2, .. Return their output, and the operands for round 0 to use.

    Round 0 must read its operands from this function. Its gradients are then the values
    from which the loop of the backward pass starts, so that no second accumulator is
    needed.
    """

    @jax.named_scope("later_rounds")
    def body(r, out_nd):
        return out_nd + window(_window_of(layout, r), x_nd, gate_nk, weights, sent)

    zero_nd = zeros_varying_as(x_nd, x_nd.shape, x_nd.dtype)
    out_nd = jax.lax.fori_loop(1, num_rounds(sent, layout), body, zero_nd)
    return out_nd, x_nd, gate_nk, weights


def _window_of(layout: Layout, r) -> Window:
    """Return the window of round r >= 1."""
    start = layout.rows_per_peer + (r - 1) * layout.rows_per_round
    return Window(start, layout.rows_per_round)


def _forward(window, layout, x_nd, gate_nk, weights, sent):
    out = later_rounds(window, layout, x_nd, gate_nk, weights, sent)
    return out, (x_nd, gate_nk, weights, sent)


def _backward(window, layout, saved, cotangents):
    *operands, sent = saved
    d_out_nd, *d_operands = cotangents

    @jax.named_scope("later_rounds")
    def body(r, sums):
        def recompute(*operands):
            return window(_window_of(layout, r), *operands, sent)

        _, vjp = jax.vjp(recompute, *operands)
        return jax.tree.map(jnp.add, sums, vjp(d_out_nd))

    sums = jax.lax.fori_loop(1, num_rounds(sent, layout), body, tuple(d_operands))
    return *sums, None


later_rounds.defvjp(_forward, _backward)
