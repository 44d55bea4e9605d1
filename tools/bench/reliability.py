"""Measure what saves cost, and how soon a run that starts again does its first step.

    python tools/bench/reliability.py --part steps --variant "none: \\
        Checkpoint.every_steps = 1000000" --variant "25: Checkpoint.every_steps = 25"
    python tools/bench/reliability.py --part restarts --turns 5 --json

steps       train --steps steps under each variant, in turns, in one process, with the
            trainer's own loop. The first variant is the reference. A variant's time is
            that of its steps and of what they waited for (saves, data, swaps), without
            compilation and evaluation. Each variant saves its last step too, so the
            cost of a save is the extra time over the number of extra saves.
saves       save the first state of the configuration --turns times, and train nothing:
            time that the caller waits, time until the checkpoint is complete, processor
            time of all threads; the first save of a process is apart
restarts    from the start of a process that resumes a run to its first step in
            metrics.jsonl, with JAX's persistent compilation cache full and disabled, in
            turns

Exit codes: 0 done, 2 bad input, 3 the machine failed.
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # this folder's modules are tools.x, never top-level names

from tools.bench.program import add_variants, read_variants  # noqa: E402
from tools.bench.timer import in_turns  # noqa: E402
from tools.launch.arguments import add_gin_flags, new_parser  # noqa: E402
from train.config import gin_reader  # noqa: E402
from train.launch.program import (  # noqa: E402
    DONE,
    PREEMPTED,
    emit,
    guarded,
    restart_with_huge_pages,
    start,
)

COUNTED = ("useful", "saves", "data", "swaps")
"""Buckets of the goodput that are part of a variant's time."""

CACHE = {
    "on": {"JAX_ENABLE_COMPILATION_CACHE": "true"},
    "off": {"JAX_ENABLE_COMPILATION_CACHE": "false"},
}
"""Environment of the two variants of a restart."""

LIMIT_SEC = 900
"""Limit on the time to a step of a process."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if argv is None and args.part == "steps":
        restart_with_huge_pages()
    return guarded(lambda: work(args), as_json=args.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--part", choices=PARTS, required=True, help="what to measure")
    add_gin_flags(parser, "configs/tiny_cpu.gin")
    add_variants(parser, "--part steps")
    add("--steps", type=int, default=100, help="steps of a variant in a turn")
    add("--turns", type=int, default=5, help="number of turns, whose medians are kept")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> int:
    if min(args.turns, args.steps) < 1:
        raise ValueError("--turns and --steps must be at least 1")
    if args.variant and args.part != "steps":
        raise ValueError("--variant is for --part steps")
    args.gin_file = args.gin_file or [str(ROOT / "configs" / "tiny_cpu.gin")]
    with tempfile.TemporaryDirectory(prefix="reliability-") as folder:
        record = PARTS[args.part](args, pathlib.Path(folder))
    show(record)
    emit(record, args.json)
    return DONE


def measure_steps(args: argparse.Namespace, folder: pathlib.Path) -> dict:
    """Train under each variant in turns; return times and the cost of a save."""
    params = f"Train.num_steps = {args.steps}", "Train.eval_every_steps = 1000000"
    cfgs = read_variants(args, params)
    start(next(iter(cfgs.values())))
    from train.job import prepare

    jobs = {name: prepare(cfg) for name, cfg in cfgs.items()}
    rows = {name: [] for name in jobs}
    for turn, name in in_turns(list(jobs), args.turns):
        row = train_once(jobs[name], folder / "run")
        print(
            f"turn {turn} {name}: {row['total_sec']:.2f} s for {args.steps} steps, "
            f"{row['saves_sec']:.2f} s in saves, step {row['step_msec']:.1f} ms",
            flush=True,
        )
        if turn >= 0:
            rows[name].append(row)
    reference, *others = rows
    saves = {name: num_saves(cfg, args.steps) for name, cfg in cfgs.items()}
    variants = {
        name: {"num_saves": saves[name]} | summarise(row) for name, row in rows.items()
    }
    for name in others:
        extra_saves = saves[name] - saves[reference]
        every_steps = cfgs[name].checkpoint.every_steps
        variants[name] |= compare(rows[name], rows[reference], extra_saves, every_steps)
    return {"part": "steps", "steps": args.steps, "variants": variants}


def num_saves(cfg, steps: int) -> int:
    """Return how often a run of `steps` steps saves. The last step is saved always."""
    return -(-steps // cfg.checkpoint.every_steps)


def compare(
    rows: list[dict], reference: list[dict], extra_saves: int, every_steps: int
) -> dict:
    """Return how much slower a variant is than the reference, from the rows of each.

    `slowdown` is of the whole. With `extra_saves` more saves than the reference,
    `save_sec` is the cost of one, and `save_share` is that over the time of the
    `every_steps` steps from one save to the next.
    """
    pairs = zip(rows, reference, strict=True)
    extra_sec = [row["total_sec"] - other["total_sec"] for row, other in pairs]
    basis = summarise(reference)
    extra = statistics.median(extra_sec)
    record = {"extra_sec": spread(extra_sec)}
    record["slowdown"] = extra / basis["total_sec"]["median"]
    if extra_saves > 0:
        save_sec = extra / extra_saves
        share = save_sec / (every_steps * basis["step_msec"]["median"] / 1e3)
        record |= {"save_sec": save_sec, "save_share": share}
    return record


def train_once(job, run_dir: pathlib.Path) -> dict:
    """Train in a new run directory, which is removed afterwards; return the times of
    its steps."""
    from train.logs.run_dir import claim
    from train.loop import Extras, train

    silence = contextlib.redirect_stdout(io.StringIO())
    with claim(run_dir) as held, silence:
        text = gin_reader.render(job.cfg)
        outcome = train(job, held, text, Extras(), say=lambda line: None)
    shutil.rmtree(run_dir)
    sec = outcome.goodput.account().sec
    return {
        "total_sec": sum(sec[name] for name in COUNTED),
        "saves_sec": sec["saves"],
        "step_msec": 1e3 * statistics.median(outcome.step_secs),
    }


def measure_saves(args: argparse.Namespace, folder: pathlib.Path) -> dict:
    """Save the first state of a configuration in turns; return seconds of a save."""
    cfg = gin_reader.load(args.gin_file, args.gin_param)
    start(cfg)
    import jax

    from moejax.axes import make_mesh
    from moejax.resolve.resolved import resolve
    from train.checkpoint.checkpoints import Checkpointer
    from train.step.compiled import make_model
    from train.step.state import init_state

    model = make_model(resolve(cfg, make_mesh(cfg.mesh)))
    state = init_state(model.run, model.optimizer, model.layout.store)
    checkpointer = Checkpointer(folder / "checkpoints", cfg.checkpoint)
    rows = []
    for turn in range(args.turns + 1):
        begin_sec, begin_cpu_sec = time.monotonic(), time.process_time()
        checkpointer.save(turn + 1, state, {})
        wait_sec = time.monotonic() - begin_sec
        checkpointer.wait()
        rows.append(
            {
                "wait_msec": 1e3 * wait_sec,
                "complete_msec": 1e3 * (time.monotonic() - begin_sec),
                "processor_msec": 1e3 * (time.process_time() - begin_cpu_sec),
            }
        )
    checkpointer.close()
    num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    variants = {"first": rows[0], "later": summarise(rows[1:])}
    return {"part": "saves", "state_mib": num_bytes / 2**20, "variants": variants}


def measure_restarts(args: argparse.Namespace, folder: pathlib.Path) -> dict:
    """Resume a run in turns with and without the compilation cache; return the seconds
    from the start of the process to its first step."""
    gin_reader.load(args.gin_file, args.gin_param)
    words = [sys.executable, str(ROOT / "train" / "main.py")]
    words += [f"--gin_file={path}" for path in args.gin_file]
    words += [f"--gin_param={param}" for param in args.gin_param]
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
    made, run = folder / "made", folder / "run"
    time_to_step(words, made, cache | CACHE["on"], signal.SIGTERM)
    shutil.copytree(made, run)
    # Programs that only a resumed run needs get into the cache here.
    time_to_step(words, run, cache | CACHE["on"])
    secs = {name: [] for name in CACHE}
    for turn, name in in_turns(list(CACHE), args.turns, 0):
        shutil.rmtree(run)
        shutil.copytree(made, run)
        sec = time_to_step(words, run, cache | CACHE[name])
        secs[name].append(sec)
        print(f"turn {turn} cache {name}: first step after {sec:.2f} s", flush=True)
    variants = {
        f"cache {name}": {"first_step_sec": spread(secs[name])} for name in secs
    }
    return {"part": "restarts", "variants": variants}


def time_to_step(
    words: list[str], run_dir: pathlib.Path, environment: dict, end=signal.SIGKILL
) -> float:
    """Start the trainer on `run_dir`, return the seconds until it has logged one step
    more than is there, and end it with a signal.

    Raises OSError if it ends before, or if SIGTERM does not end it with everything
    saved.
    """
    metrics = run_dir / "metrics.jsonl"
    done = last_step(metrics)
    with tempfile.TemporaryFile() as log:
        begin_sec = time.monotonic()
        process = subprocess.Popen(
            [*words, f"--run_dir={run_dir}"],
            env=os.environ | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            while last_step(metrics) <= done:
                sec = time.monotonic() - begin_sec
                if process.poll() is not None or sec > LIMIT_SEC:
                    raise OSError(f"no step within {sec:.0f} s: {tail(log)}")
                time.sleep(0.005)
            sec = time.monotonic() - begin_sec
            process.send_signal(end)
            code = process.wait(LIMIT_SEC)
        finally:
            process.kill()
            process.wait()
        if end == signal.SIGTERM and code != PREEMPTED:
            raise OSError(f"the run ended with {code}, not {PREEMPTED}: {tail(log)}")
    return sec


def last_step(path: pathlib.Path) -> int:
    """Return the last step in metrics.jsonl; 0 without one."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    steps = [json.loads(line)["step"] for line in lines if line.endswith(b"}\n")]
    return max(steps, default=0)


def tail(log) -> str:
    """Return the last line of a file that a process has written."""
    log.seek(0)
    return (log.read().decode(errors="replace").strip().splitlines() or [""])[-1]


def summarise(rows: list[dict]) -> dict:
    """Return median, minimum and maximum of each column over turns."""
    return {name: spread([row[name] for row in rows]) for name in rows[0]}


def spread(values: list[float]) -> dict[str, float]:
    """Return median, minimum and maximum."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
    }


def show(record: dict) -> None:
    """Print a line for each variant: medians, with minimum and maximum in brackets."""
    for name, variant in record["variants"].items():
        parts = []
        for key, value in variant.items():
            if isinstance(value, dict):
                low, high = value["min"], value["max"]
                parts.append(f"{key} {value['median']:.2f} [{low:.2f}, {high:.2f}]")
            elif key in ("slowdown", "save_share"):
                parts.append(f"{key} {value:.1%}")
            else:
                parts.append(f"{key} {value:.4g}")
        print(f"{name:<12} {'  '.join(parts)}")


PARTS = {"steps": measure_steps, "saves": measure_saves, "restarts": measure_restarts}


if __name__ == "__main__":
    sys.exit(main())
