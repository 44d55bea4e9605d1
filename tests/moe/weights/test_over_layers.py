"""Weights of layers are computed in a loop on GPUs, and without one on CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.moe.weights.over_layers import over_layers
from tests.support.hopper_traces import H200


def both(parts, mesh):
    """Return sums and products of two arrays, layer by layer."""
    return over_layers(
        lambda part: {"sum": sum(part), "x": part[0] * part[1]}, parts, mesh
    )


CPU = jax.make_mesh((8,), ("expert",))


def test_results_are_those_of_each_layer():
    x_ln, y_ln = np.arange(12.0).reshape(2, 3, 2).astype(np.float32)
    made = jax.jit(lambda parts: both(parts, CPU))((x_ln, y_ln))
    assert np.array_equal(made["sum"], x_ln + y_ln)
    assert np.array_equal(made["x"], x_ln * y_ln)


@pytest.mark.parametrize(
    ("mesh", "num_loops"), [(CPU, 0), (H200, 1)], ids=["cpu", "gpu"]
)
def test_a_cpu_has_no_loop(mesh, num_loops):
    """The devices are those of the mesh, and not those of this machine."""
    x_ln = jax.ShapeDtypeStruct((5, 2), jnp.float32)
    traced = jax.jit(lambda parts: both(parts, mesh)).trace((x_ln, x_ln))
    assert traced.lower().as_text().count("stablehlo.while") == num_loops
