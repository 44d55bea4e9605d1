"""Test the documentation's site: it builds without a warning, loads nothing from
another host, has every field that gin binds, and its search works on files."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.support.browser import open_browser
from train.config.names import KINDS

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUTSIDE = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*"
    r"|<link\b[^>]*\brel=[\"']?stylesheet[^>]*\bhref=[\"']?(?:https?:)?//[^>]*"
    r"|(?:url\(|@import)\s*['\"]?\s*(?:https?:)?//[^)'\"\s]+"
)
"""Elements and styles that load something from another host."""

pytestmark = [pytest.mark.docs, pytest.mark.slow, pytest.mark.long]


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
    return folder


def test_no_page_loads_anything_from_another_host(site):
    for path in (*site.rglob("*.html"), *site.rglob("*.css")):
        outside = OUTSIDE.findall(path.read_text(encoding="utf-8"))
        assert not outside, f"{path} loads {outside}"


def test_the_reference_has_every_field_of_the_configuration(site):
    page = (site / "reference" / "configuration.html").read_text(encoding="utf-8")
    fields = [name for name in KINDS if not name.startswith("Mesh.")]
    missing = [name for name in fields if f'id="moejax.config.{name}"' not in page]
    assert not missing


@pytest.mark.browser
def test_the_search_works_on_files(site):
    with open_browser() as browser:
        page = browser.new_page()
        page.goto((site / "index.html").as_uri())
        page.locator(".md-search__input").press_sequentially("relayout")
        results = page.locator(".md-search-result__link", has_text="relayout")
        results.first.click()
        page.wait_for_url(re.compile(r"\?h=relayout"))
