"""Descriptions of clusters: units, levels, errors with their lines, and laws of the
rates that follow."""

import dataclasses

import numpy as np
import pytest

from moejax.perf import cluster as clusters
from moejax.perf.calibration import leaving_bytes
from moejax.perf.cluster import Cluster, Device, Level
from moejax.perf.stated import COLLECTIVES, cluster_calibration
from moejax.plan.layout import Topology

DEVICE = Device("gpu", 8e10, 6e14, 4e14, 2.6e12)
TWO = Cluster("two", DEVICE, (Level("node", 4, 8e9), Level("net", 2, 1e9, 1e-3)))


@pytest.mark.parametrize("name", clusters.names())
def test_every_cluster_that_ships_has_lines_for_a_mesh(name):
    cluster = clusters.load(name)
    mesh = Topology(data=2, expert=cluster.num_devices // 2)
    lines = cluster_calibration(cluster, mesh).collectives
    assert set(lines) == set(COLLECTIVES)
    assert all(line["bytes_per_sec"] > 0 for line in lines["all_to_all"].values())


def test_a_shared_link_is_slower_by_those_who_share_it():
    inner, outer = TWO.levels
    shared = dataclasses.replace(outer, sharing=4)
    there = dataclasses.replace(TWO, levels=(inner, shared))
    mesh = Topology(expert=8)
    one, four = (
        cluster_calibration(x, mesh).collectives["all_to_all"]["expert"]
        for x in (TWO, there)
    )
    assert one["bytes_per_sec"] == pytest.approx(4 * four["bytes_per_sec"])
    # Half of what leaves a device (7/8) crosses to the other node at 1 GB/s.
    assert one["bytes_per_sec"] == pytest.approx(7 / 8 / 0.5 * 1e9)
    assert one["latency_sec"] == 1e-3


def test_a_level_without_traffic_changes_nothing():
    """Groups inside a node do not see the level above, however slow it is."""
    slow = dataclasses.replace(TWO.levels[1], bytes_per_sec=1.0, latency_sec=9.0)
    there = dataclasses.replace(TWO, levels=(TWO.levels[0], slow))
    mesh = Topology(dc=2, expert=4)
    here, slower = (cluster_calibration(x, mesh).collectives for x in (TWO, there))
    for kind in COLLECTIVES:
        assert here[kind]["expert"] == slower[kind]["expert"]
        assert here[kind]["dc"] != slower[kind]["dc"]


def test_doubling_all_rates_halves_all_times():
    fast = tuple(
        dataclasses.replace(x, bytes_per_sec=2 * x.bytes_per_sec) for x in TWO.levels
    )
    there = dataclasses.replace(TWO, levels=fast)
    mesh = Topology(dc=2, data=2, expert=2)
    here, faster = (cluster_calibration(x, mesh).collectives for x in (TWO, there))
    for kind in COLLECTIVES:
        for axes, line in here[kind].items():
            twice = faster[kind][axes]["bytes_per_sec"]
            assert twice == pytest.approx(2 * line["bytes_per_sec"])


def test_three_levels_by_counting_the_bytes_of_every_link():
    """An all_to_all of 1 byte, chunk by chunk, on 2 x 3 x 4 devices of which every
    second one is in the group."""
    levels = Level("a", 4, 5.0), Level("b", 3, 0.7, sharing=4), Level("c", 2, 0.9)
    cluster = Cluster("three", DEVICE, levels)
    mesh = Topology(expert=12, tensor=2)
    member_x = np.arange(24).reshape(12, 2)[:, 0]
    unit_of = [member_x // 4, member_x // 12]
    carried = np.zeros((3, 12))
    for x in range(12):
        for y in range(12):
            inside = unit_of[0][x] == unit_of[0][y]
            near = unit_of[1][x] == unit_of[1][y]
            carried[0, x] += (inside and x != y) / 12
            carried[1, x] += (not inside) / 12
            carried[2, x] += (not near) / 12
    rates = np.array([level.device_bytes_per_sec for level in levels])
    sec = (carried.max(axis=1) / rates).max()
    line = cluster_calibration(cluster, mesh).collectives["all_to_all"]["expert"]
    expected = leaving_bytes("all_to_all", 1.0, 12) / sec
    assert line["bytes_per_sec"] == pytest.approx(expected)


def test_a_mesh_of_more_devices_is_refused():
    with pytest.raises(ValueError, match="has 16 devices, and two has 8"):
        cluster_calibration(TWO, Topology(expert=16))


GOOD = """\
target = "h100"

[[level]]
name = "node"
size = 8
rate = "350 GB/s"

[[level]]
name = "net"
size = 2
rate = "400 Gb/s"
latency = "25 us"
sharing = 8
"""


def write(tmp_path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return str(path)


def test_bits_and_bytes_are_told_apart(tmp_path):
    node, net = clusters.load(write(tmp_path, GOOD)).levels
    assert node.bytes_per_sec == 350e9
    assert net == Level("net", 2, 50e9, pytest.approx(25e-6), 8)
    assert net.device_bytes_per_sec == 6.25e9


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('"400 Gb/s"', "50e9", ["line 11", "rate = 50000000000.0", "'45 GB/s'"]),
        ('"400 Gb/s"', '"400 Gbit"', ["line 11", "'400 Gbit'", "GB/s, MB/s"]),
        ('"400 Gb/s"', '"0 Gb/s"', ["line 11", "above 0"]),
        ('rate = "400 Gb/s"\n', "", ["line 8", "rate = None"]),
        ("size = 2", "size = 0", ["line 10", "size = 0", "whole number from 1"]),
        ("size = 2", "size = 2.0", ["line 10", "size = 2.0"]),
        ("sharing = 8", "sharing = 9", ["line 13", "9", "from 1 to 8"]),
        ("sharing = 8", "sharign = 8", ["line 13", "unknown field 'sharign'"]),
        ('"25 us"', '"-1 us"', ["line 12", "latency = '-1 us'"]),
        ('name = "net"', 'name = ""', ["line 9", "name must be a word"]),
        ('"h100"', '"h101"', ["line 1", "no target 'h101'"]),
        ('target = "h100"\n', "", ["one of target and [device]", "none"]),
        ("[[level]]", "[level]", ["not TOML"]),
        ("size = 8", "size = 2000000", ["from 1 to 1048576"]),
        (GOOD, 'target = "h100"\n', ["no table [[level]]"]),
    ],
)
def test_bad_files_are_refused_in_a_line_that_names_the_line(
    tmp_path, before, after, words
):
    assert before in GOOD
    path = write(tmp_path, GOOD.replace(before, after))
    with pytest.raises(ValueError, match=r"mine\.toml") as error:
        clusters.load(path)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words), error.value


def test_an_unknown_name_lists_those_that_ship():
    with pytest.raises(ValueError, match="no cluster 'h100_9x9': give"):
        clusters.load("h100_9x9")
