"""Test that weights are gathered whole, and that gradients are summed where they rest,
in the dtype and by the collectives that are configured."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moejax import axes
from moejax.moe.weights.gather import MIN_SHARDED_SIZE, Fsdp, gather, resting_dim
from moejax.plan.layout import Topology
from tests.support.close import assert_close
from tests.support.primitives import equations

ALONG = ("data", "expert")
MESHES = [
    Topology(data=2, expert=4),
    Topology(data=4, expert=2),
    Topology(dc=2, data=2, expert=2),
]
SHAPE = (16, 24)


def pull_back(
    topology: Topology, dim=0, dtype=None, reduce_dtype="float32", part_dtype="float32"
):
    """Return a function (weight, grad_w) -> weight as each device has it [w, ..], and
    the gradient of the weight, where device i has the gradient grad_w[i] of its whole
    weight."""
    mesh, fsdp = axes.make_mesh(topology), Fsdp(ALONG, dtype, reduce_dtype)
    batch = P(tuple(axis for axis in axes.BATCH_AXES if mesh.shape[axis] > 1))

    def on_device(part, grad_1):
        (whole,), pull = jax.vjp(
            lambda part: gather((part,), (dim,), grad_1, fsdp), part
        )
        return whole[None], pull((grad_1[0].astype(whole.dtype),))[0]

    spec = fsdp.spec(dim)
    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=(spec, batch), out_specs=(batch, spec)
    )
    return lambda weight, grad_w: run(weight.astype(part_dtype), grad_w)


def draw(dtype="float32"):
    """Return a weight, and a gradient of it for each device."""
    random = np.random.default_rng(0)
    weight = random.standard_normal(SHAPE).astype(dtype)
    return weight, random.standard_normal((8, *SHAPE)).astype(dtype)


@pytest.mark.parametrize(
    ("topology", "dim"), [(MESHES[0], 0), (MESHES[1], 1), (MESHES[2], 0)], ids=str
)
def test_a_gradient_is_the_sum_over_all_devices(topology, dim):
    weight, grad_w = draw()
    whole_w, grad = jax.jit(pull_back(topology, dim))(weight, grad_w)
    np.testing.assert_array_equal(whole_w, np.broadcast_to(weight, grad_w.shape))
    assert_close(grad, grad_w.sum(axis=0, dtype=np.float64), dtype="float32")


@pytest.mark.parametrize(
    ("topology", "dim"), [(MESHES[0], 1), (MESHES[1], 0), (MESHES[2], 1)], ids=str
)
def test_sums_of_bfloat16_are_rounded_between_axes_alone(topology, dim):
    """Sums over one axis are exact. Their values are rounded once before they travel
    along the outer axis, and not where they arrive."""
    weight, grad_w = draw()
    # Multiples of 1/64 below 4: sums of a few are exact in float32, in any order.
    grad_w = np.round(64 * grad_w).clip(-255, 255) / 64
    run = pull_back(topology, dim, "bfloat16", "bfloat16")
    whole_w, grad = jax.jit(run)(weight, grad_w)
    narrow = weight.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(whole_w, np.broadcast_to(narrow, grad_w.shape))

    by_axis = grad_w.reshape(topology.dc, topology.data, topology.expert, *SHAPE)
    inner = by_axis.sum(axis=2).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (inner != by_axis.sum(axis=2)).any(), "the test sees the rounding"
    assert grad.dtype == np.float32
    np.testing.assert_array_equal(grad, inner.sum(axis=(0, 1)))


def test_a_weight_that_rests_narrow_gets_a_narrow_gradient():
    """Slots have the compute dtype where they rest, and so has their gradient."""
    weight, grad_w = draw()
    run = pull_back(MESHES[0], part_dtype="bfloat16")
    whole_w, grad = jax.jit(run)(weight, grad_w)
    assert whole_w.dtype == grad.dtype == jnp.bfloat16
    narrow_w = grad_w.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_close(grad, narrow_w.sum(axis=0), dtype="bfloat16")


def test_weights_that_travel_together_equal_those_that_travel_alone():
    """Two weights of other shapes and dims are gathered by one collective, and so are
    their gradients: bits do not change."""
    mesh, fsdp = axes.make_mesh(MESHES[0]), Fsdp(ALONG, "bfloat16", "bfloat16")
    random, dims = np.random.default_rng(0), (0, 2)
    weights = tuple(
        random.standard_normal(shape).astype(np.float32)
        for shape in ((16, 6), (2, 3, 8))
    )
    x_w = random.standard_normal(8).astype(np.float32)

    def grads_of(gather_both):
        def loss(weights, x_w):
            def on_device(parts, x_1):
                whole = gather_both(parts, x_1)
                return sum(jnp.sin(x_1 * w.sum()) for w in whole).astype(jnp.float32)

            specs = tuple(fsdp.spec(dim) for dim in dims)
            run = jax.shard_map(
                on_device, mesh=mesh, in_specs=(specs, P(ALONG)), out_specs=P(ALONG)
            )
            return run(weights, x_w).sum()

        traced = jax.jit(jax.grad(loss)).trace(weights, x_w)
        names = [eqn.primitive.name for eqn, _ in equations(traced.jaxpr)]
        return jax.device_get(traced.lower().compile()(weights, x_w)), names

    together, names = grads_of(lambda parts, x_1: gather(parts, dims, x_1, fsdp))
    alone, _ = grads_of(
        lambda parts, x_1: tuple(
            gather((part,), (dim,), x_1, fsdp)[0] for part, dim in zip(parts, dims)
        )
    )
    for one, other in zip(together, alone):
        assert np.abs(one).max() > 0
        np.testing.assert_array_equal(one, other)
    assert names.count("all_gather") == 1


def test_whole_and_split_weights_are_gathered_together(doubles):
    """Each of three weights has the sum of its gradients, in float64. One is whole, and
    two are split along other dims."""
    mesh, fsdp = axes.make_mesh(MESHES[2]), Fsdp(ALONG, None, "bfloat16")
    batch = P(tuple(axis for axis in axes.BATCH_AXES if mesh.shape[axis] > 1))
    dims, shapes = (None, 1, 0), ((6,), (3, 16), (24, 2))
    random = np.random.default_rng(0)
    weights = tuple(random.standard_normal(shape) for shape in shapes)
    grads = tuple(random.standard_normal((8, *shape)) for shape in shapes)

    def on_device(parts, grads):
        whole, pull = jax.vjp(lambda parts: gather(parts, dims, grads[0], fsdp), parts)
        return tuple(w[None] for w in whole), pull(tuple(g[0] for g in grads))[0]

    specs = tuple(fsdp.spec(dim) for dim in dims)
    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=(specs, batch), out_specs=(batch, specs)
    )
    whole, sums = jax.jit(run)(weights, grads)
    for weight_w, weight in zip(whole, weights, strict=True):
        np.testing.assert_array_equal(weight_w, np.stack([weight] * 8))
    assert_close(sums, tuple(grad_w.sum(axis=0) for grad_w in grads), dtype=doubles)


COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter", "psum", "psum_invariant")


@pytest.mark.parametrize(
    ("reduce_dtype", "expected"),
    [
        # Once over each axis, and along the outer one a part of the gradient.
        ("bfloat16", [("all_to_all", 1, 2), ("all_to_all", 1 / 4, 2)]),
        ("float32", [("reduce_scatter", 1, 4)]),
    ],
)
def test_gradients_travel_as_configured(reduce_dtype, expected):
    """The collectives and the share and bytes of the elements that each of them takes
    are those that the module states."""
    weight, grad_w = draw()
    run = pull_back(MESHES[0], 0, "bfloat16", reduce_dtype)
    sent = [
        (
            eqn.primitive.name,
            math.prod(eqn.invars[0].aval.shape) / weight.size,
            eqn.invars[0].aval.dtype.itemsize,
        )
        for eqn, _ in equations(jax.make_jaxpr(run)(weight, grad_w))
        if eqn.primitive.name in COLLECTIVES
    ]
    assert sent == [("all_gather", 1 / 8, 2), *expected]


def test_a_sum_over_data_centres_is_of_parts():
    """The gradient is summed over dc in float32, after each data centre has summed its
    own."""
    weight, grad_w = draw()
    run = pull_back(MESHES[2], 0, "bfloat16", "bfloat16")
    sums = [
        eqn.invars[0].aval
        for eqn, _ in equations(jax.make_jaxpr(run)(weight, grad_w))
        if eqn.primitive.name.startswith("psum")
    ]
    assert [(value.size, value.dtype) for value in sums] == [
        (weight.size // 4, np.float32)
    ]


def test_the_largest_dim_that_divides_is_split():
    assert resting_dim((64, 96), 8) == 1
    assert resting_dim((64, 100), 8) == 0
    assert resting_dim((64, 96), 8, taken=(1,)) == 0
    assert resting_dim((61, 101), 8) is None
    assert resting_dim((MIN_SHARDED_SIZE - 1,), 3) is None, "small"
    assert resting_dim((MIN_SHARDED_SIZE,), 8) == 0
