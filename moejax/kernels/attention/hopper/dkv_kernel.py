"""The gradients of keys and values as one kernel for Hopper GPUs.

    warpgroup 2   TMA: copies the tile's keys and values, then queries and what belongs
                  to them, for each block of queries that reads the tile
    warpgroup 0   64 keys: weights again, their gradients, and both sums by WGMMA
    warpgroup 1   64 keys more

Scores stand on their side here: keys in rows, queries in columns, so that weights and
their gradients are in registers as the left side of the products that sum over queries.
The steps go through the query heads of the group too. So the sums over them stay in
registers, and nothing is added to in global memory.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moejax.kernels.attention.hopper import scores
from moejax.kernels.attention.hopper.scores import ROWS, TILE, Needed, Program
from moejax.kernels.grouped_dot.hopper import ring
from moejax.kernels.tuning import WARPGROUPS

COPIES = 4
"""Copies of a step: queries, gradients of the output, and two small arrays."""


@dataclasses.dataclass(frozen=True)
class _Block:
    """References of a running block to its arrays in global and shared memory."""

    program: Program
    table: Any
    """Table of scores.query_table."""
    ends: Any
    """First key that each query reads, and the key after its last one, [b, 2, t]."""
    stats: Any
    """Logarithm to base 2 of the softmax's sum, and mean gradient, [b, h, 2, t]."""
    q: Any
    k: Any
    v: Any
    dout: Any
    dk: Any
    dv: Any
    k_tile: Any
    """Keys of the tile, and then their gradients, in shared memory."""
    v_tile: Any
    """Values of the tile, and then their gradients, in shared memory."""
    q_slots: Any
    dout_slots: Any
    ends_slots: Any
    stats_slots: Any
    tile_full: Any
    """Barrier: the arrays of the tile have arrived."""
    ring: ring.Ring
    bridge: Any

    @property
    def at(self):
        """Return the place of the tile: the row of the batch, the tile and the key
        head. Causal attention gives the first tiles most queries."""
        return tuple(lax.axis_index(name) for name in ("row", "tile", "head"))

    def step(self, needed: Needed, number):
        """Return the block of queries of step `number`, and its query head. A tile that
        nobody reads has no step."""
        head = lax.div(number, needed.count)
        block = needed.begin + number - head * needed.count
        return block, lax.axis_index("head") * self.program.heads + head

    def copy_in(self):
        """Copy the arrays of the tile, and its blocks of queries."""
        row, tile, head = self.at
        keys = scores.tile_rows(tile)
        needed = scores.needed(self.table, row, tile)
        for array, place in ((self.k, self.k_tile), (self.v, self.v_tile)):
            plgpu.copy_gmem_to_smem(array.at[row, keys, head], place, self.tile_full)

        def step(number, _):
            block, query_head = self.step(needed, number)
            queries = pl.ds(pl.multiple_of(block * ROWS, ROWS), ROWS)
            self.ring.await_empty(number)
            slot = self.ring.slot(number)
            for array, slots in (
                (self.q.at[row, queries, query_head], self.q_slots),
                (self.dout.at[row, queries, query_head], self.dout_slots),
                (self.ends.at[row, :, queries], self.ends_slots),
                (self.stats.at[row, query_head, :, queries], self.stats_slots),
            ):
                full = self.ring.full.at[slot]
                plgpu.copy_gmem_to_smem(array, slots.at[slot], full)

        num_steps = needed.count * self.program.heads
        lax.fori_loop(0, num_steps, step, None)
        self.ring.drain(num_steps)

    def compute(self, warpgroup):
        """Compute the gradients of this warpgroup's keys and values, and store them."""
        row, tile, head = self.at
        part, keys = (scores.own_rows(n, warpgroup) for n in (0, tile))
        needed = scores.needed(self.table, row, tile)
        k, v = self.k_tile.at[part], self.v_tile.at[part]
        bridge = None if self.bridge is None else self.bridge.at[warpgroup]
        plgpu.barrier_wait(self.tile_full)

        def add_all(dk, dv):
            def step(number, _):
                self.ring.await_full(number)
                slot = self.ring.slot(number)
                q, dout = self.q_slots.at[slot], self.dout_slots.at[slot]

                def gradients(products, dweights):
                    plgpu.wgmma(products, k, q.T)
                    plgpu.wgmma(dweights, v, dout.T)
                    product = plgpu.wgmma_accumulator_load(products, wait_n=1)
                    score = self.program.bound(product)
                    block, _ = self.step(needed, number)
                    is_cut = needed.is_cut(block)
                    weights = self._weights(slot, score, is_cut, keys.start)
                    rounded = weights.astype(self.v.dtype)
                    scores.add_product(dv, rounded, dout, bridge)
                    weights = self.program.with_slope(weights, score)
                    dweight = plgpu.wgmma_accumulator_load(dweights, wait_n=1)
                    mean = scores.by_column(self.stats_slots.at[slot, 1])
                    return weights * (dweight - scores.over_columns(mean, score.shape))

                both = (plgpu.ACC((ROWS, ROWS)),) * 2
                dproduct = pl.run_scoped(gradients, *both).astype(self.k.dtype)
                scores.add_product(dk, dproduct, q, bridge)
                plgpu.commit_smem()  # all threads must have read the slot's numbers
                plgpu.wgmma_wait(0)
                self.ring.release(number)

            num_steps = needed.count * self.program.heads
            lax.fori_loop(0, num_steps, step, None)
            return dk[...], dv[...]

        totals = (plgpu.ACC((ROWS, array.shape[3])) for array in (self.k, self.v))
        dk, dv = pl.run_scoped(add_all, *totals)
        k[...] = (dk * self.program.scale).astype(self.dk.dtype)
        v[...] = dv.astype(self.dv.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k, self.dk.at[row, keys, head])
        plgpu.copy_smem_to_gmem(v, self.dv.at[row, keys, head])

    def _weights(self, slot, score, is_cut, begin):
        """Return the weights of a step from its scores, whose first key is `begin`."""
        lse = scores.by_column(self.stats_slots.at[slot, 0])
        power = score * self.program.unit - scores.over_columns(lse, score.shape)
        weights = jnp.exp2(power)

        def masked():
            low, high = (
                scores.by_column(self.ends_slots.at[slot, which]) for which in range(2)
            )
            return scores.mask_queries(weights, low, high, begin)

        return lax.cond(is_cut, masked, lambda: weights)


def call(program: Program, keys, stats_bh2t, q_bthi, k_bugi, v_bugj, dout_bthj):
    """Run the kernel, and return the gradients of keys and values.

    TILE must divide the numbers of queries and keys.
    """
    (b, u, g, i), j, dtype = k_bugi.shape, v_bugj.shape[3], k_bugi.dtype
    width_bytes = (i + j) * dtype.itemsize
    num_stages = scores.stages(ROWS * width_bytes, TILE * width_bytes)
    scratch = ring.ring_barriers(num_stages, COPIES) | {
        "k_tile": ring.swizzled((TILE, i), dtype),
        "v_tile": ring.swizzled((TILE, j), dtype),
        "q_slots": ring.swizzled((num_stages, ROWS, i), dtype),
        "dout_slots": ring.swizzled((num_stages, ROWS, j), dtype),
        "ends_slots": plgpu.SMEM((num_stages, 2, ROWS), jnp.int32),
        "stats_slots": plgpu.SMEM((num_stages, 2, ROWS), jnp.float32),
        "tile_full": plgpu.Barrier(num_arrivals=2),
    }
    ends_b2t = jnp.stack(keys, axis=1)
    table = scores.query_table(keys, u)
    return scores.launch(
        program,
        scores.body_with_ring(_Block, "q_slots"),
        "attention_dkv",
        (b, u // TILE, g),
        ((k_bugi.shape, dtype), (v_bugj.shape, dtype)),
        scratch,
        ((WARPGROUPS, ROWS, ROWS), dtype),
        (table, ends_b2t, stats_bh2t, q_bthi, k_bugi, v_bugj, dout_bthj),
    )
