"""Open pages in a headless Chromium, as Debian's package `chromium` installs it."""

import contextlib
import dataclasses
import shutil
from collections.abc import Iterator

CHROMIUM = shutil.which("chromium")
"""Path of the browser's program; None where there is none."""
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
"""Arguments with which Chromium starts as root and asks no host for anything itself."""


def missing_chromium() -> str:
    """Return why pages cannot be opened here; empty if they can."""
    return "" if CHROMIUM else "no chromium on the PATH: apt-get install chromium"


@contextlib.contextmanager
def open_browser() -> Iterator:
    """Start a browser of playwright, and close it at the end."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@dataclasses.dataclass
class WatchedPage:
    """A page of a browser, and all that it said and asked for."""

    page: object
    complaints: list[str] = dataclasses.field(default_factory=list)
    """Messages of the console, errors that nothing caught, and dialogs."""
    requests: list[str] = dataclasses.field(default_factory=list)
    """Addresses that were asked for, but those that hold their own data."""


@contextlib.contextmanager
def watched_page(
    browser, url: str, *, wait_for: str, **options
) -> Iterator[WatchedPage]:
    """Open `url` in a context of its own, with playwright's `options` of contexts.

    It yields when the page has an element for the selector `wait_for`.
    """
    context = browser.new_context(**options)
    watched = WatchedPage(page := context.new_page())
    page.on("console", lambda message: watched.complaints.append(message.text))
    page.on("pageerror", lambda error: watched.complaints.append(str(error)))
    page.on("dialog", lambda dialog: _dismiss(dialog, watched))
    page.on("request", lambda request: _note(request, watched))
    try:
        page.goto(url)
        page.wait_for_selector(wait_for)
        yield watched
    finally:
        context.close()


def _dismiss(dialog, watched: WatchedPage) -> None:
    watched.complaints.append(f"dialog: {dialog.message}")
    dialog.dismiss()


def _note(request, watched: WatchedPage) -> None:
    if not request.url.startswith(("data:", "blob:")):
        watched.requests.append(request.url)
