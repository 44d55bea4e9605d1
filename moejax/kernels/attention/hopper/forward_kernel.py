"""The forward pass of attention as one kernel for Hopper GPUs.

    warpgroup 2   TMA: copies the tile's queries, then keys and values, block by block
    warpgroup 0   64 queries: scores by WGMMA, softmax in registers, output by WGMMA
    warpgroup 1   64 queries more

Keys and values have a ring each, because the slot of the keys is free as soon as the
scores are there. The maximum, the sum and the output are kept in registers while the
blocks go by (Milakov and Gimelshein 2018, arXiv 1805.02867; FlashAttention-3, Shah et
al. 2024, arXiv 2407.08608).
"""

import dataclasses
import math
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
    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    q_tile: Any
    """Queries of the tile, in shared memory."""
    k_slots: Any
    v_slots: Any
    out_tile: Any
    """Output on its way out, by warpgroup, in shared memory."""
    lse_tile: Any
    """Logarithms of sums on their way out, by warpgroup, in shared memory."""
    q_full: Any
    """Barrier: the queries have arrived."""
    keys: ring.Ring
    values: ring.Ring
    bridge: Any

    def copy_in(self):
        """Copy the tile's queries, and its blocks of keys and values."""
        row, tile, head = scores.query_tile()
        own = lax.div(head, self.program.heads)
        needed = scores.needed(self.table, row, tile)
        q = self.q.at[row, scores.tile_rows(tile), head]
        plgpu.copy_gmem_to_smem(q, self.q_tile, self.q_full)

        def step(done, _):
            at = row, scores.tile_rows(needed.begin + done), own
            for fill, array, slots in (
                (self.keys, self.k, self.k_slots),
                (self.values, self.v, self.v_slots),
            ):
                fill.await_empty(done)
                slot = fill.slot(done)
                full = fill.full.at[slot]
                plgpu.copy_gmem_to_smem(array.at[at], slots.at[slot], full)

        lax.fori_loop(0, needed.count, step, None)
        self.keys.drain(needed.count)
        self.values.drain(needed.count)

    def compute(self, warpgroup):
        """Compute the output of this warpgroup's queries, and store it."""
        row, tile, _ = scores.query_tile()
        own = scores.own_rows(tile, warpgroup)
        low, high = (scores.by_row(end.at[row, own]) for end in (self.low, self.high))
        needed = scores.needed(self.table, row, tile)
        plgpu.barrier_wait(self.q_full)
        q = self.q_tile.at[scores.own_rows(0, warpgroup)]
        bridge = None if self.bridge is None else self.bridge.at[warpgroup]

        def step(done, carry):
            top, total, out = carry
            block = needed.begin + done
            score = self._scores(q, done)
            score = lax.cond(
                needed.is_cut(block),
                lambda: scores.mask_keys(score, scores.FLOOR, low, high, block * TILE),
                lambda: score,
            )
            unit = self.program.unit
            new = jnp.maximum(top, jnp.max(score, axis=1) * unit)
            weights = jnp.exp2(score * unit - scores.over_rows(new, score.shape))
            fade = jnp.exp2(top - new)
            total = total * fade + jnp.sum(weights, axis=1)
            more = self._mean(weights.astype(self.v.dtype), done, bridge)
            return new, total, out * scores.over_rows(fade, out.shape) + more

        first = _filled((ROWS,), scores.FLOOR / 2 * self.program.unit)
        empty = first, _filled((ROWS,), 0), _filled((ROWS, self.v.shape[3]), 0)
        result = lax.fori_loop(0, needed.count, step, empty)
        self._store(warpgroup, own, *result)

    def _scores(self, q, done):
        """Return the scores of a block, as Program.bound does."""
        self.keys.await_full(done)
        slot = self.keys.slot(done)

        def multiply(total):
            plgpu.wgmma(total, q, self.k_slots.at[slot].T)
            return total[...]

        product = pl.run_scoped(multiply, plgpu.ACC((ROWS, TILE)))
        self.keys.release(done)
        return self.program.bound(product)

    def _mean(self, weights, done, bridge):
        """Return the sum of a block's values with these weights."""
        self.values.await_full(done)
        slot = self.values.slot(done)

        def multiply(total):
            scores.add_product(total, weights, self.v_slots.at[slot], bridge)
            return total[...]

        more = pl.run_scoped(multiply, plgpu.ACC((ROWS, self.v.shape[3])))
        self.values.release(done)
        return more

    def _store(self, warpgroup, own, top, total, out):
        """Store the output and the logarithm of the sum."""
        row, _, head = scores.query_tile()
        is_any = total > 0
        total = jnp.where(is_any, total, jnp.ones_like(total))
        lse = top * math.log(2) + jnp.log(total)
        out_slot, lse_slot = self.out_tile.at[warpgroup], self.lse_tile.at[warpgroup]
        lse_slot[...] = jnp.where(is_any, lse, jnp.full_like(lse, -jnp.inf))
        out *= scores.over_rows(1 / total, out.shape)
        out_slot[...] = out.astype(self.out.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_slot, self.out.at[row, own, head])
        plgpu.copy_smem_to_gmem(lse_slot, self.lse.at[row, head, own])


def _filled(shape: tuple[int, ...], value: float):
    """Return an array in registers for the rows of scores."""
    layout = plgpu.Layout.WGMMA
    layout = layout.reduce(1) if len(shape) == 1 else layout
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def _kernel(program: Program, *arrays, bridge=None, **scratch):
    """Run one block: the body of the kernel."""
    rings = {}
    for name, slots in (("keys", "k"), ("values", "v")):
        full, empty = (scratch.pop(f"{slots}_{end}") for end in ("full", "empty"))
        rings[name] = ring.Ring(full, empty, scratch[f"{slots}_slots"].shape[0])
    block = _Block(program, *arrays, **scratch, **rings, bridge=bridge)
    scores.run_roles(block.copy_in, block.compute)


def call(program: Program, keys, q_bthi, k_bugi, v_bugj):
    """Run the kernel, and return the output and the logarithm of the softmax's sum.

    TILE must divide the numbers of queries and keys.
    """
    (b, t, h, i), j, dtype = q_bthi.shape, v_bugj.shape[3], q_bthi.dtype
    item = dtype.itemsize
    num_stages = scores.stages(TILE * (i + j) * item, TILE * (i + j) * item)
    barriers = {
        f"{slots}_{end}": barrier
        for slots in "kv"
        for end, barrier in ring.ring_barriers(num_stages, 1).items()
    }
    scratch = barriers | {
        "q_tile": ring.swizzled((TILE, i), dtype),
        "k_slots": ring.swizzled((num_stages, TILE, i), dtype),
        "v_slots": ring.swizzled((num_stages, TILE, j), dtype),
        "out_tile": ring.swizzled((WARPGROUPS, ROWS, j), dtype),
        "lse_tile": plgpu.SMEM((WARPGROUPS, ROWS), jnp.float32),
        "q_full": plgpu.Barrier(),
    }
    return scores.launch(
        program,
        _kernel,
        "attention_forward",
        (b, t // TILE, h),
        (((b, t, h, j), dtype), ((b, h, t), jnp.float32)),
        scratch,
        ((WARPGROUPS, ROWS, TILE), dtype),
        (scores.key_table(keys), *keys, q_bthi, k_bugi, v_bugj),
    )
