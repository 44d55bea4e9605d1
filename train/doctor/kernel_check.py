"""A check of one kernel, and the programs that run such checks on devices.

A program runs the kernel on each device and compares there, so that one number comes
back for each check: the largest error, relative to the largest expected value.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moejax.kernels import quarantine
from moejax.resolve.resolved import Resolved
from train.doctor.outcome import Outcome
from train.messages import one_line
from train.step.gpu_options import compiler_options

ALLOWED = {"float32": 3e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""Largest error that is right, relative to the largest expected value, by dtype."""
ALLOWED_TF32 = 2e-3
"""The same for float32 on GPUs, whose products XLA may compute with 10 bits."""
WITH_SPARE = ("hopper", "cudnn")
"""Implementations that another one can replace."""


@dataclasses.dataclass(frozen=True)
class KernelCheck:
    """One kernel and what its definition says."""

    name: str
    subject: str
    """As in Outcome."""
    allowed: float
    measure: Callable[[Any], Float[Array, ""]]
    """Function of one case that runs the kernel on one device and returns its largest
    relative error."""
    cases: Sequence[Any]
    """Arguments of `measure`: pytrees of NumPy arrays, all of the same shapes."""


def run_kernels(
    checks: Sequence[KernelCheck], devices: Sequence[jax.Device]
) -> list[Outcome]:
    """Run checks on devices of this process, as one program, and return what they
    found.

    If the program fails, each check runs by itself, so that the one that fails is
    known: a kernel that raises an error is wrong.
    """
    try:
        return _run(checks, devices)
    except Exception as fault:
        if len(checks) > 1:
            return [
                found for check in checks for found in run_kernels([check], devices)
            ]
        numbers = tuple(device.id for device in devices)
        detail = f"{type(fault).__name__}: {one_line(fault, 300)}"
        return [_outcome(checks[0], np.inf, numbers, detail)]


def _run(checks: Sequence[KernelCheck], devices: Sequence[jax.Device]) -> list[Outcome]:
    """Run checks as one program, which is called for each case."""
    program = make_program(checks, devices)
    errors = np.zeros((len(checks), len(devices)))
    for number in range(max(len(check.cases) for check in checks)):
        found = np.stack(jax.device_get(program(take_cases(checks, number))))
        errors = np.maximum(errors, np.where(np.isfinite(found), found, np.inf))
    outcomes = []
    for check, error_n in zip(checks, errors.tolist(), strict=True):
        pairs = zip(devices, error_n, strict=True)
        wrong = tuple(device.id for device, error in pairs if error > check.allowed)
        outcomes.append(_outcome(check, max(error_n), wrong))
    return outcomes


def make_program(checks: Sequence[KernelCheck], devices: Sequence[jax.Device]):
    """Return the jitted function from one case of each check to the errors of each, [n]
    for n devices."""

    def body(cases):
        cases = jax.tree.map(
            lambda leaf: jax.lax.pcast(leaf, "device", to="varying"), cases
        )
        pairs = zip(checks, cases, strict=True)
        return [check.measure(case).astype(jnp.float32)[None] for check, case in pairs]

    mesh = Mesh(np.array(devices), ("device",))
    return jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P("device")),
        compiler_options=compiler_options(devices[0].platform),
    )


def take_cases(checks: Sequence[KernelCheck], number: int) -> list[Any]:
    """Return the case of each check with this number; those with fewer begin again."""
    return [check.cases[number % len(check.cases)] for check in checks]


def _outcome(
    check: KernelCheck, error: float, wrong: tuple[int, ...], detail=""
) -> Outcome:
    return Outcome(
        name=check.name,
        subject=check.subject,
        error=float(error),
        allowed=check.allowed,
        devices=wrong,
        process=jax.process_index(),
        detail=detail,
    )


def largest_error(actual: Array, expected: Array) -> Float[Array, ""]:
    """Return the largest error of a result, relative to the largest expected value; NaN
    where the result has one."""
    # XLA is not to fuse the comparison into the operation, which would round less.
    actual = jax.lax.optimization_barrier(actual)
    error = jnp.max(jnp.abs(actual.astype(jnp.float32) - expected))
    return error / jnp.max(jnp.abs(expected))


def allowed_error(run: Resolved) -> float:
    """Return the largest relative error that is right for the dtype of a run."""
    dtype = run.cfg.model.compute_dtype
    is_gpu = run.mesh.devices.flat[0].platform == "gpu"
    return ALLOWED_TF32 if is_gpu and dtype == "float32" else ALLOWED[dtype]


def find_subject(kernel: str, implementation: str, run: Resolved) -> tuple[str, str]:
    """Return the implementation that computes a kernel, once those in quarantine are
    replaced, and the subject of its check: the kernel, if another implementation can
    replace this one."""
    if implementation not in WITH_SPARE:
        return implementation, ""
    if quarantine.why_unusable(kernel, run.mesh.devices.flat[0].device_kind):
        return "blocked", ""
    return implementation, kernel
