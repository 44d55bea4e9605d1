"""Grouped products whose result is rows, as one persistent kernel for Hopper GPUs.

    warpgroup 2   TMA: copies x and w into the ring, step after step, tile after tile
    warpgroup 0   WGMMA on its half of the tile, then the epilogue: registers -> shared
    warpgroup 1     memory -> TMA to the result, while the next tile's steps arrive

A tile has rows of one group (row_tiles.py), and so one matrix. Matrices are not
transposed in global memory: if the contraction is over their last dim, WGMMA reads the
tile transposed from shared memory. docs/kernels.md has a drawing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moejax.kernels import varying_alike
from moejax.kernels.grouped_dot.hopper import ring
from moejax.kernels.grouped_dot.hopper.row_tiles import group_of_tiles
from moejax.kernels.tuning import WARPGROUPS, Tiles


@dataclasses.dataclass(frozen=True)
class RowsProgram:
    """Static description of the product that a kernel computes."""

    tiles: Tiles
    """Tile sizes."""
    is_transposed: bool
    """Whether the contraction is over the last dim of w, rather than the dim before."""
    num_steps: int
    """Number of steps of one contraction."""
    num_groups: int
    """Number of groups, padding not counted."""
    num_columns: int
    """Number of tiles across the columns of the result."""
    finish: Callable
    """Epilogue (products, sources) -> results. All arrays are float32 chunks in
    registers. It is 0 where all of them are: rows of padding come out as zeros."""
    products: tuple[int | None, ...]
    """Half of w (0 or 1) that each product multiplies, or None for the whole of w. Each
    product has an accumulator."""
    sources: tuple[int | None, ...] = ()
    """Half of the source array, or None for the whole of it, for each chunk that the
    epilogue reads."""
    results: tuple[tuple[int, int | None], ...] = ((0, None),)
    """Number of the output array, and the half of it or None, for each result of
    `finish`."""

    @property
    def num_slots(self) -> int:
        """Number of shared-memory slots for chunks on their way to the result, per
        warpgroup. A single result alternates between two slots."""
        chunks = self.tiles.warpgroup_tile[1] // self.tiles.chunk
        return 2 if len(self.results) == 1 and chunks % 2 == 0 else len(self.results)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Position of one tile, in scalars that are known at run time."""

    group: Any
    """Group of the tile; num_groups for padding."""
    row: Any
    """First row of the tile in the buffer."""
    column: Any
    """First column of the tile in the result."""
    num_steps: Any
    """Number of steps of the contraction: 0 for padding."""


@dataclasses.dataclass(frozen=True)
class Block:
    """References of a running block to its arrays in global and shared memory."""

    program: RowsProgram
    groups: Any
    """Group of each tile of rows, as group_of_tiles returns them."""
    x: Any
    w: Any
    sources: tuple
    """Array that the epilogue reads, if there is one."""
    outputs: tuple
    """Results of the kernel."""
    x_slots: Any
    """Tiles of x, by slot of the ring, in shared memory."""
    w_slots: Any
    """Tiles of w, by slot of the ring and by product, in shared memory."""
    out: Any
    """Chunks on their way to the result, by warpgroup and slot, in shared memory."""
    loaded: Any
    """Barriers for the chunks that the epilogue reads, by warpgroup; None without a
    source."""
    ring: ring.Ring

    def each_tile(self, step):
        """Call step(tile, done) -> done for each tile of this block, and return the
        last `done`."""
        tiles, wide = self.program.tiles, self.program.num_columns
        high = self.groups.shape[0]
        first, blocks = lax.axis_index("block"), lax.axis_size("block")

        def run_tile(i, done):
            t, column = ring.walk(first + i * blocks, high, wide, tiles.span)
            group = self.groups[t]
            # A tile of padding has no steps and stores its accumulators, which are 0.
            steps = jnp.where(
                group < self.program.num_groups, self.program.num_steps, 0
            )
            row = pl.multiple_of(t * tiles.rows, tiles.rows)
            column = pl.multiple_of(column * tiles.columns, tiles.columns)
            return step(Tile(group, row, column, steps), done)

        count = pl.cdiv(high * wide - first, blocks)
        return lax.fori_loop(0, count, run_tile, jnp.int32(0))

    def copy_in(self, tile, done):
        """Copy the operands of all steps of a tile into the ring."""

        def step(number, done):
            self.ring.await_empty(done)
            self.copy_step(tile, number, self.ring.slot(done))
            return done + 1

        return lax.fori_loop(0, tile.num_steps, step, done)

    def copy_step(self, tile, number, slot):
        """Start the copies of x and w for step `number` of a tile into a ring slot."""
        tiles, full = self.program.tiles, self.ring.full.at[slot]
        rows = pl.ds(tile.row, tiles.rows)
        columns = pl.ds(tile.column, tiles.columns)
        depth = pl.ds(number * tiles.depth, tiles.depth)
        plgpu.copy_gmem_to_smem(self.x.at[rows, depth], self.x_slots.at[slot], full)
        window = (columns, depth) if self.program.is_transposed else (depth, columns)
        for p, half in enumerate(self.program.products):
            matrix = _windowed(self.w.at[tile.group], half, *window)
            plgpu.copy_gmem_to_smem(matrix, self.w_slots.at[slot, p], full)

    def compute(self, warpgroup, tile, done):
        """Compute this warpgroup's part of a tile, and store it."""
        self.store(warpgroup, tile, self.multiply(warpgroup, tile, done))
        return done + tile.num_steps

    def multiply(self, warpgroup, tile, done):
        """Return this warpgroup's part of each product of a tile, in registers."""
        num_products = len(self.program.products)

        def steps(*sums):
            def step(number, done):
                self.ring.await_full(done)
                x, w_p = self.operands(warpgroup, self.ring.slot(done))
                for total, w in zip(sums, w_p, strict=True):
                    plgpu.wgmma(total, x, w)
                # This step may still run while the next one begins, and the step
                # before it has finished.
                plgpu.wgmma_wait(num_products)

                @pl.when(number > 0)
                def _():
                    self.ring.release(done - 1)

                return done + 1

            after = lax.fori_loop(0, tile.num_steps, step, done)
            values = [total[...] for total in sums]

            @pl.when(tile.num_steps > 0)
            def _():
                self.ring.release(after - 1)

            return values

        return pl.run_scoped(
            steps, *[plgpu.ACC(self.program.tiles.warpgroup_tile)] * num_products
        )

    def operands(self, warpgroup, slot):
        """Return references to a warpgroup's part of the operands in a ring slot: x,
        and the matrix of each product."""
        tiles, is_transposed = self.program.tiles, self.program.is_transposed
        own_rows, own_columns = tiles.warpgroup_tile
        first_row, first_column = ring.own_part(tiles, warpgroup)
        x, w_p = self.x_slots.at[slot], []
        if tiles.halves == "rows":
            x = x.at[pl.ds(first_row, own_rows)]
        for p in range(len(self.program.products)):
            w = self.w_slots.at[slot, p]
            if tiles.halves == "columns":
                own = pl.ds(first_column, own_columns)
                w = w.at[own] if is_transposed else w.at[:, own]
            w_p.append(w.T if is_transposed else w)
        return x, w_p

    def store(self, warpgroup, tile, sums):
        """Store this warpgroup's part of a tile, one chunk of columns after the other:
        from the products in registers through shared memory to the result."""
        program, tiles = self.program, self.program.tiles
        own_rows, own_columns = tiles.warpgroup_tile
        first_row, first_column = ring.own_part(tiles, warpgroup)
        rows = pl.ds(tile.row + first_row, own_rows)
        alternates = program.num_slots > len(program.results)
        for c in range(own_columns // tiles.chunk):
            inside = slice(c * tiles.chunk, (c + 1) * tiles.chunk)
            columns = pl.ds(tile.column + first_column + inside.start, tiles.chunk)
            sources = self._read_sources(warpgroup, rows, columns)
            values = program.finish([x[:, inside] for x in sums], sources)
            # The slots' last copies to the result must have been read.
            plgpu.wait_smem_to_gmem(int(alternates), wait_read_only=True)
            for number, (output, half) in enumerate(program.results):
                slot = self.out.at[warpgroup, c % 2 if alternates else number]
                slot[...] = values[number].astype(self.out.dtype)
                plgpu.commit_smem()
                target = _windowed(self.outputs[output], half, rows, columns)
                plgpu.copy_smem_to_gmem(slot, target)

    def _read_sources(self, warpgroup, rows, columns):
        """Return the chunks that the epilogue reads, in registers. They are copied
        through the slots of results."""
        if not self.program.sources:
            return []
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        loaded = self.loaded.at[warpgroup]
        for slot, half in enumerate(self.program.sources):
            window = _windowed(self.sources[0], half, rows, columns)
            plgpu.copy_gmem_to_smem(window, self.out.at[warpgroup, slot], loaded)
        plgpu.barrier_wait(loaded)
        slots = range(len(self.program.sources))
        chunks = [self.out[warpgroup, slot].astype(jnp.float32) for slot in slots]
        plgpu.commit_smem()  # all threads must have read before any thread writes
        return chunks


def _windowed(ref, half: int | None, first, second):
    """Return the window [first, second] of a two-dimensional reference, or of one half
    of a reference [first, 2, second]."""
    return ref.at[first, second] if half is None else ref.at[first, half, second]


def _kernel(program: RowsProgram, groups, x, w, *rest, full, empty, **scratch):
    """Run one block: the body of the kernel."""
    sources, outputs = rest[: bool(program.sources)], rest[bool(program.sources) :]
    own = ring.Ring(full, empty, program.tiles.stages)
    arrays = groups, x, w, sources, outputs
    block = Block(program, *arrays, **{"loaded": None, **scratch}, ring=own)
    ring.run_roles(own, block.each_tile, block.copy_in, block.compute)


def scratch(program: RowsProgram, x_dtype, w_dtype, out_dtype) -> dict[str, Any]:
    """Return the scratch types that a block allocates, except the barriers of its
    ring."""
    tiles, (own_rows, _) = program.tiles, program.tiles.warpgroup_tile
    matrix = (tiles.depth, tiles.columns)
    matrix = matrix[::-1] if program.is_transposed else matrix
    chunk = (own_rows, tiles.chunk)
    slots = {
        "x_slots": ring.swizzled((tiles.stages, tiles.rows, tiles.depth), x_dtype),
        "w_slots": ring.swizzled(
            (tiles.stages, len(program.products), *matrix), w_dtype
        ),
        "out": ring.swizzled((WARPGROUPS, program.num_slots, *chunk), out_dtype),
    }
    if program.sources:
        slots["loaded"] = plgpu.Barrier(
            num_arrivals=len(program.sources), num_barriers=WARPGROUPS
        )
    return slots


def call(
    program: RowsProgram,
    out_shapes: list[tuple[int, ...]],
    run: ring.KernelRun,
    rows_g,
    *arrays,
):
    """Run the kernel and return its outputs, of these shapes and the dtype of x.

    `arrays` are x, w and, if the epilogue reads one, the source array.
    """
    x = arrays[0]
    groups = group_of_tiles(rows_g, x.shape[0], program.tiles.rows)
    barriers = ring.barriers(program.tiles.stages, 1 + len(program.products))
    kernel = plgpu.kernel(
        functools.partial(_kernel, program),
        out_type=tuple(jax.ShapeDtypeStruct(shape, x.dtype) for shape in out_shapes),
        scratch_types=scratch(program, x.dtype, x.dtype, x.dtype) | barriers,
        kernel_name="grouped_rows",
        **ring.kernel_arguments(run),
    )
    outputs = kernel(groups, *arrays)
    # JAX types a kernel's outputs as equal on all devices, whatever its inputs are.
    return varying_alike(*outputs, rows_g, *arrays)[: len(outputs)]
