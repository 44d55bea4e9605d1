"""Run the kernels' cases on a GPU: `pytest --gpu tests/kernels`.

Cases run in processes of their own, the workers of pytest-xdist. A worker that meets an
error of CUDA, or a kernel that does not end, writes its line and ends itself, so that
no later case runs on a broken connection: pytest-xdist starts another one for the rest.
Each case is a line of JSON in the file --gpu-out as soon as it is known.

The variable MOEJAX_PLANT plants a fault, to try what surrounds the kernels:
wrong:KERNEL, sticky:KERNEL (an error of CUDA that stays) or hang:KERNEL.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import pytest

VARIABLE = "MOEJAX_KERNEL_CASES"
"""Environment variable that says where cases run with --gpu: 'device' or
'interpret'."""
MAX_WORKERS, MAX_RESTARTS = 12, 60
RUN_LIMIT_SEC = {"device": 20.0, "interpret": 180.0}
"""Time after which a call of a kernel counts as one that hangs. Compiling has no
limit."""
_has_sticky_error = False


def where() -> str | None:
    """Return where cases run with --gpu, 'device' or 'interpret'; None without it."""
    return os.environ.get(VARIABLE)


def add_options(parser: pytest.Parser) -> None:
    add = parser.addoption
    add("--gpu", action="store_true", help="run the kernels' cases on the GPU")
    add(
        "--gpu-out",
        default="gpu_cases.jsonl",
        help="with --gpu: file to which a line of JSON is added for each case",
    )
    add(
        "--interpret",
        action="store_true",
        help="with --gpu: interpret two cases of each kernel on a CPU, to try the rest",
    )


def set_up() -> None:
    """Set the variables of processes that share a GPU, before jax is imported. The
    definitions are computed on the CPU."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if platforms := os.environ.get("JAX_PLATFORMS"):
        names = [name for name in platforms.split(",") if name != "cpu"]
        os.environ["JAX_PLATFORMS"] = ",".join([*names, "cpu"])


def require_gpu(config: pytest.Config) -> None:
    """End pytest with one line if JAX sees no GPU. Another process looks, so that this
    one holds none. Cases can be listed without one."""
    if config.option.collectonly or _is_worker():
        return
    words = [sys.executable, "-c", "import jax; print(jax.devices()[0].platform)"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().split("\n")
    if lines[-1] != "gpu":
        pytest.exit(
            f"--gpu: JAX sees no GPU here ({lines[-1][:200]}); without --gpu the same "
            "cases are interpreted on the CPU",
            returncode=4,
        )


def spread(config: pytest.Config) -> None:
    """Run cases in several processes, unless -n says otherwise. A worker must not have
    workers of its own."""
    is_spread = hasattr(config.option, "numprocesses") and not _is_worker()
    if config.option.collectonly or not is_spread:
        return
    if config.option.numprocesses is None:
        config.option.numprocesses = min(MAX_WORKERS, os.cpu_count() or 1)
    config.option.dist = "load"  # loadgroup fails where two workers end at once
    config.option.maxschedchunk = 1
    config.option.maxworkerrestart = MAX_RESTARTS


def select(config: pytest.Config, items: list) -> None:
    """Keep the kernels' cases, those of kernels made for GPUs first."""
    kept = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = sorted(kept, key=lambda item: not item.callspec.params["is_for_gpus"])


def summary(config: pytest.Config) -> str:
    """Return the line at the end of a run."""
    file = "" if config.option.collectonly else f"; lines in {config.option.gpu_out}"
    return f"with --gpu, only the kernels' cases run{file}"


def check(config: pytest.Config, node_id: str, case, implementation: str) -> None:
    """Compile a case, run it twice, and compare both results with the definition. Add a
    line to --gpu-out, and raise AssertionError unless all is right."""
    import jax

    from moejax.kernels.cases import INTERPRETED

    limit_sec = RUN_LIMIT_SEC[where()]
    is_interpreted = where() == "interpret" and implementation in INTERPRETED
    line = {
        "id": node_id,
        "kernel": case.kernel,
        "implementation": implementation,
        "case": case.name,
        "state": "error",
        "error": None,
        "tolerance": case.tolerance,
        "compile_sec": None,
        "run_sec": None,
        "why": "",
    }
    arguments = case.draw()
    expected = case.expected(arguments)
    begin_sec = time.monotonic()
    try:
        function = jax.jit(case.call(implementation, is_interpreted))
        program = function.lower(*arguments).compile()
    except Exception as error:
        _add(config, line | {"why": _text(error)})
        raise
    line["compile_sec"] = round(time.monotonic() - begin_sec, 2)
    begin_sec = time.monotonic()

    def end_hanging() -> None:
        why = f"no end after {limit_sec:.0f} s"
        _add(config, line | {"state": "hang", "why": why})
        os._exit(1)

    timer = threading.Timer(limit_sec, end_hanging)
    timer.daemon = True
    timer.start()
    try:
        _poison(expected)
        call = functools.partial(_run, program, case, arguments, implementation)
        results = [jax.device_get(call()) for _ in range(2)]
    except Exception as error:
        _add(config, line | {"why": _text(error)})
        if _is_worker():
            os._exit(1)  # the connection to the GPU may be broken for good
        raise
    finally:
        timer.cancel()
    line["run_sec"] = round(time.monotonic() - begin_sec, 3)
    error = case.error(results[0], expected)
    is_finite = error < float("inf")
    line["error"] = error if is_finite else None
    if not is_finite:
        line["why"] = "a result is not finite"
    elif case.error(results[1], results[0]) > 0:
        line["why"] = "two calls differ"
    is_right = error <= case.tolerance and not line["why"]
    _add(config, line | {"state": "right" if is_right else "wrong"})
    assert is_right, f"error {error:.3g}, at most {case.tolerance:.3g}; {line['why']}"


def _is_worker() -> bool:
    """Return whether this process is a worker of pytest-xdist."""
    return "PYTEST_XDIST_WORKER" in os.environ


def _run(program, case, arguments, implementation):
    """Run a case, with the fault that is planted for its kernel."""
    global _has_sticky_error
    import jax

    from moejax.kernels.cases import GPU_ONLY

    fault, _, kernel = os.environ.get("MOEJAX_PLANT", "").partition(":")
    fault = fault if kernel == case.kernel and implementation in GPU_ONLY else ""
    if fault == "hang":
        threading.Event().wait()
    if fault == "sticky" or _has_sticky_error:
        _has_sticky_error = True
        raise jax.errors.JaxRuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS, as planted")
    results = jax.block_until_ready(program(*arguments))
    if fault == "wrong":
        results = jax.tree.map(lambda x: x.at[(0,) * x.ndim].add(1000), results)
    return results


def _poison(expected) -> None:
    """Write NaN to memory that results most likely take, so that values which a kernel
    does not write are seen."""
    import jax
    import jax.numpy as jnp

    leaves = jax.tree.leaves(expected)
    jax.block_until_ready([jnp.full(leaf.size, jnp.nan) for leaf in leaves])


def _add(config: pytest.Config, line: dict) -> None:
    """Add a line to --gpu-out. Lines of several processes do not mix."""
    with pathlib.Path(config.option.gpu_out).open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
