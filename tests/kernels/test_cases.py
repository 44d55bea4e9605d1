"""Every case of moejax/kernels/cases.py, by every implementation.

Here kernels for GPUs are interpreted, with a detector of races. `pytest --gpu` runs the
same cases on a GPU.
"""

import jax
import pytest
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

from moejax.kernels.cases import (
    GPU_ONLY,
    IMPLEMENTATIONS,
    INTERPRETED,
    Case,
    cases,
)
from moejax.kernels.tuning import PASSES
from tests.support import on_gpu

ON_GPU = on_gpu.where()
DRY_CASES = 2
"""Number of cases of each kernel with --interpret."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the test each case by each implementation that can run here.

    On a CPU, `make test` runs the first case of each kernel, and, unless it is
    interpreted, one of the others, which takes turns. `make test-all` runs all.
    """
    given = []
    for number, (kernel, implementations) in enumerate(IMPLEMENTATIONS.items()):
        for implementation in implementations:
            is_for_gpus = implementation in GPU_ONLY
            if ON_GPU != "device" and is_for_gpus and implementation not in INTERPRETED:
                continue
            chosen = cases(kernel)[: DRY_CASES if ON_GPU == "interpret" else None]
            quick = {0} if is_for_gpus else {0, 1 + number % (len(chosen) - 1)}
            given += [
                pytest.param(
                    case,
                    implementation,
                    is_for_gpus,
                    id=f"{kernel}-{implementation}-{case.name}",
                    marks=() if ON_GPU or index in quick else pytest.mark.long,
                )
                for index, case in enumerate(chosen)
            ]
    metafunc.parametrize(("case", "implementation", "is_for_gpus"), given)


@pytest.mark.gpu
@pytest.mark.slow
def test_case(request, case: Case, implementation: str, is_for_gpus: bool):
    if ON_GPU:
        on_gpu.check(request.config, request.node.nodeid, case, implementation)
        return
    arguments = case.draw()
    call = jax.jit(case.call(implementation, is_for_gpus))
    error = case.error(jax.device_get(call(*arguments)), case.expected(arguments))
    assert error <= case.tolerance
    if is_for_gpus and case.kernel in PASSES:
        assert not get_races().races_found
