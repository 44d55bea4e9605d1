"""Test that an open page follows its server: new data, no server, the server again."""

import contextlib
import http.server
import json
import threading
import time

import pytest

from tests.support.browser import open_browser, watched_page
from tests.support.run_page_data import page_data, run_data
from tools.run_page.page import render

pytestmark = pytest.mark.browser

FOLLOW_SEC = 2.0
"""Time in which an open page shows what its server has."""


class Served:
    """What a server of a test answers with."""

    def __init__(self, data: dict) -> None:
        self.data = data
        self.num_whole = self.num_unchanged = 0

    def answer(self, path: str, tag: str | None) -> tuple[int, str, str]:
        """Return status, tag and body."""
        now = f'"{self.data["runs"][0]["step"]}-{self.data["runs"][0]["state"]}"'
        if path == "/":
            return 200, now, render(self.data)
        if tag == now:
            self.num_unchanged += 1
            return 304, now, ""
        self.num_whole += 1
        return 200, now, json.dumps(self.data)


@contextlib.contextmanager
def serving(served: Served, port: int = 0):
    """Serve a page on loopback, and yield the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, tag, body = served.answer(self.path, self.headers["If-None-Match"])
            self.send_response(status)
            self.send_header("ETag", tag)
            self.send_header("Content-Type", "text/html" if self.path == "/" else "")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_) -> None:
            """Write no line for each request."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_open_page_follows_its_server():
    """The page shows new data within FOLLOW_SEC and keeps its zoom, the slider and the
    filter; without a server it says so, and with it again it goes on."""
    run = run_data(state="running", num_steps=60, num_points=60)
    served = Served(page_data(run, live=True))
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(server := serving(served))
        browser = stack.enter_context(open_browser())
        url = f"http://127.0.0.1:{port}/"
        opening = watched_page(browser, url, wait_for="html[data-ready]")
        watched = stack.enter_context(opening)
        page = watched.page
        page.locator("#load-slider").scroll_into_view_if_needed()
        page.wait_for_selector("#load-map-plot[data-drawn]")
        page.locator("#load-slider").fill("3")
        chart = "document.getElementById('loss-curve-plot')"
        page.wait_for_selector("#loss-curve-plot[data-drawn]")
        page.evaluate(f"{chart}.layout.xaxis.range")
        _zoom(page)
        zoomed = page.evaluate(f"{chart}.layout.xaxis.range")

        longer = run_data(state="running", num_steps=120, num_points=120)
        served.data = page_data(longer, live=True)
        begin = time.monotonic()
        tile = page.locator(".tiles dd").first
        page.wait_for_selector(".tiles dd:text-matches('^120')")
        assert time.monotonic() - begin < FOLLOW_SEC
        page.locator("#loss-curve-plot").scroll_into_view_if_needed()
        assert page.evaluate(f"{chart}.data[0].x.length") == 120
        assert page.evaluate(f"{chart}.layout.xaxis.range") == zoomed
        assert page.locator("#load-slider").input_value() == "3"
        assert tile.inner_text().startswith("120")
        assert watched.complaints == []

        server.__exit__(None, None, None)
        page.wait_for_selector("#age:text-matches('not reached')")
        assert "not reached" in page.locator("#said").inner_text()
        served.data["runs"][0] |= {"state": "finished", "step": 120}
        stack.enter_context(serving(served, port))
        page.wait_for_selector("#overview .pill.finished")
        page.wait_for_selector("#age:text-matches('^updated')")
        assert set(watched.requests) == {url, url + "data.json"}
        assert served.num_whole >= 2
        assert served.num_unchanged >= 1


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
