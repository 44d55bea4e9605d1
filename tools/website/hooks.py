"""Give the site the tree of the repository, and a reference made from the code.

MkDocs calls these functions by their names (`hooks` in mkdocs.yml). A page has the same
path on the site and in the repository, so its links work in both, and MkDocs checks
them. The home page is README.md.
"""

import os
import pathlib
import re
from collections.abc import Iterable

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools.website.reference import reference_pages

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = ("*.md", "docs/**/*", "notebooks/*.md", "notebooks/*.ipynb", "moejax/**/*.md")
"""Patterns of the repository's files that the site has, beside assets and reference."""
ASSETS = "tools/website"
"""Folder whose files of assets/ the site has."""
MATHJAX = re.compile(r"<script data-mkdocs-jupyter-mathjax=.*?</script>\n?", re.DOTALL)
"""Script by which mkdocs-jupyter loads MathJax from another host."""


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the repository, and add the reference."""
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    generated = [
        File.generated(config, f"reference/{name}.md", content=text)
        for name, text in reference_pages(ROOT).items()
    ]
    return Files([*of_theme, *_repository_files(config), *generated])


def _repository_files(config: MkDocsConfig) -> Iterable[File]:
    """Yield the files of the repository that the site has."""
    roots = [(ROOT, PAGES), (ROOT / ASSETS, ("assets/*",))]
    for root, patterns in roots:
        paths = (path for pattern in patterns for path in sorted(root.glob(pattern)))
        for path in paths:
            if path.is_file():
                name = path.relative_to(root).as_posix()
                folders = os.fspath(root), config.site_dir
                yield File(name, *folders, config.use_directory_urls)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Return a page without the script that loads MathJax: no page has formulas."""
    return MATHJAX.sub("", output)
