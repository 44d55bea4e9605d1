"""A scan over layers, in which the weights of each layer are fetched a layer ahead.

While layer l computes, the weights of the next layer travel, in both directions:

    forward     fetch l + 1   |  compute l
    backward    fetch l - 1   |  compute l  |  send gradients of the weights of l + 1

A scan keeps what its iterations read for the backward pass, and would keep the fetched
weights of all layers. Here the backward pass fetches them again (`is_kept` says not
to). Only gradients travel from layer to layer in the backward pass of a scan. So the
carry has one more value, of the shape of a layer's weights, which the forward pass
hands on as it is and nobody reads. In the backward pass the "gradient" of this value is
the next weights: layer l + 1 fetches those of layer l and returns them as it.

XLA's scheduler does not place what travels by itself where a layer has time for it. A
layer can wait: `fetch` returns, beside the weights of the next layer, what tells that
they have arrived, and the layer at work gets it.

Gradients of weights need nothing special. The weights of layer l + 1 are an output of
iteration l, so their gradients leave in the backward pass of iteration l.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def scan(
    run: Callable, carry, layers, fetch: Callable, sources, is_kept: bool
) -> tuple[Any, Any]:
    """Return the last carry, and the outputs of all layers, stacked.

    run(carry, weights, (layer, dependency)) -> carry, output computes one layer;
    `layers` has the values of all layers, stacked. fetch(source) -> weights, dependency
    makes the weights of one layer, from its part of `sources`, which are stacked too.
    They are linear in every float of the source, up to a cast. `dependency`, integers
    or None, goes to the layer before. If `is_kept`, the backward pass uses the weights
    that the forward pass fetched, which all stay in memory.
    """
    num_layers = len(jax.tree.leaves(sources)[0])
    first, _ = fetch(_layer(sources, 0))
    index_l = jnp.arange(num_layers)
    if is_kept:

        def keep(carry, layer):
            carry, weights = carry
            index, layer = layer
            following, dependency = fetch(_layer(sources, (index + 1) % num_layers))
            carry, output = run(carry, weights, (layer, dependency))
            return (carry, following), output

        (carry, _), outputs = jax.lax.scan(keep, (carry, first), (index_l, layers))
        return carry, outputs

    run, begin = _refetching(run, fetch)
    constant = jax.lax.stop_gradient(sources)

    def body(carry, layer):
        carry, weights, unread = carry
        index, layer = layer
        # The next layer's weights do not depend on the carry: they travel meanwhile.
        following, dependency = fetch(_layer(sources, (index + 1) % num_layers))
        before = (index - 1) % num_layers
        args = carry, weights, unread, (layer, dependency), constant, before
        (carry, output), unread = run(*args)
        return (carry, following, unread), output

    unread = jax.tree.map(jnp.zeros_like, jax.lax.stop_gradient(first))
    carry, outputs = jax.lax.scan(body, (carry, first, unread), (index_l, layers))
    carry, _, unread = carry
    return begin(carry, unread, constant, num_layers - 1), outputs


def _refetching(run: Callable, fetch: Callable) -> tuple[Callable, Callable]:
    """Return two functions whose backward passes hand fetched weights on, as the module
    says.

    The first computes a layer: (carry, weights, unread, layer, sources, index) ->
    run(carry, weights, layer), unread. Its backward pass takes its weights from the
    gradient of `unread`, and returns those of layer `index` as that of its argument.
    The second, (carry, unread, sources, index) -> carry, begins the backward pass.
    What it fetches is in the named scope 'refetch', which tells it from gradients.
    """
    refetch = jax.named_scope("refetch")(fetch)

    @jax.custom_vjp
    def compute(carry, weights, unread, layer, sources, index):
        return run(carry, weights, layer), unread

    def compute_forward(carry, weights, unread, layer, sources, index):
        saveable = (True, False, True)
        out, pull_back = jax.vjp(run, carry, weights, layer, saveable_args=saveable)
        return (out, unread), (pull_back, sources, index)

    def compute_backward(saved, cotangents):
        (pull_back, sources, index), (d_out, weights) = saved, cotangents
        d_carry, d_weights, d_layer = _with_weights(pull_back, weights)(d_out)
        before, _ = refetch(_layer(sources, index))
        return d_carry, d_weights, before, d_layer, None, None

    @jax.custom_vjp
    def begin(carry, unread, sources, index):
        return carry

    def begin_forward(carry, unread, sources, index):
        return carry, (sources, index)

    def begin_backward(saved, d_carry):
        sources, index = saved
        last, _ = refetch(_layer(sources, index))
        return d_carry, last, None, None

    compute.defvjp(compute_forward, compute_backward)
    begin.defvjp(begin_forward, begin_backward)
    return compute, begin


def _with_weights(pull_back, weights):
    """Return the function that jax.vjp returned, with the weights that it did not
    save."""
    carry, _, layer = pull_back.args_res
    return pull_back.replace(args_res=[carry, weights, layer])


def _layer(stacked, index):
    """Return one layer's part of arrays that are stacked on a leading dim."""
    take = partial(jax.lax.dynamic_index_in_dim, index=index, keepdims=False)
    return jax.tree.map(take, stacked)
