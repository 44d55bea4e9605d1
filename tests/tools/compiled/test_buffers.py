"""The values that are in memory at the peak, read from XLA's two texts."""

import numpy as np
import pytest

from tools.compiled.buffers import Value, find_peak, fullest, new_bytes

ASSIGNMENT = """BufferAssignment:
allocation 0: size 64, page 0, parameter 3, shape |f32[4,4]|, maybe-live-out:
 value: <1 p.1 @0> (size=64,offset=0): f32[4,4]{1,0}
allocation 1: size 4, page 0, thread-local:
 value: <9 scalar.1 @0> (size=4,offset=0): f32[]
allocation 2: size 96, page 0, color 5, preallocated-temp:
 value: <8 kept.1 @5> (size=96,offset=0): bf16[48]{0}
allocation 3: size 300, page 0, preallocated-temp:
 value: <2 a{0} @0> (size=100,offset=0): bf16[50]{0}
 value: <3 b @0> (size=100,offset=100): bf16[5,10]{1,0}
 value: <4 loop.1{1} (phi) @0> (size=100,offset=100): bf16[5,10]{1,0}
 value: <5 c @0> (size=50,offset=200): u8[50]{0}
 value: <6 t{} @0> (size=16,offset=250): (f32[2], f32[2])
"""
RANGES = """HloLiveRange (max 9):
  BufferLiveRange:
    p.1{}:0-9
    a{0}:0-3
    b{}:2-4
    loop.1{1}:4-8
    c{}:7-8
    kept.1{}:1-8
  Live ranges at 7 (peak):
    c{}: 50 bytes (cumulative: 50 bytes)
"""


def test_the_peak_of_a_small_program():
    peak = find_peak(ASSIGNMENT, RANGES)
    (argument,) = peak.arguments
    assert (argument.parameter, argument.num_bytes) == (3, 64)
    names = [[value.name for value in place] for place in peak.live]
    assert names == [["a"], ["b"]]  # 200 bytes at 2, 3; at 4 and 7 fewer
    assert [value.type for (value, *_) in peak.live] == ["bf16[50]", "bf16[5,10]"]
    assert peak.temp_bytes == 300
    assert peak.gap_bytes == 100
    assert peak.host_bytes == 96


def test_texts_of_another_form_are_refused():
    with pytest.raises(ValueError, match="their form has changed"):
        find_peak("allocations: none", RANGES)


@pytest.mark.parametrize("seed", range(20))
def test_fullest_is_the_maximum_over_all_moments(seed):
    """The definition: for every moment, mark each byte that a value has."""
    rng = np.random.default_rng(seed)
    values = []
    for i in range(30):
        first, offset = rng.integers(0, 40), rng.integers(0, 60)
        last, size = first + rng.integers(0, 15), rng.integers(1, 20)
        values.append(
            Value(f"v{i}", (), int(size), int(offset), "u8", (), int(first), int(last))
        )
    expected = 0
    for moment in range(60):
        taken = np.zeros(100, bool)
        for value in values:
            if value.first <= moment <= value.last:
                taken[value.offset : value.offset + value.num_bytes] = True
        expected = max(expected, int(taken.sum()))
    places, size = fullest(values)
    assert size == expected
    assert sum(new_bytes(places)) == expected
