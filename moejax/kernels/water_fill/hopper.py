"""Sweeps of water-filling as one Pallas kernel for Hopper: one block, one warpgroup.

The kernel computes the same integers as portable.py. Matrices [w, v] compare every bin
w with every bin v. Their rows are spread over the threads, so that a sum over v needs
two shuffles and no barrier, and they are computed one block of columns at a time. A
vector is stored per row (w) or per column (v). It gets from w to v through shared
memory, which also holds the amounts, and the items if they fit.

The number of bins is padded to 64 or 128. Padding bins are empty and hold no item. They
change no result: they share no item with another bin, they rank last, because levels
are not negative and ties go to the lower number, and in the certificate they only
divide the total by a larger k.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from moejax.kernels import varying_alike
from moejax.kernels.water_fill.portable import Filled

WIDEST = 128
"""Maximum number of bins."""
SHARED_BYTES = 220 * 1024
"""Bytes of shared memory for tables, of the 227 KiB that a Hopper block can have. The
rest is for lines and reductions."""

_MATRIX = plgpu.Layout.WGMMA
_BY_ROW, _BY_COLUMN = _MATRIX.reduce(1), _MATRIX.reduce(0)
_ROW_TILE, _COLUMN_TILE, _COPIED_ROWS = 64, 8, 16
_BLOCK = 2048
"""Number of elements in one block of a matrix: 16 per thread. With 32 per thread LLVM
took more than 4 minutes to compile."""
_HUGE = jnp.iinfo(jnp.int32).max
"""Stands for infinity in a minimum."""


@dataclasses.dataclass(frozen=True)
class _Board:
    """References to the arrays of the kernel, and the cut of matrices into blocks."""

    item: Any
    """Items [colors, w], in shared memory if they fit there."""
    amount: Any
    """Amounts [colors, w], in shared memory."""
    line: Any
    """Vectors that go from rows to columns, [_NUM_LINES, w], in shared memory."""
    colors: Any
    """Number of colors in use, a scalar at run time."""
    block: int
    """Number of columns of a block."""
    num_blocks: int

    def by_row(self, ref, row):
        """Load one row of a table as a vector over w."""
        width = ref.shape[-1]
        return plgpu.load(ref.at[row, pl.ds(0, width)], layout=_BY_ROW, optimized=False)

    def by_column(self, ref, row, b):
        """Load block b of one row of a table as a vector over v."""
        columns = pl.ds(b * self.block, self.block)
        return plgpu.load(ref.at[row, columns], layout=_BY_COLUMN, optimized=False)

    def over_blocks(self, step, *start):
        """Fold `step` over the blocks of columns: values = step(b, *values) for each
        block b, beginning with `start`."""
        loop = jax.lax.fori_loop
        return loop(0, self.num_blocks, lambda b, values: step(b, *values), start)

    def full(self, value):
        """Return a vector over the bins w, filled with one value."""
        width = self.line.shape[-1]
        return plgpu.layout_cast(jnp.full((width,), value, jnp.int32), _BY_ROW)

    def bins(self, b):
        """Return the row number w and the column number v of each element in block b of
        a matrix [w, v]."""
        row_wv, column_wv = (
            plgpu.broadcasted_iota(
                jnp.int32, (self.line.shape[-1], self.block), dim, layout=_MATRIX
            )
            for dim in (0, 1)
        )
        return row_wv, column_wv + b * self.block


def fits(num_colors: int, num_bins: int) -> bool:
    """Return whether a table of these sizes fits into shared memory, and its bins into
    one matrix."""
    bytes_of_table = 4 * math.prod(_table(num_colors, num_bins))
    return num_bins <= WIDEST and bytes_of_table <= SHARED_BYTES


def _table(num_colors: int, num_bins: int) -> tuple[int, int]:
    """Return the numbers of colors and bins of a table with its padding."""
    return _round_up(num_colors, _COPIED_ROWS), _round_up(num_bins, _ROW_TILE)


_LEVEL, _FIXED, _FULL, _RANK, _LAST, _NUM_LINES = range(6)
"""Rows of `line`: levels, fixed units, candidates for the surface, ranks, and the last
rank of an item."""


def water_fill(
    item_cw: Int[Array, "c w"],
    amount_cw: Int[Array, "c w"],
    fixed_w: Int[Array, " w"],
    colors: Int[Array, ""],
    tolerance: Int[Array, ""],
    max_sweeps: int,
    *,
    interpret: bool = False,
) -> Filled:
    """Return the result of water_fill (moejax.kernels.water_fill), from one kernel.

    Raises NotImplementedError for a table that does not fit.
    """
    num_colors, num_bins = item_cw.shape
    if not fits(num_colors, num_bins):
        raise NotImplementedError(
            f"{num_colors} colors of {num_bins} bins need more than {SHARED_BYTES} "
            f"bytes of shared memory, or are more than {WIDEST} bins: use fused=False"
        )
    table = (_, num_rows) = _table(num_colors, num_bins)
    shapes = table, (_NUM_LINES, num_rows), table
    num_shared = 3 if 8 * math.prod(table) <= SHARED_BYTES else 2
    block = min(_round_up(num_bins, _COLUMN_TILE), _BLOCK // num_rows)
    sizes = {"max_sweeps": max_sweeps, "block": block, "num_bins": num_bins}
    solve = plgpu.kernel(
        functools.partial(_solve, **sizes),
        out_type=tuple(
            jax.ShapeDtypeStruct(shape, jnp.int32)
            for shape in (table, (num_rows,), (2,))
        ),
        scratch_types=[plgpu.SMEM(shape, jnp.int32) for shape in shapes[:num_shared]],
        kernel_name="water_fill",
        interpret=plgpu.InterpretGPUParams() if interpret else None,
    )
    level_w = fixed_w + jnp.sum(amount_cw, axis=0)
    pad = ((0, table[0] - num_colors), (0, num_rows - num_bins))
    new_cw, new_level_w, bound_and_sweeps = solve(
        jnp.pad(item_cw, pad, constant_values=-1),
        jnp.pad(amount_cw, pad),
        jnp.pad(jnp.stack([fixed_w, level_w]), ((0, 0), pad[1])),
        jnp.stack([colors, tolerance]),
    )
    # The kernel does not write the colors that are not in use.
    is_used_c1 = jnp.arange(num_colors)[:, None] < colors
    new_cw = jnp.where(is_used_c1, new_cw[:num_colors, :num_bins], amount_cw)
    bound, sweeps = bound_and_sweeps[0], bound_and_sweeps[1]
    outputs = new_cw, new_level_w[:num_bins], bound, sweeps
    # JAX types a kernel's outputs as equal on all devices, whatever its inputs are.
    inputs = item_cw, amount_cw, fixed_w, colors, tolerance
    return Filled(*varying_alike(*outputs, *inputs)[: len(outputs)])


def _solve(
    item,
    amount,
    start,
    limits,
    amount_out,
    level_out,
    bound_and_sweeps,
    *scratch,
    **sizes,
):
    """Run all sweeps: the body of the kernel.

    `start` holds fixed units and levels, [2, w], and `limits` the number of colors and
    the tolerance.
    """
    amount_smem, line, *rest = scratch
    colors, tolerance = limits[0], limits[1]
    _copy(amount, amount_smem, colors)
    for item_smem in rest:
        _copy(item, item_smem, colors)
        item = item_smem
    num_blocks = pl.cdiv(sizes["num_bins"], sizes["block"])
    board = _Board(item, amount_smem, line, colors, sizes["block"], num_blocks)
    for row, which in enumerate((_FIXED, _LEVEL)):
        line[which] = board.by_row(start, row)

    def goes_on(state):
        level_w, bound, sweeps, changed = state
        is_full = jnp.max(level_w) > bound + tolerance
        return is_full & (changed > 0) & (sweeps < sizes["max_sweeps"])

    def sweep(state):
        level_w, _, sweeps, _ = state
        level_w, moved_w = jax.lax.fori_loop(
            0, board.colors, functools.partial(_pour, board), (level_w, level_w * 0)
        )
        return level_w, _certificate(board, level_w), sweeps + 1, jnp.max(moved_w)

    level_w = board.by_row(line, _LEVEL)
    state = (level_w, _certificate(board, level_w), jnp.int32(0), jnp.int32(1))
    level_w, bound, sweeps, _ = jax.lax.while_loop(goes_on, sweep, state)
    level_out[...] = level_w
    bound_and_sweeps[0] = bound
    bound_and_sweeps[1] = sweeps
    _copy(amount_smem, amount_out, colors)


def _pour(board, c, state):
    """Spread the items of color c over their bins again, as `pour` of portable.py does.

    The state is the level of each bin, and the largest change of any of its cells in
    this sweep.
    """
    level_w, moved_w = state
    item_w, amount_w = board.by_row(board.item, c), board.by_row(board.amount, c)
    ground_w = level_w - amount_w

    def block(b):
        item_v = board.by_column(board.item, c, b)
        amount_v = board.by_column(board.amount, c, b)
        ground_v = board.by_column(board.line, _LEVEL, b) - amount_v
        same_wv = _same(item_w, item_v)
        shape = same_wv.shape
        return same_wv, _down(amount_v, shape), _down(ground_v, shape), board.bins(b)

    def lower(b, count_w, total_w):
        same_wv, amount_wv, ground_wv, (row_wv, column_wv) = block(b)
        lower_wv = same_wv & _before(ground_wv, ground_w, column_wv <= row_wv)
        here_wv = jnp.where(same_wv, amount_wv, 0)
        total_wv = here_wv + jnp.where(lower_wv, ground_wv, 0)
        return count_w + _count(lower_wv), total_w + jnp.sum(total_wv, axis=1)

    def lowest(b, surface_w):
        full_v = board.by_column(board.line, _FULL, b)
        same_wv = _same(item_w, board.by_column(board.item, c, b))
        full_wv = jnp.where(same_wv, _down(full_v, same_wv.shape), _HUGE)
        return (jnp.minimum(surface_w, jnp.min(full_wv, axis=1)),)

    def left(b, left_w, ahead_w):
        same_wv, amount_wv, ground_wv, (row_wv, column_wv) = block(b)
        surface_wv = _along(surface_w, same_wv.shape)
        new_wv = jnp.maximum(surface_wv - ground_wv, 0)
        ahead_wv = same_wv & (ground_wv <= surface_wv) & (column_wv < row_wv)
        left_wv = jnp.where(same_wv, amount_wv - new_wv, 0)
        return left_w + jnp.sum(left_wv, axis=1), ahead_w + _count(ahead_wv)

    none_w = board.full(0)
    board.line[_LEVEL] = level_w
    count_w, total_w = board.over_blocks(lower, none_w, none_w)
    board.line[_FULL] = jax.lax.div(total_w, jnp.maximum(count_w, 1))
    (surface_w,) = board.over_blocks(lowest, board.full(_HUGE))
    left_w, ahead_w = board.over_blocks(left, none_w, none_w)
    new_w = jnp.where(item_w < 0, 0, jnp.maximum(surface_w - ground_w, 0))
    gets_one_w = (ground_w <= surface_w) & (ahead_w < left_w)
    new_w = new_w + gets_one_w.astype(jnp.int32)
    board.amount[c] = new_w
    moved_w = jnp.maximum(moved_w, jnp.abs(new_w - amount_w))
    return level_w + new_w - amount_w, moved_w


def _certificate(board, level_w):
    """Return the lower bound that `certificate` of portable.py defines. Units that can
    be only in the k fullest bins are summed without a sort."""

    def rank(b, rank_w):
        row_wv, column_wv = board.bins(b)
        level_wv = _down(board.by_column(board.line, _LEVEL, b), row_wv.shape)
        return (rank_w + _count(_before(-level_wv, -level_w, column_wv < row_wv)),)

    def inside(line, ref, row):
        def step(b, inside_k):
            k_wv, _ = board.bins(b)
            shape = k_wv.shape
            is_inside_wv = _down(board.by_column(board.line, line, b), shape) <= k_wv
            value_wv = _down(board.by_column(ref, row, b), shape)
            return (inside_k + jnp.sum(jnp.where(is_inside_wv, value_wv, 0), axis=1),)

        return step

    def color(c, inside_k):
        item_w = board.by_row(board.item, c)

        def last(b, last_w):
            same_wv = _same(item_w, board.by_column(board.item, c, b))
            rank_wv = _down(board.by_column(board.line, _RANK, b), same_wv.shape)
            rank_wv = jnp.where(same_wv, rank_wv, -1)
            return (jnp.maximum(last_w, jnp.max(rank_wv, axis=1)),)

        (last_w,) = board.over_blocks(last, board.full(-1))
        board.line[_LAST] = jnp.where(item_w < 0, _HUGE, last_w)
        return board.over_blocks(inside(_LAST, board.amount, c), inside_k)[0]

    board.line[_LEVEL] = level_w
    (board.line[_RANK],) = board.over_blocks(rank, board.full(0))
    (inside_k,) = board.over_blocks(inside(_RANK, board.line, _FIXED), board.full(0))
    inside_k = jax.lax.fori_loop(0, board.colors, color, inside_k)
    k_w = plgpu.layout_cast(jax.lax.iota(jnp.int32, len(level_w)), _BY_ROW)
    return jnp.max(jax.lax.div(inside_k + k_w, k_w + 1))


def _same(item_w, item_v):
    """Return whether bins w and v hold the same item, bool [w, v]."""
    shape = (len(item_w), len(item_v))
    item_wv = _along(item_w, shape)
    return (item_wv == _down(item_v, shape)) & (item_wv >= 0)


def _before(height_wv, height_w, is_first_wv):
    """Return whether bin v comes before bin w when bins are sorted by height, bool
    [w, v]. `height_wv` is the height of bin v, `height_w` that of bin w, and
    `is_first_wv` says whether v comes first where both are equal."""
    other_wv = _along(height_w, height_wv.shape)
    return (height_wv < other_wv) | ((height_wv == other_wv) & is_first_wv)


def _along(value_w, shape):
    """Broadcast a vector over w along the rows of a matrix [w, v]."""
    return jax.lax.broadcast_in_dim(value_w, shape, (0,))


def _down(value_v, shape):
    """Broadcast a vector over v down the columns of a matrix [w, v]."""
    return jax.lax.broadcast_in_dim(value_v, shape, (1,))


def _count(mask_wv):
    """Count the true elements in each row of a mask [w, v]."""
    return jnp.sum(mask_wv.astype(jnp.int32), axis=1)


def _copy(source, target, num_rows):
    """Copy the first rows of a table, rounded up to a multiple of _COPIED_ROWS."""
    layout = plgpu.Layout.WG_STRIDED((_COPIED_ROWS, source.shape[-1]), vec_size=4)

    @pl.loop(0, pl.cdiv(num_rows, _COPIED_ROWS))
    def _(step):
        rows = pl.ds(step * _COPIED_ROWS, _COPIED_ROWS)
        target[rows] = plgpu.load(source.at[rows], layout=layout)


def _round_up(number, multiple):
    """Return `number` rounded up to a multiple."""
    return -(-number // multiple) * multiple
