"""A scan that fetches weights a layer ahead is the scan, and the backward pass fetches
again what it would have to keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.model import ahead
from tests.support.close import assert_close
from tests.support.primitives import equations

D = 5


def toy(num_layers: int, is_ahead: bool, remat: bool):
    """Return loss(params, x) of layers x -> tanh(x w) * scale, whose w is fetched as
    twice a parameter."""

    def run(x_d, w_dd, layer):
        scale_d, dependency = layer
        assert dependency is None
        x_d = jnp.tanh(x_d @ w_dd) * scale_d
        return x_d, x_d.sum()

    def fetch(source):
        w_dd, which = source
        return 2 * w_dd.astype(jnp.float32) * (which + 1), None

    run = jax.checkpoint(run) if remat else run

    def loss(params, x_d):
        w_ldd, scale_ld = params
        sources = w_ldd, jnp.arange(num_layers)
        if is_ahead:
            scanned = ahead.scan(run, x_d, scale_ld, fetch, sources, is_kept=not remat)
        else:
            scanned = jax.lax.scan(
                lambda x_d, layer: run(x_d, fetch(layer[0])[0], (layer[1], None)),
                x_d,
                (sources, scale_ld),
            )
        x_d, sums_l = scanned
        return (x_d * jnp.arange(D)).sum() + (sums_l**2).sum()

    return loss


def toy_operands(num_layers: int):
    rng = np.random.default_rng(num_layers)
    shapes = (num_layers, D, D), (num_layers, D), (D,)
    w_ldd, scale_ld, x_d = (rng.normal(size=s).astype(np.float32) for s in shapes)
    return (jnp.asarray(w_ldd), jnp.asarray(scale_ld)), jnp.asarray(x_d)


@pytest.mark.parametrize(("num_layers", "remat"), [(1, True), (2, False), (3, True)])
def test_a_scan_ahead_is_the_scan(num_layers, remat):
    """Value and gradients, also where gradients are added to sums in place."""
    params, x_d = toy_operands(num_layers)
    plain, here = (toy(num_layers, is_ahead, remat) for is_ahead in (False, True))
    expected = jax.jit(jax.value_and_grad(plain, (0, 1)))(params, x_d)
    actual = jax.jit(jax.value_and_grad(here, (0, 1)))(params, x_d)
    assert_close(actual, expected)

    @jax.jit
    def summed(params, x_d):
        _, pull_back = jax.vjp(lambda params: here(params, x_d), params)
        refs = jax.tree.map(lambda leaf: jax.new_ref(jnp.ones_like(leaf)), params)
        pull_back.with_refs(refs)(jnp.float32(1))
        return jax.tree.map(jax.ref.freeze, refs)

    added = jax.tree.map(lambda leaf: leaf - 1, summed(params, x_d))
    assert_close(added, expected[1][0], factor=10, reason="1 was added to them")


def kept_weights(num_layers: int, remat: bool) -> int:
    """Return how many arrays of the weights of all layers loops of the gradient make,
    the gradient itself not counted."""
    operands = toy_operands(num_layers)
    jaxpr = jax.make_jaxpr(jax.grad(toy(num_layers, True, remat)))(*operands)
    made = [
        variable
        for eqn, _ in equations(jaxpr)
        if eqn.primitive.name == "scan"
        for variable in eqn.outvars
        if variable.aval.shape == (num_layers, D, D)
    ]
    return len(made) - 1


def test_only_without_remat_are_fetched_weights_kept():
    assert kept_weights(3, remat=False) == 1
    assert kept_weights(3, remat=True) == 0


@pytest.mark.parametrize("num_layers", [1, 3])
def test_each_pass_fetches_each_layer_and_one_more(num_layers):
    loss = toy(num_layers, True, remat=True)
    jaxpr = jax.make_jaxpr(jax.grad(loss))(*toy_operands(num_layers))
    casts = [
        times
        for eqn, times in equations(jaxpr)
        if eqn.primitive.name == "dynamic_slice" and eqn.outvars[0].aval.size == D * D
    ]
    assert sum(casts) == 2 * (num_layers + 1)
