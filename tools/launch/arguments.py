"""The arguments that programs of tools/ share."""

import argparse


def new_parser(doc: str, **options) -> argparse.ArgumentParser:
    """Return a parser that shows the module's docstring as it is, with --json."""
    parser = argparse.ArgumentParser(
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )
    parser.add_argument(
        "--json", action="store_true", help="end with one JSON object on the last line"
    )
    return parser
