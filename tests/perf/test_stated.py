"""Speeds of a mesh by stated rates: seconds as tools/aot.py counts them."""

import pytest

from moejax.perf.calibration import find_line, leaving_bytes
from moejax.perf.stated import stated_calibration
from moejax.perf.target import load
from moejax.plan.layout import Topology

H100 = load("h100")
NVLINK, INFINIBAND = (
    H100.rates.nvlink_bytes_per_sec,
    H100.rates.infiniband_bytes_per_sec,
)

MESH = {"data": 2, "expert": 8}


def seconds(collective: str, axes: tuple[str, ...], **mesh: int) -> float:
    """Return the seconds of a collective of 1 GB, on nodes of 8."""
    topology = Topology(**mesh)
    line = find_line(stated_calibration(H100, topology), collective, axes)
    size = 1
    for axis in axes:
        size *= getattr(topology, axis)
    return leaving_bytes(collective, 1e9, size) / line["bytes_per_sec"]


@pytest.mark.parametrize(
    ("collective", "axes", "mesh", "expected"),
    [
        # Inside a node.
        ("all_to_all", ("expert",), MESH, 7 / 8 / NVLINK),
        ("all_gather", ("data",), {"data": 8}, 7 / 8 / NVLINK),
        # One device of a group on each node: half goes over its card.
        ("all_gather", ("data",), MESH, 1 / 2 / INFINIBAND),
        ("all_to_all", ("data",), MESH, 1 / 2 / INFINIBAND),
        # Eight devices on each of two nodes: their cards share what all of them need,
        # so that NVLink decides, but not what each of them alone receives.
        ("all_gather", ("data",), {"data": 16}, 15 / 16 / NVLINK),
        ("all_to_all", ("data",), {"data": 16}, 1 / 2 / INFINIBAND),
        ("all_reduce", ("data",), {"data": 16}, 15 / 8 / NVLINK),
        # Two devices on each of eight nodes.
        ("all_gather", ("data",), {"data": 16, "tensor": 4}, 7 / 8 / 2 / INFINIBAND),
        # A group of two axes.
        ("all_to_all", ("data", "expert"), MESH, 1 / 2 / INFINIBAND),
    ],
)
def test_the_slower_link_decides(collective, axes, mesh, expected):
    assert seconds(collective, axes, **mesh) == pytest.approx(1e9 * expected)


def test_a_mesh_has_lines_for_its_axes_alone():
    lines = stated_calibration(H100, Topology(**MESH)).collectives
    assert set(lines["all_gather"]) == {"data", "expert", "data_expert", "dc_expert"}
