"""Times of collectives and experts on the live mesh, and lines fitted to them.

Collectives are timed over each axis and over pairs of axes, for several sizes; experts
for several numbers of rows. Each program repeats its operation in a
loop in which each repetition needs the result before, so that the cost of starting the
program is spread over all repetitions.
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
from moejax.kernels.grouped_dot import grouped_swiglu
from moejax.kernels.grouped_dot.choose import choose_grouped_dot
from moejax.kernels.permute import combine_rows, gather_rows
from moejax.kernels.tuning import align_rows_for
from moejax.moe.weights.gather import reduce_scatter
from moejax.perf.calibration import LINE_KEYS, RANGES, Calibration, leaving_bytes
from tools.bench.timer import median_sec

REPEATS = 8
"""Number of repetitions of an operation in one program."""
SHARES_OF_ROWS = (0.5, 1, 2, 4)
"""Numbers of rows for which experts are timed, over those of a micro-batch."""
GROUPS = (*((axis,) for axis in AXES),
          ("dc", "expert"), ("data", "expert"), ("expert", "tensor"))  # fmt: skip
"""Mesh axes, alone or together, that collectives of the MoE layer run over."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program whose time is one point of a line."""

    line: tuple[str, ...]
    """Name of the line."""
    amount: float
    """Work of a repetition: bytes that leave one device, or FLOPs of one device."""
    run: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Line:
    """A line: seconds = latency_sec + amount / amount_per_sec."""

    latency_sec: float
    amount_per_sec: float
    r2: float


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Collectives to measure, and the sizes of their arrays."""

    names: tuple[str, ...]
    elements: tuple[int, ...]
    """Numbers of elements of the array on each device."""


def collective_programs(mesh: Mesh, dtype: str, sweep: Sweep) -> list[Program]:
    """Return the compiled programs of a sweep, for all GROUPS whose axes each have more
    than one device.

    The name of a line is (collective, axes joined by "_"). A group with an axis of one
    device needs no line, because its other axis has it.
    """
    return [
        make_collective(mesh, name, axes, elements, dtype)
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
    part_n = reduce_scatter(x_n.reshape(w, -1), axes)
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
"""Collectives by name: functions of (x_n, axes, w) whose result has the shape that the
next repetition takes."""
SWEEP = Sweep(tuple(COLLECTIVES), (2**10, 2**13, 2**16, 2**18, 2**20))
"""Sweep of tools/calibrate.py."""


def make_collective(
    mesh: Mesh,
    name: str,
    axes: tuple[str, ...],
    elements: int,
    dtype: str,
) -> Program:
    """Return a compiled program that repeats one collective. Each device has an array
    of `elements` elements, rounded up to a multiple of the group's size."""
    once, w = COLLECTIVES[name], axis_size(mesh, axes)
    elements = -(-elements // w) * w

    def body(x_n):
        step = lambda _, x_n: once(x_n, axes, w)  # noqa: E731
        return jax.lax.fori_loop(0, REPEATS, step, x_n)

    x_n = _zeros(mesh, (elements,), dtype)
    run = _compile(mesh, body, x_n)
    amount = leaving_bytes(name, elements * jnp.dtype(dtype).itemsize, w)
    return Program((name, "_".join(axes)), amount, run, (x_n,))


@dataclasses.dataclass(frozen=True)
class Widths:
    """Sizes of one device's experts."""

    d_model: int
    d_expert: int
    groups: int
    rows: int
    dtype: str


def expert_programs(mesh: Mesh, widths: Widths) -> list[Program]:
    """Return compiled programs that time experts in training: rows that move to their
    slots and back, grouped products, activation, and the gradients of all of these.

    The name of their line is ("experts",). Their FLOPs are those of the products, so
    that what moves and the activation take counts as slower products: all of it grows
    with the rows of a device. They have half to four times `widths.rows` rows; with
    fewer, the blocks that rows are cut into are not full.
    """
    d, f, groups = widths.d_model, widths.d_expert, widths.groups
    into_gdh = _zeros(mesh, (groups, d, 2 * f), widths.dtype)
    down_gfd = _zeros(mesh, (groups, f, d), widths.dtype)
    align_rows = align_rows_for(widths.rows, groups)
    if choose_grouped_dot(widths.dtype, align_rows, d, f).value != "hopper":
        align_rows = 1  # only the Hopper kernels need groups of whole tiles
    programs, multiple = [], groups * align_rows
    for part in SHARES_OF_ROWS:
        rows = max(multiple, math.ceil(part * widths.rows / multiple) * multiple)
        rows_g = np.full(groups, rows // groups, np.int32)
        source_m = np.random.default_rng(0).permutation(rows).astype(np.int32)

        def body(x_rd, into_gdh, down_gfd, rows_g=rows_g, source_m=source_m):
            options = {"rows_g": jnp.asarray(rows_g), "align_rows": align_rows}
            position_r1 = jnp.asarray(np.argsort(source_m)[:, None].astype(np.int32))
            gate_r1 = jnp.ones(position_r1.shape, jnp.float32)

            def experts(x_rd, into_gdh, down_gfd):
                x_md = gather_rows(x_rd, jnp.asarray(source_m), position_r1)
                y_md = grouped_swiglu(x_md, into_gdh, down_gfd, **options)
                return combine_rows(y_md, gate_r1, position_r1, jnp.asarray(source_m))

            def step(_, arrays):
                # Gradients are the next repetition's arrays, so that none is left out.
                y_rd, gradients_of = jax.vjp(experts, *arrays)
                return gradients_of(y_rd)

            arrays = x_rd, into_gdh, down_gfd
            return jax.lax.fori_loop(0, REPEATS, step, arrays)[0]

        arguments = (_zeros(mesh, (rows, d), widths.dtype), into_gdh, down_gfd)
        run = _compile(mesh, body, *arguments)
        flops = 3 * 6.0 * rows * d * f
        programs.append(Program(("experts",), flops, run, arguments))
    return programs


def measure_sec(programs: list[Program], turns: int) -> list[float]:
    """Return the median seconds of one repetition of each program."""
    calls = {i: partial(one.run, *one.arguments) for i, one in enumerate(programs)}
    return [sec / REPEATS for sec in median_sec(calls, turns).values()]


def measure_calibration(
    mesh: Mesh, lines: dict[tuple[str, ...], Line], widths: Widths, turns: int
) -> Calibration:
    """Measure experts, and return a calibration of them and of the given lines of
    collectives."""
    collectives: dict[str, dict] = {}
    for (name, axes), line in lines.items():
        numbers = (line.latency_sec, line.amount_per_sec, line.r2)
        collectives.setdefault(name, {})[axes] = dict(zip(LINE_KEYS, numbers))
    programs = expert_programs(mesh, widths)
    (experts,) = fit_lines(programs, measure_sec(programs, turns)).values()
    return Calibration(
        device_kind=jax.devices()[0].device_kind,
        mesh=dict(mesh.shape),
        compute_dtype=widths.dtype,
        collectives=collectives,
        flops_per_sec=experts.amount_per_sec,
        matmul_r2=experts.r2,
        compile_sec=0.0,
        when=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def fit_lines(programs: list[Program], sec: list[float]) -> dict[tuple[str, ...], Line]:
    """Fit a line of seconds over bytes or FLOPs to the programs of each line name."""
    points = {}
    for program, point_sec in zip(programs, sec, strict=True):
        points.setdefault(program.line, []).append((program.amount, point_sec))
    return {name: fit(*np.array(pairs).T) for name, pairs in points.items()}


def fit(amount_n: np.ndarray, sec_n: np.ndarray) -> Line:
    """Return the line with the least sum of squared relative errors, among lines with
    latency >= 0 and a finite rate.

    Errors are relative, so that small messages count as much as large ones. If the best
    line has a negative latency or slope, the result is the best line through the
    origin. r2 is one minus the line's sum of squares over that of the best constant;
    times that are all but equal could make it as low as one likes, and the least that a
    calibration takes stands for everything below.
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
    return Line(float(latency), float(1 / slope), max(float(r2), RANGES["r2"][0]))


def _zeros(mesh: Mesh, shape: tuple[int, ...], dtype: str):
    """Return zeros with an array of this shape on each device: the first axis of the
    whole is split over all devices."""
    whole = (mesh.size * shape[0], *shape[1:])
    sharding = NamedSharding(mesh, PartitionSpec(AXES))
    return jax.jit(partial(jnp.zeros, whole, dtype), out_shardings=sharding)()


def _compile(mesh: Mesh, body: Callable, *arguments):
    specs = tuple(PartitionSpec(AXES) for _ in arguments)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[0])
    return jax.jit(mapped).lower(*arguments).compile()
