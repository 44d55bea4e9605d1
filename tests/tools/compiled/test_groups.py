"""Groups of devices in all of XLA's spellings, and the axes on which they lie."""

import pytest

from tests.support.hlo_text import read_program
from tools.compiled.groups import axes_of, device_groups

MESH = {"dc": 1, "data": 2, "expert": 4, "tensor": 1}
ROWS = [[0, 1, 2, 3], [4, 5, 6, 7]]
COLUMNS = [[0, 4], [1, 5], [2, 6], [3, 7]]
ALL = [[0, 1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", ROWS),
        ("replica_groups=[2,4]<=[8]", ROWS),
        ("replica_groups=[8]<=[8]", ALL),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", COLUMNS),
        ("replica_groups=mesh['data'=2,'expert'=4] {'expert'}", ROWS),
        ("replica_groups=mesh['data'=2,'expert'=4] {'data'}", COLUMNS),
        ("replica_groups=mesh['data'=2,'expert'=4] {'data','expert'}", ALL),
        (
            "replica_groups=mesh['a'=8] {'a':(2)2}",
            [[0, 2], [1, 3], [4, 6], [5, 7]],
        ),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", COLUMNS),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'b'}",
            [[7, 6, 5, 4], [3, 2, 1, 0]],
        ),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("replica_groups={}", ALL),
        ("dimensions={0}", ALL),
    ],
)
def test_each_spelling_gives_the_groups(text, groups):
    module = read_program(
        f"ROOT %x = f32[] all-reduce(%p), channel_id=1, {text}, to_apply=%add"
    )
    assert device_groups(module.computations["main"].root, 8) == groups


def test_an_unknown_spelling_is_refused():
    module = read_program("ROOT %x = f32[] all-reduce(%p), replica_groups=all")
    with pytest.raises(ValueError, match="unknown form"):
        device_groups(module.computations["main"].root, 8)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (ROWS, ("expert",)),
        (COLUMNS, ("data",)),
        (ALL, ("data", "expert")),
        ([[0, 2], [1, 3]], ("expert/2",)),
        ([[0]], ()),
    ],
)
def test_axes_are_those_that_differ_in_a_group(groups, axes):
    assert axes_of(groups, MESH) == axes


def test_a_device_outside_the_mesh_is_refused():
    with pytest.raises(ValueError, match="device 8 is not in a mesh"):
        axes_of([[0, 8]], MESH)
