"""Code that all attention kernels for Hopper use: which blocks a tile needs, scores and
masks in registers, and the launch.

A kernel's block computes one tile: 128 queries or 128 keys of one head. It goes through
the blocks of the other side that the tile needs, which a table names. Each of its two
computing warpgroups has 64 rows of the tile, which are the rows of its WGMMAs.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from moejax.kernels import varying_alike
from moejax.kernels.attention.reading import (
    BlockRange,
    KeyRange,
    key_blocks,
    query_blocks,
)
from moejax.kernels.grouped_dot.hopper import ring
from moejax.kernels.tuning import WARPGROUPS

ROWS = ring.WARPGROUP_ROWS
"""Rows of a tile that one warpgroup computes."""
TILE = WARPGROUPS * ROWS
"""Queries or keys of a tile, and keys of a block."""
COPYING_REGISTERS, COMPUTING_REGISTERS = 24, 240
"""Registers per thread (ring.py has others). The sums of dkv take 128 of them, and the
compiler spills fewer than with 232."""
FLOOR = -1e30
"""Score of a key that is not read. It is finite, so that differences are."""
SHARED_BYTES = 220 * 1024
"""Shared memory for tiles and slots: what a block has, less barriers and small
arrays."""
LOG2E = math.log2(math.e)
"""Kernels take powers of 2, for which the GPU has an instruction."""


@dataclasses.dataclass(frozen=True)
class Program:
    """Static description of an attention."""

    scale: float
    """Factor of the products of queries and keys."""
    soft_cap: float | None
    """Bound of the scores, or None."""
    heads: int
    """Query heads of a group."""
    interpret: Any
    """plgpu.InterpretGPUParams to interpret kernels; None to compile them."""

    @property
    def unit(self) -> float:
        """Score of 1 from `bound`, in powers of 2."""
        return LOG2E * (self.scale if self.soft_cap is None else self.soft_cap)

    def bound(self, product):
        """Return scores in units of `unit`, from products of queries and keys."""
        if self.soft_cap is None:
            return product
        # tanh by a power of 2: the GPU's own tanh has an error of 2^-11.
        power = jnp.exp2(product * (2 * LOG2E * self.scale / self.soft_cap))
        return 1 - 2 / (power + 1)

    def with_slope(self, weights, bounded):
        """Return weights times the slope of `bound`, from what `bound` returned."""
        if self.soft_cap is None:
            return weights
        return weights * (1 - bounded * bounded)


def key_table(keys: KeyRange) -> Int[Array, "b n 4"]:
    """Return, for each tile of queries, the blocks of keys that it needs.

    The columns are those of `Needed`. The blocks are those from `begin` to `end`. Every
    query of the tile reads all keys of the blocks from `whole_begin` to `whole_end`,
    and the others need a mask.
    """
    begin_bn, end_bn = key_blocks(keys, TILE, TILE)
    first_bn, last_bn = keys.high_bt[:, ::TILE], keys.low_bt[:, TILE - 1 :: TILE]
    whole = -(-last_bn // TILE), first_bn // TILE
    return jnp.stack([begin_bn, *whole, end_bn], axis=-1)


def query_table(keys: KeyRange, num_keys: int) -> Int[Array, "b c 4"]:
    """Return, for each tile of keys, the blocks of ROWS queries that read it, as
    `key_table` does."""
    num_tiles = num_keys // TILE
    begin_bc, end_bc = query_blocks(key_blocks(keys, ROWS, TILE), num_tiles)
    # A block is whole if its first query reads the tile's last key, and its last query
    # the tile's first key. Both ends are counts of other blocks, as begin and end are.
    last_bn = -(-keys.low_bt[:, ROWS - 1 :: ROWS] // TILE)
    first_bn = keys.high_bt[:, ::ROWS] // TILE
    whole_bc = query_blocks(BlockRange(last_bn, first_bn), num_tiles)
    return jnp.stack([begin_bc, *whole_bc, end_bc], axis=-1)


class Needed(NamedTuple):
    """Blocks that a tile needs: its row of a table, in scalars."""

    begin: Any
    whole_begin: Any
    whole_end: Any
    end: Any

    @property
    def count(self):
        """Return the number of blocks."""
        return self.end - self.begin

    def is_cut(self, block):
        """Return whether a block needs a mask."""
        return (block < self.whole_begin) | (block >= self.whole_end)


def needed(table, row, tile) -> Needed:
    """Return the blocks that a tile needs, from `key_table` or `query_table`."""
    return Needed(*(table[row, tile, column] for column in range(4)))


def iota(shape: tuple[int, int], dimension: int):
    """Return the indices along a dimension of scores."""
    return plgpu.broadcasted_iota(
        jnp.int32, shape, dimension, layout=plgpu.Layout.WGMMA
    )


def by_row(ref):
    """Return an array of global memory with a value for each row of scores."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)


def by_column(ref):
    """Return an array of shared memory with a value for each column of scores."""
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(0))


def over_rows(row, shape: tuple[int, int]):
    """Return a value for each row, repeated along the row."""
    return lax.broadcast_in_dim(row, shape, [0])


def over_columns(column, shape: tuple[int, int]):
    """Return a value for each column, repeated along the column."""
    return lax.broadcast_in_dim(column, shape, [1])


def mask_keys(value, other: float, low, high, begin):
    """Return scores, or weights, of queries in rows and keys from `begin` on in
    columns, with `other` where the query does not read the key."""
    key, shape = iota(value.shape, 1), value.shape
    is_read = key >= over_rows(low - begin, shape)
    is_read &= key < over_rows(high - begin, shape)
    return jnp.where(is_read, value, jnp.full(shape, other, value.dtype))


def mask_queries(value, low, high, begin):
    """Return weights of keys from `begin` on in rows and queries in columns, with 0
    where the query does not read the key."""
    key, shape = iota(value.shape, 0), value.shape
    is_read = key >= over_columns(low - begin, shape)
    is_read &= key < over_columns(high - begin, shape)
    return jnp.where(is_read, value, jnp.zeros_like(value))


def add_product(total, left, right, bridge):
    """Start total += left @ right on the tensor cores, with `left` in registers.

    The interpreter's WGMMA takes operands from shared memory only, so that under it
    `left` goes through `bridge`. Compiled kernels have none.
    """
    if bridge is None:
        plgpu.wgmma(total, left, right)
        return
    bridge[...] = left
    plgpu.commit_smem()
    plgpu.wgmma(total, bridge, right)


def stages(slot_bytes: int, other_bytes: int) -> int:
    """Return how many slots a ring gets in shared memory, 4 at most."""
    return min(4, (SHARED_BYTES - other_bytes) // slot_bytes)


def query_tile():
    """Return the place of a block's tile of queries: the row of the batch, the tile and
    the head. The last tiles come first, because causal attention gives them most
    keys."""
    last = lax.axis_size("tile") - 1
    row, head = lax.axis_index("row"), lax.axis_index("head")
    return row, last - lax.axis_index("tile"), head


def tile_rows(number):
    """Return the rows of a tile, or of a block of TILE, in the array of all."""
    return pl.ds(pl.multiple_of(number * TILE, TILE), TILE)


def own_rows(tile, warpgroup):
    """Return the rows of a tile that a computing warpgroup has, in the array of all."""
    return pl.ds(pl.multiple_of(tile * TILE + warpgroup * ROWS, ROWS), ROWS)


def run_roles(copy_in, compute) -> None:
    """Run a block: one warpgroup copies operands in while the others compute."""
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")
        copy_in()

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(COMPUTING_REGISTERS, action="increase")
        compute(warpgroup)
        plgpu.wait_smem_to_gmem(0)


def body_with_ring(block_type, slots: str):
    """Return the body of a kernel whose blocks are of this type and have one ring, as
    long as the array `slots` in shared memory."""

    def body(program: Program, *arrays, full, empty, bridge=None, **scratch):
        barriers = ring.Ring(full, empty, scratch[slots].shape[0])
        block = block_type(program, *arrays, **scratch, ring=barriers, bridge=bridge)
        run_roles(block.copy_in, block.compute)

    return body


def launch(program: Program, body, name: str, grid, outs, scratch, bridges, arrays):
    """Run a kernel over a grid (row of the batch, tile, head), and return its outputs.

    `bridges` are the shape and dtype of what `add_product` needs under the interpreter.
    """
    bridge = None if program.interpret is None else ring.swizzled(*bridges)
    kernel = plgpu.kernel(
        functools.partial(body, program),
        out_type=tuple(jax.ShapeDtypeStruct(*out) for out in outs),
        scratch_types=scratch | ({} if bridge is None else {"bridge": bridge}),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        grid=grid,
        grid_names=("row", "tile", "head"),
        num_threads=WARPGROUPS + 1,
        thread_name="warpgroup",
        interpret=program.interpret,
        kernel_name=name,
    )
    # JAX types a kernel's outputs as equal on all devices, whatever its inputs are.
    return varying_alike(*kernel(*arrays), *arrays)[: len(outs)]
