"""The limit and the budgets of split 'top_up', from a configuration."""

import dataclasses

import pytest

from moejax.config import Config, Dispatch
from moejax.plan.layout import Layout, Topology
from moejax.plan.layout_checks import MAX_SLACK
from tests.support.resolved import make_run


def make_layout(**fields) -> Layout:
    """Return the layout of 8 experts on 4 devices with these fields of Dispatch."""
    dispatch = Dispatch(split="top_up", **fields)
    return make_run(Config(mesh=Topology(expert=4), dispatch=dispatch)).layout


@pytest.mark.parametrize(
    ("above", "copies", "expected"),
    [
        (1.05, 1, (51, 1, 2)),
        (1.0, 3, (0, 3, 2)),  # a device owns 2 experts
        (1e9, 1, (MAX_SLACK, 1, 2)),
        (float("inf"), 1, (MAX_SLACK, 1, 2)),
    ],
)
def test_the_limit_is_whole_and_the_budgets_fit(above, copies, expected):
    layout = make_layout(top_up_above=above, top_up_copies=copies)
    sizes = layout.top_up_slack, layout.top_up_copies, layout.top_up_offers
    assert sizes == expected
    assert (layout.store, layout.slots_per_device) == ("owned", 2)
    assert layout.topped_up.slots_per_device == 2 + copies


def test_slots_for_copies_are_added_to_those_of_a_plan_and_of_a_domain():
    layout = make_layout(group="dc_expert", domain=(1, 2))
    exchanged = layout.exchanged.topped_up
    assert (layout.slots_per_device, exchanged.slots_per_device) == (2, 5)
    other = dataclasses.replace(layout, split="water_filling")
    assert other.topped_up == other


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"top_up_above": 0.9}, "Dispatch.top_up_above=0.9 must be at least 1"),
        ({"top_up_copies": 0}, "Dispatch.top_up_copies=0 must be at least 1"),
        ({"exchange": "capacity"}, "split='top_up' copies experts"),
    ],
)
def test_wrong_fields_are_refused_in_one_line(fields, words):
    with pytest.raises(ValueError, match=words) as error:
        make_layout(**fields)
    assert "\n" not in str(error.value)
