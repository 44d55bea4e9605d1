"""Let the reference show the examples of docstrings as code, and link their pages."""

import re
import textwrap

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
"""An example as doctest runs it, up to the blank line behind it."""


PAGE = re.compile(r"(?<![\w`./])docs/(\w+)\.md")


class Docstrings(griffe.Extension):
    """Extension of griffe, which reads docstrings for mkdocstrings."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        """Change the text of an object's docstring."""
        if obj.docstring:
            obj.docstring.value = for_site(obj.docstring.value)


def for_site(text: str) -> str:
    """Return a docstring as Markdown of a page in reference/: examples are indented by
    four spaces, and pages of docs/ are links."""
    text = EXAMPLE.sub(lambda found: textwrap.indent(found[0], "    "), text)
    return PAGE.sub(r"[docs/\1.md](../docs/\1.md)", text)
