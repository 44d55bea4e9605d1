"""Views show the values of their arrays; they are small, escaped and readable."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from moejax import show
from moejax.axes import make_mesh
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from tests.support.close import assert_close
from tests.support.shown_page import Page

MAX_PAGE_BYTES = 250_000
# 4 experts in 6 slots; except in the last layer, expert 0 has two and slot 5 is empty.
TABLE_LP = [[0, 1, 0, 2, 3, -1], [0, 1, 0, 2, 3, -1], [3, 2, 1, 0, -1, -1]]
TOKENS_LE = np.array([[10, 1, 2, 3], [4, 4, 4, 4], [0, 0, 0, 0]])


def make_plan(table_lp=TABLE_LP, num_experts=4) -> ExpertPlan:
    return ExpertPlan(np.array(table_lp, np.int32), num_experts)


def large_views() -> dict:
    rng = np.random.default_rng(0)
    extra = rng.integers(-1, 256, (64, 256))
    every = np.tile(np.arange(256), (64, 1))
    plan = make_plan(rng.permuted(np.hstack([every, extra]), axis=1), 256)
    tokens_le = rng.integers(0, 10**6, (64, 256))
    return {
        "plan": show.plan(plan, 64),
        "loads": show.loads(tokens_le),
        "device_loads": show.device_loads(tokens_le, plan, 512),
        "mesh": show.mesh(Topology(8, 16, 64, 8)),
    }


def test_a_mesh_shows_each_device_at_its_coordinates():
    topology = Topology(data=2, expert=4)
    view = show.mesh(make_mesh(topology))
    assert view == show.mesh(topology)
    first, *rows = view.rows
    assert first == ("", *(f"expert {i}" for i in range(4)))
    for data, (name, *devices) in enumerate(rows):
        assert name == f"data {data}"
        assert [int(text) for text in devices] == [4 * data + i for i in range(4)]
    rows = show.mesh(Topology(2, 2, 2, 1)).rows
    assert [row[0] for row in rows[1:]] == [
        f"dc {dc}, data {data}" for dc in range(2) for data in range(2)
    ]
    assert [int(x) for row in rows[1:] for x in row[1:]] == list(range(8))


def test_a_plan_marks_replicas_and_empty_slots():
    plan = make_plan([[0, 1, 0, 2, 3, 1, -1, 0]])
    slots, row = show.plan(plan, 2).rows
    assert slots == ("device:slot", *(f"{p // 4}:{p}" for p in range(8)))
    assert row == ("layer 0", "0*", "1*", "0*", "2", "3", "1*", "-", "0*")


def test_layers_that_are_alike_share_a_row():
    rows = show.plan(make_plan()).rows
    assert [row[0] for row in rows] == ["slot", "layer 0-1", "layer 2"]


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
    evenly. Neither loses rows."""
    home = ExpertPlan.home(3, 4)
    assert_close(
        show.rows_per_device(TOKENS_LE, home, 2),
        TOKENS_LE.reshape(3, 2, 2).sum(axis=2).astype(float),
    )
    rows_lw = show.rows_per_device(TOKENS_LE, make_plan(), 2)
    assert_close(rows_lw, np.array([[11.0, 5.0], [8.0, 8.0], [0.0, 0.0]]))
    assert_close(rows_lw.sum(axis=1), TOKENS_LE.sum(axis=1).astype(float))
    rows = show.device_loads(TOKENS_LE, make_plan(), 2).rows
    assert rows[1] == ("layer 0", "1.38", "11", "5")


def test_pages_stay_small_whatever_they_show():
    for name, view in large_views().items():
        assert len(view._repr_html_()) < MAX_PAGE_BYTES, name
        assert max(map(len, repr(view).splitlines())) < 300, name
        assert view.notes, f"{name} says what it left out or grouped"


def test_grouped_loads_keep_the_fullest():
    tokens_le = np.ones((64, 256), int)
    tokens_le[37, 101] = 1000
    heads, *rows = show.loads(tokens_le).rows
    hot = [h for row in rows for h, x in zip(heads[2:], row[2:]) if float(x) > 1]
    assert hot == ["100-103"]


def test_html_is_plain_escaped_and_without_scripts():
    device = SimpleNamespace(id=0)
    hostile = SimpleNamespace(axis_names=("<script>&'\"",), devices=np.array([device]))
    view = show.mesh(hostile)
    views = [view, show.plan(make_plan(), 3), show.loads(TOKENS_LE)]
    for page in map(Page, views):
        assert page.tags <= {"div", "b", "table", "tbody", "tr", "td", "th"}
    assert Page(view).rows[0][1].text == "<script>&'\" 0"


def test_headings_say_what_they_head():
    """A screen reader finds the columns and the row of every cell."""
    slots, *layers = Page(show.plan(make_plan(), 2)).rows
    assert {c.scope for c in slots} == {"col"}
    assert [row[0].scope for row in layers] == ["row"] * 2
    for row in (slots, *layers):
        assert all(cell.text for cell in row if hasattr(cell, "scope"))


def test_a_terminal_gets_lines():
    assert repr(show.plan(make_plan(), 2)).splitlines()[1:] == [
        "device:slot 0:0 0:1 0:2 1:3 1:4 1:5",
        "  layer 0-1  0*   1  0*   2   3   -",
        "    layer 2   3   2   1   0   -   -",
        "* marks experts with several replicas",
    ]
    assert repr(show.mesh(Topology(data=2, expert=2))).splitlines() == [
        "mesh dc=1, data=2, expert=2, tensor=1: 4 devices",
        "       expert 0 expert 1",
        "data 0        0        1",
        "data 1        2        3",
    ]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: show.plan(make_plan(), 4), "6 slots do not divide"),
        (lambda: show.plan(make_plan(), 0), "num_devices=0"),
        (lambda: show.loads([[1, -1]]), "none negative"),
        (lambda: show.loads(np.zeros((2, 0))), r"\[2, 0\]"),
        (lambda: show.device_loads(TOKENS_LE[:2], make_plan(), 2), "same model"),
    ],
)
def test_complaints_are_one_line(call, words):
    with pytest.raises(ValueError, match=words) as error:
        call()
    assert "\n" not in str(error.value)


def test_views_need_no_jax():
    code = (
        "import sys; from moejax import show; "
        "from moejax.plan.expert_plan import ExpertPlan; "
        "ExpertPlan.home(1, 4)._repr_html_(); show.loads([[1, 2]])._repr_html_(); "
        "sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
