"""Build counts of rows and slots of plans, and compute how a split divides the rows
over the slots."""

import functools

import jax
import numpy as np

from moejax.moe.split.divide import SPLITS
from moejax.moe.types import Placement
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout

W, E = 4, 8
MANY = 2**24
"""Largest number of rows of one source and expert in these tests. Sums of it over all
sources and experts fit in int32."""


def make_layout(slots: int, split: str) -> Layout:
    """Return a layout of W devices with this many slots each."""
    return Layout(E, W, slots, 8, store="sharded", split=split)


@functools.cache
def compiled(layout: Layout):
    """Return the layout's split, jitted."""
    return jax.jit(functools.partial(SPLITS[layout.split], layout=layout))


def quotas(counts_we: np.ndarray, row_p: np.ndarray, split: str) -> np.ndarray:
    """Return the rows from each source to each slot [w, p], as the device function
    computes them."""
    layout = make_layout(len(row_p) // W, split)
    placement = Placement.from_plan(ExpertPlan(row_p[None], E).validate(layout), layout)
    placement = placement.layer(0)
    quota_wq = np.asarray(compiled(layout)(counts_we, placement).quota_wq)
    assert quota_wq.dtype == np.int32
    quota_wp = np.empty_like(quota_wq)
    quota_wp[:, placement.slot_lq] = quota_wq
    return quota_wp


def make_slots(seed: int, slots: int = 5) -> np.ndarray:
    """Return the slots of a plan with each expert at least once, in random order.

    Two replicas may share a device, and slots may be empty.
    """
    rng = np.random.default_rng(seed)
    rest = rng.choice([-1, -1, 0, 0, 1, 5], W * slots - E)
    return rng.permutation(np.r_[np.arange(E), rest]).astype(np.int32)


def make_counts(seed: int) -> np.ndarray:
    """Return the rows of each source for each expert: zero, few or many."""
    rng = np.random.default_rng(seed)
    return rng.choice([0, 0, 1, 2, 3, 17, MANY - 1, MANY], (W, E)).astype(np.int32)


CASES = [(make_slots(seed), make_counts(seed)) for seed in range(20)]
