"""Check that modules import only from lower layers and never in a circle, and print the
imports by room.

    python tools/import_graph.py                         check, docs/house.md too
    python tools/import_graph.py --write docs/house.md   write the graph to that page

Every import counts, also one in a function or for a type checker alone. A room is a
folder or a file that LAYERS names. It may import rooms of the layers below it, and none
of its own layer. `moejax/__init__.py` holds its public names as text and imports
nothing: they are loaded when they are first used. So does `moejax/rich.py` with the
views of `moejax.show`, which draws objects of lower layers for notebooks.
"""

import argparse
import ast
import graphlib
import itertools
import pathlib
import sys
import textwrap
from collections.abc import Container
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = ("moejax", "train", "tools")
LAYERS = (
    ("tools",),
    ("train.main", "train.evaluate", "train.generate"),
    ("train.dry_run", "train.summary"),
    ("train.loop",),
    ("train.replicas", "train.in_flight"),
    ("train.balance", "train.doctor", "train.eval", "train.cli"),
    ("train.job",),
    ("train.checkpoint", "train.logs"),
    ("train.step",),
    ("train.config", "train.data", "train.launch"),
    ("train.files", "train.messages"),
    ("moejax.interop",),
    ("moejax.resolve", "moejax.show"),
    ("moejax.model", "moejax.balance"),
    ("moejax.moe", "moejax.perf"),
    ("moejax.kernels", "moejax.axes", "moejax.config"),
    ("moejax.plan",),
    ("moejax.rich", "moejax.simulate"),
)
"""Rooms from top to bottom. A module is in the room whose name is the longest prefix of
the module's own name."""
LEVELS = {room: level for level, layer in enumerate(LAYERS) for room in layer}
STRANGERS = (
    {"moejax.balance", "moejax.moe"},
    {"moejax.perf", "moejax.moe"},
    {"moejax.kernels", "moejax.plan"},
)
"""Pairs of rooms that must not import each other, whatever their layers."""
BEGIN, END = "<!-- import graph -->", "<!-- end of import graph -->"
PAGE = "docs/house.md"
NAME_WIDTH, LINE_WIDTH = 22, 88


class Module(NamedTuple):
    """A Python file and its imports."""

    path: pathlib.Path
    """Path relative to the root."""
    imports: dict[str, int]
    """Modules that it imports, each with the number of the first line that does."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--root",
        type=pathlib.Path,
        default=ROOT,
        help="root of the repository to check (default: the one of this file)",
    )
    parser.add_argument(
        "--write",
        metavar="PATH",
        help=f"page to write the graph to, such as {PAGE} (default: only check {PAGE})",
    )
    args = parser.parse_args(argv)
    modules = read_modules(args.root)
    graph = draw(modules)
    print(graph)
    faults = find_circles(modules) + find_wrong_arrows(modules)
    page = args.root / (args.write or PAGE)
    text = page.read_text(encoding="utf-8")
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    new = f"{head}{BEGIN}\n```\n{graph}\n```\n{END}{tail}"
    if not (begin and end):
        faults.append(f"{page} must have {BEGIN}, and {END} after it: add both")
    elif args.write:
        page.write_text(new, encoding="utf-8")
    elif new != text:
        faults.append(f"{page} has an older graph: run this with --write {PAGE}")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def read_modules(root: pathlib.Path) -> dict[str, Module]:
    """Return the modules under `root` by their dotted names."""
    paths = {}
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            path = file.relative_to(root)
            name = ".".join(path.with_suffix("").parts)
            paths[name.removesuffix(".__init__")] = path
    return {
        name: Module(path, find_imports(name, (root / path).read_text("utf-8"), paths))
        for name, path in paths.items()
    }


def find_imports(name: str, source: str, paths: dict) -> dict[str, int]:
    """Return which modules of `paths` the source imports, each with its first line."""
    lines: dict[str, int] = {}
    is_package = paths[name].stem == "__init__"
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level else ""
            origin = ".".join(filter(None, (base, node.module)))
            targets = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for target in targets:
            module = longest_prefix(target, paths)  # the target may be a function
            if module and module != name:
                lines[module] = min(node.lineno, lines.get(module, node.lineno))
    return lines


def longest_prefix(name: str, known: Container[str]) -> str:
    """Return the longest of the known dotted names that `name` begins with, or ''."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name


def find_circles(modules: dict[str, Module]) -> list[str]:
    """Return the import cycles, each as a text with one line per import."""
    graph = {name: set(module.imports) for name, module in modules.items()}
    circles = []
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
            return circles
        except graphlib.CycleError as error:
            pairs = list(itertools.pairwise(error.args[1][::-1]))
        lines = [arrow(modules, *pair) for pair in pairs]
        circles.append("\n  ".join(["a circle of imports:", *lines]))
        graph[pairs[0][0]].remove(pairs[0][1])


def find_wrong_arrows(modules: dict[str, Module]) -> list[str]:
    """Return a text for each import from one room of another that is not below it."""
    faults = []
    for name, module in modules.items():
        for imported in module.imports:
            pair = here, there = [longest_prefix(m, LEVELS) for m in (name, imported)]
            where = arrow(modules, name, imported)
            if not all(pair):
                faults.append(f"{where}: one of the two has no room: add it to LAYERS")
            elif set(pair) in STRANGERS:
                faults.append(f"{where}: {here} and {there} must not know each other")
            elif here != there and LEVELS[here] >= LEVELS[there]:
                faults.append(f"{where}: {there} is not below {here} in LAYERS")
    return faults


def arrow(modules: dict[str, Module], importer: str, imported: str) -> str:
    """Describe one import as 'path:line imports path'."""
    path, imports = modules[importer]
    return f"{path}:{imports[imported]} imports {modules[imported].path}"


def draw(modules: dict[str, Module]) -> str:
    """Return the text of the graph: rooms from top to bottom, each with the rooms that
    it imports."""
    targets: dict[str, set[str]] = {}
    for name, module in modules.items():
        room = longest_prefix(name, LEVELS)
        rooms = {longest_prefix(imported, LEVELS) for imported in module.imports}
        targets.setdefault(room, set()).update(rooms - {room, ""})
    layers = []
    for layer in LAYERS:
        lines = [
            textwrap.fill(
                f"{room:{NAME_WIDTH}}{', '.join(sorted(targets[room])) or '-'}",
                LINE_WIDTH,
                subsequent_indent=" " * NAME_WIDTH,
            )
            for room in layer
            if room in targets
        ]
        layers.append("\n".join(lines))
    return "\n\n".join(filter(None, layers))


if __name__ == "__main__":
    sys.exit(main())
