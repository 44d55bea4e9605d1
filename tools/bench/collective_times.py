"""Measured on the live mesh: seconds of each collective over each axis and over groups
of two axes, by size, and of the grouped product, by rows.

Each program repeats its collective in a loop that needs every result, so that a
program's start counts once in REPEATS. All programs take turns, and medians are kept:
a slow second of the machine meets them all.
"""

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from moejax.axes import AXES, AxisNames, axis_size
from moejax.kernels.grouped_dot import grouped_dot
from moejax.perf.calibration import leaving_bytes
from moejax.plan.layout import ROW_MULTIPLE

REPEATS = 8
"""Of a collective in one program."""
ELEMENTS = (2**10, 2**13, 2**16, 2**18, 2**20)
"""Of the array on each device."""
GROUPS = (*((axis,) for axis in AXES),
          ("dc", "expert"), ("data", "expert"), ("expert", "tensor"))  # fmt: skip
"""Mesh axes that collectives of the MoE layer run over together."""


@dataclasses.dataclass(frozen=True)
class Program:
    """One point of a line. `amount` is what a repetition takes: bytes that leave a
    device, or FLOPs of one device."""

    line: tuple[str, ...]
    amount: float
    run: Callable[..., Any]
    arguments: tuple[Any, ...]


def collective_programs(mesh: Mesh, dtype: str) -> list[Program]:
    """Compiled; lines are (collective, axes joined by "_"), of groups each of whose
    axes has more than one device: of any other the single axis has the line."""
    return [
        collective(mesh, name, axes, elements, dtype, REPEATS)
        for axes in GROUPS
        if all(mesh.shape[axis] > 1 for axis in axes)
        for name in COLLECTIVES
        for elements in ELEMENTS
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
    return Program((name, "_".join(axes)), amount, run, (x_n,))


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
        programs.append(Program(("grouped_dot",), 4.0 * rows * d * f, run, arguments))
    return programs


def seconds(programs: list[Program], turns: int) -> list[float]:
    """Of one repetition of each: medians of `turns`, every other one backwards."""
    sec = [[] for _ in programs]
    for turn in range(1 + turns):
        order = range(len(programs))
        for index in order if turn % 2 else reversed(order):
            program = programs[index]
            begin = time.perf_counter()
            jax.block_until_ready(program.run(*program.arguments))
            if turn > 0:  # the first warms up
                sec[index].append((time.perf_counter() - begin) / REPEATS)
    return [statistics.median(times) for times in sec]


def _zeros(mesh: Mesh, shape: tuple[int, ...], dtype: str):
    """An array of this shape on each device: its first axis is split over all."""
    whole = (mesh.size * shape[0], *shape[1:])
    sharding = NamedSharding(mesh, PartitionSpec(AXES))
    return jax.jit(partial(jnp.zeros, whole, dtype), out_shardings=sharding)()


def _compiled(mesh: Mesh, body: Callable, *arguments):
    specs = tuple(PartitionSpec(AXES) for _ in arguments)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[0])
    return jax.jit(mapped).lower(*arguments).compile()
