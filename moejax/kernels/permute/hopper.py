"""The permutations' three moves as Pallas kernels for Hopper (Mosaic GPU).

    take                one row of x to each row of the buffer
    weighted_sum        K rows of the buffer to each token, summed in float32
    combine_backward    gate times a token's row to each row of the buffer, and the
                        dot product of both: one pass over what two kernels would read

All of them only move bytes, so all of them are built alike. A block is one warpgroup
and has one *piece* of the width, 2 KiB: of a row that is one access of 16 bytes a
thread (Layout.WG_STRIDED), 128 threads side by side. It loads IN_FLIGHT pieces, of
different rows, before it uses the first, and has no loop, no shared memory but 16 bytes
for dot products, and few registers: an SM has room for many blocks, which hide what
each waits for. Pieces are the slow dim of the grid: while one piece of all rows is
moved, that piece of x is read again and again, K times a row, and so is likely to stay
in the cache. Each piece has a dot product of its own; XLA adds them up.

Every row is addressed by a table in global memory, read as scalars, the same in all
threads. A row that is -1 is not loaded at all: the branch is the same for the whole
warpgroup, and so short that it can become a predicate. Rows past the last are -1 too.
No kernel reads what it writes, so none needs barriers around its stores.

These are reasons, not measurements: IN_FLIGHT, one warpgroup a block and the order of
the grid have never been timed on a GPU.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moejax.kernels import varying_alike

IN_FLIGHT = 8
"""Pieces that a block loads before it uses the first: 128 bytes a thread."""

_THREADS, _VECTOR_BYTES = 128, 16
_DTYPES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32")))


def declines(dtype: jax.typing.DTypeLike, d: int) -> str | None:
    """Why the kernels cannot take rows of d values of this dtype; None if they can."""
    dtype = jnp.dtype(dtype)
    if dtype not in _DTYPES:
        return f"rows of {dtype} are not moved, only {', '.join(map(str, _DTYPES))}"
    if d % _width(dtype):
        return (
            f"d={d} must be a multiple of {_width(dtype)} in {dtype}: a warpgroup "
            f"loads {_THREADS} x {_VECTOR_BYTES} bytes of a row at a time"
        )
    return None


def take(
    x_nd: Float[Array, "n d"], source_m: Int[Array, " m"], *, interpret: bool = False
) -> Float[Array, "m d"]:
    """Row j is x_nd[source_m[j]], or 0 where source_m[j] is -1.

    Raises NotImplementedError for rows that `declines` names. `interpret` runs the
    kernel on any device, slowly, for tests: here and below.
    """
    out_md = jax.ShapeDtypeStruct((source_m.shape[0], x_nd.shape[1]), x_nd.dtype)
    return _launched(_take, (x_nd, source_m), (out_md,), IN_FLIGHT, interpret)[0]


def weighted_sum(
    y_md: Float[Array, "m d"],
    gate_nk: Float[Array, "n k"] | None,
    positions_nk: Int[Array, "n k"],
    *,
    interpret: bool = False,
) -> Float[Array, "n d"]:
    """Row n is the float32 sum over k of gate_nk[n, k] * y_md[positions_nk[n, k]],
    without the choices whose position is -1. Gates of None are all 1."""
    num_tokens, num_choices = positions_nk.shape
    gates = () if gate_nk is None else (gate_nk.astype(jnp.float32),)
    out_nd = jax.ShapeDtypeStruct((num_tokens, y_md.shape[1]), y_md.dtype)
    tokens = max(1, IN_FLIGHT // num_choices)
    arrays = (y_md, positions_nk, *gates)
    return _launched(_weighted_sum, arrays, (out_nd,), tokens, interpret)[0]


def combine_backward(
    dout_nd: Float[Array, "n d"],
    y_md: Float[Array, "m d"],
    gate_nk: Float[Array, "n k"],
    positions_nk: Int[Array, "n k"],
    assignment_m: Int[Array, " m"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "m d"], Float[Array, "n k"]]:
    """What a weighted_sum's cotangent is for y_md (0 in rows without an assignment) and
    for gate_nk, in float32 (0 for choices without a position)."""
    gate_a = gate_nk.astype(jnp.float32).reshape(-1)
    pieces = y_md.shape[1] // _width(y_md.dtype)
    outs = (
        jax.ShapeDtypeStruct(y_md.shape, y_md.dtype),
        jax.ShapeDtypeStruct((pieces, len(assignment_m)), jnp.float32),
    )
    kernel = functools.partial(_combine_backward, num_choices=gate_nk.shape[1])
    arrays = (dout_nd, y_md, gate_a, assignment_m)
    dy_md, dot_pm = _launched(kernel, arrays, outs, IN_FLIGHT // 2, interpret)
    dot_pnk = dot_pm[:, jnp.maximum(positions_nk, 0)]
    return dy_md, jnp.where(positions_nk >= 0, jnp.sum(dot_pnk, axis=0), 0)


def _launched(kernel, arrays, outs, rows_per_block, interpret):
    """The kernel's outputs. Its first input has the rows, its first output too; a block
    makes rows_per_block rows of the latter."""
    dtype, d = arrays[0].dtype, arrays[0].shape[1]
    if why := declines(dtype, d):
        raise NotImplementedError(f"{why}: use implementation='xla'")
    width = _width(dtype)
    num_rows = outs[0].shape[0]
    name = getattr(kernel, "func", kernel).__name__.strip("_")
    arrays = varying_alike(*arrays)
    launch = plgpu.kernel(
        functools.partial(kernel, width=width, rows=rows_per_block),
        out_type=outs,
        grid=(d // width, pl.cdiv(num_rows, rows_per_block)),
        grid_names=("piece", "block"),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        kernel_name=f"permute_{name}",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    # A kernel's outputs are typed as the same on all devices, whatever its inputs are.
    return varying_alike(*launch(*arrays), *arrays)[: len(outs)]


def _take(x, source, out, *, width, rows):
    rows = _rows(rows)
    found = [_load(x, _named(source, row), width) for row in rows]
    for row, values in zip(rows, found, strict=True):
        _store(out, row, values)


def _weighted_sum(y, positions, *refs, width, rows):
    *gates, out = refs
    rows = _rows(rows)
    sums = {}
    num_choices = positions.shape[1]
    for first in range(0, num_choices, IN_FLIGHT):
        choices = range(first, min(first + IN_FLIGHT, num_choices))
        cells = [(i, k) for i in range(len(rows)) for k in choices]
        named = [_named(positions, rows[i], k) for i, k in cells]
        found = [_load(y, position, width) for position in named]
        for (i, k), position, values in zip(cells, named, found, strict=True):
            addend = values.astype(jnp.float32)
            for gate in gates:
                addend = addend * _value(gate, rows[i], k, where=position >= 0)
            sums[i] = sums[i] + addend if i in sums else addend
    for i, values in sums.items():
        _store(out, rows[i], values.astype(out.dtype))


def _combine_backward(*refs, width, rows, num_choices):
    dout, y, gate, assignment, dy, dots = refs
    rows = _rows(rows)
    named = [_named(assignment, row) for row in rows]
    found = []
    for row, at in zip(rows, named, strict=True):
        token = jnp.where(at >= 0, jax.lax.div(at, num_choices), -1)
        pair = _load(dout, token, width), _load(y, jnp.where(at >= 0, row, -1), width)
        found.append((_value(gate, at, where=at >= 0), *pair))
    for row, (weight, *pair) in zip(rows, found, strict=True):
        dout_d, y_d = (values.astype(jnp.float32) for values in pair)
        _store(dy, row, (weight * dout_d).astype(dy.dtype))
        _store_dot(dots, row, jnp.sum(dout_d * y_d))


def _rows(count):
    """Numbers of this block's rows; some may lie past the last."""
    first = jax.lax.axis_index("block") * count
    return [first + i for i in range(count)]


def _named(table, row, *column):
    """What a table of row numbers says of a row: -1 past its end."""
    is_inside = row < table.shape[0]
    return jnp.where(is_inside, table[(_inside(table, row), *column)], -1)


def _value(table, row, *column, where):
    """A number from a table, 0 (whatever is in the table) where it does not count."""
    return jnp.where(where, table[(_inside(table, row), *column)], 0)


def _inside(table, row):
    return jnp.clip(row, 0, table.shape[0] - 1)


def _load(source, row, width):
    """This block's piece of a row; zeros, without a load, where the row is -1."""
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // _THREADS)

    def load():
        values = plgpu.load(source.at[row, _columns(width)], layout=layout)
        # Inside shard_map what is loaded is typed as varying, and what is computed is
        # not: a product that compiles to nothing gives both branches one type.
        return values * 1

    def zeros():
        return plgpu.layout_cast(jnp.zeros((width,), source.dtype), layout)

    return jax.lax.cond(row >= 0, load, zeros)


def _store(out, row, values):
    @pl.when(row < out.shape[0])
    def _():
        out[row, _columns(values.shape[0])] = values


def _store_dot(dots, row, dot):
    @pl.when(row < dots.shape[1])
    def _():
        dots[jax.lax.axis_index("piece"), row] = dot


def _columns(width):
    return pl.ds(jax.lax.axis_index("piece") * width, width)


def _width(dtype):
    """Values of a row in a piece."""
    return _THREADS * _VECTOR_BYTES // jnp.dtype(dtype).itemsize
