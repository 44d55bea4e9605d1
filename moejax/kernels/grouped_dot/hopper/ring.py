"""Code that all grouped-product kernels for Hopper use: the ring, layouts, the grid."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moejax.kernels.device import device_here
from moejax.kernels.tuning import WARPGROUPS, Tiles

WARPGROUP_ROWS = 64
"""Number of rows of one WGMMA."""
COPYING_REGISTERS, COMPUTING_REGISTERS = 40, 232
"""Registers per thread: 128 copying and 256 computing threads share the 65536 registers
of a multiprocessor."""
SWIZZLED_ROWS = 8
"""Number of rows after which a swizzle pattern repeats."""
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
"""Value of KernelRun.interpret for tests: the interpreter, with its detector of
races."""


@dataclasses.dataclass(frozen=True)
class Ring:
    """Ring of shared-memory slots through which operands get from TMA to WGMMA.

    One warpgroup fills the slots and the computing warpgroups empty them, step after
    step and through all tiles of a block without a pause. Steps are numbered through
    all tiles, and `done` is the number of steps before the current one.
    """

    full: Any
    """Barriers, one per slot: all copies of the slot's step have arrived."""
    empty: Any
    """Barriers, one per slot: both computing warpgroups have finished with the slot."""
    stages: int
    """Number of slots."""

    def slot(self, done):
        """Return the index of the ring's slot that step number `done` uses."""
        return lax.rem(done, self.stages)

    def await_empty(self, done):
        """Wait until the slot of step `done` can be filled. The copying warpgroup calls
        this."""

        @pl.when(done >= self.stages)
        def _():
            plgpu.barrier_wait(self.empty.at[self.slot(done)])

    def await_full(self, done):
        """Wait until the operands of step `done` have arrived. Computing warpgroups
        call this."""
        plgpu.barrier_wait(self.full.at[self.slot(done)])

    def release(self, done):
        """Signal that this computing warpgroup no longer reads the slot of step
        `done`."""
        plgpu.barrier_arrive(self.empty.at[self.slot(done)])

    def drain(self, done):
        """Wait until the computing warpgroups have released every slot.

        The copying warpgroup calls this after its `done` steps, so that no barrier is
        left with an arrival that nobody waited for.
        """

        def await_slot(step, _):
            plgpu.barrier_wait(self.empty.at[self.slot(step)])

        lax.fori_loop(done - jnp.minimum(done, self.stages), done, await_slot, None)


def barriers(stages: int, copies: int) -> dict[str, Any]:
    """Return the scratch barriers of a Ring whose steps consist of `copies` copies."""
    return {
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    }


def swizzled(shape: tuple[int, ...], dtype):
    """Return the type of a shared-memory array with the widest swizzle that its width
    allows, which TMA fills and WGMMA reads without bank conflicts."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * itemsize * 8)
    tiling = plgpu.TilingTransform((SWIZZLED_ROWS, swizzle // itemsize))
    return plgpu.SMEM(
        shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle))
    )


@dataclasses.dataclass(frozen=True)
class KernelRun:
    """Settings of a kernel launch other than its tiles."""

    num_blocks: int | None = None
    """Number of blocks; None means one per multiprocessor of the device."""
    interpret: Any = None
    """plgpu.InterpretGPUParams to interpret the kernel on any device, for tests; None
    to compile it."""


def kernel_arguments(run: KernelRun) -> dict[str, Any]:
    """Return the arguments of plgpu.kernel that all kernels have in common: blocks of
    two computing warpgroups and one that copies."""
    return {
        "interpret": run.interpret,
        "grid": (run.num_blocks or _num_multiprocessors(),),
        "grid_names": ("block",),
        "num_threads": WARPGROUPS + 1,
        "thread_name": "warpgroup",
    }


def own_part(tiles: Tiles, warpgroup):
    """Return the first row and column of a computing warpgroup's part of its block's
    tile."""
    own_rows, own_columns = tiles.warpgroup_tile
    if tiles.halves == "rows":
        return pl.multiple_of(warpgroup * own_rows, WARPGROUP_ROWS), 0
    return 0, pl.multiple_of(warpgroup * own_columns, tiles.chunk)


def run_roles(ring: Ring, each_tile, copy_in, compute):
    """Run a block: one warpgroup copies operands in while the others compute.

    each_tile(step) calls step(*tile, done) -> done for each tile of the block, and
    returns the last `done`. copy_in has the arguments of such a step; compute has them
    after the number of its warpgroup.
    """
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")
        ring.drain(each_tile(copy_in))

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
        each_tile(functools.partial(compute, warpgroup))
        plgpu.wait_smem_to_gmem(0)


def walk(item, tiles_high: int, tiles_wide: int, span: int):
    """Return the row and column, in units of tiles, of the tile that is computed as
    number `item`.

    The order goes through bands of `span` tiles of rows, and column after column within
    a band, so that blocks that run at the same time share operands in the L2 cache.
    """
    band = lax.div(item, span * tiles_wide)
    inside = item - band * span * tiles_wide
    height = jnp.minimum(span, tiles_high - band * span)
    return band * span + lax.rem(inside, height), lax.div(inside, height)


def _num_multiprocessors() -> int:
    """Return the number of multiprocessors of the current device."""
    device = device_here()
    # Only abstract devices have num_cores.
    return getattr(device, "num_cores", None) or device.core_count
