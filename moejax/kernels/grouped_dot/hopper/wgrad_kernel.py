"""The grouped product whose result is matrices, x.T @ dy, as one kernel for Hopper.

A tile is a part of one group's matrix. Its steps go through the rows of that group, so
their number is known at run time only (row_tiles.groups_table). An empty group has no
step and stores zeros.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moejax.kernels import varying_alike
from moejax.kernels.grouped_dot.hopper import ring
from moejax.kernels.grouped_dot.hopper.row_tiles import (
    GROUP,
    START,
    STEPS,
    groups_table,
)
from moejax.kernels.tuning import TILE_ROWS, WARPGROUPS, Tiles


@dataclasses.dataclass(frozen=True)
class _Block:
    """References of a running block to its arrays in global and shared memory."""

    tiles: Tiles
    table: Any
    """Table of groups."""
    x: Any
    dy: Any
    dw: Any
    """Result of the kernel."""
    x_slots: Any
    """Rows of x, by slot of the ring, in shared memory."""
    dy_slots: Any
    """Rows of dy, by slot of the ring, in shared memory."""
    out: Any
    """Chunks on their way to the result, by warpgroup and slot, in shared memory."""
    ring: ring.Ring

    def each_tile(self, step):
        """Call step(i, row, column, done) -> done for each tile of this block, and
        return the last `done`. Column i of the table has the tile's group, and the tile
        begins at `row` and `column` of its matrix."""
        num_groups, d, f = self.dw.shape
        tiles = self.tiles
        high, wide = pl.cdiv(d, tiles.rows), pl.cdiv(f, tiles.columns)
        first, blocks = lax.axis_index("block"), lax.axis_size("block")
        total = num_groups * high * wide

        def run_tile(n, done):
            item = first + n * blocks
            i = lax.div(item, high * wide)
            inside = item - i * high * wide
            row, column = ring.walk(inside, high, wide, tiles.span)
            row = pl.multiple_of(row * tiles.rows, tiles.rows)
            column = pl.multiple_of(column * tiles.columns, tiles.columns)
            return step(i, row, column, done)

        return lax.fori_loop(0, pl.cdiv(total - first, blocks), run_tile, jnp.int32(0))

    def copy_in(self, i, row, column, done):
        """Copy the operands of all steps of a tile into the ring."""
        tiles = self.tiles
        start = pl.multiple_of(self.table[START, i], min(TILE_ROWS))

        def step(number, done):
            depth = pl.ds(start + number * tiles.depth, tiles.depth)
            self.ring.await_empty(done)
            slot = self.ring.slot(done)
            full = self.ring.full.at[slot]
            x = self.x.at[depth, pl.ds(row, tiles.rows)]
            plgpu.copy_gmem_to_smem(x, self.x_slots.at[slot], full)
            dy = self.dy.at[depth, pl.ds(column, tiles.columns)]
            plgpu.copy_gmem_to_smem(dy, self.dy_slots.at[slot], full)
            return done + 1

        return lax.fori_loop(0, self.table[STEPS, i], step, done)

    def compute(self, warpgroup, i, row, column, done):
        """Compute this warpgroup's part of a tile, and store it."""
        num_steps = self.table[STEPS, i]
        value = self._multiply(warpgroup, done, num_steps)
        self._store(warpgroup, self.table[GROUP, i], row, column, value)
        return done + num_steps

    def _multiply(self, warpgroup, done, num_steps):
        """Return this warpgroup's part of a tile, in registers."""

        def multiply(total):
            def step(number, done):
                self.ring.await_full(done)
                plgpu.wgmma(total, *self._operands(warpgroup, self.ring.slot(done)))
                plgpu.wgmma_wait(1)

                @pl.when(number > 0)
                def _():
                    self.ring.release(done - 1)

                return done + 1

            after = lax.fori_loop(0, num_steps, step, done)
            value = total[...]

            @pl.when(num_steps > 0)
            def _():
                self.ring.release(after - 1)

            return value

        return pl.run_scoped(multiply, plgpu.ACC(self.tiles.warpgroup_tile))

    def _operands(self, warpgroup, slot):
        """Return this warpgroup's parts of x, transposed, and of dy in a ring slot."""
        own_rows, own_columns = self.tiles.warpgroup_tile
        first_row, first_column = ring.own_part(self.tiles, warpgroup)
        x = self.x_slots.at[slot, :, pl.ds(first_row, own_rows)]
        return x.T, self.dy_slots.at[slot, :, pl.ds(first_column, own_columns)]

    def _store(self, warpgroup, group, row, column, value):
        """Store this warpgroup's part of a tile, one chunk of columns after the
        other."""
        tiles = self.tiles
        own_rows, own_columns = tiles.warpgroup_tile
        first_row, first_column = ring.own_part(tiles, warpgroup)
        rows = pl.ds(row + first_row, own_rows)
        for c in range(own_columns // tiles.chunk):
            inside = slice(c * tiles.chunk, (c + 1) * tiles.chunk)
            columns = pl.ds(column + first_column + inside.start, tiles.chunk)
            slot = self.out.at[warpgroup, c % self.out.shape[1]]
            plgpu.wait_smem_to_gmem(self.out.shape[1] - 1, wait_read_only=True)
            slot[...] = value[:, inside].astype(self.dw.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(slot, self.dw.at[group, rows, columns])


def _kernel(tiles: Tiles, table, x, dy, dw, *, full, empty, **scratch):
    """Run one block: the body of the kernel."""
    own = ring.Ring(full, empty, tiles.stages)
    block = _Block(tiles, table, x, dy, dw, **scratch, ring=own)
    ring.run_roles(own, block.each_tile, block.copy_in, block.compute)


def call(x_md, dy_mf, rows_g, tiles: Tiles, run: ring.KernelRun):
    """Run the kernel and return dw_gdf, in the dtype of x_md."""
    d, f = x_md.shape[1], dy_mf.shape[1]
    own_rows, own_columns = tiles.warpgroup_tile
    num_slots = 2 if own_columns // tiles.chunk % 2 == 0 else 1
    dtype, slots = x_md.dtype, (tiles.stages, tiles.depth)
    kernel = plgpu.kernel(
        functools.partial(_kernel, tiles),
        out_type=jax.ShapeDtypeStruct((rows_g.shape[0], d, f), dtype),
        scratch_types={
            "x_slots": ring.swizzled((*slots, tiles.rows), dtype),
            "dy_slots": ring.swizzled((*slots, tiles.columns), dtype),
            "out": ring.swizzled((WARPGROUPS, num_slots, own_rows, tiles.chunk), dtype),
            **ring.barriers(tiles.stages, 2),
        },
        kernel_name="grouped_matrices",
        **ring.kernel_arguments(run),
    )
    dw_gdf = kernel(groups_table(rows_g, tiles.depth), x_md, dy_mf)
    return varying_alike(dw_gdf, rows_g, x_md, dy_mf)[0]
