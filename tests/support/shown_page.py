"""Read the HTML of a view of moejax.show."""

import html.parser
from types import SimpleNamespace


class Page(html.parser.HTMLParser):
    """Parsed page: rows of (text, attributes). Tags must be closed in order."""

    def __init__(self, view):
        super().__init__()
        self.rows, self.open, self.tags = [], [], set()
        self.feed(view._repr_html_())
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append(SimpleNamespace(text="", **dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1].text += data
