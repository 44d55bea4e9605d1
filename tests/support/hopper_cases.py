"""Run the passes of the Hopper kernels in the interpreter, with operands and expected
results.

A run fails if the race detector finds a race.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
from jax.experimental.pallas import mosaic_gpu as plgpu

from moejax.kernels.grouped_dot import fp8, reference
from moejax.kernels.grouped_dot.hopper import kernels
from moejax.kernels.grouped_dot.hopper.ring import KernelRun, Ring
from moejax.kernels.shapes import ProductShape
from moejax.kernels.tuning import FP8, PASSES, Pass, Tiles

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


@dataclasses.dataclass(frozen=True)
class Setup:
    """Static arguments of a kernel: everything but the arrays and the rows of
    groups."""

    shape: ProductShape
    tiles: Tiles
    num_blocks: int
    dtype: str = "bfloat16"
    is_aligned: bool = False
    """Whether groups consist of whole tiles, and the kernel has no code for parts."""


def fitting(which: Pass, setup: Setup) -> Setup:
    """Return the setup with tiles for which this pass lowers.

    In wgrad a warpgroup blanks 64 columns of x and of dy, so that it never blanks a
    part of a swizzle. Steps of an fp8 pass are twice as deep. Its arrays are made twice
    as deep too, so that the number of steps stays the same.
    """
    if which in FP8:
        tiles, shape = dataclasses.replace(setup.tiles, depth=128), setup.shape
        shape = dataclasses.replace(shape, d=2 * shape.d, f=2 * shape.f)
        return dataclasses.replace(setup, tiles=tiles, shape=shape)
    if which != "wgrad":
        return setup
    sizes = {"rows": 128, "columns": 128, "halves": "rows", "chunk": 64}
    return dataclasses.replace(setup, tiles=dataclasses.replace(setup.tiles, **sizes))


def operand_dims(which: Pass, shape: ProductShape) -> list[tuple[int, ...]]:
    """Return the shapes of the arrays that a pass takes before rows_g."""
    m, d, f, g = shape.rows, shape.d, shape.f, shape.groups
    which = which.removeprefix("fp8_")
    return {
        "forward": [(m, d), (g, d, f)],
        "dgrad": [(m, f), (g, d, f)],
        "wgrad": [(m, d), (m, f)],
        "swiglu": [(m, d), (g, d, 2 * f)],
        "swiglu_dgrad": [(m, d), (g, f, d), (m, 2 * f)],
    }[which]


@functools.cache
def operands(setup: Setup) -> dict[Pass, list[jax.Array]]:
    """Return random operands of each pass; arrays of one shape are shared."""
    shape, random = setup.shape, np.random.default_rng(0)

    @functools.cache
    def drawn(dims):
        scale = dims[1] ** -0.5 if len(dims) == 3 else 1.0
        return jnp.asarray(scale * random.standard_normal(dims), setup.dtype)

    return {p: [drawn(dims) for dims in operand_dims(p, shape)] for p in PASSES}


@functools.cache
def kernel(which: Pass, setup: Setup):
    """Return the interpreted kernel of a pass, jitted once for any rows_g."""
    run = KernelRun(setup.num_blocks, INTERPRET, setup.is_aligned)
    return jax.jit(
        functools.partial(getattr(kernels, which), tiles=setup.tiles, run=run)
    )


def interpreted(which: Pass, setup: Setup, rows_g: np.ndarray, call=None):
    """Return the results of a pass whose padding holds NaN, and assert that there was
    no race."""
    arrays = padded_with(jnp.nan, which, setup, rows_g)
    results = (call or kernel(which, setup))(*arrays, rows_g)
    results = jax.tree.map(np.asarray, results)
    assert not get_races().races_found, f"a race in {which} of {rows_g}"
    return results


def expected(which: Pass, setup: Setup, rows_g: np.ndarray):
    """Return the results of a pass by its definition, in float32; fp8 passes take
    rounded operands."""
    return _definition(which, *padded_with(0, which, setup, rows_g), rows_g)


def padded_with(value, which: Pass, setup: Setup, rows_g) -> list[jax.Array]:
    """Return a pass's operands with `value` in the padding, the rows that belong to no
    group."""
    is_padding_m1 = jnp.arange(setup.shape.rows)[:, None] >= rows_g.sum()
    return [
        jnp.where(is_padding_m1, jnp.asarray(value, a.dtype), a) if a.ndim == 2 else a
        for a in operands(setup)[which]
    ]


@functools.partial(jax.jit, static_argnums=0)
def _definition(which: Pass, *arrays):
    """Return the results of a pass, computed by reference.py and by JAX's derivatives
    of it and of the formula of SwiGLU."""
    *floats, rows_g = arrays
    first, other, *into_mh = (a.astype(jnp.float32) for a in floats)
    if which in FP8:
        first, other = fp8.round_rows(first), fp8.round_matrices(other)

    def dot(x_md, w_gdf):
        return reference.grouped_dot(x_md, w_gdf, rows_g)

    match which.removeprefix("fp8_"):
        case "forward":
            return dot(first, other)
        case "dgrad":
            x_md = jnp.zeros((first.shape[0], other.shape[1]))
            return jax.vjp(lambda x_md: dot(x_md, other), x_md)[1](first)[0]
        case "wgrad":
            w_gdf = jnp.zeros((rows_g.shape[0], first.shape[1], other.shape[1]))
            return jax.vjp(lambda w_gdf: dot(first, w_gdf), w_gdf)[1](other)[0]
        case "swiglu":
            into_mh = dot(first, other)
            return activated(into_mh), into_mh
        case "swiglu_dgrad":
            _, back = jax.vjp(lambda into_mh: dot(activated(into_mh), other), *into_mh)
            return back(first)[0], activated(*into_mh)


def activated(into_mh: jax.Array) -> jax.Array:
    """Return silu(gate) * up; gate and up are the halves of `into_mh`."""
    gate_mf, up_mf = jnp.split(into_mh, 2, axis=-1)
    return jax.nn.silu(gate_mf) * up_mf


def leave_out(monkeypatch, holder, names):
    """Replace functions by ones that do nothing: methods if `holder` is Ring, otherwise
    functions of plgpu, as the kernel's module `holder` alone sees them."""

    def does_nothing(*args, **kwargs):
        pass

    if holder is Ring:
        for name in names:
            monkeypatch.setattr(holder, name, does_nothing)
        return
    rest = types.SimpleNamespace(**vars(plgpu) | dict.fromkeys(names, does_nothing))
    monkeypatch.setattr(holder, "plgpu", rest)
