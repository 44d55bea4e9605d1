"""Speed of a step: tokens per second, and MFU by the peak of the devices."""

from moejax.config import Config
from moejax.model.flops import flops_per_token

DENSE_BF16_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0, "B200": 2250.0}
"""Peak TFLOPS of one device for dense bf16 products with float32 accumulation, from
NVIDIA's data sheets."""


def peak_tflops(kind: str) -> float | None:
    """Return the peak TFLOPS of one device of a kind, as JAX or a target names it; None
    where it is not known, as of CPUs."""
    names = (name for name in DENSE_BF16_TFLOPS if name in kind)
    return DENSE_BF16_TFLOPS.get(next(names, ""))


def ideal_step_sec(cfg: Config, kind: str) -> float | None:
    """Return the seconds of a step's model FLOPs at the peak of the devices, that of
    Train.peak_tflops or of their kind; None where it is not known."""
    peak = cfg.train.peak_tflops or peak_tflops(kind)
    if not peak:
        return None
    flops = flops_per_token(cfg.network).train * cfg.train.batch_size * cfg.data.seq_len
    return flops / (1e12 * peak * cfg.mesh.num_devices)


def speed(cfg: Config, step_sec: float, kind: str) -> dict[str, float | None]:
    """Return tokens per second and MFU of a step on devices of this kind; MFU is None
    where their peak is not known."""
    ideal_sec = ideal_step_sec(cfg, kind)
    return {
        "tok_per_sec": cfg.train.batch_size * cfg.data.seq_len / step_sec,
        "mfu": ideal_sec and ideal_sec / step_sec,
    }
