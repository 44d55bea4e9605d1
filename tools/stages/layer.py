"""The stage 'layer': one MoE layer, our kernels against XLA's, and its time by part."""

import dataclasses
import functools

from tools.stages.stage import Result, Task

SIZES = {
    True: "--devices 1 --tokens 64 --experts 4 --d 64 --f 32 --repeats 1",
    False: "--gpu --tokens 8192 --experts 64 --top_k 8 --d 2048 --f 1024 --repeats 5",
}
"""Flags of tools/bench/moe_layer.py, by Settings.is_dry: a toy, or a layer of OLMoE for
each device."""
PROFILED = range(3, 6)
"""Calls that are profiled; those before them warm up."""
BY_PART = ("moejax", "ragged_dot")
NUM_PARTS = 6
"""Number of parts that are kept of each profile."""


def work(task: Task) -> Result:
    """Time the layer by tools/bench/moe_layer.py, and profile two of its variants."""
    from tools.bench import moe_layer

    args = moe_layer.parse(SIZES[task.settings.is_dry].split())
    moe_layer.set_up_backend(args)
    task.note("the layer and its baselines")
    record = moe_layer.run(args)
    moe_layer.show(record)
    rows = {(row["impl"], row["pass"]): row for row in record["rows"]}
    task.note("time by part", rows=record["rows"], shape=record["shape"])
    task.note("the end", parts=time_by_part(task, record["shape"]))
    own, plain, dense = (rows[n, "fwd_bwd"] for n in ("moejax", "ragged_dot", "dense"))
    why = (
        f"{own['msec']:.2f} ms forward and backward, {plain['msec']:.2f} ms with "
        f"XLA's ragged_dot, {dense['msec'] / own['msec']:.0%} of the dense rate"
    )
    return Result("passed", why, task.figures)


def time_by_part(task: Task, shape: dict) -> dict[str, dict[str, float]]:
    """Return milliseconds by part of our layer and of that with XLA's product, the
    longest first."""
    import jax
    import jax.numpy as jnp

    from tools import read_profile
    from tools.bench.moe_case import LayerShape, make_case, variants
    from train.logs.profile import Window

    names = [field.name for field in dataclasses.fields(LayerShape)]
    case = make_case(LayerShape(**{name: shape[name] for name in names}))
    every = variants(case, case.shape.layout.rows_per_slot)
    parts = {}
    for name in BY_PART:
        apply, params = every[name]

        def loss(params, x_btd, apply=apply):
            return jnp.sum(apply(params, x_btd).astype(jnp.float32) ** 2)

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        program = step.lower(params, case.x_btd).compile()
        folder = task.path.with_name(f"profile-{name}")
        text = functools.partial(program.as_text)
        with Window(folder, PROFILED, print, hlo_text=text) as window:
            for i in range(1, PROFILED.stop):
                window.before(i)
                out = program(params, case.x_btd)
                window.after(i, out)
        summary = read_profile.read_summary(window.folder)
        rows = list(summary["parts"].items())[:NUM_PARTS]
        parts[name] = {part: round(row["busy_msec"], 4) for part, row in rows}
    return parts
