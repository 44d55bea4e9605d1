"""Long tools show a bar on a terminal, on standard error, and nothing elsewhere."""

import json
import sys

import pytest

from tests.support.terminal import ROOT, Terminal

REPLAY = ["tools/replay.py", "--synthetic", "zipf:1.2", "--policies", "home", "--json"]


def make_words(tool: str, folder) -> list[str]:
    """Return the command line of a tool."""
    if tool == "replay":
        return [*REPLAY, "--devices", "4"]
    text = folder / "text.txt"
    text.write_text("a few words\n" * 9)
    out = str(folder / "shards")
    return ["tools/prepare.py", str(text), "--out", out, "--json"]


@pytest.mark.parametrize(
    ("tool", "bar", "field"),
    [
        ("replay", b"0 of 98 samples", "policies"),
        ("prepare", b"prepare", "num_documents"),
    ],
)
def test_a_bar_is_gone_at_the_end_and_json_is_the_last_line(tmp_path, tool, bar, field):
    program, *rest = make_words(tool, tmp_path)
    words = [sys.executable, str(ROOT / program), *rest]
    with Terminal(words, 4000, 20) as terminal:
        assert terminal.end() == 0
        lines = [line for line in terminal.lines() if line]
        assert bar in terminal.raw
    assert field in json.loads(lines[-1])
    assert not any(line.startswith(f"{tool}  ") for line in lines)
