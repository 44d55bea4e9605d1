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
from train.step.loss import cross_entropy, token_nats

B, T, D = 8, 12, 16
Z_LOSS = 0.03
MESHES = {
    "one device": Topology(),
    "expert": Topology(expert=4),
    "data and expert": Topology(data=2, expert=4),
    "tensor": Topology(data=2, expert=2, tensor=2),
    "dc": Topology(dc=2, data=2, expert=2),
    "dc and tensor": Topology(dc=2, expert=2, tensor=2),
}


def make_arrays(v: int, dtype=np.float64):
    """Return hidden states, head and targets, and weights of the gradient."""
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
    """Return loss, nats and gradients by hidden states and head; the loss is not the
    last function before the gradient."""

    def scaled(*args):
        loss_and_nats = loss(*args)
        return 1.7 * jnp.sin(loss_and_nats[0]), loss_and_nats

    (_, values), grads = jax.value_and_grad(scaled, (0, 1), has_aux=True)(*args)
    return *values, *grads


@functools.cache
def plain_values(v: int, dtype=np.float64):
    return jax.device_get(jax.jit(functools.partial(value_and_grads, plain_loss)))(
        *make_arrays(v, dtype)
    )


def split_values(v: int, topology: Topology, chunk: int, dtype=np.float64):
    """Return loss, nats of each token and gradients, computed on a mesh."""
    mesh = axes.make_mesh(topology, jax.devices()[: topology.num_devices])

    def loss(*args):
        loss, nats = cross_entropy(*args, mesh, chunk, Z_LOSS)
        return loss, (nats, token_nats(*args, mesh, chunk))

    rows = axes.sharding(mesh, axes.BATCH_AXES)
    hidden_btd, head_vd, targets_bt = make_arrays(v, dtype)
    args = jax.device_put((hidden_btd, targets_bt), rows)
    args = args[0], jax.device_put(head_vd, axes.sharding(mesh)), args[1]
    values = jax.jit(functools.partial(value_and_grads, loss))(*args)
    loss, (nats, nats_bt), *grads = jax.device_get(values)
    assert_close(nats, np.mean(nats_bt))
    return loss, nats_bt, *grads


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize(("v", "chunk"), [(48, 4), (37, T), (5, 100)])
def test_values_and_gradients_are_those_of_whole_logits(name, v, chunk):
    """This holds with one chunk and with several, and for vocabularies that the devices
    do not divide, or that leave devices without a row."""
    with jax.enable_x64(True):
        expected = plain_values(v)
        assert_close(split_values(v, MESHES[name], chunk), expected)
    actual = split_values(v, MESHES[name], chunk, np.float32)
    assert_close(actual, jax.tree.map(np.float32, expected))
