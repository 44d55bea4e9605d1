"""The gradient of queries as one kernel for Hopper GPUs.

    warpgroup 2   TMA: copies the tile's queries and gradients, then keys and values
    warpgroup 0   64 queries: weights again, their gradients, and the sum by WGMMA
    warpgroup 1   64 queries more

The weights are exp(score - lse), and dq is the sum over the keys of weight x (gradient
of the weight - mean gradient) x key (FlashAttention-2, Dao 2023, arXiv 2307.08691). The
sum stays in registers, so that nothing is added to in global memory.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moejax.kernels.attention.hopper import scores
from moejax.kernels.attention.hopper.scores import ROWS, TILE, Program
from moejax.kernels.grouped_dot.hopper import ring
from moejax.kernels.tuning import WARPGROUPS


@dataclasses.dataclass(frozen=True)
class _Block:
    """References of a running block to its arrays in global and shared memory."""

    program: Program
    table: Any
    """Table of scores.key_table."""
    low: Any
    high: Any
    stats: Any
    """Logarithm to base 2 of the softmax's sum, and mean gradient, [b, h, 2, t]."""
    q: Any
    k: Any
    v: Any
    dout: Any
    dq: Any
    q_tile: Any
    """Queries of the tile, and then their gradients, in shared memory."""
    dout_tile: Any
    k_slots: Any
    v_slots: Any
    tile_full: Any
    """Barrier: the arrays of the tile have arrived."""
    ring: ring.Ring
    bridge: Any

    def copy_in(self):
        """Copy the arrays of the tile, and its blocks of keys and values."""
        row, tile, head = scores.query_tile()
        own = lax.div(head, self.program.heads)
        needed = scores.needed(self.table, row, tile)
        queries = scores.tile_rows(tile)
        for array, place in ((self.q, self.q_tile), (self.dout, self.dout_tile)):
            plgpu.copy_gmem_to_smem(array.at[row, queries, head], place, self.tile_full)

        def step(done, _):
            at = row, scores.tile_rows(needed.begin + done), own
            self.ring.await_empty(done)
            slot = self.ring.slot(done)
            full = self.ring.full.at[slot]
            plgpu.copy_gmem_to_smem(self.k.at[at], self.k_slots.at[slot], full)
            plgpu.copy_gmem_to_smem(self.v.at[at], self.v_slots.at[slot], full)

        lax.fori_loop(0, needed.count, step, None)
        self.ring.drain(needed.count)

    def compute(self, warpgroup):
        """Compute the gradients of this warpgroup's queries, and store them."""
        row, tile, head = scores.query_tile()
        queries = scores.own_rows(tile, warpgroup)
        part = scores.own_rows(0, warpgroup)
        low, high = (
            scores.by_row(end.at[row, queries]) for end in (self.low, self.high)
        )
        lse, mean = (
            scores.by_row(self.stats.at[row, head, which, queries])
            for which in range(2)
        )
        needed = scores.needed(self.table, row, tile)
        bridge = None if self.bridge is None else self.bridge.at[warpgroup]
        plgpu.barrier_wait(self.tile_full)
        q, dout = self.q_tile.at[part], self.dout_tile.at[part]

        def add_all(total):
            def step(done, _):
                block = needed.begin + done
                self.ring.await_full(done)
                slot = self.ring.slot(done)
                k, v = self.k_slots.at[slot], self.v_slots.at[slot]

                def gradients(products, dweights):
                    plgpu.wgmma(products, q, k.T)
                    plgpu.wgmma(dweights, dout, v.T)
                    product = plgpu.wgmma_accumulator_load(products, wait_n=1)
                    score = self.program.bound(product)
                    shape = score.shape
                    power = score * self.program.unit - scores.over_rows(lse, shape)
                    weights = self.program.with_slope(jnp.exp2(power), score)
                    weights = lax.cond(
                        needed.is_cut(block),
                        lambda: scores.mask_keys(weights, 0, low, high, block * TILE),
                        lambda: weights,
                    )
                    return weights * (dweights[...] - scores.over_rows(mean, shape))

                both = (plgpu.ACC((ROWS, TILE)),) * 2
                dproduct = pl.run_scoped(gradients, *both).astype(self.k.dtype)
                scores.add_product(total, dproduct, k, bridge)
                plgpu.wgmma_wait(0)
                self.ring.release(done)

            lax.fori_loop(0, needed.count, step, None)
            return total[...]

        dq = pl.run_scoped(add_all, plgpu.ACC((ROWS, self.q.shape[3])))
        q[...] = (dq * self.program.scale).astype(self.dq.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q, self.dq.at[row, queries, head])


def call(program: Program, keys, stats_bh2t, q_bthi, k_bugi, v_bugj, dout_bthj):
    """Run the kernel, and return the gradient of queries.

    TILE must divide the numbers of queries and keys.
    """
    (b, t, h, i), j, dtype = q_bthi.shape, v_bugj.shape[3], q_bthi.dtype
    tile_bytes = TILE * (i + j) * dtype.itemsize
    num_stages = scores.stages(tile_bytes, tile_bytes)
    scratch = ring.ring_barriers(num_stages, 2) | {
        "q_tile": ring.swizzled((TILE, i), dtype),
        "dout_tile": ring.swizzled((TILE, j), dtype),
        "k_slots": ring.swizzled((num_stages, TILE, i), dtype),
        "v_slots": ring.swizzled((num_stages, TILE, j), dtype),
        "tile_full": plgpu.Barrier(num_arrivals=2),
    }
    (dq_bthi,) = scores.launch(
        program,
        scores.body_with_ring(_Block, "k_slots"),
        "attention_dq",
        (b, t // TILE, h),
        ((q_bthi.shape, dtype),),
        scratch,
        ((WARPGROUPS, ROWS, TILE), dtype),
        (scores.key_table(keys), *keys, stats_bh2t, q_bthi, k_bugi, v_bugj, dout_bthj),
    )
    return dq_bthi
