"""What JAX asks of cuDNN on this machine is answered for the target."""

import inspect

import jax
import pytest
from jax._src.cudnn import fused_attention_stablehlo as attention

from moejax.perf.target import load
from tools.compiled.cudnn_checks import of_target

WRITTEN_FOR = "0.11.2"


def test_the_functions_are_those_of_this_version_of_jax():
    """After an update of JAX: see that it still asks these three functions and nothing
    else of the machine, and write the new version here."""
    assert jax.__version__ == WRITTEN_FOR
    asked = inspect.getsource(attention.check_is_flash_attention)
    assert "check_compute_capability(" in asked
    assert "is_cuda_compute_capability_equal(" in asked
    assert "check_cudnn_version()" in inspect.getsource(attention.dot_product_attention)


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
