"""The stage 'machine': memory, products and collectives by XLA, and JAX's own grouped
product for Hopper, which is known to be right. What is slow or wrong here is not ours.
"""

import functools
import statistics
import time

from tools.stages.stage import Result, Task

COPY_BYTES = {True: 2**26, False: 2**32}
"""Bytes of the array that is copied, by Settings.is_dry."""
WIDTH = {True: 512, False: 8192}
"""Width of the square bfloat16 product."""
SENT_BYTES = {True: 2**16, False: 2**28}
"""Bytes on each device that a collective takes."""
REPEATS, CALLS = 5, 5
MAX_ERROR = 1e-2
"""Largest ||y - ref|| / ||ref|| of JAX's grouped product in bfloat16."""


def work(task: Task) -> Result:
    """Measure the machine. Fails if JAX's own grouped product is wrong."""
    import jax

    is_dry, device = task.settings.is_dry, jax.devices()[0]
    task.note("a copy of memory", device=device.device_kind)
    task.note("a product", copy_gb_per_sec=copy_gb_per_sec(COPY_BYTES[is_dry]))
    task.note("collectives", product_tflops=product_tflops(WIDTH[is_dry]))
    lines = collectives_gb_per_sec(SENT_BYTES[is_dry]) if jax.device_count() > 1 else {}
    task.note("JAX's ragged_dot_mgpu", collectives_gb_per_sec=lines)
    known = known_good(is_dry=is_dry)
    task.note("the end", ragged_dot_mgpu=known)
    f = task.figures
    why = (
        f"copy {f['copy_gb_per_sec']:.0f} GB/s, product {f['product_tflops']:.3g} TF/s"
    )
    why += "".join(f", {name} {rate:.0f} GB/s" for name, rate in lines.items())
    if isinstance(known, str):
        return Result("passed", f"{why}; ragged_dot_mgpu not here: {known}", f)
    if not known <= MAX_ERROR:
        text = f"JAX's own ragged_dot_mgpu is wrong: error {known:.2g}; {why}"
        return Result("failed", text, f)
    return Result("passed", f"{why}, ragged_dot_mgpu right", f)


def median_sec(call) -> float:
    """Return the seconds of a call: the median over samples of several calls between
    two waits, after two that warm up."""
    import jax

    def sample() -> float:
        begin = time.perf_counter()
        for _ in range(CALLS):
            out = call()
        jax.block_until_ready(out)
        return (time.perf_counter() - begin) / CALLS

    sample()
    return statistics.median(sample() for _ in range(REPEATS))


def copy_gb_per_sec(num_bytes: int) -> float:
    """Return the rate of a copy on the first device, bytes read and written."""
    import jax.numpy as jnp
    from jax import jit

    x_n = jnp.arange(num_bytes // 4, dtype=jnp.float32)
    add = jit(lambda x_n: x_n + 1)
    return 2 * num_bytes / median_sec(functools.partial(add, x_n)) / 1e9


def product_tflops(width: int) -> float:
    """Return the rate of a square bfloat16 product of random numbers."""
    import jax
    import jax.numpy as jnp

    keys = jax.random.split(jax.random.key(0))
    x, y = (jax.random.normal(key, (width, width), jnp.bfloat16) for key in keys)
    dot = jax.jit(jnp.matmul)
    return 2 * width**3 / median_sec(functools.partial(dot, x, y)) / 1e12


def collectives_gb_per_sec(num_bytes: int) -> dict[str, float]:
    """Return, for each collective over all devices, the bytes that leave one device in
    a second."""
    import jax

    from moejax.axes import make_mesh
    from moejax.plan.layout import Topology
    from tools.bench.collective_times import (
        COLLECTIVES,
        Sweep,
        collective_programs,
    )

    mesh = make_mesh(Topology(expert=jax.device_count()))
    sweep = Sweep(tuple(COLLECTIVES), (num_bytes // 2,), repeats=2)
    rates = {}
    for program in collective_programs(mesh, "bfloat16", sweep):
        sec = median_sec(functools.partial(program.run, *program.arguments))
        rates[program.line[0]] = program.amount * program.repeats / sec / 1e9
    return rates


def known_good(*, is_dry: bool) -> float | str:
    """Return the error of JAX's own grouped product for Hopper GPUs on a small case, or
    the reason why it cannot run here."""
    import jax.numpy as jnp
    import numpy as np

    from moejax.kernels.device import why_not_hopper
    from moejax.kernels.shapes import ProductShape
    from tools.bench import grouped_dot_cases as cases
    from tools.bench import grouped_dot_peers as peers

    if why := why_not_hopper():
        return why
    shape = ProductShape(rows=1024, d=256, f=256, groups=4)
    arrays = cases.operands("forward", shape, "bfloat16", 0)
    rows_g = np.array([512, 0, 384, 128], np.int32)
    variant, *_ = peers.variants("mgpu", "forward", 0)
    out = variant.run_results(variant.arguments(arrays, jnp.asarray(rows_g)))
    case = cases.ProductCase(arrays, rows_g)
    return cases.largest_error("forward", out, case, has_zero_padding=False)
