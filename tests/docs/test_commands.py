"""Every command of the README and of docs/*.md names a script, flags and bindings that
exist; so do the files and gin names in the text."""

import re

import pytest

from tests.support.doc_commands import ROOT, commands_in, fault, num_nodes
from train.config.gin_reader import load
from train.config.names import CLASSES, KINDS

RECORDS = {"log.md"}
"""Pages that tell what was run once, with programs that may be gone."""
EXAMPLES = {"Moe.topk", "moejax/balance/policies/hottest.py"}
"""A misspelt name, and a file that a page has its reader write."""
PAGES = [
    path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    if path.name not in RECORDS
]
PATH = re.compile(
    r"`((?:configs|docs|moejax|notebooks|tests|tools|train)/[\w./-]+\.\w+)[`: ]"
)
GIN_NAME = re.compile(rf"\b((?:{'|'.join(CLASSES)})\.[a-z]\w*)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_can_run(page):
    faults = {str(command): fault(command) for command in commands_in(page)}
    wrong = [f"{command}\n  {why}" for command, why in faults.items() if why]
    assert not wrong, "\n".join(["these commands cannot run:", *wrong])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_gin_names_exist(page):
    text = page.read_text(encoding="utf-8")
    paths = {path for path in PATH.findall(text) if not (ROOT / path).exists()}
    names = {name for name in GIN_NAME.findall(text) if name not in KINDS}
    missing = (paths | names) - EXAMPLES
    assert not missing, f"{page.name} names {sorted(missing)}: none exists"


def test_commands_are_found():
    """The parser of pages sees fenced, indented and inline commands."""
    count = sum(len(commands_in(page)) for page in PAGES)
    assert count >= 50, f"only {count} commands were found"


def test_slurm_has_a_recipe_for_each_configuration_of_gpus():
    """On 1, 2 and 4 nodes; test_commands_can_run checks their meshes."""
    commands = commands_in(ROOT / "docs" / "slurm.md")
    recipes = {
        (word.removeprefix("--gin_file="), num_nodes(command))
        for command in commands
        for word in command.words
        if word.startswith("--gin_file=") and command.words[0] == "sbatch"
    }
    for path in (ROOT / "configs").glob("*.gin"):
        if load([path]).train.num_simulated_devices is None:
            for nodes in (1, 2, 4):
                assert (f"configs/{path.name}", nodes) in recipes


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("python train/mein.py", "no script train/mein.py"),
        ("python train/main.py --gin_fil=a.gin", "required: --gin_file"),
        ("python train/main.py --gin_file=configs/no.gin", "no file configs/no.gin"),
        ("python tools/replay.py --devices many", "invalid int value: 'many'"),
        ("python train/main.py --gin_file=my.gin --gin_param=Moe.topk=2", "Moe.top_k"),
        (
            "python train/main.py --gin_file=my.gin --gin_param=Mesh.expert=3",
            "divisible by the expert axis",
        ),
        (
            "python train/main.py --gin_file=my.gin --gin_param=\"Balance.policy='a'\"",
            "no policy 'a'",
        ),
        ("python train/generate.py runs/a --gin_param=Train.seed=x", "malformed"),
        (
            "python tools/launch/local.py -n 3 -- train/main.py --gin_file=my.gin",
            "8 simulated devices for 3 processes",
        ),
        (
            "sbatch --nodes=3 tools/launch/slurm.sbatch "
            "--gin_file=configs/olmoe_1b_7b.gin",
            "has 8 devices, and 3 nodes of 8 GPUs have 24",
        ),
        ("sbatch --node=3 tools/launch/slurm.sbatch", "sbatch --node is not"),
        ("make tests", "no target tests"),
        ("make train ARG=--fresh", "no variable ARG"),
    ],
)
def test_a_wrong_command_is_found(text, match, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"Text.\n\n```\n{text}\n```\n")
    monkeypatch.setattr("tests.support.doc_commands.PAGES_ROOT", tmp_path)
    [command] = commands_in(page)
    assert (command.page, command.line) == ("page.md", 4)
    assert match in fault(command)


def test_what_pages_may_write(tmp_path, monkeypatch):
    """Continued lines, variables, pipes, redirections, comments, and elisions."""
    page = tmp_path / "page.md"
    page.write_text(
        """```
$ A=1 make \\
    train | head -3    # a comment
T="make test ARGS='-x'"
$T && $T > out.txt
srun python train/main.py ..
output of a program
```

    make lint

Inline `make bench`, and `python old.py` (last at commit `1234567`).
"""
    )
    monkeypatch.setattr("tests.support.doc_commands.PAGES_ROOT", tmp_path)
    words = [list(command.words) for command in commands_in(page)]
    test = ["make", "test", "ARGS='-x'"]
    assert words == [
        ["A=1", "make", "train"], ["head", "-3"], test, test, ["make", "lint"],
        ["make", "bench"],
    ]  # fmt: skip
    assert not any(fault(command) for command in commands_in(page))
