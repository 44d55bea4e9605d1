"""The figures of a step that the page draws as curves, and how each becomes a number.

docs/metrics.md says what each field of a line means.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from tools.run_page.plain import as_number

NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Curve:
    """A curve: a field of a step's line, and for lists by layer how one number is made
    of them."""

    name: str
    unit: str
    label: str
    of_layers: Callable[[np.ndarray], float] | None = None


def largest(number_l: np.ndarray) -> float:
    """Return the largest finite number; NaN where there is none."""
    return float(np.fmax.reduce(number_l)) if number_l.size else NAN


def mean(number_l: np.ndarray) -> float:
    """Return the mean of the finite numbers; NaN where there is none."""
    good_l = number_l[np.isfinite(number_l)]
    return float(good_l.mean()) if good_l.size else NAN


def total(number_l: np.ndarray) -> float:
    """Return the sum of the finite numbers; NaN where there is none."""
    good_l = number_l[np.isfinite(number_l)]
    return float(good_l.sum()) if good_l.size else NAN


CURVES = (
    Curve("loss", "nats per token", "training loss"),
    Curve("total_loss", "nats per token", "loss with router losses"),
    Curve("grad_norm", "1", "norm of all gradients"),
    Curve("lr", "1", "learning rate"),
    Curve("tok_per_sec", "tokens per second", "throughput"),
    Curve("step_msec", "ms", "time of a step"),
    Curve("modelled_step_msec", "ms", "time of the blocks of a step, modelled"),
    Curve("mfu", "share", "MFU"),
    Curve("dropped_share", "share", "choices that were dropped"),
    Curve("redone", "share", "steps that ran again"),
    Curve("skipped", "share", "updates that were skipped"),
    Curve("rounds", "rounds", "rounds of the exchange, worst layer", largest),
    Curve("fullest_pair", "rows", "fullest pair, worst layer", largest),
    Curve("device_max_over_mean", "ratio", "device max/mean, worst layer", largest),
    Curve(
        "home_device_max_over_mean",
        "ratio",
        "device max/mean of the home placement, worst layer",
        largest,
    ),
    Curve("expert_max_over_mean", "ratio", "expert max/mean, worst layer", largest),
    Curve("home_std_over_std", "ratio", "deviation at home over this one (RB)", mean),
    Curve("router_entropy", "nats", "entropy of a token's choice", mean),
    Curve("dead_experts", "experts", "experts without a choice, all layers", total),
    Curve("host_memory_gib", "GiB", "memory of process 0"),
    Curve("device_memory_gib", "GiB", "memory of the fullest device"),
    Curve("peak_device_memory_gib", "GiB", "peak memory of the fullest device"),
    Curve("adopt_msec", "ms", "to adopt a plan or a layout"),
    Curve("adopt_wait_msec", "ms", "waited for the compilation of a layout"),
    Curve("plan_wait_msec", "ms", "waited for a decision"),
    Curve("modelled_saving_msec", "ms", "saved a step beside home, modelled"),
)
LAYER_CURVES = ("device_max_over_mean", "expert_max_over_mean", "router_entropy")
"""Fields by layer that are drawn layer by layer too."""
PARTS = ("experts", "wait", "wires", "copies", "blocks")
"""Parts of modelled_parts_msec."""
UNSHOWN = (
    b"balance_loss", b"sequence_balance_loss", b"router_z_loss",
    b"mutual_information_loss", b"device_max_over_bound",
)  # fmt: skip
"""Fields by layer that the page does not show: their numbers are not parsed."""


def numbers_of(record: dict) -> tuple[list[float], list[bool], dict[str, np.ndarray]]:
    """Return the numbers of a step's line for CURVES and then PARTS, which of them it
    has, and its lists of LAYER_CURVES."""
    numbers, has, lists = [], [], {}
    for curve in CURVES:
        value = record.get(curve.name, ...)
        has.append(value is not ...)
        if isinstance(value, list) and curve.of_layers is not None:
            number_l = as_array(value)
            numbers.append(curve.of_layers(number_l))
            if curve.name in LAYER_CURVES:
                lists[curve.name] = number_l
        else:
            numbers.append(as_number(value))
    parts = record.get("modelled_parts_msec")
    has_parts = isinstance(parts, dict)
    has += [has_parts] * len(PARTS)
    numbers += [as_number(parts.get(p)) if has_parts else NAN for p in PARTS]
    return numbers, has, lists


def as_array(values: list) -> np.ndarray:
    """Return a list of numbers as an array, with NaN for null; empty for any other
    list."""
    try:
        number_l = np.array(values, np.float64)
    except (ValueError, TypeError, OverflowError):
        return np.zeros(0)
    return number_l if number_l.ndim == 1 else np.zeros(0)
