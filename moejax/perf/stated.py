"""Speeds of a mesh on a cluster that is described, in the form of a calibration.

A mesh that nobody has measured can be compared with others at these rates. Each line
has the rate at which bytes leave a device when the links of all levels work at the same
time, as tools/aot.py counts seconds, and all groups of the mesh send at once.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from moejax.perf.calibration import LEAVING_SHARE, Calibration, leaving_bytes
from moejax.perf.cluster import Cluster, nodes_of
from moejax.perf.target import Target
from moejax.plan.groups import GROUP_AXES
from moejax.plan.layout import Topology

COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
"""Names of the collectives that predictions need."""
COMPILE_SEC = 30.0
"""Presumed time to compile a train step. OLMoE's of 8 layers took 29 s on a machine
with an H100 (docs/gpu.md)."""


def stated_calibration(target: Target, mesh: Topology) -> Calibration:
    """Return a calibration of a mesh of GPUs on nodes of 8, at the target's rates."""
    return cluster_calibration(nodes_of(target, mesh.num_devices), mesh)


def cluster_calibration(cluster: Cluster, mesh: Topology) -> Calibration:
    """Return a calibration of a mesh on the first devices of a cluster.

    Devices are numbered in the order of the axes, the last one innermost, and units of
    the cluster hold consecutive ones. Raises ValueError for a mesh of more devices.
    """
    sizes = dataclasses.asdict(mesh)
    if mesh.num_devices > cluster.num_devices:
        raise ValueError(
            f"Mesh ({mesh}) has {mesh.num_devices} devices, and {cluster.name} has "
            f"{cluster.num_devices}"
        )
    groups = [(axis,) for axis in sizes] + [g for g in GROUP_AXES.values() if g[1:]]
    found = {axes: _members(sizes, axes) for axes in groups}
    collectives = {
        name: {
            "_".join(axes): _line(name, member_x, cluster)
            for axes, member_x in found.items()
            if len(member_x) > 1
        }
        for name in COLLECTIVES
    }
    return Calibration(
        device_kind=cluster.device.name,
        mesh=sizes,
        compute_dtype="bfloat16",
        collectives=collectives,
        flops_per_sec=cluster.device.grouped_flops_per_sec,
        matmul_r2=1.0,
        compile_sec=COMPILE_SEC,
        when="stated",
    )


def _members(sizes: dict[str, int], axes: tuple[str, ...]) -> np.ndarray:
    """Return the numbers of the devices of the first group along these axes."""
    device = np.arange(int(np.prod(list(sizes.values())))).reshape(*sizes.values())
    return device[tuple(slice(None) if a in axes else 0 for a in sizes)].ravel()


def _line(collective: str, member_x: np.ndarray, cluster: Cluster) -> dict[str, float]:
    """Return the line of a collective of these devices: that of the slowest level."""
    size = len(member_x)
    leaving = leaving_bytes(collective, 1.0, size)
    crossed = list(_crossed(collective, member_x, cluster))
    return {
        "latency_sec": max(latency_sec for _, latency_sec in crossed),
        "bytes_per_sec": leaving / max(sec for sec, _ in crossed),
        "r2": 1.0,
    }


def _crossed(
    collective: str, member_x: np.ndarray, cluster: Cluster
) -> Iterator[tuple[float, float]]:
    """Yield the seconds and the latency at each level that a collective of an array of
    1 byte crosses.

    In an all_to_all the link out of a unit carries, of each of its devices, the chunks
    to devices outside. In other collectives bytes cross once for each unit, and the
    links of its devices in the group share them (tools/compiled/collectives.py). The
    links of the innermost level carry what stays inside it of an all_to_all, and all
    bytes of other collectives.
    """
    size, inside = len(member_x), 1
    twice = LEAVING_SHARE[collective](size) * size / (size - 1)
    for number, level in enumerate(cluster.levels):
        below = len(np.unique(member_x // inside))
        inside *= level.size
        per_below, units = size / below, len(np.unique(member_x // inside))
        if below == units:
            continue  # one member in each unit: nothing travels inside
        if collective == "all_to_all":
            carried = 1 - per_below / size
            if number == 0:
                carried = (size / units - 1) / size
        else:
            carried = twice * (below - 1) / below / per_below
        yield carried / level.device_bytes_per_sec, level.latency_sec
