"""Peak matrix throughput of the devices in use, for MFU."""

import time

import jax
import jax.numpy as jnp
import numpy as np

DENSE_BF16_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}
"""Dense bf16 with fp32 accumulation, from NVIDIA's data sheets."""
PROBE_WIDTH = 1024
PROBE_REPEATS = 7


def peak_tflops(num_devices: int, override: float | None) -> float | None:
    """Return TFLOPS of all devices together; None when the device is not known.

    Simulated devices share one CPU, so that one is measured: the best of a few float32
    products of 1024 x 1024 on all its cores.
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
    dot = jax.jit(jnp.matmul)
    square = jax.device_put(np.ones((PROBE_WIDTH, PROBE_WIDTH), np.float32))
    times_sec = []
    for _ in range(PROBE_REPEATS + 1):
        start = time.perf_counter()
        dot(square, square).block_until_ready()
        times_sec.append(time.perf_counter() - start)
    return 2 * PROBE_WIDTH**3 / min(times_sec[1:]) / 1e12
