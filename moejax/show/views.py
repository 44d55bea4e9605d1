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

import numpy as np

from moejax.perf.traffic import over_mean
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Topology
from moejax.show.table import View, groups, left_out, span

__all__ = ["View", "device_loads", "loads", "mesh", "plan", "rows_per_device"]

MAX_ROWS, MAX_COLUMNS = 24, 64
"""Largest number of rows and columns of a view: 1,536 cells of some 90 bytes keep a
page below 250 kB."""


def mesh(mesh) -> View:
    """Return a view of the devices of a jax Mesh or a Topology by their coordinates.

    The last axis of more than one device runs to the right, the others down.
    """
    names, ids = _device_grid(mesh)
    wide = [axis for axis, size in enumerate(ids.shape) if size > 1] or [ids.ndim - 1]
    *down, right = wide
    ids_dr = np.moveaxis(ids, right, -1).reshape(-1, ids.shape[right])
    num_down, num_right = ids_dr.shape
    columns = range(num_right)[:MAX_COLUMNS]
    rows = [("", *(f"{names[right]} {i}" for i in columns))]
    sizes = [ids.shape[axis] for axis in down]
    for row in range(num_down)[:MAX_ROWS]:
        at = np.unravel_index(row, sizes) if down else ()
        place = ", ".join(f"{names[axis]} {i}" for axis, i in zip(down, at))
        rows.append((place, *(str(ids_dr[row, i]) for i in columns)))
    title = ", ".join(f"{n}={size}" for n, size in zip(names, ids.shape))
    notes = left_out(num_right - len(columns), "columns")
    notes += left_out(num_down - len(rows) + 1, "rows")
    return View(f"mesh {title}: {ids.size} devices", tuple(rows), tuple(notes))


def plan(plan: ExpertPlan, num_devices: int | None = None) -> View:
    """Return a view of a plan: slots to the right, layers down, experts in the cells.

    An asterisk marks experts with several replicas, '-' an empty slot. Neighbouring
    layers with equal slots share a row.
    """
    table_lp, num_slots = plan.slot_to_expert_lp, plan.num_slots
    slots, heads = range(num_slots)[:MAX_COLUMNS], [""] * num_slots
    if num_devices is not None:
        _check_devices(num_slots, num_devices)
        per_device = num_slots // num_devices
        heads = [f"{p // per_device}:" for p in range(num_slots)]
    runs = _equal_runs(table_lp)
    shown = runs[:MAX_ROWS]
    first = "slot" if num_devices is None else "device:slot"
    rows = [(first, *(f"{heads[p]}{p}" for p in slots))]
    for begin, end in shown:
        row_p = table_lp[begin]
        copies_e = np.bincount(row_p[row_p >= 0], minlength=plan.num_experts)
        cells = (_slot_text(int(row_p[p]), copies_e) for p in slots)
        rows.append((span("layer", begin, end), *cells))
    num_empty = int(np.sum(table_lp < 0))
    title = (
        f"plan {plan.digest}: {plan.num_experts} experts in {num_slots} slots, "
        f"layers: {plan.num_layers}, empty slots: {num_empty}"
    )
    notes = ["* marks experts with several replicas"] * _has_replicas(table_lp)
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
    rows = [("expert", "max/mean", *(span("", *group) for group in experts))]
    for first, last in layers:
        part_le = ratio_le[first : last + 1]
        cells = (f"{part_le[:, e0 : e1 + 1].max():.1f}" for e0, e1 in experts)
        rows.append((span("layer", first, last), f"{part_le.max():.2f}", *cells))
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
    rows = [("device", "max/mean", *map(str, devices))]
    for first, last in layers:
        layer = first + int(np.argmax(ratio_lw[first : last + 1].max(axis=1)))
        cells = (f"{rows_lw[layer, w]:,.1f}".removesuffix(".0") for w in devices)
        fullest = f"{ratio_lw[layer].max():.2f}"
        rows.append((span("layer", first, last), fullest, *cells))
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


def _slot_text(expert: int, copies_e: np.ndarray) -> str:
    """Return the cell of a slot that holds this expert, or none (-1)."""
    if expert < 0:
        return "-"
    return f"{expert}*" if copies_e[expert] > 1 else str(expert)


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
