"""Test that the index lists every page, and that links and paths in the docs exist."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
INDEX = ROOT / "docs" / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
READ = [
    *ROOT.glob("*.md"),
    *PAGES,
    *ROOT.glob("notebooks/*.md"),
    *ROOT.glob("moejax/**/*.md"),
]
FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^()\s]+)\)")
FILE = re.compile(r"`((?:configs|docs|moejax|notebooks|tests|tools|train)/[\w./-]+)`")
TO_BE_WRITTEN = {
    "moejax/balance/policies/hottest.py",  # examples of docs/extend.md
    "moejax/kernels/grouped_dot/next/",
    "moejax/kernels/tuned/",  # made by tools/tune_kernels.py on a GPU
}
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def prose(page: pathlib.Path) -> str:
    """Return a page's text without its blocks of code."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def links(page: pathlib.Path) -> list[tuple[pathlib.Path, str]]:
    """Return (file, anchor) of every link of a page to a file of the repository."""
    targets = [t for t in LINK.findall(prose(page)) if "://" not in t]
    parts = [target.partition("#") for target in targets]
    return [
        ((page.parent / path).resolve() if path else page, anchor)
        for path, _, anchor in parts
    ]


def anchors(page: pathlib.Path) -> set[str]:
    """Return the anchors that GitHub and MkDocs give to a page's headings."""
    titles = (re.sub(r"[^\w\- ]", "", h.lower()) for h in HEADING.findall(prose(page)))
    return {title.strip().replace(" ", "-") for title in titles}


def test_the_index_lists_every_page():
    listed = {INDEX, *(path for path, _ in links(INDEX))}
    missing = [str(p.relative_to(ROOT)) for p in PAGES if p not in listed]
    assert not missing, f"add a line to docs/README.md for each of {missing}"


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_files_of_a_page_exist(page):
    """Links resolve, and files that a page names exist, except in the log, which names
    files of earlier commits."""
    for path, anchor in links(page):
        assert path.exists(), f"{path} does not exist"
        if anchor:
            assert anchor in anchors(path), f"{path} has no heading #{anchor}"
    names = set(FILE.findall(prose(page))) - TO_BE_WRITTEN
    missing = sorted(name for name in names if not (ROOT / name).exists())
    assert not missing or page.name == "log.md"
