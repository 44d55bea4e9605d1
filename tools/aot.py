"""Compile a train step ahead of time for GPUs that are not here: will it fit?

    python tools/aot.py --gin_file=configs/olmoe_1b_7b.gin --target h100 --devices 8
    python tools/aot.py --gin_file=configs/tiny_cpu.gin --census

XLA compiles the whole step on the CPU for the target's GPUs, in a minute or two. The
tool prints the memory of a device at the peak of the step, by kind, the largest buffers
with their source lines, the collectives with what hides them, and whether attention
makes an array of a window's length squared (docs/aot.md).
`make aot-wheels` installs the plugin it needs.

--census counts collectives instead, by who inserted them, in the step compiled for the
simulated CPU devices and in the step lowered for CUDA. It needs no plugin.

Exit codes: 0 done, 2 bad input, 3 a file could not be written. A step that does not fit
is no bad input: `fits` in the record says so.
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
    set_up_backend,
)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return guarded(lambda: work(args), as_json=args.json)


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
        "--html",
        nargs="?",
        type=pathlib.Path,
        const=pathlib.Path("aot.html"),
        metavar="FILE",
        help="write the report as a page to FILE (default: aot.html)",
    )
    add(
        "--keep",
        type=pathlib.Path,
        metavar="FOLDER",
        help="keep what XLA writes about the program, its text included, in FOLDER",
    )
    add(
        "--costs",
        type=pathlib.Path,
        metavar="FILE.pbtxt",
        help="write what each instruction costs to a file, for XLA's scheduler in the "
        "next compilation of this step (docs/overlap.md)",
    )
    add("--census", action="store_true", help="count collectives instead")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    cfg = gin_reader.load(args.gin_file, args.gin_param)
    record = count(cfg, args) if args.census else compile_for_target(cfg, args)
    emit(record, args.json)
    return DONE


def count(cfg: Config, args: argparse.Namespace) -> dict:
    """Print the numbers of collectives, and return them."""
    from tools.compiled.census import census

    for name in ("html", "keep", "costs"):
        if getattr(args, name) is not None:
            raise ValueError(f"--census writes no file: leave out --{name}")
    set_up_backend(cfg)
    record = census(cfg)
    for backend, groups in record.items():
        for group, counts in groups.items():
            print(f"{backend:5} {group:12} {counts}")
    return record


def compile_for_target(cfg: Config, args: argparse.Namespace) -> dict:
    """Compile, print the report, and return its record."""
    from tools.compiled import hlo, sub_operators
    from tools.compiled.attention import find_attention
    from tools.compiled.compile import compile_step
    from tools.compiled.costs import profile
    from tools.compiled.exposure import summary
    from tools.compiled.memory import memory
    from tools.compiled.page import page
    from tools.compiled.report import make_report, text
    from tools.compiled.schedule import Schedule

    gpu = target.load(args.target)
    gpu_memory_fraction()  # a wrong variable is found before the minutes of compilation
    if args.costs and args.costs.suffix != ".pbtxt":
        raise ValueError(f"--costs={args.costs}: XLA reads it as text if named *.pbtxt")
    for name, path in {"html": args.html, "costs": args.costs}.items():
        if path and not path.parent.is_dir():
            raise ValueError(f"--{name}={path}: no folder {path.parent}")
    step = compile_step(cfg, gpu, args.devices, args.nodes, args.keep)
    rates = dataclasses.replace(gpu.rates, filled_rows=step.run.filled_rows)
    module = hlo.read(step.text)
    mesh = dataclasses.asdict(cfg.mesh)
    schedule = Schedule(module, mesh, args.devices, rates)
    travels = summary(schedule)
    attention = find_attention(module, cfg.data.seq_len, step.weight_shapes)
    weights = sub_operators.find(schedule, travels.exposures)
    report = make_report(step, memory(step), travels, weights, attention, gpu)
    print(text(report), flush=True)
    if args.html:
        title = f"{pathlib.Path(args.gin_file[-1]).stem} on {cfg.mesh}"
        args.html.write_text(page(report, title), encoding="utf-8")
        print(f"page: {args.html}", flush=True)
    if args.costs:
        args.costs.write_text(profile(schedule), encoding="utf-8")
        print(f"costs: {args.costs}", flush=True)
    asked = {"gin_files": args.gin_file, "gin_params": args.gin_param}
    return asked | {"nodes": args.nodes} | report.record


if __name__ == "__main__":
    sys.exit(main())
