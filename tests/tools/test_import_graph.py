"""Test the import graph: circles and imports of higher layers are reported with their
lines."""

import pathlib

import pytest

from tools import import_graph
from tools.import_graph import BEGIN, END, LEVELS, PAGE, longest_prefix

ROOT = pathlib.Path(import_graph.__file__).parents[1]


def make_tree(root: pathlib.Path, sources: dict[str, str]) -> pathlib.Path:
    """Write a tree of files with these sources, and a page without a graph."""
    for name, source in {**sources, PAGE: f"a\n{BEGIN}\n{END}\nb\n"}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


def check(root: pathlib.Path, capsys, *words: str) -> tuple[int, list[str]]:
    """Run the check, and return its exit code and the faults it reports."""
    code = import_graph.main(["--root", str(root), *words])
    return code, capsys.readouterr().err.splitlines()


def find_faults(root: pathlib.Path, capsys) -> list[str]:
    """Write the graph to the page, and return the faults that remain."""
    check(root, capsys, "--write", PAGE)
    code, faults = check(root, capsys)
    assert code == (1 if faults else 0)
    return faults


def test_the_repository_has_neither_circles_nor_upward_imports(capsys):
    assert check(ROOT, capsys) == (0, [])


def test_every_room_has_a_module():
    modules = import_graph.read_modules(ROOT)
    assert {longest_prefix(name, LEVELS) for name in modules} - {""} == set(LEVELS)


def test_a_circle_through_a_function_is_refused(tmp_path, capsys):
    sources = {
        "moejax/plan/a.py": "from moejax.plan import b\n",
        "moejax/plan/b.py": "import moejax.plan.c\n",
        "moejax/plan/c.py": "def late():\n    from moejax.plan.a import name\n",
        "moejax/plan/d.py": "from moejax.plan import a\n",
    }
    circle, *lines = find_faults(make_tree(tmp_path, sources), capsys)
    assert circle == "a circle of imports:"
    assert sorted(lines) == [
        "  moejax/plan/a.py:1 imports moejax/plan/b.py",
        "  moejax/plan/b.py:1 imports moejax/plan/c.py",
        "  moejax/plan/c.py:2 imports moejax/plan/a.py",
    ]


def test_a_circle_for_type_checkers_alone_is_refused(tmp_path, capsys):
    sources = {
        "moejax/plan/a.py": "from . import b\n",
        "moejax/plan/b.py": "if TYPE_CHECKING:\n    from .a import A\n",
    }
    assert len(find_faults(make_tree(tmp_path, sources), capsys)) == 3


@pytest.mark.parametrize(
    ("importer", "imported", "fault"),
    [
        ("moejax.plan.a", "moejax.show.b", "moejax.show is not below moejax.plan"),
        ("moejax.model.a", "moejax.balance.b", "moejax.balance is not below"),
        ("train.data.a", "train.loop", "train.loop is not below train.data"),
        ("moejax.balance.a", "moejax.moe.b", "must not know each other"),
        ("moejax.moe.a", "moejax.perf.b", "must not know each other"),
        ("moejax.kernels.a", "moejax.plan.b", "must not know each other"),
        ("moejax.moe.a", "moejax.other", "one of the two has no room"),
    ],
)
def test_imports_from_outside_the_lower_layers_are_refused(
    tmp_path, capsys, importer, imported, fault
):
    paths = {name: name.replace(".", "/") + ".py" for name in (importer, imported)}
    sources = {paths[importer]: f"\nimport {imported}\n", paths[imported]: ""}
    (line,) = find_faults(make_tree(tmp_path, sources), capsys)
    assert line.startswith(f"{paths[importer]}:2 imports {paths[imported]}: ")
    assert fault in line


def test_the_page_is_written_and_compared(tmp_path, capsys):
    sources = {"moejax/plan/a.py": "", "moejax/show/b.py": "import moejax.plan.a\n"}
    root = make_tree(tmp_path, sources)
    code, (fault,) = check(root, capsys)
    assert code == 1
    assert "older graph" in fault
    assert check(root, capsys, "--write", PAGE) == (0, [])
    assert check(root, capsys) == (0, [])
    text = (root / PAGE).read_text()
    assert "\nmoejax.show           moejax.plan\n\nmoejax.plan           -\n" in text
    assert text.startswith(f"a\n{BEGIN}\n```\n")
    assert text.endswith(f"```\n{END}\nb\n")


def test_a_page_without_marks_is_refused(tmp_path, capsys):
    root = make_tree(tmp_path, {})
    (root / PAGE).write_text("nothing\n")
    code, (fault,) = check(root, capsys)
    assert code == 1
    assert f"must have {BEGIN}" in fault
