"""Ask the price by which a run decides about clusters that are not here.

    python tools/simulate.py what_if --gin_file=configs/qwen3_30b_a3b.gin \\
        --cluster=h100_2x8 --load=zipf:0.5
    python tools/simulate.py papers --out docs/papers.md
    python tools/simulate.py scale --gin_file=configs/qwen3_30b_a3b.gin

what_if   the meshes, schedules, domains, stores, policies and slots with which a
          configuration can run on a cluster, the fastest first, and gin lines to paste
papers    the tables of the papers beside this price and our own clocks, row by row
scale     the best way beside plain expert parallelism, from 8 to 100,000 devices

A cluster is the name of one that ships, or a TOML file (docs/simulate.md). Nothing is
measured: all seconds are predicted at stated rates. Exit codes: 0 done, 2 bad input, 3
a file could not be written.
"""

import argparse
import pathlib
import sys

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from moejax.perf import cluster as clusters  # noqa: E402
from tools.launch.arguments import (  # noqa: E402
    HelpFormatter,
    add_command,
    add_gin_flags,
)
from train.config import gin_reader  # noqa: E402
from train.launch.program import DONE, emit, guarded  # noqa: E402

LOAD_HELP = (
    "loads of experts: even, zipf:EXPONENT, rotating:SHARE, burst:SHARE, one_hot, "
    "uniform, or recorded ones in an .npz file"
)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with guarded(as_json=args.json) as ending:
        return args.work(args)
    return ending.code


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False
    )
    commands = parser.add_subparsers(required=True, metavar="what_if | papers | scale")

    ask, papers, scale = (
        add_command(commands, name, purpose)
        for name, purpose in (
            ("what_if", "rank the ways to run on a cluster"),
            ("papers", "compare the papers' tables with our price"),
            ("scale", "compare with plain expert parallelism"),
        )
    )
    for command, work in ((ask, _what_if), (papers, _papers), (scale, _scale)):
        command.set_defaults(work=work)
    _add_run(ask)
    ask.add_argument(
        "--cluster",
        required=True,
        help=f"cluster: {', '.join(clusters.names())}, or a TOML file",
    )
    ask.add_argument("--count", type=int, default=8, help="number of ways to print")
    papers.add_argument(
        "--out", type=pathlib.Path, help="Markdown file (default: it is printed)"
    )
    _add_run(scale)
    scale.add_argument(
        "--cluster",
        default="h100_2x8",
        help="cluster whose outermost level grows",
    )
    scale.add_argument(
        "--devices", type=int, default=100_000, help="largest number of devices"
    )
    return parser.parse_args(argv)


def _add_run(parser: argparse.ArgumentParser) -> None:
    add_gin_flags(parser)
    add = parser.add_argument
    add("--load", default="zipf:0.5", help=LOAD_HELP)
    add(
        "--tokens",
        type=float,
        default=1e9,
        help="tokens of the training whose device hours are counted",
    )
    add("--picture", type=pathlib.Path, help="PNG file for a picture (default: none)")


def _what_if(args: argparse.Namespace) -> int:
    from tools.simulated import picture, report
    from tools.simulated.what_if import what_if

    cfg = gin_reader.load(args.gin_file, args.gin_param)
    _check_positive(args, "tokens", "count")
    answers = what_if(cfg, clusters.load(args.cluster), args.load, args.count)
    print("\n".join(report.lines(answers, cfg, args.tokens, args.count)))
    if args.picture is not None:
        found = answers.found[: args.count]
        picture.draw_answers(
            found, f"{answers.cluster}, loads {args.load}", args.picture
        )
    emit(report.record(answers, cfg, args.tokens), args.json)
    return DONE


def _papers(args: argparse.Namespace) -> int:
    from tools.simulated.papers import page

    text, record = page.make()
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text, encoding="utf-8")
    emit(record, args.json)
    return DONE


def _scale(args: argparse.Namespace) -> int:
    from tools.simulated import picture, scale

    cfg = gin_reader.load(args.gin_file, args.gin_param)
    _check_positive(args, "tokens", "devices")
    found = scale.scale(cfg, clusters.load(args.cluster), args.load, args.devices)
    print("\n".join(scale.lines(found, args.tokens)))
    if args.picture is not None:
        picture.draw_sizes(found, args.picture)
    emit(scale.record(found, args.tokens), args.json)
    return DONE


def _check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raise ValueError for a number that is not above 0."""
    for name in names:
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name}={getattr(args, name):g} must be above 0")


if __name__ == "__main__":
    sys.exit(main())
