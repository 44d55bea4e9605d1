"""Pages of the built site: what they load, link to, and say."""

import html.parser
import pathlib
import re
from urllib.parse import unquote

LOADS = {
    "script": "src", "link": "href", "img": "src", "iframe": "src", "source": "src",
    "video": "src", "audio": "src", "object": "data", "embed": "src",
}  # fmt: skip
"""Attribute of each element by which a page loads something."""
LINKS_ALONE = {"canonical", "next", "prev", "alternate"}
"""Relations of <link> that load nothing."""
CODE = ("code", "pre", "script", "style")
OUTSIDE = re.compile(r"(?:https?:)?//")


class SitePage(html.parser.HTMLParser):
    """One page, read from its file."""

    def __init__(self, path: pathlib.Path) -> None:
        super().__init__()
        self.path, self.text = path, path.read_text(encoding="utf-8")
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.prose = ""
        """Text of the article, without its code."""
        self._within: list[str] = []
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids.add(values.get("id", ""))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if (url := values.get(LOADS.get(tag, ""))) and not (
            tag == "link" and LINKS_ALONE & set(values.get("rel", "").split())
        ):
            self.loads.append(url)
        if tag in ("article", *CODE):
            self._within.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._within:
            self._within.remove(tag)

    def handle_data(self, data: str) -> None:
        if self._within == ["article"]:
            self.prose += data

    def target(self, url: str) -> tuple[pathlib.Path, str]:
        """Return the file and the anchor that a URL of this page leads to."""
        path, _, anchor = url.partition("#")
        path = unquote(path.partition("?")[0])
        file = (self.path.parent / path).resolve() if path else self.path
        return file, unquote(anchor)


def read_site(folder: pathlib.Path) -> dict[pathlib.Path, SitePage]:
    """Return the pages of a site by file."""
    return {path: SitePage(path) for path in folder.rglob("*.html")}
