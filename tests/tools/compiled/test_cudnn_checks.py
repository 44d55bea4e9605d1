"""Questions that JAX asks of cuDNN on this machine are answered for the target."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as attention
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from moejax.kernels.attention import Rule, cudnn
from moejax.kernels.attention.reading import Inputs
from moejax.perf.target import load
from tools.compiled.cudnn_checks import of_target

WRITTEN_FOR = "0.11.2"


def test_the_functions_are_those_of_this_version_of_jax():
    """After an update of JAX: see that it still asks these two functions and nothing
    else of the machine, and write the new version here. Our attention asks for cuDNN's
    version."""
    assert jax.__version__ == WRITTEN_FOR
    asked = inspect.getsource(attention.check_is_flash_attention)
    assert "check_compute_capability(" in asked
    assert "is_cuda_compute_capability_equal(" in asked


@pytest.mark.parametrize(
    ("name", "at_least_10", "is_9"), [("h100", False, True), ("b200", True, False)]
)
def test_answers_are_the_targets(name, at_least_10, is_9):
    with of_target(load(name)):
        assert attention.check_cudnn_version() == 92800
        assert attention.check_compute_capability("8.0")
        assert attention.check_compute_capability("10.0") is at_least_10
        assert attention.is_cuda_compute_capability_equal("9.0") is is_9
    assert not attention.check_compute_capability("8.0")  # this machine's again


@pytest.mark.parametrize(
    ("capability", "why"), [("9.0", None), ("8.0", "at least Hopper")]
)
def test_our_attention_by_cudnn_is_declined_where_the_target_has_none(capability, why):
    q_bthi = jax.ShapeDtypeStruct((1, 64, 4, 64), jnp.bfloat16)
    first_bt, start = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((1, 64), ()))
    inputs = Inputs(q_bthi, q_bthi, q_bthi, first_bt, start)
    target = dataclasses.replace(load("h100"), compute_capability=capability)
    gpu = AbstractDevice(target.name, num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        with of_target(target):
            found = cudnn.declines(inputs, Rule())
        assert cudnn.declines(inputs, Rule()) is None  # no GPU is here to be asked
    assert found is why is None or why in found
