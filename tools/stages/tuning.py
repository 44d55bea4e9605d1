"""The stage 'tuning': the fastest tiles for the products of given configurations."""

import functools
import time
from collections.abc import Callable

from tools.stages.stage import Result, Task

MARGIN_SEC = 10.0
DRY_LIMIT_SEC = 0.5


def work(task: Task) -> Result:
    """Search tiles for each pass of the layers' products, until the time is up.

    Second forms are tried too, unless those of the pass are quarantined. A pass whose
    default tiles compute something else is quarantined. Shapes that have tiles are left
    out, as in tools/tune_kernels.py.
    """
    from moejax.kernels import device_file, quarantine
    from tools import tune_kernels
    from tools.bench import tune_cases, tune_search

    settings = task.settings
    kind = settings.device_kind
    held = quarantine.unusable(quarantine.PASSES, kind)
    buckets = [b for b in find_buckets(task) if b.which not in held]
    product = _portable_product if settings.is_dry else _product
    timer = (lambda tiles, call: 1.0) if settings.is_dry else tune_cases.time_msec
    passes = list(dict.fromkeys(bucket.which for bucket in buckets))
    measured, num_left, wrong = [], 0, {}
    end_sec = time.monotonic() + task.left_sec - MARGIN_SEC
    for i, which in enumerate(passes):
        task.note(which, measured=measured)
        share = (end_sec - time.monotonic()) / (len(passes) - i)
        own = tune_search.Settings(
            buckets=[bucket for bucket in buckets if bucket.which == which],
            skews=["zipf"] if settings.is_dry else ["zipf", "uniform"],
            dtype="bfloat16",
            limit_sec=DRY_LIMIT_SEC if settings.is_dry else max(1.0, share),
            seed=0,
            is_again=False,
            path=device_file.path_of(kind),
            forms="first" if quarantine.find(which, kind) else "all",
        )
        try:
            summary = tune_kernels.tune(own, kind, product, timer)
        except tune_cases.WrongKernel as error:
            wrong[which] = str(error)
            quarantine.store(kind, which, "first", wrong[which])
            continue
        measured += summary["measured"]
        num_left += summary["num_left"]
    figures = {"measured": measured, "num_left": num_left, "quarantined_before": held}
    gain = [row["rule_msec"] / row["msec"] for row in measured]
    why = f"tiles of {len(measured)} buckets in {device_file.path_of(kind).name}"
    if gain:
        why += f", at best {max(gain):.2f} times as fast as the default tiles"
    why += f"; {num_left} buckets are left" if num_left else ""
    why += f"; not searched, quarantined: {', '.join(held)}" if held else ""
    if wrong:
        return Result("quarantined", f"{why}; {'; '.join(wrong.values())}", figures)
    return Result("passed", why, figures)


def find_buckets(task: Task) -> list:
    """Return the buckets of the configurations' layers on one of these devices, fp8
    included; in a dry run one small bucket for each of two passes."""
    from moejax.kernels.shapes import ProductShape
    from tools.bench import tune_search
    from tools.stages.models import read_models

    if task.settings.is_dry:
        shape = ProductShape(rows=64, d=64, f=64, groups=2)
        return [
            tune_search.Bucket("toy", which, shape) for which in ("forward", "wgrad")
        ]
    from tools.calibrate import hidden_widths

    shapes = {}
    for name, cfg in read_models(task.settings).items():
        widths = hidden_widths(cfg)
        shapes[name] = ProductShape(
            widths.rows, widths.d_model, widths.d_expert, widths.groups
        )
    return list(tune_search.tuning_buckets(shapes, is_layer=True))


def _product(which, tiles) -> Callable:
    """Return a kernel with tiles."""
    from moejax.kernels.grouped_dot.hopper import kernels

    return functools.partial(getattr(kernels, which), tiles=tiles)


def _portable_product(which, tiles) -> Callable:
    """Return the portable product of a pass, whatever the tiles: a dry run tries the
    search, not the kernels."""
    from moejax.kernels.grouped_dot.choose import products

    return getattr(products("blocked"), which)
