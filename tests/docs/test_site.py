"""Test the documentation's site: it is whole, its links hold, it loads nothing from
another host, and its search works on files."""

import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import yaml
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

import moejax
from moejax import config
from tests.support.browser import ARGUMENTS, CHROMIUM
from tests.support.site_pages import OUTSIDE, SitePage, read_site
from tools.website.program_help import programs

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = (
    "*.md",
    "docs/**/*.md",
    "notebooks/*.md",
    "notebooks/*.ipynb",
    "moejax/**/*.md",
)
IN_STYLES = re.compile(r"(?:url\(|@import)\s*['\"]?\s*(?:https?:)?//[^)'\"\s]+")
MARKDOWN = re.compile(r"^ *\* .*|^ *\|.*\|$|^ *```.*|\]\([^)]*\)", re.MULTILINE)
MAX_MIB = 30


def built(test: Callable) -> Callable:
    """Mark a test that needs the built site."""
    return pytest.mark.slow(pytest.mark.docs(test))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    """The site, built as `make docs` does, without a warning."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[pathlib.Path, SitePage]:
    """The pages of the site by file."""
    return read_site(site)


def pages_in_nav(entries: list) -> list[str]:
    """Return the paths of the pages that a part of the nav names."""
    found = []
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        found += pages_in_nav(value) if isinstance(value, list) else [value]
    return found


@pytest.mark.docs
def test_every_page_is_in_the_nav():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = pages_in_nav(yaml.unsafe_load(text)["nav"])
    files = {
        path.relative_to(ROOT).as_posix()
        for pattern in PAGES
        for path in ROOT.glob(pattern)
    }
    missing = sorted(files - set(named))
    assert not missing, f"add these pages to `nav` of mkdocs.yml: {missing}"
    assert len(named) == len(set(named)), "a page is in the nav twice"


@pytest.mark.parametrize(
    "page", sorted((ROOT / "docs").glob("[!R]*.md")), ids=lambda page: page.stem
)
def test_a_page_begins_with_its_question(page):
    _, first, *_ = page.read_text(encoding="utf-8").split("\n\n")
    assert "This page answers:" in first, (
        f"{page.name} must say in its first paragraph which question it answers: "
        "'This page answers: ...?'"
    )


@built
def test_no_page_loads_anything_from_another_host(site, pages):
    """Each page finds what it loads in the site."""
    for file, page in pages.items():
        outside = [url for url in page.loads if OUTSIDE.match(url)]
        assert not outside, f"{file} loads {outside}"
        assert not IN_STYLES.findall(page.text), file
        inside = (url for url in page.loads if not url.startswith("data:"))
        missing = [url for url in inside if not page.target(url)[0].is_file()]
        assert not missing, f"{file} lacks {missing}"
        assert "No description has been provided" not in page.text, f"{file}: no alt"
    for style in site.rglob("*.css"):
        assert not IN_STYLES.findall(style.read_text(encoding="utf-8")), style


@built
def test_links_lead_to_files_and_anchors_of_the_site(pages):
    """Also those that plugins made, which MkDocs does not check."""
    for file, page in pages.items():
        for url in page.links:
            if re.match(r"[a-z]+:", url):
                continue  # to another host
            target, anchor = page.target(url)
            assert target.is_file(), f"{file} links to {url}, which is not there"
            if anchor and target in pages:
                assert anchor in pages[target].ids, f"{file} links to {url}: no anchor"


@pytest.fixture(scope="module")
def index(site) -> list[dict[str, str]]:
    """The entries of the search: a part of a page each, with a title and a text."""
    text = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    return json.loads(text)["docs"]


@built
def test_the_search_knows_words_of_all_kinds_of_pages(index):
    texts: dict[str, str] = {}
    for entry in index:
        page = entry["location"].partition("#")[0]
        texts[page] = f"{texts.get(page, '')} {entry['title']} {entry['text']}"
    for page, word in (
        ("index.html", "simulated devices"),
        ("SECURITY.html", "loopback"),
        ("docs/balance.html", "relayout"),
        ("docs/decisions/0002-exact-rounds.html", "rounds"),
        ("notebooks/02_plans_and_swaps.html", "swap"),
        ("reference/library.html", "set_up"),
        ("reference/configuration.html", "relayout_lag_steps"),
        ("reference/programs.html", "--gin_param"),
    ):
        assert word in texts[page], f"{page} has no {word!r}"
    assert "font-face" not in "".join(texts.values())


@built
def test_the_reference_is_complete(site, pages, index):
    """It has every name of `moejax`, every field of the configuration, and every
    program. Examples in docstrings are code."""
    titles = {(entry["location"].partition("#")[0], entry["title"]) for entry in index}
    for name in moejax.__all__:
        assert ("reference/library.html", f"moejax.{name}") in titles
    for script in programs(ROOT):
        assert ("reference/programs.html", script) in titles
    reference = site / "reference"
    for name in config.__all__:
        for field in getattr(getattr(config, name), "__dataclass_fields__", {}):
            ids = pages[reference / "configuration.html"].ids
            assert f"moejax.config.{name}.{field}" in ids
    assert not any("<blockquote" in pages[p].text for p in reference.glob("*.html"))


@built
def test_no_markdown_is_left_in_a_page(pages):
    """Lists, tables, links and code became what they are, as they do on GitHub."""
    for file, page in pages.items():
        left = MARKDOWN.findall(page.prose)
        assert not left, (
            f"{file} has {left[:3]}: lists and tables need a blank line before them, "
            "and four spaces within an item of a list"
        )


@built
def test_the_site_is_small(site):
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    assert size < MAX_MIB * 2**20, f"{size / 2**20:.1f} MiB"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        arguments = {"executable_path": CHROMIUM, "args": ARGUMENTS}
        browser = playwright.chromium.launch(**arguments)
        yield browser
        browser.close()


@pytest.fixture
def page(browser) -> Iterator[Page]:
    """A page that must log no error and ask no other host for anything."""
    page, faults = browser.new_page(viewport={"width": 1280, "height": 900}), []

    def see_line(line: ConsoleMessage) -> None:
        if line.type in ("error", "warning"):
            faults.append(line.text)

    def see_request(request: Request) -> None:
        if not request.url.startswith(("file:", "data:", "about:", "blob:")):
            faults.append(request.url)

    page.on("console", see_line)
    page.on("request", see_request)
    page.on("pageerror", lambda error: faults.append(str(error)))
    yield page
    page.close()
    assert not faults, faults


@built
@pytest.mark.browser
def test_the_search_works_on_files(site, page):
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__input").press_sequentially("relayout")
    results = page.locator(".md-search-result__link", has_text="relayout")
    results.first.wait_for()
    assert results.count() >= 3
    results.first.click()
    page.wait_for_url(re.compile(r"\?h=relayout"))
    marks = page.locator("mark", has_text=re.compile("relayout", re.IGNORECASE))
    marks.first.wait_for()


@built
@pytest.mark.browser
@pytest.mark.parametrize(
    "name",
    [
        "index.html",
        "docs/tutorial.html",
        "docs/testbed.html",
        "reference/configuration.html",
        "notebooks/02_plans_and_swaps.html",
    ],
)
def test_no_page_is_wider_than_a_phone(site, page, name):
    """What is wide scrolls in a box of its own."""
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto((site / name).as_uri())
    page.evaluate("window.scrollTo(10000, 0)")
    assert page.evaluate("[window.scrollX, document.body.scrollWidth]") == [0, 360]
