"""Write the page of a run: one HTML file that holds its data, its code and plotly.

The files of `browser/` are put in one script, in the order of SCRIPTS. The page asks
for nothing else.
"""

import base64
import functools
import hashlib
import json
import pathlib
import re

from train.logs.goodput import BUCKETS

BROWSER = pathlib.Path(__file__).parent / "browser"
SCRIPTS = (
    "dom.js", "data.js", "figures.js", "curves.js", "overview.js", "time.js", "load.js",
    "layer.js", "decisions.js", "tables.js", "sections.js",
)  # fmt: skip
COLORS = (
    (20, 60, 140),
    (105, 160, 205),
    (246, 245, 241),
    (232, 150, 85),
    (150, 45, 5),
)
"""Red, green and blue of loads from a quarter of the mean to four times the mean. The
white in the middle is the mean."""


def render(data: dict) -> str:
    """Return the page of the run in `data`, as HTML.

    `data` is the object of `read_run`. Its texts may hold
    anything: within the page they are data, and never HTML or code.
    """
    parts = {
        "policy": content_security_policy(),
        "style": _text("page.css"),
        "settings": as_json({"colors": COLORS, "buckets": BUCKETS}),
        "data": as_json(data),
        "plotly": _plotly(),
        "script": _script(),
    }
    # One pass: a name in the data that looks like a place to fill stays as it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _text("page.html"))


def as_json(value) -> str:
    """Return JSON that can stand in an HTML script element.

    All of it is ASCII, so U+2028 and halves of surrogate pairs are escaped too.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for letter in "<>&":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


@functools.cache
def content_security_policy() -> str:
    """Return the policy that lets a browser run the two scripts of the page and no
    other, and reach nothing.

    Plotly sets styles in attributes and draws maps of colors as `data:` images.
    """
    hashes = " ".join(f"'sha256-{_digest(text)}'" for text in (_plotly(), _script()))
    rules = {
        "default-src": "'none'",
        "script-src": hashes,
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "connect-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@functools.cache
def _script() -> str:
    """Return the code of the page, as one function that leaves no names behind."""
    code = "\n".join(_text(name) for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n{code}}})();'


@functools.cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    code = get_plotlyjs()
    assert "</script" not in code.lower(), "plotly.js would end its own script element"
    return code


@functools.cache
def _text(name: str) -> str:
    return (BROWSER / name).read_text(encoding="utf-8")
