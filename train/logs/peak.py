"""Peak matrix throughput of the devices in use, for MFU."""

import time

import jax
import jax.numpy as jnp
import numpy as np

DENSE_BF16_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}
"""Peak TFLOPS of one device for dense bf16 products with float32 accumulation, from
NVIDIA's data sheets."""
PROBE_WIDTH = 1024
PROBE_REPEATS = 7


def peak_tflops(num_devices: int, override: float | None) -> float | None:
    """Return the peak TFLOPS of all devices together; None for an unknown device.

    `override` is the TFLOPS of one device. Simulated devices share one CPU, so the CPU
    is measured: the best of seven float32 products of 1024 x 1024 on all its cores.
    """
    if override is not None:
        return override * num_devices
    device = jax.devices()[0]
    if device.platform == "cpu":
        return _measure()
    for name, tflops in DENSE_BF16_TFLOPS.items():
        if name in device.device_kind:
            return tflops * num_devices
    return None


def _measure() -> float:
    """Return the TFLOPS of the fastest of PROBE_REPEATS products on this CPU."""
    dot = jax.jit(jnp.matmul)
    square = jax.device_put(np.ones((PROBE_WIDTH, PROBE_WIDTH), np.float32))
    times_sec = []
    for _ in range(PROBE_REPEATS + 1):
        start = time.perf_counter()
        dot(square, square).block_until_ready()
        times_sec.append(time.perf_counter() - start)
    return 2 * PROBE_WIDTH**3 / min(times_sec[1:]) / 1e12
