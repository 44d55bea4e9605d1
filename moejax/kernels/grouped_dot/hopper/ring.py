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
PAIR = "pair"
"""Name of the axis of the blocks of a cluster."""


@dataclasses.dataclass(frozen=True)
class Ring:
    """Ring of shared-memory slots through which operands get from TMA to WGMMA.

    One warpgroup fills the slots and the computing warpgroups empty them, step after
    step and through all tiles of a block without a pause. Steps are numbered through
    all tiles, and `done` is the number of steps before the current one.

    Where warpgroups take turns, they empty the slots of their own tiles alone, and each
    has its own barriers `full`: a warpgroup must see all phases of a barrier that it
    waits for. The order of the ring is then the order of the turns.

    In a cluster, the copy of x fills a slot of each block, and a slot is empty when the
    warpgroups of all blocks have finished with theirs.
    """

    full: Any
    """Barriers, one per slot, or in turns one per warpgroup and slot: all copies of the
    slot's step have arrived."""
    empty: Any
    """Barriers, one per slot: all computing warpgroups that read the slot have finished
    with it."""
    stages: int
    """Number of slots."""
    takes_turns: bool = False
    """Whether each computing warpgroup computes whole tiles, in turns."""

    def slot(self, done):
        """Return the index of the ring's slot that step number `done` uses."""
        return lax.rem(done, self.stages)

    def full_at(self, slot, number=0):
        """Return the barrier `full` of a slot for steps of tile `number` of the block,
        which only turns use."""
        if self.takes_turns:
            slot = lax.rem(number, WARPGROUPS) * self.stages + slot
        return self.full.at[slot]

    def await_empty(self, done):
        """Wait until the slot of step `done` can be filled. The copying warpgroup calls
        this."""

        @pl.when(done >= self.stages)
        def _():
            plgpu.barrier_wait(self.empty.at[self.slot(done)])

    def await_full(self, done, number=0):
        """Wait until the operands of step `done`, of tile `number`, have arrived.
        Computing warpgroups call this."""
        plgpu.barrier_wait(self.full_at(self.slot(done), number))

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


def ring_barriers(
    stages: int, copies: int, *, takes_turns: bool = False, cluster: int = 1
) -> dict[str, Any]:
    """Return the scratch barriers of a Ring whose steps consist of `copies` copies, in
    a cluster of this many blocks."""
    readers = 1 if takes_turns else WARPGROUPS
    num_full = WARPGROUPS * stages if takes_turns else stages
    empty = {"num_arrivals": readers, "num_barriers": stages}
    return {
        "full": plgpu.Barrier(num_arrivals=copies, num_barriers=num_full),
        "empty": plgpu.Barrier(**empty)
        if cluster == 1
        else plgpu.ClusterBarrier(collective_axes=(PAIR,), **empty),
    }


def of_tiles(tiles: Tiles, full, empty) -> Ring:
    """Return the ring of a product, from its barriers."""
    return Ring(full, empty, tiles.stages, tiles.takes_turns)


def barriers_of_tiles(tiles: Tiles, copies: int) -> dict[str, Any]:
    """Return the scratch barriers of the ring of a product."""
    form = {"takes_turns": tiles.takes_turns, "cluster": tiles.cluster}
    return ring_barriers(tiles.stages, copies, **form)


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
    """Number of blocks; None means one per multiprocessor of the device, less those
    that the tiles spare."""
    interpret: Any = None
    """plgpu.InterpretGPUParams to interpret the kernel on any device, for tests; None
    to compile it."""
    is_aligned: bool = False
    """Whether the rows of every group, and those of the array, are whole tiles (in
    wgrad, whole steps). The kernel then has no code for parts of them."""


def kernel_arguments(run: KernelRun, tiles: Tiles) -> dict[str, Any]:
    """Return the arguments of plgpu.kernel that all kernels have in common: blocks of
    two computing warpgroups and one that copies."""
    num_blocks = run.num_blocks or _num_unspared(tiles)
    arguments = {
        "interpret": run.interpret,
        "grid": (max(1, num_blocks // tiles.cluster),),
        "grid_names": ("block",),
        "num_threads": WARPGROUPS + 1,
        "thread_name": "warpgroup",
    }
    if tiles.cluster > 1:  # the grid then counts clusters
        arguments |= {"cluster": (tiles.cluster,), "cluster_names": (PAIR,)}
    if tiles.math == "approx" or tiles.barriers == "own":
        arguments["compiler_params"] = plgpu.CompilerParams(
            approx_math=tiles.math == "approx",
            unsafe_no_auto_barriers=tiles.barriers == "own",
        )
    return arguments


def shared_by(tiles: Tiles) -> str | None:
    """Return the axis of the blocks that one copy of x fills slots of, or None for this
    block alone."""
    return PAIR if tiles.cluster > 1 else None


def own_column(tiles: Tiles, column):
    """Return the column, in units of tiles, of this block's tile among those that its
    cluster computes side by side, as number `column`."""
    if tiles.cluster == 1:
        return column
    return column * tiles.cluster + lax.axis_index(PAIR)


def when_in_turn(tiles: Tiles, warpgroup, number, compute):
    """Call compute() for tile `number` of the block, if this warpgroup computes a part
    of it."""
    if tiles.takes_turns:
        pl.when(lax.rem(number, WARPGROUPS) == warpgroup)(compute)
    else:
        compute()


def own_part(tiles: Tiles, warpgroup):
    """Return the first row and column of a computing warpgroup's part of its block's
    tile."""
    own_rows, own_columns = tiles.warpgroup_tile
    if tiles.takes_turns:
        return 0, 0
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


def walk(item, tiles_high, tiles_wide: int, span: int):
    """Return the row and column, in units of tiles, of the tile that is computed as
    number `item`.

    The order goes through bands of `span` tiles of rows, and column after column within
    a band, so that blocks that run at the same time share operands in the L2 cache.
    `tiles_high` may be a value known at run time only.
    """
    band = lax.div(item, span * tiles_wide)
    inside = item - band * span * tiles_wide
    height = jnp.minimum(span, tiles_high - band * span)
    return band * span + lax.rem(inside, height), lax.div(inside, height)


def _num_unspared(tiles: Tiles) -> int:
    """Return the number of multiprocessors of the current device that get a block.
    Raises ValueError if the tiles spare too many."""
    device = device_here()
    # Only abstract devices have num_cores.
    cores = getattr(device, "num_cores", None) or device.core_count
    if cores - tiles.spared < tiles.cluster:
        raise ValueError(
            f"spared={tiles.spared} must leave {tiles.cluster} or more of the "
            f"{cores} multiprocessors of {device.device_kind}: measure tiles with a "
            "smaller --spared"
        )
    return cores - tiles.spared
