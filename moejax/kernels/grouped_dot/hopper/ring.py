"""What the Hopper kernels of this room share: a ring of slots, layouts, the grid."""

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
COPYING_REGISTERS, COMPUTING_REGISTERS = 40, 232
"""Of a thread: 65536 of an SM, for 128 copying and 256 computing threads."""
SWIZZLED_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Ring:
    """Slots of shared memory which one warpgroup fills and the computing ones empty,
    step after step, through all tiles of a block without a pause: `done` counts its
    steps so far."""

    full: Any
    """Barriers, one a slot: all copies of a step have landed."""
    empty: Any
    """The same: all computing warpgroups are through with a step."""
    stages: int

    def slot(self, done):
        return lax.rem(done, self.stages)

    def await_empty(self, done):
        """Before the slot of step `done` is filled again."""

        @pl.when(done >= self.stages)
        def _():
            plgpu.barrier_wait(self.empty.at[self.slot(done)])

    def await_full(self, done):
        plgpu.barrier_wait(self.full.at[self.slot(done)])

    def release(self, done):
        """By a computing warpgroup, which reads the slot of step `done` no more."""
        plgpu.barrier_arrive(self.empty.at[self.slot(done)])

    def drain(self, done):
        """By the filling warpgroup, at its end: nothing is left that it did not see."""

        def await_slot(step, _):
            plgpu.barrier_wait(self.empty.at[self.slot(step)])

        lax.fori_loop(done - jnp.minimum(done, self.stages), done, await_slot, None)


def ring_barriers(stages: int, copies: int) -> dict[str, Any]:
    """Scratch of a Ring whose steps have so many copies."""
    return {
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=stages),
    }


def swizzled(shape: tuple[int, ...], dtype):
    """Shared memory that TMA fills and WGMMA reads without bank conflicts."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * itemsize * 8)
    tiling = plgpu.TilingTransform((SWIZZLED_ROWS, swizzle // itemsize))
    return plgpu.SMEM(
        shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle))
    )


@dataclasses.dataclass(frozen=True)
class KernelRun:
    """How a kernel is run, beside its tiles."""

    num_blocks: int | None = None
    """None: one a multiprocessor of the device."""
    interpret: Any = None
    """plgpu.InterpretGPUParams, for tests on any device."""


def kernel_arguments(run: KernelRun) -> dict[str, Any]:
    """Arguments of plgpu.kernel: two warpgroups a block and one that copies."""
    return {
        "interpret": run.interpret,
        "grid": (run.num_blocks or _num_multiprocessors(),),
        "grid_names": ("block",),
        "num_threads": WARPGROUPS + 1,
        "thread_name": "warpgroup",
    }


def own_part(tiles: Tiles, warpgroup):
    """First row and column of a computing warpgroup in its block's tile."""
    own_rows, own_columns = tiles.own
    if tiles.halves == "rows":
        return pl.multiple_of(warpgroup * own_rows, WARPGROUP_ROWS), 0
    return 0, pl.multiple_of(warpgroup * own_columns, tiles.chunk)


def run_roles(ring: Ring, each_tile, copy_in, compute):
    """The program of a block: each_tile(step) walks its tiles with step(.., done);
    copy_in and compute(warpgroup, ..) are such steps."""
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


def walk(item, tiles_high, tiles_wide: int, span: int):
    """Row and column of tile number `item`: bands of `span` tiles of rows, and in a
    band column after column, so that blocks which run at the same time share operands
    in the L2. `tiles_high` is known at run time only."""
    band = lax.div(item, span * tiles_wide)
    inside = item - band * span * tiles_wide
    height = jnp.minimum(span, tiles_high - band * span)
    return band * span + lax.rem(inside, height), lax.div(inside, height)


def _num_multiprocessors() -> int:
    device = device_here()
    cores = getattr(device, "num_cores", None)  # of an abstract one
    return cores or device.core_count
