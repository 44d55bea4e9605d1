"""Build calibrations of imaginary machines."""

from moejax.perf.calibration import Calibration

KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")


def ideal(**bytes_per_sec: float) -> Calibration:
    """Return the calibration of a machine without latency."""
    lines = {axis: line(rate) for axis, rate in bytes_per_sec.items()}
    return Calibration(
        "paper", {}, "float32", dict.fromkeys(KINDS, lines), 1.0, 1.0, 0.0, "never"
    )


def line(bytes_per_sec: float, latency_sec: float = 0.0) -> dict[str, float]:
    """Return the calibrated speed of one collective, as a calibration file holds it."""
    return {"latency_sec": latency_sec, "bytes_per_sec": bytes_per_sec, "r2": 1.0}


def calibration(flops_per_sec=1e12, **line_of_axes) -> Calibration:
    """Return the calibration of a machine on which every collective over an axis has
    the same speed."""
    mesh = {"dc": 1, "data": 1, "expert": 4, "tensor": 2}
    collectives = {kind: dict(line_of_axes) for kind in KINDS}
    return Calibration(
        "paper", mesh, "float32", collectives, flops_per_sec, 1.0, 0.0, "never"
    )


TWO_LEVELS = calibration(expert=line(1e8, 1e-4), tensor=line(1e10, 1e-5))
