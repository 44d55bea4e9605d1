"""Peak matrix throughput of GPUs, for MFU."""

DENSE_BF16_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}
"""Peak TFLOPS of one device for dense bf16 products with float32 accumulation, from
NVIDIA's data sheets."""


def peak_tflops(kind: str) -> float | None:
    """Return the peak TFLOPS of one device of a kind, as JAX or a target names it; None
    where it is not known, as of CPUs."""
    names = (name for name in DENSE_BF16_TFLOPS if name in kind)
    return DENSE_BF16_TFLOPS.get(next(names, ""))
