"""Train a model for a few steps, and measure them.

    python -m tools.stages.trial SETTINGS.json TRIAL.json RESULT.json

As a program it runs one variant, in a process of its own because XLA reads its flags
once. The stages 'steps' and 'profile' call `measure`.
"""

import functools
import gc
import itertools
import json
import pathlib
import statistics
import sys
import time

from moejax.config import Config
from tools.stages.stage import LINE, Settings
from train.files import write_whole
from train.messages import one_line

WARM_UP = 2
"""Number of steps at the beginning that are not counted in speeds."""


def main() -> int:
    from tools.stages.models import read_models, trained_model
    from tools.stages.runner import begin_process
    from train.config import gin_reader
    from train.launch.program import start

    begin_process()
    settings = Settings.load(pathlib.Path(sys.argv[1]))
    trial = json.loads(pathlib.Path(sys.argv[2]).read_text())
    start(next(iter(read_models(settings).values())))
    try:
        text = gin_reader.render(trained_model(settings))
        path = pathlib.Path(sys.argv[3]).with_name("trial.gin")
        path.write_text(text)
        record = measure(gin_reader.load([path], trial["params"]), trial["num_steps"])
    except Exception as error:  # a variant may need too much memory, or not compile
        record = {"why": f"{type(error).__name__}: {one_line(error, LINE)}"}
    write_whole(pathlib.Path(sys.argv[3]), json.dumps(record))
    return 0


def measure(
    cfg: Config,
    num_steps: int,
    folder: pathlib.Path | None = None,
    profiled: range = range(0),
) -> dict:
    """Train `num_steps` steps, and return speeds, memory, seconds of compilation and
    the loss of each step. The steps of `profiled` are traced to `folder`."""
    import jax

    from train.balance.ahead import Steps
    from train.data.feed import feed
    from train.job import prepare
    from train.logs.profile import Window
    from train.step.compiled import home_placement
    from train.step.state import init_state

    job = prepare(cfg)
    model = job.model
    program, sec = compile_by_part(model)
    may_redo = model.layout.overflow == "redo"
    steps = Steps(program, None, program if may_redo else None)
    steps.require_room()
    placement = home_placement(model.run)
    state = init_state(model.run, model.optimizer, model.layout.store)
    sizes = cfg.train.batch_size, cfg.train.accumulate_steps
    window = Window(folder or "", profiled, hlo_text=functools.partial(program.as_text))
    times_sec, losses, before = [], [], None
    begin = time.perf_counter()
    with window:
        for i in range(1, num_steps + 1):
            windows = feed(job.batches, i - 1, *sizes, job.window_sharding)
            window.before(i)
            state, metrics = steps.run(i, state, placement, windows, is_loop_free=True)
            window.after(i, state)
            if before is not None:
                losses.append(float(jax.device_get(before.loss)))
                times_sec.append(time.perf_counter() - begin)
                begin = time.perf_counter()
            before = metrics
        losses.append(float(jax.device_get(before.loss)))
    record = speeds(job, times_sec) | {"compile_sec": sec, "losses": losses}
    record |= memory(program, job)
    record["profile"] = str(window.folder) if profiled else None
    del state, program, steps, job, model, windows, metrics, before
    gc.collect()
    return record


def compile_by_part(model) -> tuple:
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


def speeds(job, times_sec: list[float]) -> dict:
    """Return the speeds of the steps after the first ones, from the seconds between the
    ends of two steps."""
    from moejax.model.flops import flops_per_token
    from train.logs.peak import peak_tflops

    step_sec = statistics.median(times_sec[WARM_UP:] or times_sec)
    tokens = job.tokens_per_step
    peak = peak_tflops(job.model.mesh.size, job.cfg.train.peak_tflops)
    flops = flops_per_token(job.cfg.network).train * tokens
    return {
        "num_layers": job.cfg.model.num_layers,
        "step_msec": 1e3 * step_sec,
        "tok_per_sec": tokens / step_sec,
        "mfu": flops / step_sec / 1e12 / peak if peak else None,
        "kernels": {k: list(c) for k, c in job.model.run.kernels.items()},
    }


def memory(program, job) -> dict:
    """Return the bytes of a device: those that XLA compiled the step for, and the peak
    that the device has seen, which is None where it does not say."""
    from train.step.compiled import device_bytes

    stats = job.model.mesh.devices.flat[0].memory_stats() or {}
    return {
        "compiled_bytes": device_bytes(program.memory_analysis()),
        "peak_bytes": stats.get("peak_bytes_in_use"),
    }


if __name__ == "__main__":
    sys.exit(main())
