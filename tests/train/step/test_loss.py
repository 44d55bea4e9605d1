"""Compare the loss, nats of tokens and gradients with jax.nn.log_softmax on whole
logits, on meshes of every shape."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax import axes
from moejax.plan.layout import Topology
from tests.support.close import assert_close
from tests.support.primitives import dot_flops
from train.step.loss import cross_entropy, token_nats

B, T, D = 8, 12, 16
Z_LOSS = 0.03


def make_arrays(v: int, dtype=np.float64):
    """Return hidden states, head and targets."""
    random = np.random.default_rng(v)
    hidden_btd, head_vd = (
        random.standard_normal(shape).astype(dtype) for shape in ((B, T, D), (v, D))
    )
    return hidden_btd, head_vd, random.integers(0, v, (B, T)).astype(np.int32)


def plain_loss(hidden_btd, head_vd, targets_bt):
    """Return the loss, and the nats of each token."""
    logits_btv = hidden_btd @ head_vd.T
    log_share_btv = jax.nn.log_softmax(logits_btv)
    nats_bt = -jnp.take_along_axis(log_share_btv, targets_bt[..., None], -1)[..., 0]
    square = jnp.mean(jax.nn.logsumexp(logits_btv, axis=-1) ** 2)
    return jnp.mean(nats_bt) + Z_LOSS * square, nats_bt


def value_and_grads(loss, *args):
    """Return loss, nats, and the gradients by hidden states and head of a function of
    the loss."""

    def scaled(*args):
        loss_and_nats = loss(*args)
        return 1.7 * jnp.sin(loss_and_nats[0]), loss_and_nats

    (_, values), grads = jax.value_and_grad(scaled, (0, 1), has_aux=True)(*args)
    return *values, *grads


@functools.cache
def plain_values(v: int):
    return jax.device_get(jax.jit(functools.partial(value_and_grads, plain_loss)))(
        *make_arrays(v)
    )


def split_values(v: int, topology: Topology, chunk: int):
    """Return loss, nats of each token and gradients, computed on a mesh."""
    mesh = axes.make_mesh(topology)

    def loss(*args):
        loss, nats = cross_entropy(*args, mesh, chunk, Z_LOSS)
        return loss, (nats, token_nats(*args, mesh, chunk))

    rows = axes.sharding(mesh, axes.BATCH_AXES)
    hidden_btd, head_vd, targets_bt = make_arrays(v)
    args = jax.device_put((hidden_btd, targets_bt), rows)
    args = args[0], jax.device_put(head_vd, axes.sharding(mesh)), args[1]
    values = jax.jit(functools.partial(value_and_grads, loss))(*args)
    loss, (nats, nats_bt), *grads = jax.device_get(values)
    assert_close(nats, np.mean(nats_bt))
    return loss, nats_bt, *grads


@pytest.mark.parametrize(
    ("topology", "v", "chunk"),
    [
        (Topology(data=2, expert=4), 37, 100),
        (Topology(dc=2, data=2, expert=2), 5, T),
        (Topology(dc=2, expert=2, tensor=2), 48, 4),
    ],
    ids=str,
)
def test_values_and_gradients_are_those_of_whole_logits(topology, v, chunk):
    """This holds with one chunk and with several, and for vocabularies that the devices
    do not divide, or that leave devices without a row."""
    with jax.enable_x64(True):
        expected = plain_values(v)
        assert_close(split_values(v, topology, chunk), expected)


def test_logits_are_computed_once():
    """With the gradient there are three products over the vocabulary, and one
    without."""
    args, mesh = (
        make_arrays(48, np.float32),
        axes.make_mesh(Topology(), jax.devices()[:1]),
    )

    def loss(*args):
        return cross_entropy(*args, mesh, 4)[0]

    product = 2 * B * T * 48 * D
    assert dot_flops(loss, *args) == product
    assert dot_flops(jax.grad(loss, (0, 1)), *args) == 3 * product


def test_errors_of_bfloat16():
    """Errors of the gradients are below those of two roundings. The gradient of logits
    is rounded, that of hidden states also as a part from each slice and as the sum."""
    mesh = axes.make_mesh(Topology(data=2, expert=2, tensor=2))
    *arrays, targets_bt = make_arrays(512)
    few = [jnp.asarray(array, jnp.bfloat16) for array in arrays]
    with jax.enable_x64(True):
        args = *(np.float64(array) for array in few), targets_bt
        expected = jax.grad(lambda *args: jnp.mean(plain_loss(*args)[1]), (0, 1))(*args)
    rows = axes.sharding(mesh, axes.BATCH_AXES)
    hidden_btd, targets_bt = jax.device_put((few[0], targets_bt), rows)
    head_vd = jax.device_put(few[1].astype(jnp.float32), axes.sharding(mesh))
    grad = jax.jit(jax.grad(lambda *args: cross_entropy(*args, mesh, 4)[0], (0, 1)))
    actual = grad(hidden_btd, head_vd, targets_bt)
    for gradient, exact in zip(actual, expected, strict=True):
        rounded = jnp.asarray(exact, jnp.bfloat16)
        assert relative_error(gradient, exact) < 2 * relative_error(rounded, exact)


def relative_error(actual, expected) -> float:
    """Return the norm of the difference over that of `expected`."""
    difference = np.asarray(actual, np.float64) - np.asarray(expected)
    return np.linalg.norm(difference) / np.linalg.norm(expected)


@pytest.mark.parametrize("topology", [Topology(), Topology(data=2, expert=2, tensor=2)])
def test_weighted_tokens_are_counted_by_their_weights(topology):
    """Weights that are 0 leave tokens out of loss, nats and gradients. The definition
    is in float64, on whole logits."""
    *arrays, targets_bt = make_arrays(37)
    weight_bt = np.random.default_rng(1).uniform(size=(B, T)).round(1)
    weight_bt[0] = weight_bt[1, :6] = 0.0
    weight_bt /= weight_bt.sum()

    def plain(hidden_btd, head_vd):
        logits_btv = hidden_btd @ head_vd.T
        norm_bt = jax.nn.logsumexp(logits_btv, axis=-1)
        chosen = jnp.take_along_axis(logits_btv, targets_bt[..., None], -1)[..., 0]
        nats = jnp.sum(weight_bt * (norm_bt - chosen))
        return nats + Z_LOSS * jnp.sum(weight_bt * norm_bt**2), nats

    mesh = axes.make_mesh(topology, jax.devices()[: topology.num_devices])

    def split(hidden_btd, head_vd):
        args = hidden_btd, head_vd, targets_bt, mesh, 4, Z_LOSS
        return cross_entropy(*args, jnp.asarray(weight_bt))

    with jax.enable_x64(True):
        expected, found = (
            jax.device_get(jax.jit(functools.partial(value_and_grads, x))(*arrays))
            for x in (plain, split)
        )
    assert_close(found, expected)
    assert not np.any(found[2][0])
