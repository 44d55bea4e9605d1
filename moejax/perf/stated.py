"""Speeds of a mesh by the stated rates of a target, in the form of a calibration.

A mesh that nobody has measured can be compared with others at these rates. Each line
has the rate at which bytes leave a device when links inside a node and between nodes
work at the same time, as tools/aot.py counts seconds.
"""

import dataclasses

import numpy as np

from moejax.perf.calibration import LEAVING_SHARE, Calibration, leaving_bytes
from moejax.perf.rates import Rates
from moejax.perf.target import Target
from moejax.plan.groups import GROUP_AXES
from moejax.plan.layout import Topology

COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
"""Names of the collectives that predictions need."""
NODE_DEVICES = 8
"""GPUs of a node: all_to_all along the expert axis is fast within one."""
COMPILE_SEC = 30.0
"""Presumed time to compile a train step. OLMoE's of 8 layers took 29 s on a machine
with an H100 (docs/gpu.md)."""


def stated_calibration(
    target: Target, mesh: Topology, devices_per_node: int = NODE_DEVICES
) -> Calibration:
    """Return a calibration of a mesh on nodes of `devices_per_node` GPUs.

    Devices are numbered in the order of the axes, the last one innermost, and nodes
    hold consecutive ones.
    """
    sizes = dataclasses.asdict(mesh)
    groups = [(axis,) for axis in sizes] + [g for g in GROUP_AXES.values() if g[1:]]
    collectives = {
        name: {
            "_".join(axes): {
                "latency_sec": 0.0,
                "bytes_per_sec": _rate(name, *nodes, target.rates),
                "r2": 1.0,
            }
            for axes in groups
            if (nodes := _nodes(sizes, axes, devices_per_node))[0] > 1
        }
        for name in COLLECTIVES
    }
    return Calibration(
        device_kind=target.name,
        mesh=sizes,
        compute_dtype="bfloat16",
        collectives=collectives,
        flops_per_sec=target.rates.grouped_flops_per_sec,
        matmul_r2=1.0,
        compile_sec=COMPILE_SEC,
        when="stated",
    )


def _nodes(
    sizes: dict[str, int], axes: tuple[str, ...], devices_per_node: int
) -> tuple[int, int]:
    """Return the devices of a group along these axes, and the nodes that they are
    on."""
    device = np.arange(int(np.prod(list(sizes.values())))).reshape(*sizes.values())
    group = device[tuple(slice(None) if a in axes else 0 for a in sizes)]
    return group.size, len(np.unique(group // devices_per_node))


def _rate(collective: str, size: int, num_nodes: int, rates: Rates) -> float:
    """Return the bytes per second that leave a device in a collective of `size` devices
    on `num_nodes` nodes.

    Of an array of 1 byte, a device's card carries what its own chunks to other nodes
    are in an all_to_all. In other collectives bytes cross once for each node, and the
    cards of a node share them (tools/compiled/collectives.py).
    """
    leaving, per_node = leaving_bytes(collective, 1.0, size), size / num_nodes
    twice = LEAVING_SHARE[collective](size) * size / (size - 1)
    across = twice * (num_nodes - 1) / num_nodes
    inside = leaving
    if collective == "all_to_all":
        inside = (per_node - 1) / size
    else:
        across /= per_node
    sec = max(
        inside / rates.nvlink_bytes_per_sec * (per_node > 1),
        across / rates.infiniband_bytes_per_sec,
    )
    return leaving / sec
