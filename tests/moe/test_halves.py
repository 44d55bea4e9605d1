"""An MoE layer whose tokens are exchanged in two independent halves (Layout.halves) is
the whole layer applied to each half. test_equals_reference.py compares it with the
reference."""

import dataclasses

import jax
import numpy as np
import pytest

from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from tests.support.close import assert_close
from tests.support.layers import (
    EXPERTS,
    MESHES,
    SEQ,
    WIDTH,
    layer_layout,
    make_layer,
    on_mesh,
    zipf_choices,
)
from tests.support.random_plans import random_plan

BATCH = 8
"""One sequence for each device."""


@pytest.mark.slow
def test_a_layer_in_halves_is_the_layer_of_each_half():
    """Each half has its own manifest, and drops rows by its own buffer. Statistics are
    sums over halves, or the larger of two maxima."""
    topology, slots = MESHES["expert8"], 2 * EXPERTS // 8
    whole = layer_layout(
        topology, "transient", exchange="capacity", slots_per_device=slots,
        buffer_factor=1.0, counts_together=True,
    )  # fmt: skip
    plan = random_plan(np.random.default_rng(0), whole, 1)
    in_halves = make_layer(topology, dataclasses.replace(whole, halves=True))
    of_half = make_layer(topology, whole)
    x_btd = np.random.default_rng(0).normal(size=(BATCH, SEQ, WIDTH))
    x_btd = x_btd.astype(np.float32)
    for seed in range(2):
        forced_btk = zipf_choices(seed, 1.2)[:BATCH]
        y_btd, sums = forward(in_halves, plan, x_btd, forced_btk)
        # The halves of each device's tokens, which are one sequence.
        pairs = zip(np.split(x_btd, 2, axis=1), np.split(forced_btk, 2, axis=1))
        halves = [forward(of_half, plan, *pair) for pair in pairs]
        assert_close(y_btd, np.concatenate([y for y, _ in halves], axis=1))
        one, two = (vars(of_one) for _, of_one in halves)
        for name, value in vars(sums).items():
            if name == "sequence":  # a half of a sequence has a balance of its own
                continue
            if name in ("rows_h", "bound_h"):
                expected = np.concatenate([one[name], two[name]], axis=1)
            else:
                join = np.maximum if name in ("rounds", "fullest_pair") else np.add
                expected = join(one[name], two[name])
            assert_close(value, expected)
        assert sums.dropped.sum() > 0
        assert int(sums.rows_h.sum() + sums.dropped.sum()) == forced_btk.size


def forward(layer, plan: ExpertPlan, *args):
    """Return the output and the sums of a layer."""
    return jax.device_get(layer.forward(*on_mesh(layer, plan, args)))


def test_the_buffer_of_a_half_has_half_the_rows():
    fields = {"num_experts": EXPERTS, "num_devices": 8, "assignments_per_device": 512}
    whole, half = (Layout.home(**fields, halves=halves) for halves in (False, True))
    assert (whole.num_exchanges, half.num_exchanges) == (1, 2)
    assert 2 * half.rows_per_peer == whole.rows_per_peer
    assert 2 * half.rows_per_device == whole.rows_per_device
