"""Compile a train step ahead of time for GPUs that are not here: will it fit?

    python tools/aot.py --gin_file=configs/olmoe_1b_7b.gin --target h100 --devices 8

XLA compiles the whole step on the CPU for the target's GPUs, in a minute or two. The
tool prints the memory of a device at the peak of the step, by kind and beside the
prediction, the largest buffers with their source lines, the collectives with the share
of their time that other work hides, and the estimated seconds of a step (docs/aot.md).
`make aot-wheels` installs the plugin it needs.

Exit codes: 0 done, 2 bad input. A step that does not fit is no bad input: `fits` in the
record says so.
"""

import argparse
import dataclasses
import pathlib
import sys

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from moejax.config import Config  # noqa: E402
from moejax.perf import target  # noqa: E402
from tools.launch.arguments import add_gin_flags, new_parser  # noqa: E402
from train.config import gin_reader  # noqa: E402
from train.launch.program import (  # noqa: E402
    DONE,
    emit,
    gpu_memory_fraction,
    guarded,
)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with guarded(as_json=args.json) as ending:
        return work(args)
    return ending.code


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add_gin_flags(parser)
    add(
        "--target",
        default="h100",
        help=f"GPU to compile for: {', '.join(target.names())}, or a file like those "
        "in moejax/perf/targets",
    )
    add("--devices", type=int, default=8, metavar="N", help="GPUs of a node")
    add(
        "--nodes", type=int, default=1, metavar="N", help="nodes, with a slower network"
    )
    add(
        "--keep",
        type=pathlib.Path,
        metavar="FOLDER",
        help="keep what XLA writes about the program, its text included, in FOLDER",
    )
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    cfg = gin_reader.load(args.gin_file, args.gin_param)
    emit(compile_for_target(cfg, args), args.json)
    return DONE


def compile_for_target(cfg: Config, args: argparse.Namespace) -> dict:
    """Compile, print the report, and return its record."""
    from tools.compiled import hlo
    from tools.compiled.compile import compile_step
    from tools.compiled.exposure import summary
    from tools.compiled.memory import memory
    from tools.compiled.report import make_record, text

    gpu = target.load(args.target)
    gpu_memory_fraction()  # a wrong variable is found before the minutes of compilation
    step = compile_step(cfg, gpu, args.devices, args.nodes, args.keep)
    rates = dataclasses.replace(gpu.rates, filled_rows=step.run.filled_rows)
    mesh = dataclasses.asdict(cfg.mesh)
    travels = summary(hlo.read(step.text), mesh, args.devices, rates)
    record = make_record(step, memory(step), travels, gpu)
    print(text(step, travels, gpu, record), flush=True)
    asked = {"gin_files": args.gin_file, "gin_params": args.gin_param}
    return asked | {"nodes": args.nodes} | record


if __name__ == "__main__":
    sys.exit(main())
