"""Grouped products of 8-bit values with scales (fp8.py) on Hopper GPUs.

The kernel is that of rows_kernel.py with another loop over steps. The depth of a step
is 128, the size of a scale's block. The WGMMA of each step starts its sum at zero, and
the sum is multiplied by the scales of its rows and of its part of the matrix and added
in registers:

    total += (x tile @ w tile) * row scales * matrix scale        float32

The reason is that tensor cores add 8-bit products with fewer bits than float32 has
(DeepSeek-V3, arXiv 2412.19437, section 3.3.2, counts 14). While one warpgroup adds, the
other one multiplies.

WGMMA takes 8-bit operands only if the contraction is over their last dim, so w is
[g, columns, depth] in both passes. Row scales are stored as [depth / 128, m], so that
one copy brings those of a tile into the slot of its step. A matrix scale is read when
it is needed, before the wait for the step's operands.
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
from moejax.kernels.grouped_dot.fp8 import BLOCK, Quantized
from moejax.kernels.grouped_dot.hopper import ring, rows_kernel
from moejax.kernels.grouped_dot.hopper.row_tiles import group_of_tiles
from moejax.kernels.tuning import Tiles


@dataclasses.dataclass(frozen=True)
class _Block(rows_kernel.Block):
    """References of a running block, as in rows_kernel, and those of the scales."""

    x_scale: Any
    """Row scales [depth / 128, m], in global memory."""
    w_scale: Any
    """Matrix scales [g, columns / 128, depth / 128], in global memory."""
    scale_slots: Any
    """Row scales of each ring slot [stages, rows of a tile], in shared memory."""

    def copy_step(self, tile, number, slot):
        super().copy_step(tile, number, slot)
        rows = pl.ds(tile.row, self.program.tiles.rows)
        source = self.x_scale.at[number, rows]
        plgpu.copy_gmem_to_smem(
            source, self.scale_slots.at[slot], self.ring.full.at[slot]
        )

    def multiply(self, warpgroup, tile, done):
        own = self.program.tiles.warpgroup_tile
        first_row, first_column = ring.own_part(self.program.tiles, warpgroup)
        rows = pl.ds(first_row, own[0])
        # A tile can end outside of w, where there is no scale.
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
            # The scales were read by plain loads, which must be complete before the
            # next copy into the slot.
            plgpu.commit_smem()
            self.ring.release(done)
            return done + 1, total + product * lax.broadcast_in_dim(scale, own, (0,))

        zeros = plgpu.layout_cast(jnp.zeros(own, jnp.float32), plgpu.Layout.WGMMA)
        return [lax.fori_loop(0, tile.num_steps, step, (done, zeros))[1]]


def _product(x, w, total):
    """Return x @ w, computed in the accumulator `total`, which must be zero."""
    plgpu.wgmma(total, x, w)
    return total[...]  # reading the accumulator waits for the WGMMA


def _kernel(program, groups, x, w, x_scale, w_scale, y, *, full, empty, **scratch):
    """Run one block: the body of the kernel."""
    own = ring.Ring(full, empty, program.tiles.stages)
    scales = {"x_scale": x_scale, "w_scale": w_scale}
    references = {"loaded": None, "ring": own, **scratch, **scales}
    block = _Block(program, groups, x, w, (), (y,), **references)
    ring.run_roles(own, block.each_tile, block.copy_in, block.compute)


def call(
    x: Quantized, w: Quantized, rows_g: Array, dtype, tiles: Tiles, run: ring.KernelRun
):
    """Return rows of x [m, k] times the transposed matrix of their group in w
    [g, n, k]: an array [m, n] of this dtype. Raises ValueError for tiles that scales do
    not fit."""
    check(tiles)
    (num_rows, depth), (num_groups, width, _) = x.values.shape, w.values.shape
    program = rows_kernel.RowsProgram(
        tiles=tiles,
        is_transposed=True,
        num_steps=depth // BLOCK,
        num_groups=num_groups,
        num_columns=pl.cdiv(width, tiles.columns),
        finish=lambda products, sources: products,
        products=(None,),
    )
    slots = rows_kernel.scratch(program, x.values.dtype, w.values.dtype, dtype)
    scales = plgpu.SMEM((tiles.stages, tiles.rows), jnp.float32)
    groups = group_of_tiles(rows_g, num_rows, tiles.rows)
    kernel = plgpu.kernel(
        functools.partial(_kernel, program),
        out_type=jax.ShapeDtypeStruct((num_rows, width), dtype),
        scratch_types=slots | {"scale_slots": scales, **ring.barriers(tiles.stages, 3)},
        kernel_name="grouped_rows_fp8",
        **ring.kernel_arguments(run),
    )
    y = kernel(groups, x.values, w.values, x.scale.T, w.scale)
    return varying_alike(y, rows_g, *x, *w)[0]


def check(tiles: Tiles) -> None:
    """Raise ValueError unless one scale per row and one per matrix fit each step of a
    warpgroup's tile."""
    own_rows, own_columns = tiles.warpgroup_tile
    if tiles.depth != BLOCK or own_columns not in (BLOCK // 2, BLOCK) or own_rows != 64:
        raise ValueError(
            f"{tiles} must have depth={BLOCK}, and 64 x 64 or 64 x 128 values of a "
            "tile for each warpgroup in fp8: a step has one scale for each row of x "
            "and one for w"
        )
