"""Answers of the target, in place of this machine, to what JAX asks of cuDNN.

JAX asks three functions of a private module, while attention is lowered, which version
of cuDNN is here and which compute capability the first GPU has. Without a GPU there is
no answer. `of_target` answers for the target. A test names the version of JAX whose
functions these are.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

from moejax.perf.target import CUDNN, Target


@contextlib.contextmanager
def of_target(target: Target) -> Iterator[None]:
    """Within the block, cuDNN is that of the target."""
    from jax._src.cudnn import fused_attention_stablehlo as attention

    major, minor, patch = CUDNN
    answers = {
        "check_cudnn_version": lambda: 10000 * major + 100 * minor + patch,
        "check_compute_capability": lambda asked: target.capability >= _parse(asked),
        "is_cuda_compute_capability_equal": lambda asked: (
            target.capability == _parse(asked)
        ),
    }
    with mock.patch.multiple(attention, **answers):
        yield


def _parse(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))
