"""Test that an open page follows a run: new steps, no server, the server again."""

import contextlib
import itertools
import json
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.support.browser import open_browser, watched_page
from tests.support.metrics_lines import balanced_lines, decided, write_run

pytestmark = [pytest.mark.browser, pytest.mark.slow]

FOLLOW_SEC = 2.0
"""Time in which an open page shows what the run has written. The machine may be busy,
so the fastest of several times counts."""
CHART = "document.getElementById('loss-curve-plot')"
LINES = balanced_lines(120, [decided("swap", 10, 14)])
STEPS = [json.loads(line)["step"] for line in LINES]
CUTS = [STEPS.index(step) for step in (61, 81, 111)]
"""Lines at which the run goes on while its page is open."""


@contextlib.contextmanager
def serving(repo, folder, port: int = 0):
    """Start tools/report.py --serve, yield the address, and kill it."""
    command = [sys.executable, "tools/report.py", folder, "--serve", "--json"]
    process = subprocess.Popen(
        [*command, f"--port={port}"], cwd=repo, stdout=subprocess.PIPE, text=True
    )
    try:
        line = next(line for line in process.stdout if line.startswith("{"))
        yield json.loads(line)["address"]
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def test_an_open_page_follows_a_run(repo, tmp_path):
    """The page shows new steps within FOLLOW_SEC, and keeps its zoom and its slider.
    Without a server it says so, and goes on when there is one again."""
    folder = write_run(tmp_path / "run", LINES[: CUTS[0]])
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(server := serving(repo, folder))
        browser = stack.enter_context(open_browser())
        opening = watched_page(browser, url, wait_for="#loss-curve-plot[data-drawn]")
        watched = stack.enter_context(opening)
        page = watched.page
        assert page.locator(".pill").first.inner_text().endswith("running")
        text = page.locator("#overview").inner_text()
        assert re.search(r"Last step \d+ s ago\.", text)
        page.locator("#load-slider").fill("3")
        _zoom(page)
        zoomed = page.evaluate(f"{CHART}.layout.xaxis.range")

        secs = []
        for first, end in itertools.pairwise([*CUTS, len(LINES)]):
            _append(folder, LINES[first:end])
            begin = time.monotonic()
            page.wait_for_selector(f".tiles dd:text-matches('^{STEPS[end - 1]}')")
            secs.append(time.monotonic() - begin)
        assert min(secs) < FOLLOW_SEC, secs
        page.wait_for_selector("#loss-curve-plot[data-drawn]")
        assert page.evaluate(f"{CHART}.data[0].x.length") == 120
        assert page.evaluate(f"{CHART}.layout.xaxis.range") == zoomed
        assert page.locator("#load-slider").input_value() == "3"
        assert watched.complaints == []

        server.__exit__(None, None, None)
        page.wait_for_selector("#age:text-matches('not reached')")
        assert "not reached" in page.locator("#said").inner_text()
        _append(folder, [json.dumps(json.loads(LINES[-2]) | {"step": 121})])
        port = int(url.rstrip("/").rpartition(":")[2])
        assert stack.enter_context(serving(repo, folder, port)) == url
        page.wait_for_selector(".tiles dd:text-matches('^121')")
        page.wait_for_selector("#age:text-matches('^updated')")
        assert set(watched.requests) == {url, url + "data.json"}


def _append(folder, lines: list[str]) -> None:
    """Write lines to the metrics of a run, as the run does."""
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(line + "\n" for line in lines)


def _zoom(page) -> None:
    """Zoom into the curve of losses with the mouse."""
    page.locator("#loss-curve-plot").evaluate(
        "(plot) => plot.scrollIntoView({behavior: 'instant', block: 'center'})"
    )
    box = page.locator("#loss-curve-plot .nsewdrag").first.bounding_box()
    y = box["y"] + 0.5 * box["height"]
    page.mouse.move(box["x"] + 0.3 * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], y, steps=4)
    page.mouse.up()
