"""The moves of the row permutations as Pallas kernels for Hopper (Mosaic GPU).

    take                copies one row of x to each row of the buffer
    weighted_sum        sums K rows of the buffer for each token, in float32
    combine_backward    writes the gate times a token's cotangent to each row of the
                        buffer, and the dot product of cotangent and row: one pass over
                        the inputs, which two kernels would read twice

The kernels are limited by memory bandwidth and built alike. A block is one warpgroup
and works on one *piece* of the row width, 2 KiB. It reads or writes the piece of a row
in one access of 16 bytes per thread by 128 neighbouring threads (Layout.WG_STRIDED). It
loads IN_FLIGHT pieces, of different rows, before it uses the first one. It has no loop,
few registers, and no shared memory but 16 bytes for dot products, so that an SM has
room for many blocks, which hide each other's latency. Pieces are the slow dim of the
grid: while one piece of all rows is moved, that piece of x is read K times per row, and
so is likely to stay in the cache. Each piece has its own dot products, and XLA adds
them up.

Row numbers come from a table in global memory and are read as scalars, equal in all
threads. A row number of -1 loads nothing: the branch is the same for the whole
warpgroup, and so short that it can become a predicate. Rows past the end of the table
count as -1. No kernel reads what it writes, so none needs barriers around its stores.

These are reasons, not measurements: IN_FLIGHT, one warpgroup per block and the order of
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
"""Number of pieces that a block loads before it uses the first: 128 bytes per
thread."""

_THREADS, _VECTOR_BYTES = 128, 16
_DTYPES = tuple(map(jnp.dtype, ("bfloat16", "float16", "float32")))


def declines(dtype: jax.typing.DTypeLike, d: int) -> str | None:
    """Return the reason why the kernels cannot move rows of d values of this dtype, or
    None if they can."""
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
    """Return the buffer whose row j is x_nd[source_m[j]], or 0 where source_m[j] is -1.

    Raises NotImplementedError for rows that `declines` names. `interpret` runs the
    kernel on any device, slowly, for tests. The next two functions have both in common.
    """
    out_md = jax.ShapeDtypeStruct((source_m.shape[0], x_nd.shape[1]), x_nd.dtype)
    return _launch(_take, (x_nd, source_m), (out_md,), IN_FLIGHT, interpret)[0]


def weighted_sum(
    y_md: Float[Array, "m d"],
    gate_nk: Float[Array, "n k"] | None,
    positions_nk: Int[Array, "n k"],
    *,
    interpret: bool = False,
) -> Float[Array, "n d"]:
    """Return, for each token n, the sum over k of
    gate_nk[n, k] * y_md[positions_nk[n, k]].

    Choices whose position is -1 are left out. Gates of None count as 1. Sums are taken
    in float32, and the result has y_md's dtype.
    """
    num_tokens, num_choices = positions_nk.shape
    gates = () if gate_nk is None else (gate_nk.astype(jnp.float32),)
    out_nd = jax.ShapeDtypeStruct((num_tokens, y_md.shape[1]), y_md.dtype)
    tokens = max(1, IN_FLIGHT // num_choices)
    arrays = (y_md, positions_nk, *gates)
    return _launch(_weighted_sum, arrays, (out_nd,), tokens, interpret)[0]


def combine_backward(
    dout_nd: Float[Array, "n d"],
    y_md: Float[Array, "m d"],
    gate_nk: Float[Array, "n k"],
    positions_nk: Int[Array, "n k"],
    assignment_m: Int[Array, " m"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "m d"], Float[Array, "n k"]]:
    """Return the cotangents of y_md and of gate_nk for the cotangent dout_nd of
    weighted_sum(y_md, gate_nk, positions_nk).

    The first has y_md's dtype and zeros in rows without an assignment. The second is
    float32, with zeros for choices without a position.
    """
    gate_a = gate_nk.astype(jnp.float32).reshape(-1)
    pieces = y_md.shape[1] // _width(y_md.dtype)
    outs = (
        jax.ShapeDtypeStruct(y_md.shape, y_md.dtype),
        jax.ShapeDtypeStruct((pieces, len(assignment_m)), jnp.float32),
    )
    kernel = functools.partial(_combine_backward, num_choices=gate_nk.shape[1])
    arrays = (dout_nd, y_md, gate_a, assignment_m)
    dy_md, dot_pm = _launch(kernel, arrays, outs, IN_FLIGHT // 2, interpret)
    dot_pnk = dot_pm[:, jnp.maximum(positions_nk, 0)]
    return dy_md, jnp.where(positions_nk >= 0, jnp.sum(dot_pnk, axis=0), 0)


def _launch(kernel, arrays, outs, rows_per_block, interpret):
    """Run a kernel and return its outputs.

    Its first input and its first output hold rows of the same width and dtype, and one
    block makes one piece of `rows_per_block` rows of that output.
    """
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
    # JAX types a kernel's outputs as equal on all devices, whatever its inputs are.
    return varying_alike(*launch(*arrays), *arrays)[: len(outs)]


def _take(x, source, out, *, width, rows):
    rows = _block_rows(rows)
    loaded = [_load(x, _read_row_number(source, row), width) for row in rows]
    for row, values in zip(rows, loaded, strict=True):
        _store(out, row, values)


def _weighted_sum(y, positions, *refs, width, rows):
    *gates, out = refs
    rows = _block_rows(rows)
    sums = {}
    num_choices = positions.shape[1]
    for first in range(0, num_choices, IN_FLIGHT):
        choices = range(first, min(first + IN_FLIGHT, num_choices))
        cells = [(i, k) for i in range(len(rows)) for k in choices]
        sources = [_read_row_number(positions, rows[i], k) for i, k in cells]
        loaded = [_load(y, position, width) for position in sources]
        for (i, k), position, values in zip(cells, sources, loaded, strict=True):
            addend = values.astype(jnp.float32)
            for gate in gates:
                addend = addend * _read_value(gate, rows[i], k, where=position >= 0)
            sums[i] = sums[i] + addend if i in sums else addend
    for i, values in sums.items():
        _store(out, rows[i], values.astype(out.dtype))


def _combine_backward(*refs, width, rows, num_choices):
    dout, y, gate, assignment, dy, dots = refs
    rows = _block_rows(rows)
    assignments = [_read_row_number(assignment, row) for row in rows]
    loaded = []
    for row, at in zip(rows, assignments, strict=True):
        token = jnp.where(at >= 0, jax.lax.div(at, num_choices), -1)
        pair = _load(dout, token, width), _load(y, jnp.where(at >= 0, row, -1), width)
        loaded.append((_read_value(gate, at, where=at >= 0), *pair))
    for row, (weight, *pair) in zip(rows, loaded, strict=True):
        dout_d, y_d = (values.astype(jnp.float32) for values in pair)
        _store(dy, row, (weight * dout_d).astype(dy.dtype))
        _store_dot(dots, row, jnp.sum(dout_d * y_d))


def _block_rows(count):
    """Return the row numbers of this block. Some may be past the last row."""
    first = jax.lax.axis_index("block") * count
    return [first + i for i in range(count)]


def _read_row_number(table, row, *column):
    """Return a row number from a table, or -1 if `row` is past the table's end."""
    is_inside = row < table.shape[0]
    return jnp.where(is_inside, table[(_clip(table, row), *column)], -1)


def _read_value(table, row, *column, where):
    """Return a number from a table, or 0 where `where` is False. There the table is
    read too, and its content is ignored."""
    return jnp.where(where, table[(_clip(table, row), *column)], 0)


def _clip(table, row):
    """Return `row` clipped to the rows of a table."""
    return jnp.clip(row, 0, table.shape[0] - 1)


def _load(source, row, width):
    """Return this block's piece of a row; zeros, without a load, if the row is -1."""
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=width // _THREADS)

    def load():
        columns = _columns(jax.lax.axis_index("piece"), width)
        values = plgpu.load(source.at[row, columns], layout=layout)
        # Inside shard_map, loaded values are typed as varying and computed ones are
        # not. A product that compiles to nothing gives both branches the same type.
        return values * 1

    def zeros():
        return plgpu.layout_cast(jnp.zeros((width,), source.dtype), layout)

    return jax.lax.cond(row >= 0, load, zeros)


def _store(out, row, values):
    """Write this block's piece of a row, unless the row is past the end."""

    @pl.when(row < out.shape[0])
    def _():
        # LLVM stores 16 bytes at once only where it can tell that the address is
        # aligned. It cannot where it reuses parts of a load's address, because a load
        # is in a branch. The barrier makes it compute the address again.
        piece = jax.lax.axis_index("piece")
        same_row, same_piece = jax.lax.optimization_barrier((row, piece))
        out[same_row, _columns(same_piece, values.shape[0])] = values


def _store_dot(dots, row, dot):
    """Write the dot product of this block's piece of a row, unless the row is past the
    end."""

    @pl.when(row < dots.shape[1])
    def _():
        dots[jax.lax.axis_index("piece"), row] = dot


def _columns(piece, width):
    """Return the columns of a piece."""
    return pl.ds(piece * width, width)


def _width(dtype):
    """Return the number of values of a row in one piece."""
    return _THREADS * _VECTOR_BYTES // jnp.dtype(dtype).itemsize
