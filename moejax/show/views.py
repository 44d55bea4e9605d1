"""Views of meshes, plans and loads: tables in a notebook, plain text in a terminal.

    show.mesh(mesh)                     which device sits at which coordinates
    show.plan(plan, num_devices)        which expert each slot holds
    show.loads(tokens_le)               load of each expert over the mean
    show.device_loads(tokens_le, plan, num_devices)

Each function returns a View, for the last line of a notebook cell or for print(). The
size of a view is bounded: rows and columns that do not fit are grouped or left out, and
a note says so. This module needs NumPy only; it can show a jax mesh without importing
jax.
"""

import itertools
import math

import numpy as np

from moejax.perf.traffic import over_mean
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from moejax.show.table import (
    PALETTE,
    Cell,
    View,
    groups,
    head,
    heat,
    hue,
    left_out,
    span,
    tint,
)

__all__ = ["View", "device_loads", "loads", "mesh", "plan", "rows_per_device"]

MAX_ROWS, MAX_COLUMNS = 24, 64
"""Largest number of rows and columns of a view: 1,536 cells of some 120 bytes keep a
page below 250 kB."""


def mesh(mesh, along: str | None = None) -> View:
    """Return a view of the devices of a jax Mesh or a Topology by their coordinates.

    The last axis of more than one device runs to the right, the others down, and each
    axis has a color. With `along`, devices of one color are one group of collectives
    over that axis. Raises ValueError if the mesh has no axis `along`.
    """
    names, ids = _device_grid(mesh)
    if along is not None and along not in names:
        raise ValueError(
            f"along={along!r} is not an axis of the mesh: use one of {', '.join(names)}"
        )
    wide = [axis for axis, size in enumerate(ids.shape) if size > 1] or [ids.ndim - 1]
    *down, right = wide
    num_down = math.prod(ids.shape[axis] for axis in down)
    columns, rows = range(ids.shape[right]), range(num_down)
    shown_columns, shown_rows = columns[:MAX_COLUMNS], rows[:MAX_ROWS]
    corner = [head("", len(down))] if down else []
    heads = [
        head(f"{names[right]} {i}", color=_axis_color(right)) for i in shown_columns
    ]
    table = [(*corner, *heads)]
    for row in shown_rows:
        at = np.unravel_index(row, [ids.shape[axis] for axis in down]) if down else ()
        cells = [
            head(f"{names[axis]} {i}", color=_axis_color(axis))
            for axis, i in zip(down, at)
        ]
        for column in shown_columns:
            index = [0] * ids.ndim
            for axis, i in zip(wide, (*at, column)):
                index[axis] = int(i)
            cells.append(_device_cell(names, ids, tuple(index), along))
        table.append(tuple(cells))
    sizes = ", ".join(f"{n}={size}" for n, size in zip(names, ids.shape))
    notes = []
    if along is not None and ids.shape[names.index(along)] < ids.size:
        notes.append(f"devices of one color are one group along {along}")
    notes += left_out(len(columns) - len(shown_columns), "columns")
    notes += left_out(len(rows) - len(shown_rows), "rows")
    return View(f"mesh {sizes}: {ids.size} devices", tuple(table), tuple(notes))


def plan(plan: ExpertPlan, num_devices: int | None = None) -> View:
    """Return a view of a plan: slots to the right, layers down, experts in the cells.

    Experts with several replicas have a color, the same in all their slots. Empty slots
    are hatched. Neighbouring layers with equal slots share a row.
    """
    table_lp, num_slots = plan.slot_to_expert_lp, plan.num_slots
    if num_devices is not None:
        _check_devices(num_slots, num_devices)
    runs = _equal_runs(table_lp)
    shown, slots = runs[:MAX_ROWS], range(num_slots)[:MAX_COLUMNS]
    rows = []
    if num_devices is not None:
        per_device = num_slots // num_devices
        spans = [
            (f"device {w}", min(per_device, len(slots) - w * per_device))
            for w in range(-(-len(slots) // max(per_device, 1)))
        ]
        rows.append((head(""), *(head(text, span) for text, span in spans)))
    rows.append((head("slot"), *(head(str(p)) for p in slots)))
    for first, last in shown:
        row_p = table_lp[first]
        copies_e = np.bincount(row_p[row_p >= 0], minlength=plan.num_experts)
        cells = (_slot_cell(int(row_p[p]), copies_e) for p in slots)
        rows.append((head(span("layer", first, last)), *cells))
    num_empty = int(np.sum(table_lp < 0))
    title = (
        f"plan {plan.digest}: {plan.num_experts} experts in {num_slots} slots, "
        f"layers: {plan.num_layers}, empty slots: {num_empty}"
    )
    notes = ["a color marks the replicas of one expert"] * _has_replicas(table_lp)
    notes += left_out(num_slots - len(slots), "slots")
    notes += left_out(len(runs) - len(shown), "groups of layers")
    return View(title, tuple(rows), tuple(notes))


def loads(tokens_le) -> View:
    """Return a view of each expert's load over its layer's mean, where 1 is even.

    `tokens_le` has the loads [layers, experts].
    """
    tokens_le = _check_loads(tokens_le)
    num_layers, num_experts = tokens_le.shape
    ratio_le = over_mean(tokens_le)
    layers, experts = groups(num_layers, MAX_ROWS), groups(num_experts, MAX_COLUMNS)
    heads = [head(span("", *group)) for group in experts]
    rows = [(head("expert"), head("max/mean"), *heads)]
    for layer in layers:
        part_le = ratio_le[layer[0] : layer[1] + 1]
        cells = [
            _ratio_cell(part_le[:, e0 : e1 + 1].max(), span("expert", e0, e1))
            for e0, e1 in experts
        ]
        fullest = Cell(f"{part_le.max():.2f}")
        rows.append((head(span("layer", *layer)), fullest, *cells))
    notes = []
    if len(experts) < num_experts or len(layers) < num_layers:
        notes.append("a cell is the fullest of its layers and experts")
    title = (
        f"load over the layer's mean: {num_experts} experts, layers: {num_layers}, "
        f"fullest {ratio_le.max():.2f}, without a token: {np.sum(tokens_le == 0)}"
    )
    return View(title, tuple(rows), tuple(notes))


def device_loads(tokens_le, plan: ExpertPlan, num_devices: int) -> View:
    """Return a view of the rows that each device of the group computes under a plan, by
    layer."""
    rows_lw = rows_per_device(tokens_le, plan, num_devices)
    ratio_lw = over_mean(rows_lw)
    layers = groups(plan.num_layers, MAX_ROWS)
    devices = range(num_devices)[:MAX_COLUMNS]
    rows = [(head("device"), head("max/mean"), *(head(str(w)) for w in devices))]
    for first, last in layers:
        layer = first + int(np.argmax(ratio_lw[first : last + 1].max(axis=1)))
        cells = (_rows_cell(rows_lw[layer, w], ratio_lw[layer, w]) for w in devices)
        fullest = Cell(f"{ratio_lw[layer].max():.2f}")
        rows.append((head(span("layer", first, last)), fullest, *cells))
    notes = ["replicas of an expert share its rows evenly"] * _has_replicas(
        plan.slot_to_expert_lp
    )
    if len(layers) < plan.num_layers:
        notes.append("a row is the least even of its layers")
    notes += left_out(num_devices - len(devices), "devices")
    title = f"rows per device under plan {plan.digest}: {num_devices} devices"
    return View(title, tuple(rows), tuple(notes))


def rows_per_device(tokens_le, plan: ExpertPlan, num_devices: int) -> np.ndarray:
    """Return the rows that each device computes under a plan, float [layers, devices].

    The replicas of an expert share its load evenly. Raises ValueError where loads, plan
    and devices do not fit together.
    """
    tokens_le = _check_loads(tokens_le)
    _check_devices(plan.num_slots, num_devices)
    expected = (plan.num_layers, plan.num_experts)
    if tokens_le.shape != expected:
        raise ValueError(
            f"the loads have {tokens_le.shape[0]} layers and {tokens_le.shape[1]} "
            f"experts, the plan has {expected[0]} and {expected[1]}: give loads "
            "[layers, experts] of the same model"
        )
    rows_lp = np.zeros(plan.slot_to_expert_lp.shape)
    for layer, row_p in enumerate(plan.slot_to_expert_lp):
        full_p = row_p >= 0
        copies_e = np.bincount(row_p[full_p], minlength=plan.num_experts)
        expert_p = row_p[full_p]
        rows_lp[layer, full_p] = tokens_le[layer, expert_p] / copies_e[expert_p]
    return rows_lp.reshape(plan.num_layers, num_devices, -1).sum(axis=-1)


def _device_grid(mesh) -> tuple[tuple[str, ...], np.ndarray]:
    """Return the names of the mesh axes, and device numbers in the mesh's shape."""
    if isinstance(mesh, Topology):
        ids = np.arange(mesh.num_devices).reshape(mesh.sizes)
        return ("dc", "data", "expert", "tensor"), ids
    devices = np.asarray(mesh.devices)
    ids = np.array([device.id for device in devices.flat]).reshape(devices.shape)
    return tuple(mesh.axis_names), ids


def _device_cell(names, ids: np.ndarray, index: tuple[int, ...], along) -> Cell:
    """Return the cell of one device, with the color of its group along an axis."""
    color = ""
    if along is not None:
        axis = names.index(along)
        others = index[:axis] + index[axis + 1 :]
        sizes = ids.shape[:axis] + ids.shape[axis + 1 :]
        group = int(np.ravel_multi_index(others, sizes)) if sizes else 0
        color = hue(group)
    hint = ", ".join(f"{name}={i}" for name, i in zip(names, index))
    return Cell(str(ids[index]), color, hint)


def _slot_cell(expert: int, copies_e: np.ndarray) -> Cell:
    """Return the cell of a slot that holds this expert, or none (-1)."""
    if expert < 0:
        return Cell(hint="empty", is_hatched=True)
    return Cell(str(expert), hue(expert) if copies_e[expert] > 1 else "")


def _ratio_cell(ratio: float, hint: str) -> Cell:
    """Return the cell of a load over the mean."""
    return Cell(f"{ratio:.1f}", heat(ratio), hint)


def _rows_cell(rows: float, ratio: float) -> Cell:
    """Return the cell of a device's rows, colored by their ratio to the mean."""
    text = f"{rows:,.1f}".removesuffix(".0")
    return Cell(text, heat(ratio), f"{ratio:.2f} of the mean")


def _axis_color(axis: int) -> str:
    """Return the color of a mesh axis by its number."""
    return tint(PALETTE[(axis + 1) % len(PALETTE)], 0.35)


def _check_loads(tokens_le) -> np.ndarray:
    """Return loads as an array [layers, experts]; raise ValueError if they are not."""
    tokens_le = np.atleast_2d(np.asarray(tokens_le))
    if tokens_le.ndim != 2 or tokens_le.size == 0 or not np.all(tokens_le >= 0):
        raise ValueError(
            "loads must be counts [layers, experts], none negative, and are "
            f"{tokens_le.dtype} {list(tokens_le.shape)}: give RoutingStats.tokens_le"
        )
    return tokens_le


def _check_devices(num_slots: int, num_devices: int) -> None:
    """Raise ValueError unless the devices have equally many slots."""
    if num_devices < 1 or num_slots % num_devices:
        raise ValueError(
            f"{num_slots} slots do not divide over num_devices={num_devices}: give the "
            "size of the group that the plan was made for"
        )


def _has_replicas(table_lp: np.ndarray) -> bool:
    """Return whether an expert has several slots in some layer."""
    return any(len(row := p[p >= 0]) > len(np.unique(row)) for p in table_lp)


def _equal_runs(table_lp: np.ndarray) -> list[tuple[int, int]]:
    """Return the first and the last layer of each run of equal rows."""
    keys = [row.tobytes() for row in table_lp]
    groups = [list(g) for _, g in itertools.groupby(range(len(keys)), keys.__getitem__)]
    return [(group[0], group[-1]) for group in groups]
