"""Meshes that a configuration can have on a given number of devices, best first."""

import dataclasses
from typing import NamedTuple

from moejax.config import Config
from moejax.perf.cluster import NODE_DEVICES
from moejax.plan.layout import MAX_AXIS, Topology

RULE = (
    f"the expert axis is as wide as the experts and the {NODE_DEVICES} GPUs of a node "
    "allow, and the data axis takes the rest; then a larger batch, then a tensor axis"
)
"""The order of proposals, in words."""


class MeshProposal(NamedTuple):
    """A configuration with another mesh, and the bindings that lead to it."""

    cfg: Config
    params: tuple[str, ...]
    """Values for --gin_param: 'Mesh.data = 2'."""


def propose_meshes(
    cfg: Config, num_devices: int, dc: int | None = None
) -> list[MeshProposal]:
    """Return the valid meshes of `num_devices` devices, best first.

    `dc` is the size of that axis; None: it stays as configured. RULE is the order: a
    narrower tensor axis comes first. With the same tensor axis, meshes that leave
    Train.batch_size as it is come first. Among those, a wider expert axis comes first,
    but one that is wider than a node comes last. Where the micro-batches do not divide
    over a mesh, Train.accumulate_steps becomes the largest of its divisors with which
    they do. Where the batch does not divide either, Train.batch_size is rounded up.
    Raises ValueError where no mesh is valid.
    """
    dc = cfg.mesh.dc if dc is None else dc
    if num_devices < 1:
        raise ValueError(f"--num_devices={num_devices} must be at least 1")
    if num_devices % dc:
        raise ValueError(
            f"--num_devices={num_devices} must be a multiple of Mesh.dc={dc}: "
            "set Mesh.dc = 1, or give another number"
        )
    proposals, problem = [], ""
    for mesh in _meshes(dc, num_devices):
        try:
            proposals.append(_with_mesh(cfg, mesh))
        except ValueError as fault:
            problem = problem or f"Mesh ({mesh}): {fault}"
    if not proposals:
        raise ValueError(
            f"no mesh of {num_devices} devices is valid; the first of them, {problem}"
        )
    return sorted(proposals, key=lambda proposal: _rank(cfg, proposal.cfg))


def _meshes(dc: int, num_devices: int) -> list[Topology]:
    """Return every mesh of `num_devices` devices with `dc` data centres, whose axes are
    no longer than they may be."""
    rest = num_devices // dc
    return [
        Topology(dc, rest // tensor // expert, expert, tensor)
        for tensor in _divisors(rest)
        for expert in _divisors(rest // tensor)
        if max(dc, rest // tensor // expert, expert, tensor) <= MAX_AXIS
    ]


def _rank(cfg: Config, proposed: Config) -> tuple[int, bool, bool, int]:
    """Return the key by which proposals are sorted."""
    mesh, has_batch = proposed.mesh, proposed.train.batch_size == cfg.train.batch_size
    is_wider = mesh.expert > NODE_DEVICES
    expert = mesh.expert if is_wider else -mesh.expert
    return mesh.tensor, not has_batch, is_wider, expert


def _with_mesh(cfg: Config, mesh: Topology) -> MeshProposal:
    """Return the configuration on another mesh, or raise ValueError."""
    train, params = cfg.train, []
    for field in dataclasses.fields(Topology):
        size = getattr(mesh, field.name)
        if size != getattr(cfg.mesh, field.name):
            params.append(f"Mesh.{field.name} = {size}")
    rows = -(-train.batch_size // mesh.num_batch_shards)
    steps = max(n for n in _divisors(train.accumulate_steps) if rows % n == 0)
    changes = {
        "num_simulated_devices": train.num_simulated_devices and mesh.num_devices,
        "batch_size": rows * mesh.num_batch_shards,
        "accumulate_steps": steps,
    }
    for name, value in changes.items():
        if value != getattr(train, name):
            params.append(f"Train.{name} = {value}")
    train = dataclasses.replace(train, **changes)
    return MeshProposal(dataclasses.replace(cfg, mesh=mesh, train=train), tuple(params))


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, in rising order."""
    return [n for n in range(1, number + 1) if number % n == 0]
