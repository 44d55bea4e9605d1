"""Views have the figures of what they show, and are escaped and small HTML."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from IPython.lib.pretty import pretty

from moejax import Dispatch, Moe, compare_ways, show
from moejax.axes import make_mesh
from moejax.balance.decision import Decision
from moejax.moe.types import RoutingStats
from moejax.perf.cost_model import NOTES
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Topology
from tests.support import calibrations
from tests.support.close import assert_close
from tests.support.shown_page import Page

TAGS = {"div", "b", "table", "tbody", "tr", "td", "th"}
MAX_PAGE_BYTES = 250_000
# 4 experts in 6 slots; except in the last layer, expert 0 has two and slot 5 is empty.
TABLE_LP = [[0, 1, 0, 2, 3, -1], [0, 1, 0, 2, 3, -1], [3, 2, 1, 0, -1, -1]]
PLAN = ExpertPlan(np.array(TABLE_LP, np.int32), 4)
TOKENS_LE = np.array([[10, 1, 2, 3], [4, 4, 4, 4], [0, 0, 0, 0]])
LAYOUT = Layout(4, 2, 3, 16, store="sharded")
LOAD_LWE = np.random.default_rng(0).poisson(30, (3, 2, 4))
COST = dataclasses.replace(NOTES, latency_sec=1e-5, compile_sec=8.0)
PARTS = COST.step_parts(LOAD_LWE, PLAN, LAYOUT)
RELAYOUT = Decision(
    kind="relayout", step=30, adopt_step=34, plan=PLAN, layout=LAYOUT, policy="eplb",
    device_max_over_mean_before=1.8, device_max_over_mean_after=1.1, num_moves=5,
    modelled_gain_sec=2e-3, modelled_cost_sec=0.5, why="saves more than it costs",
    digest_before="7c1f", layout_before=dataclasses.replace(LAYOUT, slots_per_device=2),
)  # fmt: skip
SPEEDS = calibrations.ideal(dc=1e9, expert=1e10, tensor=1e10)
SPEEDS = dataclasses.replace(SPEEDS, flops_per_sec=1e12)
MESH = Topology(dc=2, expert=4, tensor=2)
WAYS = compare_ways(
    Moe(num_experts=8, top_k=2, d_expert=128), MESH, (8, 96, 64),
    dataclasses.replace(SPEEDS, mesh=dataclasses.asdict(MESH)),
    Dispatch(group="dc_expert", domain="auto"),
)  # fmt: skip
SCHEDULE, DOMAIN = WAYS["schedule"], WAYS["domain"]
STATS = RoutingStats(
    tokens_lwe=np.stack([LOAD_LWE[0], 0 * LOAD_LWE[0]]),
    rows_lw=np.array([[300, 200], [0, 0]]),
    rounds_l=np.array([2, 1]),
    dropped_l=np.array([0, 3]),
    fullest_pair_l=np.array([90, 0]),
    fullest_device_l=np.array([300, 0]),
    bound_l=np.array([260, 0]),
)
OBJECTS = {
    "plan": PLAN, "mesh": Topology(expert=8), "layout": LAYOUT, "decision": RELAYOUT,
    "cost_model": COST, "step_parts": PARTS, "prediction": SCHEDULE.alternatives["s1"],
    "choice": DOMAIN, "stats": STATS,
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_shows_itself(name):
    """A notebook and a terminal of IPython show the view that moejax.show draws."""
    value, view = OBJECTS[name], getattr(show, name)(OBJECTS[name])
    assert value._repr_html_() == view._repr_html_()
    assert pretty(value) == str(view)
    assert Page(view).tags <= TAGS


def test_names_are_escaped():
    device = SimpleNamespace(id=0)
    hostile = SimpleNamespace(axis_names=("<script>&'\"",), devices=np.array([device]))
    page = Page(show.mesh(hostile))
    assert page.tags <= TAGS
    assert page.rows[0][1].text == "<script>&'\" 0"


def table_of(view) -> dict[str, list[str]]:
    """Return the texts of a view's rows behind their first cells."""
    return {name: list(texts) for name, *texts in view.rows}


def test_a_mesh_shows_each_device_at_its_coordinates():
    topology = Topology(data=2, expert=4)
    assert show.mesh(make_mesh(topology)) == show.mesh(topology)
    for sizes, names in (
        ((1, 2, 4, 1), ["data 0", "data 1"]),
        (
            (2, 2, 2, 1),
            ["dc 0, data 0", "dc 0, data 1", "dc 1, data 0", "dc 1, data 1"],
        ),
    ):
        _, *rows = show.mesh(Topology(*sizes)).rows
        assert [row[0] for row in rows] == names
        assert [int(x) for row in rows for x in row[1:]] == list(range(8))


def test_a_plan_marks_replicas_and_empty_slots_and_layers_that_are_alike_share_a_row():
    slots, *layers = show.plan(PLAN, 2).rows
    assert slots == ("device:slot", *(f"{p // 3}:{p}" for p in range(6)))
    assert layers == [
        ("layer 0-1", "0*", "1", "0*", "2", "3", "-"),
        ("layer 2", "3", "2", "1", "0", "-", "-"),
    ]


def test_loads_are_over_the_mean_of_their_layer():
    """A layer without tokens counts as even."""
    _, *rows = show.loads(TOKENS_LE).rows
    for row, tokens_e in zip(rows, TOKENS_LE, strict=True):
        _, fullest, *cells = row
        ratio_e = tokens_e / tokens_e.mean() if tokens_e.any() else np.ones(4)
        assert cells == [f"{ratio:.1f}" for ratio in ratio_e]
        assert fullest == f"{ratio_e.max():.2f}"


def test_rows_per_device_are_those_of_its_slots():
    """At home, a device has the rows of its neighbouring experts. Replicas share rows
    evenly."""
    home = ExpertPlan.home(3, 4)
    home_lw = TOKENS_LE.reshape(3, 2, 2).sum(axis=2).astype(float)
    assert_close(show.rows_per_device(TOKENS_LE, home, 2), home_lw)
    rows_lw = show.rows_per_device(TOKENS_LE, PLAN, 2)
    assert_close(rows_lw, np.array([[11.0, 5.0], [8.0, 8.0], [0.0, 0.0]]))
    rows = show.device_loads(TOKENS_LE, PLAN, 2).rows
    assert rows[1] == ("layer 0", "1.38", "11", "5")


def test_large_pages_stay_small_and_keep_the_fullest():
    tokens_le = np.ones((64, 256), int)
    tokens_le[37, 101] = 1000
    heads, *rows = show.loads(tokens_le).rows
    hot = [h for row in rows for h, x in zip(heads[2:], row[2:]) if float(x) > 1]
    assert hot == ["100-103"]
    rng = np.random.default_rng(0)
    extra = rng.integers(-1, 256, (64, 256))
    table_lp = np.hstack([np.tile(np.arange(256), (64, 1)), extra])
    plan = ExpertPlan(rng.permuted(table_lp, axis=1).astype(np.int32), 256)
    many = dataclasses.replace(
        STATS, **{f.name: np.repeat(getattr(STATS, f.name), 40, axis=0)
                  for f in dataclasses.fields(STATS)},
    )  # fmt: skip
    for view in (
        show.plan(plan, 64), show.loads(tokens_le), show.stats(many),
        show.device_loads(tokens_le, plan, 512), show.mesh(Topology(8, 16, 64, 8)),
    ):  # fmt: skip
        assert len(view._repr_html_()) < MAX_PAGE_BYTES
        assert view.notes, "what was left out or grouped"


def test_a_decision_shows_what_changes_and_when_that_has_paid():
    table = table_of(show.decision(RELAYOUT))
    assert table["plan"] == ["7c1f", PLAN.digest]
    assert table["forecast device max/mean"] == ["1.80", "1.10"]
    assert table["slots_per_device"] == ["2", "3"]
    for gain_sec, text in ((2e-3, "250"), (5.0, "1"), (0.0, "none"), (-1.0, "none")):
        decision = dataclasses.replace(RELAYOUT, modelled_gain_sec=gain_sec)
        (steps,) = table_of(show.decision(decision))["steps that pay for it"]
        assert steps.startswith(text)
    keep = dataclasses.replace(RELAYOUT, kind="keep")
    assert "steps that pay for it" not in table_of(show.decision(keep))


def test_shares_of_a_step_add_up_and_prices_are_sizes_over_speeds():
    """A row of 3072 bytes at 12.5 GB/s takes 246 ns; what is free has no row."""
    _, *shares = table_of(show.step_parts(PARTS)).values()
    assert abs(sum(float(cells[1].rstrip("%")) for cells in shares) - 100) <= 2.5
    nothing = dataclasses.replace(PARTS, experts=0, wait=0, wires=0, copies=0, blocks=0)
    assert "0 ns" in str(show.step_parts(nothing))
    table = table_of(show.cost_model(COST))
    assert table["send a row to another device"] == ["3.07 kB", "246 ns"]
    assert "rest of a block, forward" not in table


def test_candidates_stand_fastest_first():
    _, *rows = show.choice(SCHEDULE).rows
    assert rows[0][0] == SCHEDULE.value
    over = [float(row[2]) for row in rows]
    assert len(over) == len(SCHEDULE.alternatives)
    assert over == sorted(over)
    assert over[0] == 1


def test_statistics_are_over_the_mean_of_their_layer():
    _, first, second = show.stats(STATS).rows
    assert first[2:4] == ("1.20", "1.04")
    assert first[4:] == ("2", "90", "0", "0")
    assert second[4:] == ("1", "0", "3", "4"), "no token at all"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: show.pairs(np.zeros((2, 3))), r"are \[2, 3\]"),
        (lambda: show.pairs([]), r"are \[0\]"),
        (lambda: show.pairs(np.zeros((2, 2)), "miles"), "one of rows, bytes"),
        (lambda: show.plan(PLAN, 4), "6 slots do not divide"),
        (lambda: show.plan(PLAN, 0), "num_devices=0"),
        (lambda: show.loads([[1, -1]]), "none negative"),
        (lambda: show.loads(np.zeros((2, 0))), r"\[2, 0\]"),
        (lambda: show.device_loads(TOKENS_LE[:2], PLAN, 2), "same model"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_one_line(call, words):
    with pytest.raises(ValueError, match=words) as error:
        call()
    assert "\n" not in str(error.value)
