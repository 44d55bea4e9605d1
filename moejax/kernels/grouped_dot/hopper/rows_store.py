"""Epilogue of the kernel of rows_kernel.py: from sums in registers to rows of the
result.

A warpgroup stores its part of a tile in chunks of columns: registers -> shared memory
-> TMA. The order of its threads at each place is in docs/kernels.md (own barriers).
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moejax.kernels.grouped_dot.hopper import ring
from moejax.kernels.grouped_dot.hopper.row_tiles import ALIGNMENT
from moejax.kernels.tuning import EDGE_ROWS


def store(block, warpgroup, tile, sums):
    """Store the rows of this warpgroup's part of a tile that belong to its group.

    `block` is the Block of rows_kernel.py, `tile` one of its tiles, and `sums` are the
    products of the warpgroup's part, in registers.
    """
    own_rows, _ = block.program.tiles.warpgroup_tile
    first_row, first_column = ring.own_part(block.program.tiles, warpgroup)
    if block.program.is_aligned:
        at = (tile.row + first_row, tile.column + first_column)
        _store_chunks(block, warpgroup, at, tile, sums)
        return
    low = jnp.maximum(tile.low - first_row, 0)
    high = jnp.minimum(tile.high - first_row, own_rows)
    is_whole = (low == 0) & (high == own_rows)
    at = (tile.row + first_row, tile.column + first_column)
    chunks = functools.partial(_store_chunks, block, warpgroup, at, tile, sums)
    pl.when(is_whole)(chunks)
    pl.when(~is_whole & (low < high))(functools.partial(chunks, (low, high)))


def _store_chunks(block, warpgroup, at, tile, sums, part=None):
    """Store one chunk of columns after the other through this warpgroup's slots.
    With `part` = (low, high) only these rows are written."""
    program, tiles = block.program, block.program.tiles
    (own_rows, own_columns), (row, column) = tiles.warpgroup_tile, at
    rows = pl.ds(pl.multiple_of(row, ALIGNMENT), own_rows)
    is_padding = tile.group == program.num_groups
    alternates = part is None and program.num_slots > len(program.results)
    edge = None if block.edge is None else block.edge.at[warpgroup]
    shift = 0 if part is None else lax.rem(part[0], EDGE_ROWS)
    for c in range(own_columns // tiles.chunk):
        inside = slice(c * tiles.chunk, (c + 1) * tiles.chunk)
        columns = pl.ds(column + inside.start, tiles.chunk)
        sources = _read_sources(block, warpgroup, rows, columns)
        values = program.finish([x[:, inside] for x in sums], sources, is_padding)
        for number, (output, half) in enumerate(program.results):
            if number == 0 or part is not None:
                plgpu.wait_smem_to_gmem(int(alternates), wait_read_only=True)
            slot = block.out.at[warpgroup, c % 2 if alternates else number]
            slot = slot if part is None else edge.at[pl.ds(shift, own_rows)]
            slot[...] = values[number].astype(block.out.dtype)
            plgpu.commit_smem()
            target = windowed(block.outputs[output], half, rows, columns)
            if part is None:
                plgpu.copy_smem_to_gmem(slot, target)
            else:
                _copy_rows(edge, shift, target, *part)


def _read_sources(block, warpgroup, rows, columns):
    """Return the chunks that the epilogue reads, in registers. They are copied
    through the slots of results."""
    if not block.program.sources:
        return []
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    loaded = block.loaded.at[warpgroup]
    for slot, half in enumerate(block.program.sources):
        window = windowed(block.sources[0], half, rows, columns)
        plgpu.copy_gmem_to_smem(window, block.out.at[warpgroup, slot], loaded)
    plgpu.barrier_wait(loaded)
    count = len(block.program.sources)
    chunks = [block.out[warpgroup, slot].astype(jnp.float32) for slot in range(count)]
    plgpu.commit_smem()  # all threads must have read before any thread writes
    return chunks


def windowed(ref, half: int | None, first, second):
    """Return the window [first, second] of a two-dimensional reference, or of one half
    of a reference [first, 2, second]."""
    return ref.at[first, second] if half is None else ref.at[first, half, second]


def _copy_rows(edge, shift, target, low, high):
    """Copy rows low to high of a chunk from `edge` to the result, in pieces whose
    numbers of rows are powers of two.

    The largest piece comes first. So every piece begins at a row of the same parity as
    `low`, and with `shift` = low % 2 added at an even row of `edge`, as TMA requires
    (EDGE_ROWS).
    """
    piece, count = target.shape[0] // 2, high - low
    while piece:
        first = low + (count & ~(2 * piece - 1))

        @pl.when(count & piece != 0)
        def _(first=first, piece=piece):
            source = edge.at[pl.ds(first + shift, piece)]
            rows = target.at[pl.ds(first, piece)]
            plgpu.copy_smem_to_gmem(source, rows, commit_group=False)

        piece //= 2
    plgpu.commit_smem_to_gmem_group()
