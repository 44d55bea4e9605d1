"""Measure whether a collective runs beside independent products, and time whole steps
that differ in it.

    python tools/testbed/run.py run --rate_mbit 200 -- tools/bench/overlap.py --json
    python tools/testbed/run.py run --rate_mbit 200 -- tools/bench/overlap.py \\
        --gin_file=configs/tiny_cpu.gin --gin_param='Mesh.data = 1' \\
        --gin_param='Mesh.expert = 2' --gin_param='Train.num_simulated_devices = 2' \\
        --variant 'kept: Model.remat = "none"' --variant 'remat: Model.remat = "full"'

exchange    an all_to_all of --mib MiB on each device
products    a chain of products that takes about as long as the exchange
both        the exchange and products that are independent of it, in one program
whole       an exchange, then the products of its rows
halves      the same in two halves of the rows: the exchanges of both, then the products
            of each

Products are `unrolled`, one operation each; in a `loop`, which is one operation; or
`wide`, in 16 chains that are independent of one another. A `pause` stands in their
place: a call of the host that sleeps, needs no core, and so measures the same on a busy
machine.

All programs take turns; a time is that of the slowest process. Times and shares are
medians over turns. `hidden` is the share of the shorter of exchange and products that
runs beside the other, (exchange + products - both) / min(exchange, products).
`hidden_in_halves` is the saved time over what two halves can save at most, (whole -
halves) / (min(exchange, products) / 2).

With --variant, whole train steps of a configuration are timed instead, under the
settings of each variant, every expert at its owner. The first variant is the reference.

Exit codes: 0 done, 2 bad input, 3 the machine failed.
"""

import argparse
import dataclasses
import math
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from moejax.config import Config  # noqa: E402
from tools.bench.process_turns import make_barrier, time_runs  # noqa: E402
from tools.bench.program import add_variants, read_variants  # noqa: E402
from tools.calibrate import mesh_params  # noqa: E402
from tools.launch.arguments import add_gin_flags, new_parser  # noqa: E402
from train.config import gin_reader  # noqa: E402
from train.launch.program import DONE, emit, guarded, start  # noqa: E402

AXIS = "expert"
FORMS = ("unrolled", "loop", "wide", "pause")
PAUSE_SEC = 1e-6
"""Pause for each row, in place of one product."""
CHAINS = 16
"""Number of chains of wide products. XLA:CPU gives ready operations to other threads
only where more than a few are ready."""
PROBE = 8
"""Number of products whose time says how many take as long as the exchange."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return guarded(lambda: work(args), as_json=args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--devices", type=int, default=2, help="devices that exchange rows")
    add("--mib", type=float, default=4.0, help="MiB of rows on each device")
    add("--width", type=int, default=256, help="width of the rows and of the products")
    add(
        "--turns",
        type=int,
        default=7,
        help="number of times that each program is measured; medians are kept",
    )
    add_gin_flags(parser, "none; for --variant")
    add_variants(parser, "whole steps")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    rows = round(args.mib * 2**20 / 4 / max(args.width, 1))
    if min(args.turns, args.width) < 1 or args.devices < 2:
        raise ValueError(
            f"--turns {args.turns} and --width {args.width} must be at least 1, and "
            f"--devices {args.devices} at least 2"
        )
    multiple = 2 * math.lcm(args.devices, CHAINS)
    if rows % multiple or not rows:
        raise ValueError(
            f"--mib {args.mib:g} is {rows} rows of --width {args.width}, which must be "
            f"a multiple of {multiple}: two halves, each for all --devices and in "
            f"{CHAINS} chains"
        )
    if args.variant:
        cfgs = read_variants(args)
        start(next(iter(cfgs.values())))
        record = measure_steps(cfgs, args.turns)
    else:
        args.mesh, args.gpu = f"{AXIS}={args.devices}", False
        cfg = gin_reader.load([], mesh_params(args))
        start(cfg)
        record = measure_programs(cfg, rows, args)
    from train.launch.processes import is_first

    if is_first():
        show(record)
        emit(record, args.json)
    return DONE


def measure_programs(cfg: Config, rows: int, args: argparse.Namespace) -> dict:
    """Return the seconds of all programs and the shares that are hidden."""
    from moejax.axes import make_mesh

    mesh = make_mesh(cfg.mesh)
    case = Case(mesh, rows, args.width)
    measure = partial(measure_times, turns=args.turns, meet=connect(mesh))
    probe = {"exchange": case.program(exchange)}
    probe |= {form: case.program(chain, PROBE, form) for form in FORMS}
    sec = medians(measure(probe))
    counts = {f: max(1, round(PROBE * sec["exchange"] / sec[f])) for f in FORMS}
    programs = {"exchange": probe["exchange"]}
    for form in FORMS:
        for name, body in BODIES.items():
            program = case.program(body, counts[form], form)
            programs[f"{name}_{form}"] = program
    times = measure(programs)
    return {
        "devices": args.devices,
        "mib": args.mib,
        "width": args.width,
        "turns": args.turns,
        "cpu_load": os.getloadavg()[0],
        "num_products": counts,
        "sec": medians(times),
        "hidden": {form: median_of(hidden, times, form) for form in FORMS},
        "hidden_in_halves": {
            form: median_of(hidden_in_halves, times, form) for form in FORMS
        },
    }


def hidden(sec: dict[str, float], form: str) -> float:
    """Return the share of the shorter of exchange and products that runs beside the
    other: 0 where they run one after another, 1 where the shorter one is free."""
    a, b, both = sec["exchange"], sec[f"products_{form}"], sec[f"both_{form}"]
    return (a + b - both) / min(a, b)


def hidden_in_halves(sec: dict[str, float], form: str) -> float:
    """Return the time that two halves save over the most that they can save: the
    exchange of the second half under the products of the first."""
    shorter = min(sec["exchange"], sec[f"products_{form}"])
    return (sec[f"whole_{form}"] - sec[f"halves_{form}"]) / (shorter / 2)


def median_of(share: Callable, times: dict[str, list[float]], form: str) -> float:
    """Return the median over turns of a share. The programs of a turn run at nearly the
    same time, when the machine is as busy for all of them."""
    turns = (dict(zip(times, row)) for row in zip(*times.values()))
    return statistics.median(share(sec, form) for sec in turns)


def connect(mesh) -> Callable[[], object]:
    """Return a barrier that all processes have met at once. Gloo gives them 30 s to
    connect, which may be less than one takes longer to compile than another."""
    meet = make_barrier(mesh)
    meet()
    return meet


def measure_times(
    programs: dict[str, Callable], turns: int, meet: Callable
) -> dict[str, list[float]]:
    """Return the seconds of each program in each turn."""
    return dict(zip(programs, time_runs(list(programs.values()), turns, meet)))


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    """Return the median seconds of each program over turns."""
    return {name: statistics.median(row) for name, row in times.items()}


@dataclasses.dataclass(frozen=True)
class Case:
    """Arrays and devices of all programs."""

    mesh: object
    rows: int
    width: int

    def program(self, body: Callable, *settings) -> Callable[[], object]:
        """Return a compiled program of rows [n, d] on each device and a matrix [d, d]
        that all share."""
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        split = PartitionSpec(AXIS)
        shapes = (self.mesh.shape[AXIS] * self.rows, self.width), (self.width,) * 2
        specs = split, PartitionSpec()
        arguments = [
            jax.jit(
                partial(jnp.full, shape, 1 / self.width),
                out_shardings=NamedSharding(self.mesh, spec),
            )()
            for shape, spec in zip(shapes, specs, strict=True)
        ]
        mapped = jax.shard_map(
            lambda *arrays: body(*arrays, *settings),
            mesh=self.mesh,
            in_specs=specs,
            out_specs=split,
        )
        compiled = jax.jit(mapped).lower(*arguments).compile()
        return lambda: compiled(*arguments)


def exchange(x_nd, matrix_dd=None):
    """Return the rows after an all_to_all."""
    import jax

    return jax.lax.all_to_all(x_nd, AXIS, 0, 0, tiled=True)


def chain(x_nd, matrix_dd, count: int, form: str):
    """Return rows after `count` products with a matrix, or after a pause."""
    import jax
    import jax.numpy as jnp

    if form == "pause":
        sleep = partial(pause, sec=count * PAUSE_SEC * x_nd.shape[0])
        first = jax.ShapeDtypeStruct((), x_nd.dtype)
        return x_nd.at[0, 0].set(jax.pure_callback(sleep, first, x_nd[0, 0]))
    if form == "wide":
        parts = jnp.split(x_nd, CHAINS)
        parts = [chain(part_nd, matrix_dd, count, "unrolled") for part_nd in parts]
        return jnp.concatenate(parts)
    if form == "loop":
        return jax.lax.fori_loop(0, count, lambda _, x_nd: x_nd @ matrix_dd, x_nd)
    for _ in range(count):
        x_nd = x_nd @ matrix_dd
    return x_nd


def pause(value, sec: float):
    """Return the value after a pause."""
    time.sleep(sec)
    return np.asarray(value)


def both(x_nd, matrix_dd, count: int, form: str):
    """Return the rows after an all_to_all, and the products of the same rows."""
    return exchange(x_nd), chain(x_nd, matrix_dd, count, form)


def whole(x_nd, matrix_dd, count: int, form: str):
    """Return the products of the rows after an all_to_all."""
    return chain(exchange(x_nd), matrix_dd, count, form)


def halves(x_nd, matrix_dd, count: int, form: str):
    """Return the same in two halves of the rows."""
    middle = x_nd.shape[0] // 2
    parts = [exchange(part_nd) for part_nd in (x_nd[:middle], x_nd[middle:])]
    return tuple(chain(part_nd, matrix_dd, count, form) for part_nd in parts)


BODIES = {"products": chain, "both": both, "whole": whole, "halves": halves}
"""Programs with products, by name: functions of (x_nd, matrix_dd, count, form)."""


def measure_steps(cfgs: dict[str, Config], turns: int) -> dict:
    """Return the seconds of a train step of each configuration, and their ratio to
    those of the first."""
    from moejax.axes import make_mesh

    meet = connect(make_mesh(next(iter(cfgs.values())).mesh))
    steps = {name: make_step(cfg) for name, cfg in cfgs.items()}
    sec = medians(measure_times(steps, turns, meet))
    reference = next(iter(sec.values()))
    ratio = {name: value / reference for name, value in sec.items()}
    return {"turns": turns, "sec": sec, "ratio": ratio}


def make_step(cfg: Config) -> Callable[[], object]:
    """Return a function that trains one more step on the first batch."""
    from train.data.feed import feed
    from train.job import prepare
    from train.step.compiled import home_placement, trace_train_step
    from train.step.state import init_state

    job = prepare(cfg)
    model = job.model
    step = trace_train_step(model).lower().compile()
    sizes = cfg.train.batch_size, cfg.train.accumulate_steps
    windows = feed(job.batches, 0, *sizes, job.window_sharding)
    placement = home_placement(model.run)
    state = init_state(model.run, model.optimizer, model.layout.store)

    def run():
        nonlocal state
        state, metrics = step(state, placement, windows)
        return metrics

    return run


def show(record: dict) -> None:
    """Print the times, and the shares or the ratios."""
    for name, sec in record["sec"].items():
        ratio = f"  {record['ratio'][name]:.3f}" if "ratio" in record else ""
        print(f"{name:20} {1e3 * sec:9.1f} ms{ratio}")
    for key in ("hidden", "hidden_in_halves"):
        for form, share in record.get(key, {}).items():
            print(f"{key:20} {form:9} {share:.2f}")


if __name__ == "__main__":
    sys.exit(main())
