"""Time the step of one MoE layer under several schedules or domains, and compare with
the times that the models predict.

    python tools/bench/communication.py --mesh dc=2,expert=2 --cases cases.json [--json]

The program simulates the mesh's devices, or is one of several processes that share
them: so tools/testbed/run.py measures on slow links. The file is a JSON list of cases:

    [{"name": "D=2", "shape": {"tokens": 128, "d_model": 2048, "d_expert": 43,
      "num_experts": 4, "top_k": 2}, "variants": ["1x1", "2x1"]}]

Variants are schedules (base, s1, ..) or domains ('2x1': domains of two along dc and one
along expert). First all collectives are measured in the same processes, and the models
of moejax/perf choose a variant by these times. 'auto' is the chosen variant, measured
once more. The programs of a case are compiled, then its variants take turns with a
barrier before each. A time is that of the slowest process, and the median over turns.

Exit codes: 0 done, 2 bad input, 3 the machine failed.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time
from functools import partial

sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

from moejax.plan.layout import Topology  # noqa: E402
from tools.bench.process_turns import make_barrier, time_runs  # noqa: E402
from tools.calibrate import mesh_params  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.config import gin_reader  # noqa: E402
from train.launch.program import DONE, emit, guarded, start  # noqa: E402

ELEMENTS, REPEATS = (2**10, 2**13, 2**16), 3
"""Array sizes of the calibration, beside --largest, and the number of repetitions of a
collective in one of its programs."""
AUTO, DTYPE = "auto", "float32"


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    return guarded(lambda: work(args), as_json=args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--mesh", required=True, help="sizes of mesh axes, as dc=2,expert=2")
    add(
        "--cases",
        type=pathlib.Path,
        required=True,
        help="JSON file with a list of cases, as above",
    )
    add(
        "--turns",
        type=int,
        default=5,
        help="number of times that each variant is measured; medians are kept",
    )
    add(
        "--largest",
        type=int,
        default=2**19,
        help="elements of the largest array in the calibration",
    )
    add(
        "--dcs",
        type=int,
        default=2,
        help="number of DCs, each with the same number of consecutive devices",
    )
    args = parser.parse_args(argv)
    args.gin_file, args.gpu = [], False
    return args


def work(args: argparse.Namespace) -> int:
    cases = parse_cases(args)
    cfg = gin_reader.load([], mesh_params(args))
    topology = cfg.mesh
    if topology.num_devices % args.dcs:
        raise ValueError(
            f"--dcs {args.dcs} must divide the {topology.num_devices} devices of --mesh"
        )
    # Optimizing takes long to compile and gains little, since links are the bottleneck.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    start(cfg)
    import jax

    from moejax.axes import make_mesh
    from tools.bench.communication_cases import BenchedLayer
    from train.launch.processes import is_first

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    mesh = make_mesh(topology)
    cases = [case | {"shape": BenchedLayer(**case["shape"])} for case in cases]
    calibration = calibrate(mesh, cases[0]["shape"], args)
    record = {
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "turns": args.turns,
        "calibration": dataclasses.asdict(calibration),
        "cases": measure_cases(mesh, cases, calibration, args),
    }
    if is_first():
        print("\n".join(map(format_record, record["cases"])))
        emit(record, args.json)
    return DONE


def parse_cases(args: argparse.Namespace) -> list[dict]:
    """Return the cases of --cases. Raises ValueError, with one line, for bad flags and
    for a file that is not a list of cases."""
    for name in ("turns", "dcs"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} must be at least 1")
    if args.largest <= ELEMENTS[-1]:
        raise ValueError(f"--largest {args.largest} must be above {ELEMENTS[-1]}")
    try:
        cases = json.loads(args.cases.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"cannot read {args.cases} as JSON: {error}: give a list of cases"
        ) from error
    keys = {"name", "shape", "variants"}
    if not (isinstance(cases, list) and cases):
        raise ValueError(f"{args.cases} must hold a list of cases, and holds none")
    for case in cases:
        if not isinstance(case, dict) or set(case) != keys:
            raise ValueError(f"a case must have {sorted(keys)}, but this is {case}")
    return cases


def calibrate(mesh, shape, args: argparse.Namespace):
    """Measure the collectives of this mesh on sizes that suit slow links, and return a
    Calibration."""
    from tools.bench import collective_times as times

    names = tuple(name for name in times.COLLECTIVES if name != "ppermute")
    sweep = times.Sweep(names, (*ELEMENTS, args.largest), REPEATS)
    programs = times.collective_programs(mesh, DTYPE, sweep)
    runs = [partial(program.run, *program.arguments) for program in programs]
    rows = time_runs(runs, args.turns, make_barrier(mesh))
    sec = [statistics.median(row) / REPEATS for row in rows]
    widths = times.Widths(
        d_model=shape.d_model,
        d_expert=shape.d_expert,
        groups=max(1, shape.num_experts // mesh.size),
        rows=shape.tokens * shape.top_k,
        dtype=DTYPE,
    )
    lines = times.fit_lines(programs, sec)
    return times.measure_calibration(mesh, lines, widths, args.turns)


def measure_cases(mesh, cases: list[dict], calibration, args) -> list[dict]:
    """Measure the cases, and return a record of each: the seconds and bytes of its
    variants, and the predictions."""
    from tools.bench.communication_cases import compile_step, predict_variants
    from train.launch.processes import from_first_process, is_first

    topology = Topology(*mesh.devices.shape)
    per_dc = mesh.size // args.dcs
    records, meet = [], make_barrier(mesh)
    for case in cases:
        shape, variants, begin = case["shape"], case["variants"], time.perf_counter()
        prediction = from_first_process(
            partial(predict_variants, shape, variants, topology, calibration)
        )
        steps = {
            variant: compile_step(shape, variant, mesh, per_dc) for variant in variants
        }
        compile_sec = time.perf_counter() - begin
        check_drops(case["name"], steps)
        steps[AUTO] = steps[prediction["chosen"]]
        runs = [partial(step.run, *step.arguments) for step in steps.values()]
        sent = [[] for _ in runs]
        times = time_runs(runs, args.turns, meet, sent)
        middle = [map(statistics.median, rows) for rows in (times, sent)]
        record = {
            "name": case["name"],
            "shape": dataclasses.asdict(shape),
            **prediction,
            "step_sec": dict(zip(steps, middle[0])),
            "times_sec": dict(zip(steps, times)),
            "sent_bytes": dict(zip(steps, middle[1])),
            "expected_bytes": {
                variant: s.leaving_bytes for variant, s in steps.items()
            },
            "compile_sec": compile_sec,
        }
        records.append(record)
        if is_first():
            print(format_record(record), file=sys.stderr, flush=True)
    return records


def check_drops(name: str, steps: dict) -> None:
    """Raise ValueError if a variant drops rows: variants that do not compute the same
    cannot be compared."""
    for variant, step in steps.items():
        (_, dropped), _ = step.run(*step.arguments)
        if int(dropped):
            raise ValueError(
                f"case {name}: {variant} drops {int(dropped)} rows, but must drop "
                "none: use a larger buffer_factor"
            )


def format_record(record: dict) -> str:
    """Return a line with the milliseconds of each variant, predictions in brackets, and
    the MB that left the first DC."""
    predicted_sec, sent = record["predicted_sec"], record["sent_bytes"]
    chosen_sec = predicted_sec[record["chosen"]]  # that of 'auto'
    variants = [
        f"{variant} {1e3 * sec:.0f} "
        f"[{1e3 * predicted_sec.get(variant, chosen_sec):.0f}] ms "
        f"{1e-6 * sent[variant]:.2f} MB"
        for variant, sec in record["step_sec"].items()
    ]
    return (
        f"{record['name']}: {', '.join(variants)}; chosen {record['chosen']}; "
        f"compiled in {record['compile_sec']:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
