"""Objects show themselves in a notebook, and the views of layouts, decisions, costs and
traffic have the figures of what they draw."""

import dataclasses

import numpy as np
import pytest
from IPython.lib.pretty import pretty

from moejax import show
from moejax.balance.decision import Decision
from moejax.moe.types import RoutingStats
from moejax.perf import choose_domain, choose_schedule
from moejax.perf.cost_model import NOTES
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Topology
from tests.support import calibrations
from tests.support.shown_page import Page

LAYOUT = Layout(8, 4, 3, 16, store="sharded")
PLAN = ExpertPlan(np.array([[0, 1, 2, 2, 3, 0, 4, 5, -1, 6, 7, -1]], np.int32), 8)
LOAD_LWE = np.random.default_rng(0).poisson(30, (1, 4, 8))
COST = dataclasses.replace(NOTES, latency_sec=1e-5, compile_sec=8.0)
PARTS = COST.step_parts(LOAD_LWE, PLAN, LAYOUT)
SWAP = Decision(
    kind="swap", step=30, adopt_step=34, plan=PLAN, layout=LAYOUT, policy="eplb",
    device_max_over_mean_before=1.8, device_max_over_mean_after=1.1, num_moves=5,
    modelled_gain_sec=2e-3, modelled_cost_sec=0.5, why="saves more than it costs",
    digest_before="7c1f", layout_before=LAYOUT,
)  # fmt: skip
RELAYOUT = dataclasses.replace(
    SWAP, kind="relayout", layout_before=dataclasses.replace(LAYOUT, slots_per_device=2)
)
KEEP = dataclasses.replace(SWAP, kind="keep", why="no plan is cheaper", step=40)
SPEEDS = calibrations.ideal(dc=1e9, expert=1e10, tensor=1e10)
SPEEDS = dataclasses.replace(SPEEDS, mesh={"data": 1}, flops_per_sec=1e12)
SHAPE = choose_schedule.MicroBatchShape(
    tokens=96, d_model=64, d_expert=128, num_experts=8, top_k=2, buffer_factor=1.5,
    itemsize=4, tensor=2, expert_shards=2, sizes={"expert": 4},
)  # fmt: skip
SCHEDULE = choose_schedule.choose(SHAPE, SPEEDS)
TRAFFIC = calibrations.stream(1e6, 1e5, sizes={"dc": 2, "expert": 4})
DOMAIN = choose_domain.choose(TRAFFIC, SPEEDS)
STATS = RoutingStats(
    tokens_lwe=np.stack([LOAD_LWE[0], 0 * LOAD_LWE[0]]),
    rows_lw=np.array([[300, 200, 200, 260], [0, 0, 0, 0]]),
    rounds_l=np.array([2, 1]),
    dropped_l=np.array([0, 3]),
    fullest_pair_l=np.array([90, 0]),
    fullest_device_l=np.array([300, 0]),
    bound_l=np.array([240, 0]),
)
OBJECTS = {
    "plan": PLAN, "mesh": Topology(expert=8), "layout": LAYOUT, "decision": SWAP,
    "cost_model": COST, "step_parts": PARTS, "prediction": SCHEDULE.alternatives["s1"],
    "choice": DOMAIN, "stats": STATS,
}  # fmt: skip


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_shows_itself(name):
    """A notebook and a terminal of IPython show the view that moejax.show draws."""
    value, view = OBJECTS[name], getattr(show, name)(OBJECTS[name])
    assert value._repr_html_() == view._repr_html_()
    assert pretty(value) == str(view)
    assert Page(view).tags <= {"div", "b", "table", "tbody", "tr", "td", "th"}


def test_texts_of_plans_and_decisions_are_short():
    text = (
        f"ExpertPlan({PLAN.digest}: 8 experts in 12 slots, layers: 1, empty slots: 2)"
    )
    assert str(PLAN) == repr(PLAN) == text
    assert str(SWAP) == SWAP.line()


def table_of(view) -> dict[str, list[str]]:
    """Return the texts of a view's rows behind their first cells."""
    return {name: list(texts) for name, *texts in view.rows}


def test_a_layout_shows_what_was_set_and_what_follows():
    table = table_of(show.layout(LAYOUT))
    assert table["slots_per_device"] == ["3"]
    assert table["store"] == ["sharded"]
    assert table["slots of all devices"] == ["12"]
    assert "transport" not in table
    (note,) = show.layout(LAYOUT).notes
    assert "transport padded" in note
    names = {field.name for field in dataclasses.fields(Layout)}
    usual = {words.split()[0] for words in note.partition(": ")[2].split(", ")}
    assert names == usual | (set(table) & names)


def test_a_decision_shows_what_changes_and_its_price():
    table = table_of(show.decision(RELAYOUT))
    assert table["plan"] == ["7c1f", PLAN.digest]
    assert table["forecast device max/mean"] == ["1.80", "1.10"]
    assert table["slots_per_device"] == ["2", "3"]
    assert table["modelled gain, a step"] == ["2.0 ms"]
    assert table["steps that pay for it"] == ["250"], "0.5 s at 2 ms a step"
    assert table["adoption"] == ["step 34"]
    assert show.decision(RELAYOUT).notes == ("saves more than it costs",)


def test_a_decision_to_keep_has_no_price():
    assert set(table_of(show.decision(KEEP))) == {
        "", "plan", "forecast device max/mean",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("gain_sec", "text"), [(0.0, "none: nothing is saved"), (-1.0, "none"), (5.0, "1")]
)
def test_what_saves_nothing_is_never_paid_for(gain_sec, text):
    decision = dataclasses.replace(SWAP, modelled_gain_sec=gain_sec)
    assert table_of(show.decision(decision))["steps that pay for it"][0].startswith(
        text
    )


def test_shares_of_a_step_add_up():
    table = table_of(show.step_parts(PARTS))
    shares = [float(cells[1].rstrip("%")) for cells in list(table.values())[1:]]
    assert sum(shares) == pytest.approx(100, abs=2.5), "five shares, each rounded"
    nothing = dataclasses.replace(PARTS, experts=0, wait=0, wires=0, copies=0, blocks=0)
    assert "modelled time of a step: 0 ns" in str(show.step_parts(nothing))


def test_prices_are_sizes_over_speeds():
    """A row of 3072 bytes at 12.5 GB/s takes 246 ns; what is free has no row."""
    table = table_of(show.cost_model(COST))
    assert table["send a row to another device"] == ["3.07 kB", "246 ns"]
    assert table["begin a collective"] == ["", "10 us"]
    assert table["compile a step"] == ["", "8 s"]
    assert "rest of a block, forward" not in table
    assert "rest of a block, forward" in show.cost_model(COST).notes[0]


@pytest.mark.parametrize("choice", [SCHEDULE, DOMAIN], ids=["schedule", "domain"])
def test_candidates_stand_fastest_first(choice):
    view = show.choice(choice)
    _, *rows = view.rows
    over = [float(row[2]) for row in rows]
    assert over == sorted(over)
    assert over[0] == 1
    chosen = choice.value
    if isinstance(chosen, tuple):
        chosen = " x ".join(map(str, chosen))
    assert rows[0][0] == chosen
    assert view.title == f"chosen: {chosen}"
    assert len(rows) == len(choice.alternatives)


def test_a_prediction_lists_its_terms():
    prediction = SCHEDULE.alternatives["s1"]
    _, *rows = show.prediction(prediction).rows
    assert [row[0] for row in rows] == [term.name for term in prediction.terms]
    assert [int(row[1]) for row in rows] == [t.count for t in prediction.terms]


def test_pairs_count_what_leaves_a_device():
    sent_ww = np.array([[9, 2, 0], [1, 5, 4], [0, 3, 7]])
    table = table_of(show.pairs(sent_ww))
    assert table["device 0"] == ["9", "2", "0", "2"]
    assert table["device 1"] == ["1", "5", "4", "5"]
    assert table["received"] == ["1", "5", "4", "10"]
    assert "10 travel, fullest pair 4" in str(show.pairs(sent_ww))
    assert "2 kB" in str(show.pairs([[0, 2000], [0, 0]], "bytes"))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: show.pairs(np.zeros((2, 3))), r"are \[2, 3\]"),
        (lambda: show.pairs([]), r"are \[0\]"),
        (lambda: show.pairs(np.zeros((2, 2)), "miles"), "one of rows, bytes"),
    ],
)
def test_what_are_no_pairs_is_refused(call, words):
    with pytest.raises(ValueError, match=words) as error:
        call()
    assert "\n" not in str(error.value)


def test_statistics_are_over_the_mean_of_their_layer():
    _, first, second = show.stats(STATS).rows
    mean = STATS.rows_lw[0].mean()
    assert first[2:4] == (f"{300 / mean:.2f}", f"{240 / mean:.2f}")
    assert first[4:] == ("2", "90", "0", "0")
    assert second[4:] == ("1", "0", "3", "8"), "no token at all"
    many = dataclasses.replace(
        STATS,
        **{f.name: np.repeat(getattr(STATS, f.name), 40, axis=0)
           for f in dataclasses.fields(STATS)},
    )  # fmt: skip
    view = show.stats(many)
    assert len(view.rows) <= 1 + 24
    assert view.notes
