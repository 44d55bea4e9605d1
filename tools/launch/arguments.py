"""The argument parser that all programs of tools/ share."""

import argparse


class HelpFormatter(
    argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter
):
    """Format of --help: the description as written, and the default of each flag.

    Nothing is added for a flag whose default is None, False, or an empty list: the
    flag's own text says what happens without it.
    """

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


def new_parser(doc: str, **options) -> argparse.ArgumentParser:
    """Return a parser that has --json and describes the program by `doc`, its module's
    docstring. Flags are taken whole: a misspelt one is an error."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=HelpFormatter, allow_abbrev=False, **options
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the result as one JSON object on the last line of stdout",
    )
    return parser


def add_command(commands, name: str, purpose: str) -> argparse.ArgumentParser:
    """Add a command to those of a program, and return its parser, which has --json."""
    command = commands.add_parser(
        name,
        help=purpose,
        description=purpose[0].upper() + purpose[1:],
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument(
        "--json",
        action="store_true",
        help="print the result as one JSON object on the last line of stdout",
    )
    return command


def add_gin_flags(parser: argparse.ArgumentParser, default: str = "") -> None:
    """Add --gin_file, which is required unless `default` says what stands in its place,
    and --gin_param. Both are lists."""
    parser.add_argument(
        "--gin_file",
        action="append",
        default=[],
        required=not default,
        help="configuration; may be repeated, and later files win"
        + (f" (default: {default})" if default else ""),
    )
    parser.add_argument(
        "--gin_param",
        action="append",
        default=[],
        help="one more setting, as 'Moe.d_expert = 512'; may be repeated",
    )
