"""Views of what devices send and compute: pairs of devices, and a step's statistics."""

import numpy as np

from moejax.perf.traffic import over_mean
from moejax.show.table import View, groups, left_out, quantity, span

MAX_DEVICES = 24
"""Largest number of devices of which a view lists the pairs."""
MAX_LAYERS = 24
UNITS = {"rows": ("",), "bytes": ("B", "kB", "MB", "GB")}


def pairs(sent_ww, unit: str = "rows") -> View:
    """Return a view of what each device (down) sends to each device (right).

    `sent_ww` is [sender, receiver], in `unit`: 'rows' or 'bytes'. Raises ValueError
    unless the table is square and the unit is known.
    """
    sent_ww = np.asarray(sent_ww, float)
    num_devices = len(sent_ww)
    if sent_ww.shape != (num_devices, num_devices) or num_devices == 0:
        raise ValueError(
            f"pairs must be [devices, devices], and are {list(sent_ww.shape)}: give "
            "what each device sends to each device"
        )
    if unit not in UNITS:
        raise ValueError(f"unit={unit!r} must be one of {', '.join(UNITS)}")
    away_ww = np.where(np.eye(num_devices, dtype=bool), 0.0, sent_ww)
    units = UNITS[unit]
    shown = range(num_devices)[:MAX_DEVICES]
    rows = [("from, to", *map(str, shown), "sent")]
    for u in shown:
        cells = (_amount(sent_ww[u, w], units) for w in shown)
        rows.append((f"device {u}", *cells, _amount(away_ww[u].sum(), units)))
    received = (_amount(away_ww[:, w].sum(), units) for w in shown)
    rows.append(("received", *received, _amount(away_ww.sum(), units)))
    fullest = _amount(away_ww.max(), units)
    title = (
        f"{unit} from each device to each: {num_devices} devices, "
        f"{_amount(away_ww.sum(), units)} travel, fullest pair {fullest}"
    )
    notes = ["sent and received do not count what stays on its device"]
    notes += left_out(num_devices - len(shown), "devices")
    return View(title, tuple(rows), tuple(notes))


def stats(stats) -> View:
    """Return a view of a moejax.RoutingStats: how even each layer was, and its rounds.

    The bound is the least device max/mean that the split could have reached.
    """
    tokens_le, rows_lw = np.asarray(stats.tokens_le), np.asarray(stats.rows_lw)
    mean_l = np.maximum(rows_lw.mean(axis=1), 1e-300)
    expert_l = over_mean(tokens_le).max(axis=1)
    device_l = np.asarray(stats.fullest_device_l) / mean_l
    bound_l = np.asarray(stats.bound_l) / mean_l
    names = ("layer", "expert max/mean", "device max/mean", "bound", "rounds")
    names += ("fullest pair", "dropped", "experts without a token")
    rows = [names]
    for first, last in groups(len(tokens_le), MAX_LAYERS):
        part = slice(first, last + 1)
        ratios = (a[part].max() for a in (expert_l, device_l, bound_l))
        counts = (
            np.max(stats.rounds_l[part]),
            np.max(stats.fullest_pair_l[part]),
            np.sum(stats.dropped_l[part]),
            np.sum(tokens_le[part] == 0),
        )
        rows.append(
            (
                span("", first, last),
                *(f"{ratio:.2f}" for ratio in ratios),
                *(f"{int(count):,}" for count in counts),
            )
        )
    notes = ["a row has the worst of its layers, and sums of what was dropped"]
    is_grouped = len(rows) <= len(tokens_le)
    title = (
        f"routing of a step: {tokens_le.shape[1]} experts, "
        f"{rows_lw.shape[1]} devices, layers: {len(tokens_le)}"
    )
    return View(title, tuple(rows), tuple(notes * is_grouped))


def _amount(value: float, units: tuple[str, ...]) -> str:
    """Return a number of rows or bytes as text."""
    if value == 0:
        return "0"
    if len(units) > 1:
        return quantity(float(value), units)
    return f"{value:,.1f}".removesuffix(".0")
