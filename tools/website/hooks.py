"""Give the site the tree of the repository, and a reference made from the code.

MkDocs calls these functions by their names (`hooks` in mkdocs.yml). A page has the same
path on the site and in the repository, so its links work in both, and MkDocs checks
them. The home page is README.md.
"""

import html
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.website.reference import reference_pages

ROOT = pathlib.Path(__file__).resolve().parents[2]
WEBSITE = ROOT / "tools" / "website"
PAGES = ("*.md", "docs/**/*", "notebooks/*.md", "notebooks/*.ipynb", "moejax/**/*.md")
"""Patterns of the repository's files that the site has, beside those that they link."""
LINK = re.compile(r"\]\(([^()\s:#]+)\)")
MATHJAX = re.compile(r"<script data-mkdocs-jupyter-mathjax=.*?</script>\n?", re.DOTALL)
"""Script by which mkdocs-jupyter loads MathJax from another host."""

NO_ALT = re.compile(r'alt="No description has been provided for this image"')


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the repository, and add the reference."""
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    paths = dict.fromkeys(path for pattern in PAGES for path in ROOT.glob(pattern))
    pages = [path for path in sorted(paths) if path.is_file()]
    linked = sorted(_linked_files(pages) - set(pages))
    of_repository = [_file(path, ROOT, config) for path in (*pages, *linked)]
    assets = [_file(path, WEBSITE, config) for path in WEBSITE.glob("assets/*")]
    reference = [
        File.generated(config, f"reference/{name}.md", content=text)
        for name, text in reference_pages(ROOT).items()
    ]
    return Files([*of_theme, *of_repository, *assets, *reference])


def _linked_files(pages: Iterable[pathlib.Path]) -> set[pathlib.Path]:
    """Return the files of the repository, such as code, that pages link to."""
    return {
        path
        for page in pages
        if page.suffix == ".md"
        for link in LINK.findall(page.read_text(encoding="utf-8"))
        if (path := (page.parent / link).resolve()).is_file()
    }


def _file(path: pathlib.Path, root: pathlib.Path, config: MkDocsConfig) -> File:
    """Return a file that the site has at the same path as `root` has."""
    name = path.relative_to(root).as_posix()
    return File(name, os.fspath(root), config.site_dir, config.use_directory_urls)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Return a page without the script that loads MathJax, since no page has formulas,
    and with the texts that say what a notebook's pictures show."""
    output = MATHJAX.sub("", output)
    if not page.file.src_uri.endswith(".ipynb"):
        return output
    texts = _picture_texts(pathlib.Path(page.file.abs_src_path))
    return NO_ALT.sub(lambda _: f'alt="{html.escape(next(texts))}"', output)


def _picture_texts(notebook: pathlib.Path) -> Iterator[str]:
    """Yield the text that stands for each picture of a notebook, which
    tools/store_notebook.py keeps and nbconvert's template does not read."""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                yield cell["metadata"]["alt"]


def on_post_build(config: MkDocsConfig) -> None:
    """Remove the theme's page for files that are not there: it looks for its styles at
    the root of a server, where this site need not be."""
    (pathlib.Path(config.site_dir) / "404.html").unlink(missing_ok=True)
