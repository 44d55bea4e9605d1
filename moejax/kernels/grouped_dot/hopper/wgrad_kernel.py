"""The grouped product whose result is matrices, x.T @ dy, as one kernel for Hopper.

A tile is a part of one group's matrix. Its steps go through the rows of that group, so
their number is known at run time only. Steps begin at multiples of ALIGNMENT rows, so
that the first and the last step of a group can hold rows of other groups or padding. In
such steps the two computing warpgroups set these rows to zero in shared memory, each
half of the columns. They do so in both x and dy, because 0 times NaN is NaN. Where
groups are aligned, all steps are whole. An empty group has no step and stores zeros.

Groups with most rows come first, so that the longest tiles begin first.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from moejax.kernels import varying_alike
from moejax.kernels.grouped_dot.hopper import ring
from moejax.kernels.grouped_dot.hopper.row_tiles import ALIGNMENT, bounds
from moejax.kernels.tuning import WARPGROUPS, Tiles

GROUP, START, LOW, HIGH, STEPS = range(5)
"""Rows of the table of groups: see groups_table."""


def groups_table(
    rows_g: Int[Array, " g"], num_rows: int, depth: int
) -> Int[Array, "5 g"]:
    """Return the table of groups, the group with most rows first.

    Each column has the group's number, the first row of its first step (START), the
    range of rows, counted from START, that belong to it (LOW to HIGH), and its number
    of steps of `depth` rows.
    """
    first_g, end_g = (bound_g[:-1] for bound_g in bounds(rows_g, num_rows))
    start_g = first_g - first_g % ALIGNMENT
    steps_g = jnp.where(rows_g > 0, -(-(end_g - start_g) // depth), 0)
    group_g = jnp.argsort(-rows_g)
    table = [start_g, first_g - start_g, end_g - start_g, steps_g]
    return jnp.stack([group_g, *(a[group_g] for a in table)]).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class _Block:
    """References of a running block to its arrays in global and shared memory."""

    tiles: Tiles
    is_aligned: bool
    """Whether groups consist of whole steps (KernelRun.is_aligned)."""
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
    blanked: Any
    """Barrier: both computing warpgroups have set rows of other groups to zero. None in
    turns, where one warpgroup does so, and where groups are aligned."""
    ring: ring.Ring

    def each_tile(self, step):
        """Call step(n, i, row, column, done) -> done for each tile of this block, n =
        0, 1, .., and return the last `done`. Column i of the table has the tile's
        group, and the tile begins at `row` and `column` of its matrix."""
        num_groups, d, f = self.dw.shape
        tiles = self.tiles
        high, wide = pl.cdiv(d, tiles.rows), pl.cdiv(f, tiles.columns * tiles.cluster)
        first, blocks = lax.axis_index("block"), lax.axis_size("block")
        total = num_groups * high * wide

        def run_tile(n, done):
            item = first + n * blocks
            i = lax.div(item, high * wide)
            inside = item - i * high * wide
            row, column = ring.walk(inside, high, wide, tiles.span)
            row = pl.multiple_of(row * tiles.rows, tiles.rows)
            column = ring.own_column(tiles, column)
            column = pl.multiple_of(column * tiles.columns, tiles.columns)
            return step(n, i, row, column, done)

        return lax.fori_loop(0, pl.cdiv(total - first, blocks), run_tile, jnp.int32(0))

    def copy_in(self, n, i, row, column, done):
        """Copy the operands of all steps of a tile into the ring."""
        tiles = self.tiles
        start = pl.multiple_of(self.table[START, i], ALIGNMENT)

        def step(number, done):
            depth = pl.ds(start + number * tiles.depth, tiles.depth)
            self.ring.await_empty(done)
            slot = self.ring.slot(done)
            full = self.ring.full_at(slot, n)
            x, dy = self.x.at[depth, pl.ds(row, tiles.rows)], self.dy.at[depth]
            plgpu.copy_gmem_to_smem(
                x, self.x_slots.at[slot], full, collective_axes=ring.shared_by(tiles)
            )
            dy = dy.at[:, pl.ds(column, tiles.columns)]
            plgpu.copy_gmem_to_smem(dy, self.dy_slots.at[slot], full)
            return done + 1

        return lax.fori_loop(0, self.table[STEPS, i], step, done)

    def compute(self, warpgroup, n, i, row, column, done):
        """Compute this warpgroup's part of a tile, and store it."""
        num_steps = self.table[STEPS, i]

        def own_part():
            value = self._multiply(warpgroup, n, i, done, num_steps)
            self._store(warpgroup, self.table[GROUP, i], row, column, value)

        ring.when_in_turn(self.tiles, warpgroup, n, own_part)
        return done + num_steps

    def _multiply(self, warpgroup, n, i, done, num_steps):
        """Return this warpgroup's part of a tile, in registers."""
        part = None if self.is_aligned else (self.table[LOW, i], self.table[HIGH, i])

        def multiply(total):
            def step(number, done):
                self.ring.await_full(done, n)
                slot = self.ring.slot(done)
                if part is not None:
                    self._blank_others(warpgroup, slot, number, *part)
                plgpu.wgmma(total, *self._operands(warpgroup, slot))
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

    def _blank_others(self, warpgroup, slot, number, low, high):
        """Set the rows of step `number` of a group that are outside of [low, high), in
        the rows of all its steps, to zero."""
        first = number * self.tiles.depth
        low_here, high_here = low - first, high - first
        is_cut = (low_here > 0) | (high_here < self.tiles.depth)
        blank = functools.partial(self._blank, warpgroup, slot, low_here, high_here)
        pl.when(is_cut)(blank)

    def _own_columns(self, warpgroup):
        """Return the columns of x and of dy, in a ring slot, that this warpgroup's part
        of the tile needs."""
        tiles = self.tiles
        own_rows, own_columns = tiles.warpgroup_tile
        first_row, first_column = ring.own_part(tiles, warpgroup)
        return pl.ds(first_row, own_rows), pl.ds(first_column, own_columns)

    def _operands(self, warpgroup, slot):
        """Return this warpgroup's parts of x, transposed, and of dy in a ring slot."""
        x_columns, dy_columns = self._own_columns(warpgroup)
        x = self.x_slots.at[slot, :, x_columns]
        return x.T, self.dy_slots.at[slot, :, dy_columns]

    def _blank(self, warpgroup, slot, low, high):
        """Set the rows of a ring slot outside [low, high) to zero. Each warpgroup does
        half of the columns of x and of dy, and waits for the other one. In turns it
        does one half after the other."""
        for slots in (self.x_slots, self.dy_slots):
            half = slots.shape[-1] // WARPGROUPS
            first = [pl.multiple_of(warpgroup * half, half)]
            if self.tiles.takes_turns:
                first = [number * half for number in range(WARPGROUPS)]
            for start in first:
                _blank_columns(slots.at[slot, :, pl.ds(start, half)], low, high)
        plgpu.commit_smem()
        if not self.tiles.takes_turns:
            plgpu.barrier_arrive(self.blanked)
            plgpu.barrier_wait(self.blanked)

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


def _blank_columns(slot, low, high):
    """Set the rows of a reference outside [low, high) to zero."""
    value = slot[...]
    row = lax.broadcasted_iota(jnp.int32, value.shape, 0)
    is_own = (low <= row) & (row < high)
    slot[...] = jnp.where(is_own, value, jnp.zeros_like(value))


def _kernel(
    tiles: Tiles, is_aligned: bool, table, x, dy, dw, *, full, empty, **scratch
):
    barriers = ring.of_tiles(tiles, full, empty)
    static = tiles, is_aligned
    scratch = {"blanked": None, **scratch}
    block = _Block(*static, table, x, dy, dw, **scratch, ring=barriers)
    ring.run_roles(barriers, block.each_tile, block.copy_in, block.compute)


def call(x_md, dy_mf, rows_g, tiles: Tiles, run: ring.KernelRun):
    """Run the kernel and return dw_gdf, in the dtype of x_md. Raises ValueError for a
    form that this kernel does not have."""
    check(tiles, run.is_aligned)
    (num_rows, d), f = x_md.shape, dy_mf.shape[1]
    own_rows, own_columns = tiles.warpgroup_tile
    num_slots = 2 if own_columns // tiles.chunk % 2 == 0 else 1
    dtype, slots = x_md.dtype, (tiles.stages, tiles.depth)
    blanked = {"blanked": plgpu.Barrier(num_arrivals=WARPGROUPS)}
    kernel = plgpu.kernel(
        functools.partial(_kernel, tiles, run.is_aligned),
        out_type=jax.ShapeDtypeStruct((rows_g.shape[0], d, f), dtype),
        scratch_types={
            "x_slots": ring.swizzled((*slots, tiles.rows), dtype),
            "dy_slots": ring.swizzled((*slots, tiles.columns), dtype),
            "out": ring.swizzled((WARPGROUPS, num_slots, own_rows, tiles.chunk), dtype),
            **({} if run.is_aligned or tiles.takes_turns else blanked),
            **ring.barriers_of_tiles(tiles, 2),
        },
        kernel_name="grouped_matrices",
        **ring.kernel_arguments(run, tiles),
    )
    dw_gdf = kernel(groups_table(rows_g, num_rows, tiles.depth), x_md, dy_mf)
    return varying_alike(dw_gdf, rows_g, x_md, dy_mf)[0]


def check(tiles: Tiles, is_aligned: bool) -> None:
    """Raise ValueError for barriers='own' unless groups are aligned. Blanking reads and
    writes the same shared memory, and only the compiler's barriers keep its threads
    apart."""
    if tiles.barriers == "own" and not is_aligned:
        raise ValueError(
            f"{tiles} must have barriers='auto' in wgrad, which sets rows of other "
            "groups to zero in shared memory: use that, or groups of aligned rows"
        )
