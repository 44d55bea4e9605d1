"""Let the reference show the examples of docstrings as code."""

import re
import textwrap

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)
"""An example as doctest runs it, up to the blank line behind it."""


class Examples(griffe.Extension):
    """Extension of griffe, which reads docstrings for mkdocstrings."""

    def on_object(self, *, obj: griffe.Object, **_) -> None:
        """Indent the examples of an object's docstring, which makes them code."""
        if obj.docstring:
            obj.docstring.value = indent_examples(obj.docstring.value)


def indent_examples(text: str) -> str:
    """Return a docstring whose examples are indented by four spaces."""
    return EXAMPLE.sub(lambda found: textwrap.indent(found[0], "    "), text)
