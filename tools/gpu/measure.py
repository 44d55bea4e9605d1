"""The parts of tools/gpu_report.py that no other program measures.

    python -m tools.gpu.measure machine --out FILE
    python -m tools.gpu.measure train --gin_file=tools/gpu/olmoe.gin --out FILE
    python -m tools.gpu.measure trainer --gin_file=tools/gpu/trainer.gin --out FILE

`machine` says which device is here, and how fast it copies and multiplies. `train`
trains as many layers as are predicted to fit, on random words. `trainer` starts
train/main.py as a user does: a whole run, and one in two halves, with each of two kinds
of attention. FILE is JSON; `train` writes it again after the compilation and after
every 10 steps, `trainer` after every run.

Exit codes: 0 done, 2 bad input or no such device.
"""

import concurrent.futures
import dataclasses
import importlib.metadata
import itertools
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from moejax.config import Config
from tools.bench import program
from tools.bench.timer import median_sec
from tools.launch.arguments import add_gin_flags, new_parser
from train.files import write_whole
from train.launch.agreement import LIBRARIES
from train.launch.program import DONE, guarded, start

PEERS = ("torch", "triton", "tokamax")
SMI = "driver_version,memory.total,clocks.max.sm,power.limit"
"""Fields that nvidia-smi is asked for."""
USED_SHARE = 0.92
"""Share of what a run may use that the predicted memory may take. A prediction is
within 10 % of the compiled peak, mostly within 6 %."""
WARM_UP = 2
"""Number of steps at the beginning that do not count in speeds."""
WRITE_EVERY = 10
"""Number of steps after which the figures are written."""
TRAINER_STEPS = 12
"""Steps of a run of `trainer`."""
ATTENTION = ("auto", "blocked")
"""Kinds of attention of `trainer`. On GPUs they are cuDNN's and our own in blocks."""
NUM_WORDS = 200_000
"""Words of the corpus: 1 MB, twice what 30 steps read."""


def main(argv: list[str] | None = None) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("part", choices=("machine", "train", "trainer"))
    parser.add_argument("--out", type=pathlib.Path, required=True, metavar="FILE")
    parser.add_argument("--dry", action="store_true", help="toy sizes, on a CPU")
    parser.add_argument("--steps", type=int, default=30, help="number of train steps")
    add_gin_flags(parser, default="none")
    args = parser.parse_args(argv)
    work = {"machine": machine, "train": train, "trainer": trainer}[args.part]
    with guarded(as_json=args.json) as ending:
        return work(args)
    return ending.code


def machine(args) -> int:
    """Write what is known of the device, the driver and the libraries, and how fast the
    device copies an array and multiplies two. Raises ValueError without a GPU."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    if device.platform != "gpu" and not args.dry:
        raise ValueError(
            f"JAX sees no GPU here, only {device.device_kind}: look at nvidia-smi, or "
            "run every part at toy size on the CPU with --dry"
        )
    width, length = (256, 2**16) if args.dry else (8192, 2**28)
    # Of random numbers: products of ones take less power, so that clocks stay higher.
    square = jax.random.normal(jax.random.key(0), (width, width), jnp.bfloat16)
    line = jnp.ones(length)
    calls = {
        "product": partial(jax.jit(jnp.matmul), square, square),
        "copy": partial(jax.jit(lambda x: x + 1), line),
    }
    sec = median_sec(calls, turns=5, calls_per_turn=10)
    record = {
        "kind": device.device_kind,
        "num_devices": jax.device_count(),
        "dense_tflops": 2 * width**3 / sec["product"] / 1e12,
        "copy_tb_per_sec": 2 * line.nbytes / sec["copy"] / 1e12,
        "commit": program.commit(),
        "versions": dict(_versions()),
        "nvidia_smi": _nvidia_smi(),
    }
    write_whole(args.out, json.dumps(record))
    return DONE


def _versions() -> Iterator[tuple[str, str]]:
    """Yield name and version of Python and of the libraries that are here."""
    yield "python", ".".join(map(str, sys.version_info[:3]))
    for name in (*LIBRARIES, *PEERS):
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _nvidia_smi() -> dict[str, str]:
    """Return what nvidia-smi says of the first GPU, by name; {} without it."""
    if (smi := shutil.which("nvidia-smi")) is None:
        return {}
    words = [smi, f"--query-gpu={SMI}", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    values = done.stdout.split("\n")[0].split(", ")
    return dict(zip(SMI.split(","), values)) if done.returncode == 0 else {}


def train(args) -> int:
    """Train a few steps of the configuration with as many layers as fit, and write
    speeds, memory, losses and the seconds of compilation."""
    from train.config import gin_reader

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "words.txt"
        path.write_text(random_words())
        params = [f"Data.corpus = '{path}'", *args.gin_param]
        cfg = gin_reader.load(args.gin_file, params)
        start(cfg)
        cfg, predicted_bytes = fit_layers(cfg)
        record = {
            "num_layers": cfg.model.num_layers,
            "predicted_bytes": predicted_bytes,
        }
        for figures in measure(cfg, args.steps):
            record |= figures
            write_whole(args.out, json.dumps(record))
    return DONE


def fit_layers(cfg: Config) -> tuple[Config, int]:
    """Return the configuration with the largest number of layers that is predicted to
    fit on the device here, and the predicted bytes. Raises ValueError if not one layer
    fits."""
    import jax

    from moejax.perf import target
    from train.dry_run import dry_run

    device = jax.devices()[0]
    gpu = target.of_device(device.device_kind)
    limit = (device.memory_stats() or {}).get("bytes_limit")
    for num_layers in range(cfg.model.num_layers, 0, -1):
        model = dataclasses.replace(cfg.model, num_layers=num_layers)
        cut = dataclasses.replace(cfg, model=model)
        predicted_bytes = sum(dry_run(cut, gpu)["memory"].values())
        if limit is None or predicted_bytes <= USED_SHARE * limit:
            return cut, predicted_bytes
    raise ValueError(
        f"one layer needs {predicted_bytes / 2**30:.1f} GiB, and JAX has "
        f"{limit / 2**30:.1f} GiB here: give another --gin_file"
    )


def measure(cfg: Config, num_steps: int) -> Iterator[dict[str, Any]]:
    """Yield what is known after the compilation, and then every WRITE_EVERY steps."""
    import jax

    from train.data.feed import feed
    from train.job import prepare
    from train.logs.peak import speed
    from train.step.compiled import device_bytes, home_placement, require_room
    from train.step.state import init_state

    job = prepare(cfg)
    model = job.model
    assert model.layout.overflow != "redo", "one device needs no step to run again"
    program, compile_sec = compile_by_part(model)
    require_room(program)
    device = model.mesh.devices.flat[0]
    yield {
        "kernels": {k: [c.value, c.why] for k, c in model.run.kernels.items()},
        "compile_sec": compile_sec,
        "compiled_bytes": device_bytes(program.memory_analysis()),
    }
    placement = home_placement(model.run)
    state = init_state(model.run, model.optimizer, model.layout.store)
    sizes = cfg.train.batch_size, cfg.train.accumulate_steps
    times_sec: list[float] = []
    losses: list[float] = []
    begin, before = time.perf_counter(), None
    for i in range(num_steps):
        windows = feed(job.batches, i, *sizes, job.window_sharding)
        state, metrics = program(state, placement, windows)
        if before is not None:  # the next step is dispatched, so the device goes on
            losses.append(float(jax.device_get(before.loss)))
            times_sec.append(time.perf_counter() - begin)
            begin = time.perf_counter()
        before = metrics
        is_last = i + 1 == num_steps
        if not times_sec or not (is_last or (i + 1) % WRITE_EVERY == 0):
            continue
        step_sec = statistics.median(times_sec[WARM_UP:] or times_sec)
        yield {
            "losses": losses,
            "step_msec": 1e3 * step_sec,
            **speed(cfg, step_sec, device.device_kind),
            "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        }


def compile_by_part(model) -> tuple[Any, dict[str, float]]:
    """Return the compiled train step, and the seconds of each part of compilation."""
    from train.step.compiled import trace_train_step
    from train.step.gpu_options import compiler_options

    options = compiler_options(model.mesh.devices.flat[0].platform)
    times = [time.perf_counter()]
    traced = trace_train_step(model)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    program = lowered.compile(compiler_options=options)
    times.append(time.perf_counter())
    parts = (round(b - a, 2) for a, b in itertools.pairwise(times))
    return program, dict(zip(("trace", "lower", "compile"), parts))


def trainer(args) -> int:
    """Run train/main.py, and write for each run its exit code, its last line if it
    failed, and the digest of its parameters. Kinds of attention take their runs beside
    one another, and those of one kind share their programs."""
    runs: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ThreadPoolExecutor() as threads,
    ):
        corpus = pathlib.Path(folder) / "words.txt"
        corpus.write_text(random_words())
        for done in concurrent.futures.as_completed(
            threads.submit(run_trainer, args, corpus, attention, runs)
            for attention in ATTENTION
        ):
            done.result()
    return DONE


def run_trainer(args, corpus: pathlib.Path, attention: str, runs: list[dict]) -> None:
    """Add a whole run with this attention to `runs`, and one in two halves. A run ends
    the others of its kind if it fails."""
    half = TRAINER_STEPS // 2
    for name, steps in (
        ("whole", TRAINER_STEPS),
        ("resumed", half),
        ("resumed", TRAINER_STEPS),
    ):
        params = {
            "Data.corpus": str(corpus),
            "Model.attention": attention,
            "Train.num_steps": steps,
            "Checkpoint.every_steps": half,
        }
        words = [sys.executable, "train/main.py", "--json", "--plain"]
        words += [f"--run_dir={corpus.parent / attention / name}"]
        words += [f"--gin_file={path}" for path in args.gin_file]
        words += [f"--gin_param={key} = {value!r}" for key, value in params.items()]
        words += [f"--gin_param={param}" for param in args.gin_param]
        begin_sec = time.perf_counter()
        env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run(
            words, env=env, capture_output=True, text=True, check=False
        )
        record = {"attention": attention, "run": name, "steps": steps}
        record["sec"] = round(time.perf_counter() - begin_sec, 1)
        if done.returncode == 0:
            summary = json.loads(done.stdout.splitlines()[-1])
            record |= {"digest": summary["digest"], "failed": ""}
        else:
            line = done.stderr.strip().rpartition("\n")[2]
            record |= {"digest": "", "failed": f"code {done.returncode}: {line}"}
        runs.append(record)
        write_whole(args.out, json.dumps({"runs": runs}))
        if record["failed"]:
            return


def random_words() -> str:
    """Return a text of random words, in documents of a hundred."""
    rng = random.Random(0)
    known = ["".join(rng.choices("etaoinshrdlu", k=1 + i % 8)) for i in range(300)]
    words = rng.choices(known, k=NUM_WORDS)
    parts = (" ".join(words[i : i + 100]) for i in range(0, NUM_WORDS, 100))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main())
