"""Read which modules of the repository import which, with the standard library alone.

Results of a part are kept as long as the files that it imports are the same.
"""

import ast
import pathlib
from collections.abc import Container
from typing import NamedTuple

FOLDERS = ("moejax", "train", "tools")


class Module(NamedTuple):
    """A Python file and its imports."""

    path: pathlib.Path
    """Path relative to the root."""
    imports: frozenset[str]
    """Modules of FOLDERS that it imports, also in a function or for a type checker."""


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


def find_imports(name: str, source: str, paths: dict) -> frozenset[str]:
    """Return which modules of `paths` the source of the module `name` imports."""
    found: set[str] = set()
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
        found |= {longest_prefix(target, paths) for target in targets}
    return frozenset(found - {"", name})


def longest_prefix(name: str, known: Container[str]) -> str:
    """Return the longest of the known dotted names that `name` begins with, or ''."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name
