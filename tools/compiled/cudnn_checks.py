"""Answers of the target, in place of this machine, to what JAX asks of cuDNN.

Three functions of a private module of JAX say which version of cuDNN is here and which
compute capability the first GPU has. moejax.kernels.attention.cudnn asks them before it
takes attention, where a GPU of the right kind is here. Without one there is no answer.
`of_target` says that the target is here, and answers for it. A test names the version
of JAX whose functions these are.
"""

import contextlib
from collections.abc import Iterator
from unittest import mock

from moejax.perf.target import CUDNN, Target


@contextlib.contextmanager
def of_target(target: Target) -> Iterator[None]:
    """Within the block, cuDNN is that of the target."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    from moejax.kernels.attention import cudnn

    major, minor, patch = CUDNN
    answers = {
        "check_cudnn_version": lambda: 10000 * major + 100 * minor + patch,
        "check_compute_capability": lambda asked: target.capability >= _parse(asked),
        "is_cuda_compute_capability_equal": lambda asked: (
            target.capability == _parse(asked)
        ),
    }
    is_here = mock.patch.object(cudnn, "is_here", return_value=True)
    with is_here, mock.patch.multiple(fused, **answers):
        yield


def _parse(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))
