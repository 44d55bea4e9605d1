"""Test the page of a run in a real browser: what it draws, and what it never does."""

import contextlib
import json

import numpy as np
import pytest

from tests.support.browser import open_browser, watched_page
from tests.support.metrics_lines import DECISIONS, balanced_lines
from tests.support.page_contract import decode
from tests.support.run_folders import finish, make_folder, table
from tools.run_page.page import as_json, render
from tools.run_page.read import read_run

pytestmark = [pytest.mark.browser, pytest.mark.slow]

SMALL_WINDOW = {"width": 900, "height": 500}
EVIL = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    '"onmouseover="alert(3)',
    "{{data}}",
    "</script><script>alert(5)</script>",
    "%{x}<b>bold</b>\u2028\udc80",
    "__proto__",
)
"""Names that would do something if they were read as HTML, as code or as a template."""


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@contextlib.contextmanager
def opened(browser, folder):
    """Open the page of a run, and hold it to this: it asks for nothing but itself, and
    complains of nothing."""
    path = folder / "report.html"
    path.write_text(render(read_run(folder)))
    options = {"wait_for": "html[data-ready]", "viewport": SMALL_WINDOW}
    with watched_page(browser, path.as_uri(), **options) as watched:
        yield watched.page
        assert watched.complaints == []
        assert watched.requests == [path.as_uri()]


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    """The page of a finished run, which tests share: it takes long to open."""
    lines = [json.loads(line) for line in balanced_lines(40, DECISIONS)]
    for line in lines:
        if "decision" in line:
            line["decision"] |= {"modelled_gain_sec": 0.01, "why": "it pays"}
        elif "loss" in line:
            line |= {
                "mfu": 0.4,
                "modelled_step_msec": 45.0,
                "router_entropy": [1, 2, 3],
            }
    folder = make_folder(tmp_path_factory.mktemp("runs") / "run", metrics=lines)
    finish(folder)
    with opened(browser, folder) as page:
        yield page


def draw_all(page) -> None:
    """Bring each figure into the window, and return when all are drawn."""
    for plot in page.locator(".plot").all():
        plot.evaluate("(e) => e.scrollIntoView({block: 'center'})")
        page.wait_for_selector(f"#{plot.get_attribute('id')}[data-drawn]")


def test_a_run_is_drawn_whole(page):
    draw_all(page)
    assert page.locator("main > section").count() == 12
    assert page.locator("nav a.without").all_inner_texts() == ["Memory"]
    assert page.locator(".plot").count() >= 10
    assert "finished after step 40" in page.locator("#overview").inner_text()


def test_the_slider_changes_the_map_of_loads_and_the_table(page):
    draw_all(page)
    page.locator("#load-map").get_by_role("button", name="Show numbers").click()
    maps = []
    for index in (3, 0):
        page.locator("#load-slider").fill(str(index))
        maps.append(page.evaluate("document.getElementById('load-map-plot').data[0].z"))
    assert maps[0] != maps[1]
    cells = page.locator("#load-map-table tbody tr").first.locator("td")
    found = [float(text) for text in cells.all_inner_texts()]
    np.testing.assert_allclose(found, 2.0 ** np.array(maps[1][0]), rtol=5e-3)
    assert page.locator(".marks span").count() == 2  # a swap and a relayout


def test_the_map_of_devices_shows_the_rows_of_a_layer_at_all_steps(page):
    draw_all(page)
    rows = json.loads(page.locator("#data").text_content())["rows"]
    sizes = len(rows["step"]), rows["num_layers"], rows["num_devices"]
    ratio_tlw = 2.0 ** ((decode(rows["log2_b64"], "u1", *sizes) - 128.0) / 32)
    plot = "document.getElementById('device-map-plot').data"
    for layer in (0, 2):
        page.locator("#device-layer").fill(str(layer))
        found_wt = page.evaluate(f"{plot}[0].customdata")
        np.testing.assert_allclose(found_wt, ratio_tlw[:, layer].T)
    assert page.evaluate(f"{plot}.length") == 3  # the map, swaps and relayouts


def test_a_layer_shows_its_devices_before_and_after_a_change(page):
    before_lws, after_lws = (table(seed).reshape(3, 4, 3).tolist() for seed in (0, 1))
    layer = page.locator("#layer")
    assert "After the relayout" in layer.inner_text()
    layer.get_by_role("button", name="Previous change").click()
    assert "Before the swap" in layer.inner_text()
    layer.get_by_role("button", name="Next change").click()
    for number in range(3):
        page.locator("#layer-number").fill(str(number))
        before, after = layer.locator("section.plan").all()
        # The swap before has put expert 1 into the first slot of layer 2, and expert 5
        # into the last slot of layer 0.
        before_ws, after_ws = before_lws[number], after_lws[number]
        if number == 0:
            before_ws[3][2] = 5
        if number == 2:
            before_ws[0][0] = 1
        for panel, slots_ws in ((before, before_ws), (after, after_ws)):
            rows = panel.locator("tbody tr")
            shown = [row.locator(".slot").all_inner_texts() for row in rows.all()]
            slots = [[int(text) if text else -1 for text in texts] for texts in shown]
            assert slots == slots_ws
        new = after.locator(".new").all_inner_texts()
        expected = [
            f"+{expert}"
            for held, slots in zip(before_ws, after_ws)
            for expert in slots
            if expert >= 0 and expert not in held
        ]
        assert new == expected


def test_decisions_are_filtered_by_kind(page):
    table = page.locator("#decisions tbody tr")
    assert table.count() == 4
    page.get_by_label("Kind").select_option("relayout")
    (text,) = table.all_inner_texts()
    assert "slots per device 2 → 3" in text
    page.get_by_label("Search").fill("top_k")
    assert page.locator("#configuration tbody tr").count() == 1


def test_an_empty_run_says_so_and_the_page_runs_its_own_scripts_alone(
    browser, tmp_path
):
    folder = make_folder(tmp_path / "run", metrics=[], goodput=[], plans=[])
    (folder / "report.html").write_text(render(read_run(folder)))
    with watched_page(
        browser, (folder / "report.html").as_uri(), wait_for="html[data-ready]"
    ) as watched:
        page = watched.page
        assert page.locator("nav a").all_inner_texts() == ["Overview", "Configuration"]
        assert watched.complaints == []
        page.evaluate(
            "() => { const s = document.createElement('script'); "
            "s.textContent = 'window.hit = 1'; document.body.append(s); }"
        )
        assert page.evaluate("window.hit") is None
        assert "Content Security Policy" in watched.complaints[0]


def test_names_are_never_read_as_html_or_code(browser, tmp_path):
    lines = [json.loads(line) for line in balanced_lines(40, DECISIONS)]
    for line in lines:
        if "decision" in line:
            change = {EVIL[2]: [EVIL[3], EVIL[1]]}
            line["decision"] |= {"why": EVIL[0], "changes": change}
    folder = make_folder(tmp_path / "<b>run", metrics=lines)
    config = "".join(f"Moe.top_k = {text.splitlines()[0]}\n" for text in EVIL[:5])
    (folder / "config.gin").write_text(config.replace("top_k", "a", 1))
    path = folder / "goodput.jsonl"
    path.write_text(path.read_text().replace('"useful"', json.dumps(EVIL[5])))
    plans = (folder / "plans.jsonl").read_text()
    plans = plans.replace('"all_to_all"', json.dumps(EVIL[6]))
    plans = plans.replace('"resident"', json.dumps(EVIL[0]))
    (folder / "plans.jsonl").write_text(plans)
    with (folder / "attempts.jsonl").open("a") as file:
        end = {"step": 40, "attempt": 2, "at": 1e9, "end": "failed", "why": EVIL[1]}
        file.write(json.dumps(end) + "\n")
    with opened(browser, folder) as page:
        draw_all(page)
        assert page.locator("script").count() == 4
        strange = "img, iframe, object, main a, [onerror], [onmouseover], main b"
        assert page.locator(strange).count() == 0
        assert page.locator(".plot a, .plot b, .plot [style*=bold]").count() == 0
        text = page.locator("main").inner_text()
        for name in (*EVIL[:5], EVIL[6]):
            assert name in text
        assert page.locator("h1").inner_text() == "<b>run"


def test_json_in_a_script_element_cannot_end_it():
    text = as_json({"a": "</script><!--&\u2028\udc80"})
    assert text.isascii()
    assert not set("<>&") & set(text)
