"""Seconds of collectives and products on the live mesh, and the lines through them.

Collectives run over each axis and over groups of two axes, by size; the grouped product
by rows. Each program repeats its operation in a loop that needs every result, so that a
program's start counts once in its repeats.
"""

import dataclasses
import datetime
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.axes import AXES, AxisNames, axis_size
from moejax.kernels.grouped_dot import grouped_dot
from moejax.perf.calibration import LINE_KEYS, Calibration, leaving_bytes
from moejax.plan.layout import ROW_MULTIPLE
from tools.bench.turns import median_sec

REPEATS = 8
"""Of an operation in one program."""
GROUPS = (*((axis,) for axis in AXES),
          ("dc", "expert"), ("data", "expert"), ("expert", "tensor"))  # fmt: skip
"""Mesh axes that collectives of the MoE layer run over together."""


@dataclasses.dataclass(frozen=True)
class Program:
    """One point of a line. `amount` is what a repetition takes: bytes that leave a
    device, or FLOPs of one device."""

    line: tuple[str, ...]
    amount: float
    repeats: int
    run: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Line:
    """sec = latency_sec + amount / amount_per_sec."""

    latency_sec: float
    amount_per_sec: float
    r2: float


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Which collectives are measured, and on which sizes."""

    names: tuple[str, ...]
    elements: tuple[int, ...]
    """Of the array on each device."""
    repeats: int = REPEATS


def collective_programs(mesh: Mesh, dtype: str, sweep: Sweep) -> list[Program]:
    """Compiled; lines are (collective, axes joined by "_"), of groups each of whose
    axes has more than one device: of any other the single axis has the line."""
    return [
        collective(mesh, name, axes, elements, dtype, sweep.repeats)
        for axes in GROUPS
        if all(mesh.shape[axis] > 1 for axis in axes)
        for name in sweep.names
        for elements in sweep.elements
    ]


def _all_to_all(x_n, axes: AxisNames, w: int):
    return jax.lax.all_to_all(x_n.reshape(w, -1), axes, 0, 0).reshape(-1)


def _all_gather(x_n, axes: AxisNames, w: int):
    all_n = jax.lax.all_gather(x_n[: x_n.size // w], axes, tiled=True)
    return jax.lax.optimization_barrier(all_n)


def _reduce_scatter(x_n, axes: AxisNames, w: int):
    part_n = jax.lax.psum_scatter(x_n, axes, tiled=True)
    return jax.lax.dynamic_update_slice(x_n, part_n, (0,))


def _all_reduce(x_n, axes: AxisNames, w: int):
    return jax.lax.pcast(jax.lax.psum(x_n, axes), axes, to="varying")


def _ppermute(x_n, axes: AxisNames, w: int):
    return jax.lax.ppermute(x_n, axes, [(i, (i + 1) % w) for i in range(w)])


COLLECTIVES: dict[str, Callable] = {
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "ppermute": _ppermute,
}
"""Shape to shape."""
SWEEP = Sweep(tuple(COLLECTIVES), (2**10, 2**13, 2**16, 2**18, 2**20))
"""Of tools/calibrate.py."""


def collective(
    mesh: Mesh,
    name: str,
    axes: tuple[str, ...],
    elements: int,
    dtype: str,
    repeats: int,
) -> Program:
    """Compiled: `repeats` of one collective of arrays of so many elements a device."""
    once, w = COLLECTIVES[name], axis_size(mesh, axes)
    elements = -(-elements // w) * w

    def body(x_n):
        step = lambda _, x_n: once(x_n, axes, w)  # noqa: E731
        return jax.lax.fori_loop(0, repeats, step, x_n)

    x_n = _zeros(mesh, (elements,), dtype)
    run = _compiled(mesh, body, x_n)
    amount = leaving_bytes(name, elements * jnp.dtype(dtype).itemsize, w)
    return Program((name, "_".join(axes)), amount, repeats, run, (x_n,))


@dataclasses.dataclass(frozen=True)
class Widths:
    """Of the experts of one device."""

    d_model: int
    d_expert: int
    groups: int
    rows: int
    dtype: str


def matmul_programs(mesh: Mesh, widths: Widths) -> list[Program]:
    """Compiled; the line is ("grouped_dot",), rows are half to four times the usual
    (below, the blocks that rows are cut into are not full)."""
    d, f, groups = widths.d_model, widths.d_expert, widths.groups
    into_gdf = _zeros(mesh, (groups, d, f), widths.dtype)
    down_gfd = _zeros(mesh, (groups, f, d), widths.dtype)
    programs = []
    for part in (0.5, 1, 2, 4):
        multiple = math.lcm(groups, ROW_MULTIPLE)  # no size that a kernel declines
        rows = max(multiple, math.ceil(part * widths.rows / multiple) * multiple)
        rows_g = np.full(groups, rows // groups, np.int32)

        def body(x_md, into_gdf, down_gfd, rows_g=rows_g):
            def step(_, x_md):
                h_mf = grouped_dot(x_md, into_gdf, jnp.asarray(rows_g))
                return grouped_dot(h_mf, down_gfd, jnp.asarray(rows_g))

            return jax.lax.fori_loop(0, REPEATS, step, x_md)

        arguments = (_zeros(mesh, (rows, d), widths.dtype), into_gdf, down_gfd)
        run = _compiled(mesh, body, *arguments)
        flops = 4.0 * rows * d * f
        programs.append(Program(("grouped_dot",), flops, REPEATS, run, arguments))
    return programs


def seconds(programs: list[Program], turns: int) -> list[float]:
    """Return the median seconds of one repetition of each program."""
    calls = {i: partial(one.run, *one.arguments) for i, one in enumerate(programs)}
    return [
        sec / program.repeats
        for program, sec in zip(programs, median_sec(calls, turns).values())
    ]


def measure_calibration(
    mesh: Mesh, lines: dict[tuple[str, ...], Line], widths: Widths, turns: int
) -> Calibration:
    """Return the lines of collectives as a calibration, with the grouped product, which
    is measured here."""
    collectives: dict[str, dict] = {}
    for (name, axes), line in lines.items():
        numbers = (line.latency_sec, line.amount_per_sec, line.r2)
        collectives.setdefault(name, {})[axes] = dict(zip(LINE_KEYS, numbers))
    programs = matmul_programs(mesh, widths)
    (matmul,) = fitted(programs, seconds(programs, turns)).values()
    return Calibration(
        device_kind=jax.devices()[0].device_kind,
        mesh=dict(mesh.shape),
        compute_dtype=widths.dtype,
        collectives=collectives,
        flops_per_sec=matmul.amount_per_sec,
        matmul_r2=matmul.r2,
        compile_sec=0.0,
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def fitted(programs: list[Program], sec: list[float]) -> dict[tuple[str, ...], Line]:
    """Return the line through the points of each name."""
    points = {}
    for program, point_sec in zip(programs, sec, strict=True):
        points.setdefault(program.line, []).append((program.amount, point_sec))
    return {name: fit(*np.array(pairs).T) for name, pairs in points.items()}


def fit(amount_n: np.ndarray, sec_n: np.ndarray) -> Line:
    """The line of least relative squares with latency >= 0 and a finite rate.

    Relative, so that small messages count as much as large ones; where the best line
    has a negative latency or slope, it is the best one through the origin. r2 is that
    of the relative errors as well: 1 - (theirs) / (those of the best constant).
    """
    weight_n = 1 / sec_n
    design_n2 = np.stack([weight_n, amount_n * weight_n], axis=1)
    latency, slope = np.linalg.lstsq(design_n2, np.ones(len(sec_n)))[0]
    if latency < 0 or slope <= 0:
        scaled_n = amount_n * weight_n
        latency, slope = 0.0, scaled_n.sum() / (scaled_n**2).sum()
    error = np.sum((1 - (latency + slope * amount_n) * weight_n) ** 2)
    constant = weight_n.sum() / (weight_n**2).sum()
    spread = np.sum((1 - constant * weight_n) ** 2)
    r2 = 1 - error / spread if spread > 0 else 1.0
    return Line(float(latency), float(1 / slope), float(r2))


def _zeros(mesh: Mesh, shape: tuple[int, ...], dtype: str):
    """An array of this shape on each device: its first axis is split over all."""
    whole = (mesh.size * shape[0], *shape[1:])
    sharding = NamedSharding(mesh, PartitionSpec(AXES))
    return jax.jit(partial(jnp.zeros, whole, dtype), out_shardings=sharding)()


def _compiled(mesh: Mesh, body: Callable, *arguments):
    specs = tuple(PartitionSpec(AXES) for _ in arguments)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[0])
    return jax.jit(mapped).lower(*arguments).compile()
