"""Pages of the site's reference, which mkdocstrings fills from docstrings.

library          every name that `moejax` exports
configuration    the classes that gin files bind, with all of their fields
plans, balancer, views      modules that other code may use
programs         the --help of each program
"""

import importlib
import pathlib
from collections.abc import Iterable, Iterator

from moejax import config
from tools.website.program_help import help_texts, programs

FIELDS = ("show_signature: false", "separate_signature: false")
"""Options that show a class by its fields, with types and defaults in headings."""
PACKAGES = {
    "plans": (
        "Layouts and plans",
        "what do `Layout`, `ExpertPlan` and the other types that host and device share "
        "hold?",
        ("moejax.plan",),
    ),
    "balancer": (
        "Balancer",
        "which functions and types does the balancer consist of, and what does a "
        "policy get and return?",
        ("moejax.balance", "moejax.balance.policies"),
    ),
    "views": (
        "Views",
        "how does a notebook or a terminal show meshes, plans, loads and decisions?",
        ("moejax.show", "moejax.rich"),
    ),
}
"""Title, question and packages of the pages about modules, by name."""
OF_LIBRARY = ("moejax.simulate",)
"""Modules that programs around the library use by name."""


def reference_pages(root: pathlib.Path) -> dict[str, str]:
    """Return the Markdown of each page of the reference, by name."""
    pages = {"library": _library(), "configuration": _configuration()}
    for name, (title, question, packages) in PACKAGES.items():
        modules = dict.fromkeys(
            module for package in packages for module in _modules(root, package)
        )
        pages[name] = _page(title, question, map(_module, modules))
    return pages | {"programs": _programs(root)}


def _modules(root: pathlib.Path, package: str) -> Iterator[str]:
    """Yield the name of a package, then those of its modules, but no private one."""
    yield package
    for path in sorted((root / package.replace(".", "/")).glob("[!_]*.py")):
        yield f"{package}.{path.stem}"


def _page(title: str, question: str, parts: Iterable[str]) -> str:
    """Return a page that says first which question it answers."""
    return "\n\n".join([f"# {title}", f"This page answers: {question}", *parts])


def _library() -> str:
    """Return the page of the names that `moejax` exports. Those that another page shows
    are links."""
    moejax, parts = importlib.import_module("moejax"), []
    for name in sorted(moejax.__all__, key=str.lower):
        kind = getattr(moejax, name)
        module = kind.__module__
        if module.startswith("moejax.config"):
            parts.append(_link(name, f"configuration.md#moejax.config.{name}"))
        elif module.startswith("moejax.plan."):
            parts.append(_link(name, f"plans.md#{module}.{name}"))
        else:
            options = f"heading: moejax.{name}", f"toc_label: {name}"
            parts.append(_object(f"{module}.{name}", *options))
    parts += map(_module, OF_LIBRARY)
    question = "which classes and functions does `import moejax` give, and what do "
    return _page("Library", f"{question}they take and return?", parts)


def _link(name: str, target: str) -> str:
    """Return the part about a name that another page shows."""
    return (
        f"## moejax.{name}\n\nIts description is on another page: [{name}]({target})."
    )


def _configuration() -> str:
    """Return the page of the classes that a gin file binds."""
    classes = {"Config": ("moejax.config.Config",)}
    classes["Mesh"] = "moejax.plan.layout.Topology", "skip_local_inventory: true"
    for name in config.__all__:
        if isinstance(getattr(config, name), type) and name != "Config":
            classes[name] = (f"moejax.config.{name}",)
    parts = [
        _object(*path, f"heading: {name}", f"toc_label: {name}", *FIELDS)
        for name, path in classes.items()
    ]
    question = (
        "which fields does a configuration have, with which types and defaults, and "
        "what does each one mean? A gin file or `--gin_param` binds a field by its "
        "class and name: `Moe.top_k = 2`."
    )
    return _page("Configuration", question, parts)


def _module(name: str) -> str:
    return _object(name, f"heading: {name}", f"toc_label: {name}")


def _object(path: str, *options: str) -> str:
    """Return the lines by which mkdocstrings shows an object."""
    return "\n".join([f"::: {path}", "    options:", *(f"      {o}" for o in options)])


def _programs(root: pathlib.Path) -> str:
    """Return the page of the programs and their --help."""
    parts = []
    for script in programs(root):
        for name, text in help_texts(script):
            level = "##" if name == script else "###"
            parts.append(f"{level} {name}\n\n```text\n{text.rstrip()}\n```")
    question = "which programs are there, and which flags does each one take?"
    return _page("Programs", question, parts)
