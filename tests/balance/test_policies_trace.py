"""Test the policies on a recorded trace.

A plan is made from one sample and scored on the next, layer by layer. The tests use
tests/golden/routing.npz. docs/log.md has all of them, with p90 and the worst.
"""

import dataclasses

import numpy as np
import pytest

from moejax.balance.policies import POLICIES
from moejax.perf.cost_model import NOTES, tight
from moejax.perf.traffic import device_rows, max_over_mean, rows_by_slot
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from tests.support import cut_routing

NUM_LAYERS, NUM_DEVICES, NUM_EXPERTS = 6, 16, 32


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    """Loads as floats [pair, (planned from, scored on), l, w, e]."""
    return cut_routing.pairs()


def make_layout(name: str, slots: int, store=None) -> Layout:
    """Return a layout that a policy plans for, with its first store unless one is
    given."""
    policy = POLICIES[name]
    store = store or policy.stores[0]
    has_copies = store in ("transient", "resident")
    return Layout(
        NUM_EXPERTS,
        NUM_DEVICES,
        slots,
        8192,
        transport="ragged",
        store=store,
        split=policy.split,
        prefetch=policy.prefetch,
        offers_per_device=2 if has_copies else 0,
        copies_per_device=slots if has_copies else 0,
    )


def medians(name: str, slots: int, tokens, store=None) -> tuple[np.ndarray, np.ndarray]:
    """Return for each layer the medians of the devices' max/mean and of the modelled
    seconds at tight budgets."""
    layout = make_layout(name, slots, store)
    current = ExpertPlan.home_in(layout, NUM_LAYERS)
    ratio_nl, sec_nl = [], []
    for load_lwe, next_lwe in tokens:
        current = POLICIES[name].plan(load_lwe, layout, NOTES, current)
        current.validate(layout)
        scores = [
            _score(next_lwe[layer], current, layer, layout)
            for layer in range(NUM_LAYERS)
        ]
        ratio_nl.append([ratio for ratio, _ in scores])
        sec_nl.append([sec for _, sec in scores])
    return np.median(ratio_nl, axis=0), np.median(sec_nl, axis=0)


def _score(load_we, plan, layer, layout) -> tuple[float, float]:
    """Return max/mean and modelled seconds of one layer."""
    part = slice(layer, layer + 1)
    alone = dataclasses.replace(
        plan,
        slot_to_expert_lp=plan.slot_to_expert_lp[part],
        owned_le=plan.owned_le[part],
    )
    row_p = alone.slot_to_expert_lp[0]
    rows_wp = rows_by_slot(load_we, row_p, NUM_DEVICES, layout.split)
    sec = NOTES.layer_sec(load_we, row_p, tight(layout, alone))
    return max_over_mean(device_rows(rows_wp)), sec


def test_home_is_four_to_nine_times_the_mean(tokens):
    ratio_l, _ = medians("home", 2, tokens)
    assert ratio_l.min() > 4
    assert ratio_l.max() < 8.6


@pytest.mark.parametrize(
    ("name", "slots", "store", "limit"),
    [
        ("flexmoe", 3, "resident", 1.5),
        ("flexmoe", 3, "sharded", 1.5),
        ("eplb", 3, "sharded", 1.5),
        ("eplb", 4, "sharded", 1.2),
    ],
)
def test_replicas_even_out_every_layer(tokens, name, slots, store, limit):
    ratio_l, _ = medians(name, slots, tokens, store)
    assert ratio_l.max() <= limit, ratio_l


def test_shadows_even_out_every_layer_and_prophet_is_faster(tokens):
    fastermoe_l, fastermoe_sec_l = medians("fastermoe", 10, tokens)
    prophet_l, prophet_sec_l = medians("prophet", 10, tokens)
    assert fastermoe_l.max() <= 2.3, fastermoe_l
    assert prophet_l.max() <= 2.3, prophet_l
    assert (prophet_sec_l <= fastermoe_sec_l).all(), (prophet_sec_l, fastermoe_sec_l)


def test_a_permutation_cannot_split_a_hot_expert_but_never_harms(tokens):
    ratio_l, sec_l = medians("smartmoe", 2, tokens)
    home_l, home_sec_l = medians("home", 2, tokens)
    assert ratio_l.min() > 3
    assert (ratio_l <= home_l).all()
    assert (sec_l <= home_sec_l).all()
