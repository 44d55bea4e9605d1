"""The --help of every program, read without running more of it than its parser."""

import argparse
import contextlib
import importlib
import inspect
import pathlib
import sys
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

FOLDERS = ("train", "tools", "tools/launch", "tools/testbed", "tools/bench")
"""Folders of the programs that people start. Those of other folders are started by
programs."""
START = '\nif __name__ == "__main__":'


def programs(root: pathlib.Path) -> list[str]:
    """Return the paths of all programs that people start, from `root`."""
    files = (
        path for folder in FOLDERS for path in sorted((root / folder).glob("*.py"))
    )
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    return [
        path.relative_to(root).as_posix()
        for path, text in texts.items()
        if START in text and "parse_args" in text
    ]


def help_texts(script: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the --help of a program, and of each of its commands."""
    parser, _ = reach_parser(script, [])
    parser.prog = script
    yield script, parser.format_help()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                command.prog = f"{script} {name}"
                yield command.prog, command.format_help()


def reach_parser(
    script: str, words: list[str]
) -> tuple[argparse.ArgumentParser, list[str] | None]:
    """Return the parser of a program that gets `words`, and the words that it would
    parse. Nothing else of the program runs. Raises ValueError where it has none."""
    module = load_program(script)

    def stop(parser, argv=None, namespace=None):
        raise _Reached(parser, argv)

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
        mock.patch.object(sys, "argv", [script, *words]),
        contextlib.suppress(SystemExit),
    ):
        try:
            takes_words = inspect.signature(module.main).parameters
            module.main(*([words] if takes_words else []))
        except _Reached as reached:
            return reached.args
    raise ValueError(f"{script} has no argument parser")


class _Reached(BaseException):
    """A program has made its parser: it goes no further."""


def load_program(script: str) -> ModuleType:
    """Return the module of a program, which may put its own folder on sys.path."""
    with mock.patch.object(sys, "path", list(sys.path)):
        return importlib.import_module(script.removesuffix(".py").replace("/", "."))
