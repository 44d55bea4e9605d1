"""The screen at the end of a bring-up: a line for each stage, and what to do next."""

import shutil
import textwrap

from tools.stages.table import BY_NAME

WIDTH = 100
MAX_LINES = 3
"""Largest number of lines of one stage."""
WORDS = {"not_here": "not here"}


def draw(record: dict) -> str:
    """Return the screen of a bring-up's record."""
    width = min(WIDTH, max(60, shutil.get_terminal_size((WIDTH, 40)).columns))
    lines = [headline(record), ""]
    for name, own in record["stages"].items():
        state = WORDS.get(own["state"], own["state"])
        head = f"{state:12}{name:10}{own['sec']:7.1f} s  "
        text = own["why"] or BY_NAME[name].what
        lines += wrap(head, text, width)
    if record["left"]:
        lines += wrap("left        ", ", ".join(record["left"]), width)
    lines.append("")
    for kernel, held in record["quarantined"].items():
        form = "second forms" if held["form"] == "second" else "kernel"
        lines += wrap(f"quarantined {kernel}: ", f"its {form}: {held['why']}", width)
    for operation, (implementation, why) in record["kernels"].items():
        if "quarantined" in why:
            lines += wrap(f"falls back  {operation}: ", f"{implementation} ({why})",
                          width)  # fmt: skip
    for line in record["lines"]:
        lines += wrap("", line, width)
    return "\n".join(lines) + "\n"


def headline(record: dict) -> str:
    """Return the line that says what was brought up."""
    versions = record["versions"]
    names = [n for n in ("jax", "jaxlib", "jax-cuda13-plugin") if n in versions]
    parts = [
        f"{record['num_devices']} x {record['device']}",
        f"commit {record['commit']}",
        *(f"{name} {versions[name]}" for name in names),
    ]
    if record["driver"]:
        parts.append(f"driver {record['driver']}")
    return "bring-up: " + ", ".join(parts)


def wrap(head: str, text: str, width: int) -> list[str]:
    """Return a text behind a head, in at most MAX_LINES lines."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * min(len(head), 34),
        max_lines=MAX_LINES,
        placeholder=" ..",
        break_on_hyphens=False,
    )
