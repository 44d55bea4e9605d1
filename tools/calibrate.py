"""Measure the speed of this machine's collectives and matrix products, for the
balancer's cost model.

    python tools/calibrate.py --gin_file=configs/tiny_cpu.gin --out calibration.json
    python tools/calibrate.py --mesh data=2,expert=4          (8 simulated devices)

collectives   line seconds = latency + bytes / bandwidth of all_to_all, all_gather,
              reduce_scatter, all_reduce and ppermute, over each axis of more than one
              device, and over dc x expert, data x expert and expert x tensor together
              (dc_expert ..). Bytes are those that leave one device. All groups of the
              mesh send at once, so the line includes the effect of shared links.
experts       FLOPs per second of one device in the products of experts, forward and
              backward, with their activation and the moves of rows to slots and back,
              in the configuration's widths and dtype
compile       seconds to compile the train step (--compile, needs --gin_file)

Every line comes with its r2. Exit codes: 0 done, 2 bad input, 3 the result could not be
written.
"""

import argparse
import dataclasses
import math
import pathlib
import sys
import time

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])

from moejax.config import Config  # noqa: E402
from tools.launch.arguments import add_gin_flags, new_parser  # noqa: E402
from train.config import gin_reader  # noqa: E402
from train.files import write_whole  # noqa: E402
from train.launch.program import DONE, emit, guarded, start  # noqa: E402

MESH_AXES = ("dc", "data", "expert", "tensor")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with guarded(as_json=args.json) as ending:
        return work(args)
    return ending.code


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add_gin_flags(parser, "none")
    add(
        "--mesh",
        help="sizes of mesh axes, as data=2,expert=4 (default: the gin file's)",
    )
    add(
        "--gpu",
        action="store_true",
        help="with --mesh: use the GPUs of this machine instead of simulated devices",
    )
    add(
        "--turns",
        type=int,
        default=5,
        help="number of times that each program is measured; medians are kept",
    )
    add(
        "--compile",
        action="store_true",
        help="also time the compilation of the train step",
    )
    add(
        "--out",
        type=pathlib.Path,
        help="JSON file for the calibration (default: it is only printed)",
    )
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    cfg = read_config(args)
    start(cfg)
    from train.launch.processes import is_first

    calibration = measure(cfg, args)
    if is_first():
        if args.out is not None:
            write_whole(args.out, calibration.to_json())
        show(calibration)
        emit(dataclasses.asdict(calibration), args.json)
    return DONE


def read_config(args: argparse.Namespace) -> Config:
    """Return the configuration of the gin files, with the mesh of --mesh if given.

    With --mesh alone all other fields have their defaults. Raises ValueError for flags
    that do not fit together.
    """
    if not args.gin_file and not args.mesh:
        raise ValueError(
            "no mesh is named: give --gin_file configs/tiny_cpu.gin, or --mesh "
            "data=2,expert=4"
        )
    if args.compile and not args.gin_file:
        raise ValueError("--compile times a configuration's step: give its --gin_file")
    if args.turns < 1:
        raise ValueError(f"--turns {args.turns} must be at least 1")
    params = mesh_params(args) if args.mesh else []
    cfg = gin_reader.load(args.gin_file, [*params, *args.gin_param])
    # The file that the configuration names may be the one to be written.
    balance = dataclasses.replace(cfg.balance, calibration=None)
    return dataclasses.replace(cfg, balance=balance)


def mesh_params(args: argparse.Namespace) -> list[str]:
    """Return the gin bindings of --mesh.

    Without --gpu they include the number of simulated devices; without --gin_file also
    a batch size and a number of experts that fit the mesh.
    """
    sizes = dict.fromkeys(MESH_AXES, 1)
    for word in args.mesh.split(","):
        axis, _, size = word.strip().partition("=")
        if axis not in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"--mesh {args.mesh}: {word!r} is not an axis with a size: write it as "
                f"data=2,expert=4; the axes are {', '.join(MESH_AXES)}"
            )
        sizes[axis] = int(size)
    params = [f"Mesh.{axis} = {size}" for axis, size in sizes.items()]
    devices = math.prod(sizes.values())
    if not args.gpu:
        params.append(f"Train.num_simulated_devices = {devices}")
    if not args.gin_file:
        params.append(f"Train.batch_size = {4 * devices}")
        params.append(f"Moe.num_experts = {4 * sizes['expert']}")
        if not args.gpu:  # CPUs emulate bfloat16, slowly
            params.append("Model.compute_dtype = 'float32'")
    return params


def measure(cfg: Config, args: argparse.Namespace):
    """Measure the mesh of `cfg`, which must have all devices of the run, and return a
    Calibration."""
    from moejax.axes import make_mesh
    from tools.bench import collective_times as times

    mesh = make_mesh(cfg.mesh)
    programs = times.collective_programs(mesh, cfg.model.compute_dtype, times.SWEEP)
    sec = times.measure_sec(programs, args.turns)
    lines = times.fit_lines(programs, sec)
    calibration = times.measure_calibration(mesh, lines, hidden_widths(cfg), args.turns)
    if args.compile:
        return dataclasses.replace(calibration, compile_sec=compile_sec(cfg, mesh))
    return calibration


def hidden_widths(cfg: Config):
    """Return the sizes of the experts that one device computes under `cfg`."""
    from tools.bench.collective_times import Widths

    shards = cfg.mesh.num_batch_shards * cfg.train.accumulate_steps
    tokens = cfg.train.batch_size // shards * cfg.data.seq_len
    return Widths(
        d_model=cfg.model.d_model,
        d_expert=cfg.moe.d_expert,
        groups=cfg.moe.num_experts // cfg.group_size,
        rows=tokens * cfg.moe.top_k,
        dtype=cfg.model.compute_dtype,
    )


def compile_sec(cfg: Config, mesh) -> float:
    """Return the seconds to trace, lower and compile the train step without the
    compilation cache."""
    import jax

    from moejax.resolve.resolved import resolve
    from train.step.compiled import make_model, trace_train_step

    is_cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    begin = time.perf_counter()
    try:
        trace_train_step(make_model(resolve(cfg, mesh))).lower().compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", is_cached)
    return time.perf_counter() - begin


def show(calibration) -> None:
    """Print a calibration as a table."""
    sizes = ", ".join(f"{axis}={size}" for axis, size in calibration.mesh.items())
    print(f"{calibration.device_kind}, mesh {sizes}, {calibration.compute_dtype}")
    print(f"{'collective':16s}{'axes':14s}{'latency us':>12s}{'GB/s':>10s}{'r2':>8s}")
    for name, lines in calibration.collectives.items():
        for axes, line in lines.items():
            print(
                f"{name:16s}{axes:14s}{1e6 * line['latency_sec']:12.1f}"
                f"{1e-9 * line['bytes_per_sec']:10.3f}{line['r2']:8.3f}"
            )
    tflops = 1e-12 * calibration.flops_per_sec
    r2 = calibration.matmul_r2
    print(f"experts      {tflops:.4f} TFLOP/s per device, r2 {r2:.3f}")
    if calibration.compile_sec:
        print(f"compile      {calibration.compile_sec:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
