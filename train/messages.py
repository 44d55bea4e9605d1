"""Make messages that fit a line of a terminal, whatever a damaged file puts in them."""

MAX_LINE = 1000
"""Largest number of characters of an error line."""


def one_line(error: object, limit: int = MAX_LINE) -> str:
    """Return the text of an error without line breaks, cut in the middle to `limit`
    characters, and with characters that a terminal would not show escaped.

    >>> one_line("in \\x1b[31m" + "a" * 5 + "\\u202e: \\n try again")
    'in \\\\x1b[31maaaaa\\\\u202e: try again'
    """
    text = str(error)
    if len(text) > 8 * limit:  # so that a huge text costs no time
        text = f"{text[: 4 * limit]} {text[-4 * limit :]}"
    return shorten(visible(" ".join(text.split())), limit)


def shorten(text: str, limit: int) -> str:
    """Return a text without its middle if it is longer than `limit` characters.

    In a message the place of an error stands at the beginning, and what to do at the
    end.
    """
    if len(text) <= limit:
        return text
    end = limit // 3
    return f"{text[: limit - end - 5]} ... {text[-end:]}"


def visible(text: str) -> str:
    """Return a text with an escape for each character that a terminal would obey or
    hide, such as ESC, NUL and those that turn the direction of text."""
    return "".join(
        x if x.isprintable() else x.encode("unicode_escape").decode() for x in text
    )
