"""Which devices a collective joins, and along which axes of the mesh they lie."""

import re

import numpy as np

from tools.compiled.hlo import Instruction


def device_groups(instruction: Instruction, num_devices: int) -> list[list[int]]:
    """Return the groups of devices that a collective joins.

    All spellings are read: lists `{{0,1},{2,3}}`, iotas `[2,2]<=[4]` and
    `[2,2]<=[2,2]T(1,0)`, axes of a named mesh `mesh['a'=2,'b'=2] {'b'}`, and the pairs
    of a permutation. Permutations and sends give one group for each pair. A collective
    that names no groups joins all devices. Raises ValueError for a spelling that is not
    known.
    """
    match = _GROUPS.search(instruction.attributes)
    if not match:
        return [list(range(num_devices))]
    text = match[1]
    if text.startswith("mesh["):
        return _named(text)
    if text.startswith("["):
        return _iota(text).tolist()
    if text.startswith("{"):
        groups = [_numbers(row) for row in re.findall(r"\{([\d, ]+)\}", text)]
        return groups or [list(range(num_devices))]
    raise ValueError(f"{instruction.name} has groups in an unknown form: {text[:80]!r}")


def axes_of(groups: list[list[int]], mesh_shape: dict[str, int]) -> tuple[str, ...]:
    """Return the axes of the mesh along which the devices of a group lie.

    `mesh_shape` has the size of each axis, the slowest first; devices are numbered in
    this order. An axis of which a group has only a part is written with the size of the
    part: 'expert/4'. Raises ValueError for a device that the mesh does not have.
    """
    sizes = tuple(mesh_shape.values())
    members = np.array(max(groups, key=len))
    if members.max() >= np.prod(sizes, dtype=int):
        raise ValueError(f"device {members.max()} is not in a mesh of {mesh_shape}")
    axes = []
    for (name, size), index in zip(
        mesh_shape.items(), np.unravel_index(members, sizes), strict=True
    ):
        parts = len(np.unique(index))
        if parts > 1:
            axes.append(name if parts == size else f"{name}/{parts}")
    return tuple(axes)


def _iota(text: str) -> np.ndarray:
    """Return the devices of '[2,4]<=[4,2]T(1,0)' in an array [groups, devices]."""
    shape, source, order = _IOTA.match(text).groups()
    return _ordered(source, order).reshape(-1, _numbers(shape)[-1])


def _named(text: str) -> list[list[int]]:
    """Return the groups of "mesh['a'=2,'b'=4] {'b'}". An axis may be a part of one of
    the mesh: 'b':(2)2 is the part of size 2 below an outer part of size 2."""
    mesh, ids, chosen = _MESH.match(text).groups()
    sizes = {name: int(size) for name, size in _AXIS_SIZE.findall(mesh)}
    devices = np.arange(int(np.prod(list(sizes.values()))))
    if ids and ids.startswith("["):
        devices = _ordered(*_ORDER.match(ids).groups())
    elif ids:
        devices = np.array(_numbers(ids))
    # Every axis is cut where a chosen part of it begins or ends.
    parts = [
        (name, int(before or 1), int(size or sizes[name]))
        for name, before, size in _AXIS_PART.findall(chosen)
    ]
    shape, joined = [], []
    for name, size in sizes.items():
        own = sorted((before, part) for axis, before, part in parts if axis == name)
        done = 1
        for before, part in own:
            shape += [before // done, part]
            joined += [False, True]
            done = before * part
        shape.append(size // done)
        joined.append(False)
    dims = range(len(shape))
    order = [d for d in dims if not joined[d]] + [d for d in dims if joined[d]]
    width = int(np.prod([shape[d] for d in dims if joined[d]], dtype=int))
    return devices.reshape(shape).transpose(order).reshape(-1, width).tolist()


def _ordered(source: str, order: str | None) -> np.ndarray:
    """Return the numbers 0, 1, ... of an array of this shape, in this order of dims."""
    shape = _numbers(source)
    devices = np.arange(int(np.prod(shape))).reshape(shape)
    return (devices.transpose(_numbers(order)) if order else devices).reshape(-1)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


_GROUPS = re.compile(
    r"\b(?:replica_groups|source_target_pairs)="
    r"(mesh\[[^{]*\{[^}]*\}|\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?|"
    r"\{(?:\{[\d, ]*\},? ?)*\}|\S+)"
)
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_ORDER = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\((.*)\))? \{(.*)\}")
_AXIS_SIZE = re.compile(r"'?([^',=]+)'?=(\d+)")
_AXIS_PART = re.compile(r"'?([^',:]+)'?(?::\((\d+)\)(\d+))?")
