"""The --help of the programs gives each option's default, and names its numbers."""

import argparse
from unittest import mock

import pytest

from train import evaluate, generate, main

UNITS = {"num_devices", "step", "batches", "max_tokens",
         "temperature", "top_p", "seed", "profile_steps"}  # fmt: skip


def make_parser(program) -> argparse.ArgumentParser:
    """Return the parser that a program builds."""
    with mock.patch.object(argparse.ArgumentParser, "parse_args", lambda self, _: self):
        return program.parse([])


@pytest.mark.parametrize(
    "program", [main, evaluate, generate], ids=lambda module: module.__name__
)
def test_every_option_has_its_default_and_a_unit(program):
    parser = make_parser(program)
    for action in parser._actions:
        text = action.help % {"default": action.default} if action.help else ""
        assert text, f"{action.dest} has no help"
        if action.option_strings and action.dest != "help":
            default = "required" if action.required else "default: "
            assert default in text, f"{action.option_strings[0]}: {text}"
        if action.dest in UNITS:
            assert action.metavar, f"{action.option_strings[0]} names no number"
        if isinstance(action.default, int | float) and action.nargs != 0:
            assert f"default: {action.default}" in text
    shown = " ".join(parser.format_help().split())
    assert "%(default)s" not in shown
