"""The figures of a step that the page draws as curves, and how each becomes a number.

docs/metrics.md says what each field of a line means.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from tools.run_page.plain import MAX_NUMBER, as_number


@dataclasses.dataclass(frozen=True)
class Curve:
    """A curve: a field of a step's line, and for lists by layer how one number is made
    of those that are finite."""

    name: str
    unit: str
    label: str
    of_layers: Callable[[np.ndarray], float] | None = None


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
    Curve("rounds", "rounds", "rounds of the exchange, worst layer", np.max),
    Curve("fullest_pair", "rows", "fullest pair, worst layer", np.max),
    Curve("device_max_over_mean", "ratio", "device max/mean, worst layer", np.max),
    Curve(
        "home_device_max_over_mean",
        "ratio",
        "device max/mean of the home placement, worst layer",
        np.max,
    ),
    Curve("expert_max_over_mean", "ratio", "expert max/mean, worst layer", np.max),
    Curve(
        "home_std_over_std", "ratio", "deviation at home over this one (RB)", np.mean
    ),
    Curve("router_entropy", "nats", "entropy of a token's choice", np.mean),
    Curve("dead_experts", "experts", "experts without a choice, all layers", np.sum),
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


def numbers_of(record: dict) -> np.ndarray:
    """Return the numbers of a step's line for CURVES and then PARTS: NaN for one that
    the line does not have, infinity for one that is there and not finite."""
    parts = record.get("modelled_parts_msec")
    parts = parts if isinstance(parts, dict) else {}
    fields = [(record, curve.name, curve.of_layers) for curve in CURVES]
    fields += [(parts, name, None) for name in PARTS]
    number_c = np.full(len(fields), np.nan)
    for index, (values, name, of_layers) in enumerate(fields):
        if name not in values:
            continue
        value = values[name]
        if isinstance(value, list) and of_layers is not None:
            number_l = layers_of(value)
            good_l = number_l[np.isfinite(number_l)]
            value = float(of_layers(good_l)) if good_l.size else None
        number = as_number(value)
        number_c[index] = np.inf if np.isnan(number) else number
    return number_c


def layers_of(values) -> np.ndarray:
    """Return a list of numbers as an array, with infinity for one that is not finite;
    empty for any other value."""
    try:
        number_l = np.array(values, np.float64)
    except (ValueError, TypeError, OverflowError):
        return np.zeros(0)
    if number_l.ndim != 1:
        return np.zeros(0)
    return np.where(np.abs(number_l) <= MAX_NUMBER, number_l, np.inf)
