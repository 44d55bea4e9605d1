"""Grouped products of 8-bit values with scales (fp8.py) on Hopper GPUs: the kernel of
rows_kernel.py with another loop over steps.

A step is one block of scales deep. Its WGMMA starts a sum of its own; that, times the
scales of its rows and of its part of the matrix, is added in registers:

    total += (x tile @ w tile) * row scales * matrix scale        float32

for the tensor cores add 8-bit products in fewer bits than float32 has (DeepSeek-V3,
arXiv 2412.19437, section 3.3.2, counts 14). While one warpgroup adds, the other
multiplies. WGMMA takes 8-bit operands only where the contraction is over their last
dim, so w is [g, columns, depth] in both passes. Row scales lie [depth / 128, m]: those
of a tile are one copy, into the slot of its step. Scales of matrices are read as they
are needed, before the wait for the step.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from moejax.kernels import varying_alike
from moejax.kernels.grouped_dot.fp8 import BLOCK, Scaled
from moejax.kernels.grouped_dot.hopper import ring, rows_kernel
from moejax.kernels.grouped_dot.hopper.row_tiles import row_tiles
from moejax.kernels.tuning import Tiles


@dataclasses.dataclass(frozen=True)
class _Block(rows_kernel.Block):
    x_scale: Any
    w_scale: Any
    scale_slots: Any

    def copy_step(self, tile, number, slot):
        super().copy_step(tile, number, slot)
        rows = pl.ds(tile.row, self.job.tiles.rows)
        source, full = self.x_scale.at[number, rows], self.ring.full.at[slot]
        plgpu.copy_gmem_to_smem(source, self.scale_slots.at[slot], full)

    def multiply(self, warpgroup, tile, done):
        own = self.job.tiles.own
        first_row, first_column = ring.own_part(self.job.tiles, warpgroup)
        rows = pl.ds(first_row, own[0])
        # Tiles may end outside of w, and have no scale there.
        last = self.w_scale.shape[1] - 1
        column = jnp.minimum(lax.div(tile.column + first_column, BLOCK), last)

        def step(number, carry):
            done, total = carry
            w_scale = self.w_scale[tile.group, column, number]
            self.ring.await_full(done)
            slot = self.ring.slot(done)
            x, (w,) = self.operands(warpgroup, slot)
            product = pl.run_scoped(functools.partial(_product, x, w), plgpu.ACC(own))
            scale = self.scale_slots.at[slot, rows]
            scale = plgpu.load(scale, layout=plgpu.Layout.WGMMA.reduce(1)) * w_scale
            # These were plain reads, which a copy into the slot must not overtake.
            plgpu.commit_smem()
            self.ring.release(done)
            return done + 1, total + product * lax.broadcast_in_dim(scale, own, (0,))

        zeros = plgpu.layout_cast(jnp.zeros(own, jnp.float32), plgpu.Layout.WGMMA)
        return [lax.fori_loop(0, tile.num_steps, step, (done, zeros))[1]]


def _product(x, w, total):
    plgpu.wgmma(total, x, w)
    return total[...]  # which waits for it


def _kernel(job, table, count, *arrays, **scratch):
    x, w, x_scale, w_scale, y = arrays
    barriers = ring.Ring(scratch.pop("full"), scratch.pop("empty"), job.tiles.stages)
    scales = {"x_scale": x_scale, "w_scale": w_scale}
    held = {"loaded": None, "ring": barriers, **scratch, **scales}
    block = _Block(job, table, count, x, w, (), (y,), **held)
    ring.run_roles(barriers, block.each_tile, block.copy_in, block.compute)


def call(x: Scaled, w: Scaled, rows_g: Array, dtype, tiles: Tiles, run: ring.KernelRun):
    """Rows of x [m, k] times those of their group's matrix in w [g, n, k], in dtype."""
    check(tiles)
    (num_rows, depth), (num_groups, width, _) = x.values.shape, w.values.shape
    job = rows_kernel.RowsProgram(
        tiles=tiles,
        is_transposed=True,
        num_steps=depth // BLOCK,
        num_groups=num_groups,
        num_columns=pl.cdiv(width, tiles.columns),
        finish=lambda products, sources, is_padding: products,
        products=(None,),
    )
    slots = rows_kernel.scratch(job, x.values.dtype, w.values.dtype, dtype)
    scales = plgpu.SMEM((tiles.stages, tiles.rows), jnp.float32)
    table, count = row_tiles(rows_g, num_rows, tiles.rows)
    kernel = plgpu.kernel(
        functools.partial(_kernel, job),
        out_type=jax.ShapeDtypeStruct((num_rows, width), dtype),
        scratch_types=slots
        | {"scale_slots": scales, **ring.ring_barriers(tiles.stages, 3)},
        kernel_name="grouped_rows_fp8",
        **ring.kernel_arguments(run),
    )
    y = kernel(table, count, x.values, w.values, x.scale.T, w.scale)
    return varying_alike(y, rows_g, *x, *w)[0]


def check(tiles: Tiles) -> None:
    """ValueError for tiles that a scale does not fit."""
    own_rows, own_columns = tiles.own
    if tiles.depth != BLOCK or own_columns not in (BLOCK // 2, BLOCK) or own_rows != 64:
        raise ValueError(
            f"{tiles} must have depth={BLOCK}, and 64 x 64 or 64 x 128 of a tile for a "
            "warpgroup in fp8: a step has one scale for each row, and one for w"
        )
