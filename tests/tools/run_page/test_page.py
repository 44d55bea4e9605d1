"""Test the page of a run in a real browser: what it draws, and what it never does."""

import contextlib

import numpy as np
import pytest

from tests.support.browser import open_browser, watched_page
from tests.support.run_page_data import (
    empty_run,
    huge_run,
    loads,
    page_data,
    run_data,
)  # fmt: skip
from tools.run_page.page import as_json, render

pytestmark = [pytest.mark.browser, pytest.mark.slow]

READY = "html[data-ready]"
SPARING = {"viewport": {"width": 900, "height": 500}, "reduced_motion": "reduce"}
"""A small window that does not glide: without a GPU Chromium draws slowly."""
RUN = run_data()
SCROLL = "(e) => e.scrollIntoView({behavior: 'instant', block: 'center'})"
EVIL = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    '"onmouseover="alert(3)',
    "{{data}}",
    "<a href='javascript:alert(4)'>go</a>",
    "</script><script>alert(5)</script>",
    "%{x}<b>bold</b>\u2028\udc80",
    "__proto__",
    "a_name_that_has_no_place_to_break_anywhere_at_all" * 3,
)
"""Names that would do something if they were read as HTML, as code or as a template."""


@pytest.fixture(scope="module")
def browser():
    with open_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def opened(browser, tmp_path_factory):
    """Return a context that shows data as a page."""
    path = tmp_path_factory.mktemp("pages") / "page.html"

    def open_data(data: dict):
        path.write_text(render(data))
        return watched_page(browser, path.as_uri(), wait_for=READY, **SPARING)

    return open_data


@contextlib.contextmanager
def quiet(opening):
    """Hold a page to this: it asks for nothing but itself, and complains of nothing."""
    with opening as watched:
        yield watched.page
        assert watched.complaints == []
        assert len(watched.requests) == 1
        assert watched.requests[0].startswith("file:")


@pytest.fixture(scope="module")
def finished(opened):
    """The page of a finished run. Tests share it, for it takes long to open."""
    with quiet(opened(page_data(RUN))) as page:
        yield page


def draw_all(page) -> None:
    """Bring each figure into the window, and return when all are drawn."""
    draw(
        page, *page.evaluate("[...document.querySelectorAll('.plot')].map((p) => p.id)")
    )


def draw(page, *names: str) -> None:
    """Bring figures into the window, and return when they are drawn."""
    for name in names:
        page.locator(f"#{name}").evaluate(SCROLL)
        page.wait_for_selector(f"#{name}[data-drawn]")


def test_a_run_is_drawn_whole(finished):
    assert finished.locator("main > section").count() == 12
    assert finished.locator(".missing").count() == 0
    draw_all(finished)
    assert finished.locator(".plot[data-drawn]").count() > 20
    finished.wait_for_selector("figure:last-child .plot[aria-label]")
    for plot in finished.locator(".plot").all():
        assert len(plot.get_attribute("aria-label")) > 25


def test_an_empty_run_says_so_and_the_page_runs_its_own_scripts_alone(opened):
    with opened(page_data(empty_run())) as watched:
        page = watched.page
        menu = page.locator("nav a").all_inner_texts()
        assert menu == ["Overview", "Configuration"]
        assert "no step was recorded yet" in page.locator("#overview").inner_text()
        assert "metrics.jsonl is missing" in page.locator(".notes").inner_text()
        assert watched.complaints == []
        page.evaluate(
            "() => { const s = document.createElement('script'); "
            "s.textContent = 'window.hit = 1'; document.body.append(s); }"
        )
        assert page.evaluate("window.hit") is None
        assert "Content Security Policy" in watched.complaints[0]


def test_a_section_without_data_says_how_to_get_it(opened):
    run = run_data()
    for name in ("load", "rows", "goodput"):
        run[name] = None
    run |= {"plans": [], "decisions": [], "bytes": [], "layer_curves": {}}
    nothing = {"unit": "", "label": "", "step": [1, 2], "mean": [None, None]}
    run["curves"] = {"loss": run["curves"]["loss"], "mfu": nothing}
    run["curves"]["loss"]["mean"][3] = None
    with quiet(opened(page_data(run))) as page:
        draw_all(page)
        missing = page.locator(".missing").all_inner_texts()
        assert len(missing) == 9
        assert any("Train.log_load_every_steps" in text for text in missing)
        assert any("plans.jsonl" in text for text in missing)


def test_the_slider_changes_the_map_of_loads_and_the_table(finished):
    slider = finished.locator("#load-slider")
    slider.scroll_into_view_if_needed()
    finished.wait_for_selector("#load-map-plot[data-drawn]")
    for index in (11, 4, 0):
        slider.fill(str(index))
        shown = finished.evaluate("document.getElementById('load-map-plot').data[0].z")
        expected = [_log2(bytes_e) for bytes_e in loads(RUN)[index]]
        np.testing.assert_allclose(shown, expected)
    finished.locator("#load-map").get_by_role("button", name="Show numbers").click()
    cells = finished.locator("#load-map-table tbody tr").first.locator("td")
    expected = 2.0 ** np.array(_log2(loads(RUN)[0, 0]))
    actual = [float(text) for text in cells.all_inner_texts()]
    np.testing.assert_allclose(actual, expected, rtol=5e-3)
    ticks = finished.locator(".marks span").count()
    assert ticks == 4  # three swaps and a relayout


def test_a_layer_shows_its_devices_before_and_after_a_change(finished):
    """The second swap of RUN is told by its changes alone, the third by its table."""
    layer = finished.locator("#layer")
    assert "After the relayout" in layer.inner_text()
    finished.locator("#layer-number").fill("1")
    for steps, device in (("72 to 95", 2), ("48 to 71", 1), ("24 to 47", 0)):
        layer.get_by_role("button", name="Previous change").click()
        before, after = layer.locator("section.plan").all()
        assert "Before the swap" in before.inner_text()
        assert f"steps {steps}" in after.inner_text()
        rows = after.locator("tbody tr")
        assert rows.count() == 8
        assert rows.first.locator(".slot").count() == 3
        assert after.locator(".slot.new").count() == 1
        assert rows.nth(device).locator(".slot.new").count() == 1


def test_a_median_of_an_even_number_is_the_mean_of_the_middle_two(finished):
    tile = finished.locator(".tiles > div", has_text="ms per step")
    shown = tile.locator("dd").evaluate("(e) => Number(e.firstChild.textContent)")
    msecs = RUN["curves"]["step_msec"]["mean"][-20:]
    assert shown == pytest.approx(np.median(msecs), abs=0.051)
    assert "median of the last 20" in tile.inner_text()


def test_decisions_are_filtered_by_kind(finished):
    table = finished.locator("#decisions tbody tr")
    assert table.count() == 6
    finished.get_by_label("Kind").select_option("relayout")
    adopted, first = table.all_inner_texts()
    assert "slots per device 3 → 4" in adopted
    assert "saves 12.3 ms" in adopted
    assert "planned anew at 92" in first
    finished.get_by_label("Search").fill("num_exp")
    assert finished.locator("#configuration tbody tr").count() == 1


@pytest.fixture(scope="module")
def evil(opened):
    """The page of a run whose texts are all taken from EVIL."""
    with quiet(opened(page_data(_evil_run()))) as page:
        yield page


def test_names_are_never_read_as_html_or_code(evil):
    draw_all(evil)
    assert evil.locator("script").count() == 4
    strange = "img, iframe, object, main a, [onerror], [onmouseover], main b"
    found = evil.locator(strange).all()
    assert [one.evaluate("(e) => e.outerHTML") for one in found] == []
    assert evil.locator(".plot a, .plot b, .plot [style*=bold]").count() == 0
    text = evil.locator("main").inner_text()
    for name in EVIL[:6]:
        assert name in text
    for plot in evil.locator(".plot").all()[:3]:
        plot.hover()


def test_json_in_a_script_element_cannot_end_it():
    text = as_json({"a": "</script><!--&\u2028\udc80"})
    assert text.isascii()
    assert not set("<>&") & set(text)


def test_a_huge_page_is_small_enough():
    assert len(render(page_data(huge_run()))) < 15e6


def _log2(bytes_e) -> list[float]:
    """Return the logarithms of loads as the page draws them, by the data's format."""
    return [-4.0 if byte == 0 else (int(byte) - 128) / 32 for byte in bytes_e]


def _evil_run() -> dict:
    """Return a run whose texts are all taken from EVIL."""
    names = EVIL
    run = run_data(num_points=30, num_steps=30)
    run |= dict(zip(("name", "path", "state_text"), names))
    run |= {"notes": list(EVIL), "config": [[text, text] for text in EVIL]}
    for plan in run["plans"]:
        plan |= {"digest": names[0], "store": names[1]}
    for decision in run["decisions"]:
        decision |= {"why": names[0], "policy": names[1]}
        decision["changes"] = {names[2]: [names[3], names[1]]}
    run["attempts"] = [
        {"step": 0, "at": 0, "device_kind": text, "end": text, "why": text}
        for text in EVIL
    ]
    run["bytes"] = [{"step": 1, "by": dict.fromkeys(EVIL, 1e6)}]
    run["goodput"]["share"] |= dict.fromkeys(EVIL, 0.02)
    return run
