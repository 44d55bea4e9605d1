"""Weights of layers are computed in a loop on GPUs, and without one on CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.moe.weights.over_layers import over_layers
from tests.support.hopper_traces import H200


def both(parts):
    """Return sums and products of two arrays, layer by layer."""
    return over_layers(lambda part: {"sum": sum(part), "x": part[0] * part[1]}, parts)


def test_results_are_those_of_each_layer():
    x_ln, y_ln = np.arange(12.0).reshape(2, 3, 2).astype(np.float32)
    made = jax.jit(both)((x_ln, y_ln))
    assert np.array_equal(made["sum"], x_ln + y_ln)
    assert np.array_equal(made["x"], x_ln * y_ln)


@pytest.mark.parametrize(("platform", "num_loops"), [("cpu", 0), ("gpu", 1)])
def test_a_cpu_has_no_loop(platform, num_loops):
    x_ln = jax.ShapeDtypeStruct((5, 2), jnp.float32)
    mesh = H200 if platform == "gpu" else jax.sharding.get_abstract_mesh()
    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.jit(both).trace((x_ln, x_ln)).lower().as_text()
    assert program.count("stablehlo.while") == num_loops
