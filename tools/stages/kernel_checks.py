"""Check kernels one after another, in the process that the stage 'numerics' starts.

    python -m tools.stages.kernel_checks SETTINGS.json FINDINGS.jsonl wgrad/first ..

Each kernel writes a line before it begins and one when it has ended, so that a crash or
a hang names the kernel. A result is compared with the definition in float64. Each call
runs twice, after arrays of NaN have been written and freed where its outputs will most
likely be, and both results must have the same bits.
"""

import itertools
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from tools.stages.runner import begin_process
from tools.stages.stage import Settings
from train.messages import one_line

POISON = {"f": float("nan"), "i": -(2**30), "u": 2**30}
MAX_REASON = 160


def main() -> int:
    settings_path, findings, *units = sys.argv[1:]
    begin_process()
    settings = Settings.load(pathlib.Path(settings_path))
    with pathlib.Path(findings).open("a") as file:
        for unit in units:
            for line in check(unit, settings):
                file.write(json.dumps({"unit": unit} | line) + "\n")
                file.flush()
    return 0


def check(unit: str, settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield a line at the beginning of a kernel's form and one at its end, whose `why`
    is '' if it is right."""
    yield {"is_over": False}
    from tools.stages.kernel_cases import make_cases

    kernel, form = unit.split("/")
    is_wrong = f"wrong:{kernel}" in settings.plants and form == "first"
    is_wrong |= f"wrong:{unit}" in settings.plants
    begin, num_cases, max_error, why = time.monotonic(), 0, 0.0, ""
    programs: dict = {}
    cases = make_cases(kernel, form, is_dry=settings.is_dry)
    for case in itertools.islice(cases, 1) if settings.is_small else cases:
        try:
            error, is_same = run_twice(case, programs, is_wrong)
        except Exception as fault:  # whatever a compiler or a kernel raises
            why = f"{case.name}: {type(fault).__name__}: {one_line(fault, MAX_REASON)}"
            break
        num_cases, max_error = num_cases + 1, max(max_error, error)
        if not error <= case.max_error:
            why = f"{case.name}: error {error:.2g}, at most {case.max_error:.1g}"
        elif not is_same:
            why = f"{case.name}: two runs differ in their bits"
        if why:
            break
    yield {
        "is_over": True,
        "why": why,
        "num_cases": num_cases,
        "max_error": max_error if max_error < float("inf") else None,
        "sec": round(time.monotonic() - begin, 2),
    }


def run_twice(case, programs: dict, is_wrong: bool) -> tuple[float, bool]:
    """Return the error of a case, and whether two runs of it have the same bits.

    `programs` are those that cases before it have compiled, by call and dtype.
    `is_wrong` plants wrong elements.
    """
    import jax
    import numpy as np

    key = case.call, *((a.shape, a.dtype) for a in case.arguments)
    if key not in programs:
        lowered = jax.jit(case.call).lower(*case.arguments)
        programs[key] = lowered.compile(), lowered.out_info
    program, shapes = programs[key]
    runs = []
    for _ in range(2):
        jax.block_until_ready(jax.tree.map(poison, shapes))
        runs.append(jax.device_get(program(*case.arguments)))
    if is_wrong:
        runs = [jax.tree.map(spoil, run) for run in runs]
    first, second = map(jax.tree.leaves, runs)
    is_same = all(np.array_equal(_bits(a), _bits(b)) for a, b in zip(first, second))
    return case.error(runs[0]), is_same


def poison(shape):
    """Return an array of a shape and dtype, full of NaN or of large integers."""
    import jax.numpy as jnp

    kind = "f" if jnp.issubdtype(shape.dtype, jnp.floating) else shape.dtype.kind
    return jnp.full(shape.shape, POISON[kind], shape.dtype)


def spoil(array):
    """Return an array with wrong values in its first row."""
    import numpy as np

    wrong = np.array(array)
    wrong[:1] = 3 * wrong[:1] + 1
    return wrong


def _bits(array):
    import numpy as np

    return np.atleast_1d(array).view(np.uint8)


if __name__ == "__main__":
    sys.exit(main())
