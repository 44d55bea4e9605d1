"""Views show the values of their arrays; they are small, escaped and readable."""

import colorsys
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from moejax import show
from moejax.axes import make_mesh
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from moejax.show import table
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
        "mesh": show.mesh(Topology(8, 16, 64, 8), along="tensor"),
    }


def test_a_mesh_shows_each_device_at_its_coordinates():
    topology = Topology(data=2, expert=4)
    view = show.mesh(make_mesh(topology))
    assert view == show.mesh(topology)
    first, *rows = Page(view).rows
    assert [c.text for c in first] == ["", *(f"expert {i}" for i in range(4))]
    for data, (name, *devices) in enumerate(rows):
        assert name.text == f"data {data}"
        assert [int(c.text) for c in devices] == [4 * data + i for i in range(4)]
        assert devices[1].title == f"dc=0, data={data}, expert=1, tensor=0"
    assert rows[0][0].background == rows[1][0].background != first[1].background


@pytest.mark.parametrize("along", ["dc", "data", "expert", "tensor"])
def test_one_color_is_one_group_along_the_axis(along):
    """Devices share a color iff their coordinates differ along the axis only."""
    view = show.mesh(Topology(2, 2, 4, 1), along=along)
    cells = [cell for row in Page(view).rows for cell in row if hasattr(cell, "title")]
    assert len(cells) == 16
    others = [re.sub(rf"\b{along}=\d+", "", cell.title) for cell in cells]
    groups, colors = set(others), {cell.background for cell in cells}
    pairs = set(zip(others, (cell.background for cell in cells)))
    assert len(groups) == len(colors) == len(pairs)


def test_a_plan_colors_replicas_and_hatches_empty_slots():
    plan = make_plan([[0, 1, 0, 2, 3, 1, -1, 0]])
    devices, slots, row = Page(show.plan(plan, 2)).rows
    assert [(c.text, int(c.colspan)) for c in devices[1:]] == [
        ("device 0", 4),
        ("device 1", 4),
    ]
    assert [c.text for c in slots[1:]] == [str(p) for p in range(8)]
    colors = [c.background for c in row[1:]]
    assert [c.text for c in row[1:]] == ["0", "1", "0", "2", "3", "1", "", "0"]
    assert colors[0] == colors[2] == colors[7] != ""
    assert colors[1] == colors[5] not in ("", colors[0])
    assert colors[3] == colors[4] == ""
    assert "repeating-linear-gradient" in colors[6]


def test_layers_that_are_alike_share_a_row():
    rows = Page(show.plan(make_plan())).rows
    assert [row[0].text for row in rows] == ["slot", "layer 0-1", "layer 2"]


def test_loads_are_over_the_mean_of_their_layer():
    """A layer without tokens counts as even."""
    _, *rows = Page(show.loads(TOKENS_LE)).rows
    for row, tokens_e in zip(rows, TOKENS_LE, strict=True):
        _, fullest, *cells = row
        ratio_e = tokens_e / tokens_e.mean() if tokens_e.any() else np.ones(4)
        assert [c.text for c in cells] == [f"{ratio:.1f}" for ratio in ratio_e]
        assert fullest.text == f"{ratio_e.max():.2f}"


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
    rows = Page(show.device_loads(TOKENS_LE, make_plan(), 2)).rows
    assert [c.text for c in rows[1]] == ["layer 0", "1.38", "11", "5"]


def test_pages_stay_small_whatever_they_show():
    for name, view in large_views().items():
        assert len(view._repr_html_()) < MAX_PAGE_BYTES, name
        assert max(map(len, repr(view).splitlines())) < 300, name
        assert view.notes, f"{name} says what it left out or grouped"


def test_grouped_loads_keep_the_fullest():
    tokens_le = np.ones((64, 256), int)
    tokens_le[37, 101] = 1000
    cells = [c for row in Page(show.loads(tokens_le)).rows[1:] for c in row[2:]]
    hot = [c for c in cells if float(c.text) > 1]
    assert [c.title for c in hot] == ["expert 100-103"]


def test_html_is_plain_escaped_and_without_scripts():
    device = SimpleNamespace(id=0)
    hostile = SimpleNamespace(axis_names=("<script>&'\"",), devices=np.array([device]))
    view = show.mesh(hostile)
    views = [view, show.plan(make_plan(), 3), show.loads(TOKENS_LE)]
    for page in map(Page, views):
        assert page.tags <= {"div", "b", "table", "tbody", "tr", "td", "th"}
    assert Page(view).rows[0][0].text == "<script>&'\" 0"


def test_headings_say_what_they_head():
    """A screen reader finds the columns and the row of every cell."""
    devices, slots, *layers = Page(show.plan(make_plan(), 2)).rows
    assert [c.scope for c in devices[1:]] == ["colgroup"] * 2
    assert {c.scope for c in slots} == {"col"}
    assert [row[0].scope for row in layers] == ["row"] * 2
    for row in (devices, slots, *layers):
        assert all(cell.text for cell in row if hasattr(cell, "scope"))


def test_text_reads_on_light_and_dark_pages():
    """The contrast of text with every color is at least 4.5 (WCAG 2, level AA)."""
    views = [*large_views().values(), show.mesh(Topology(2, 2, 2, 2), "dc")]
    fills = {cell.background for v in views for row in Page(v).rows for cell in row}
    fills |= {table.hue(index) for index in range(360)}
    for fill in sorted(f for f in fills if f and "gradient" not in f):
        rgb, strength = parse_color(fill)
        for page, text in ((1.0, 0.0), (0.12, 1.0)):
            mixed = [strength * c + (1 - strength) * page for c in rgb]
            assert contrast(mixed, [text] * 3) > 4.5, fill


def parse_color(css: str) -> tuple[list[float], float]:
    a, b, c, strength = (float(x.strip("%")) for x in css[5:-1].split(","))
    if css.startswith("rgba("):
        return [a / 255, b / 255, c / 255], strength
    return list(colorsys.hls_to_rgb(a / 360, c / 100, b / 100)), strength


def contrast(first: list[float], second: list[float]) -> float:
    def luminance(rgb):
        linear = [c / 12.92 if c <= 0.04 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(first), luminance(second)))
    return (light + 0.05) / (dark + 0.05)


def test_a_terminal_gets_lines():
    assert repr(show.plan(make_plan(), 2)).splitlines()[1:] == [
        "          device 0 device 1",
        "     slot    0 1 2    3 4 5",
        "layer 0-1    0 1 0    2 3 -",
        "  layer 2    3 2 1    0 - -",
        "a color marks the replicas of one expert",
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
        (lambda: show.mesh(Topology(), along="rows"), "use one of dc, data, expert"),
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
