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
    docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=HelpFormatter, **options
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the result as one JSON object on the last line of stdout",
    )
    return parser
