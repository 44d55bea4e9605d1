"""Every command of the README and of docs/*.md names a script, flags and bindings that
exist; so do the gin names in the text."""

import re

import pytest

from tests.support.doc_commands import ROOT, commands_in, fault
from train.config.names import CLASSES, KINDS

RECORDS = {"log.md"}
"""Pages that tell what was run once, with programs that may be gone."""
PAGES = [
    path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if path.name not in RECORDS
]
MISSPELT = {"Moe.topk"}
"""An example of a name that is refused."""
GIN_NAME = re.compile(rf"\b((?:{'|'.join(CLASSES)})\.[a-z]\w*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_can_run_and_gin_names_exist(page):
    faults = {str(command): fault(command) for command in commands_in(page)}
    wrong = [f"{command}\n  {why}" for command, why in faults.items() if why]
    assert not wrong, "\n".join(["these commands cannot run:", *wrong])
    names = set(GIN_NAME.findall(page.read_text(encoding="utf-8"))) - MISSPELT
    assert names <= KINDS.keys()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("python train/mein.py", "no script train/mein.py"),
        ("python tools/replay.py --devices many", "invalid int value: 'many'"),
        ("python train/main.py --gin_file=my.gin --gin_param=Moe.topk=2", "Moe.top_k"),
        ("make tests", "no target tests"),
    ],
)
def test_a_wrong_command_is_found(text, match, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"Text.\n\n```\n{text} | head\n```\n")
    monkeypatch.setattr("tests.support.doc_commands.PAGES_ROOT", tmp_path)
    command, head = commands_in(page)
    assert (command.page, command.line) == ("page.md", 4)
    assert match in fault(command)
    assert not fault(head)
