"""Tables of tiles: each row is in exactly one tile, for any sizes of the groups."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.kernels.grouped_dot.hopper.row_tiles import (
    ALIGNMENT,
    GROUP,
    HIGH,
    LOW,
    START,
    max_tiles,
    row_tiles,
)
from moejax.kernels.grouped_dot.hopper.wgrad_kernel import groups_table
from moejax.kernels.shapes import MODEL_SHAPES, SKEWS, make_rows

table_jit = jax.jit(row_tiles, static_argnums=(1, 2))
groups_jit = jax.jit(groups_table, static_argnums=(1, 2))
NUM_ROWS = 200


def group_of_each_row(rows_g, num_rows):
    """Return the group of each row; padding counts as one more group."""
    num_groups = len(rows_g)
    owner_m = np.full(num_rows, num_groups)
    owner_m[: sum(rows_g)] = np.repeat(np.arange(num_groups), rows_g)
    return owner_m


def check(rows_g, num_rows, tile_rows):
    """Check the whole contract of a table, tile by tile."""
    rows_g = np.asarray(rows_g, np.int32)
    table, count = map(np.asarray, table_jit(rows_g, num_rows, tile_rows))
    assert table.dtype == count.dtype == np.int32
    assert table.shape == (4, max_tiles(num_rows, len(rows_g), tile_rows))
    assert count <= table.shape[1]
    group_m = np.full(num_rows, -1)
    for tile in table.T[: int(count[0])]:
        assert tile[START] % ALIGNMENT == 0
        assert 0 <= tile[LOW] < tile[HIGH] <= tile_rows
        rows = tile[START] + np.arange(tile[LOW], tile[HIGH])
        assert (group_m[rows] == -1).all(), "a row in two tiles"
        group_m[rows] = tile[GROUP]
    np.testing.assert_array_equal(group_m, group_of_each_row(rows_g, num_rows))
    assert (np.diff(table[GROUP, : int(count[0])]) >= 0).all(), "not in order of rows"


@st.composite
def rows_of_groups(draw):
    """Draw group sizes with boundaries anywhere, such as empty groups and padding."""
    num_groups = draw(st.sampled_from([1, 2, 8, 30]))
    bounds = draw(
        st.lists(st.integers(0, NUM_ROWS), min_size=num_groups, max_size=num_groups)
    )
    return np.diff(sorted(bounds), prepend=0)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows_g=rows_of_groups(), tile_rows=st.sampled_from([64, 128]))
def test_each_row_is_in_one_tile(rows_g, tile_rows):
    check(rows_g, NUM_ROWS, tile_rows)


@pytest.mark.parametrize(
    "rows_g",
    [
        (200,),
        (0,),
        (0, 0, 0),
        (64, 64, 64),
        (63, 1, 65, 71),
        (1, 0, 0, 0, 199),
        (7, 8, 9, 1, 64, 0, 0, 57),
    ],
)
def test_boundaries_at_and_beside_edges(rows_g):
    check(rows_g, NUM_ROWS, 64)


@pytest.mark.parametrize("tile_rows", [64, 128])
@pytest.mark.parametrize("skew", SKEWS)
def test_rows_of_a_real_model(skew, tile_rows):
    shape = MODEL_SHAPES["fine_grained"]
    rows_g = make_rows(skew, shape.rows - 1001, shape.groups, seed=3)
    check(rows_g, shape.rows, tile_rows)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows_g=rows_of_groups(), depth=st.sampled_from([64, 128]))
def test_steps_of_each_group(rows_g, depth):
    rows_g = rows_g.astype(np.int32)
    table = np.asarray(groups_jit(rows_g, NUM_ROWS, depth))
    assert table.dtype == np.int32
    group_g, start_g, low_g, high_g, steps_g = table
    assert sorted(group_g) == list(range(len(rows_g)))
    assert (np.diff(rows_g[group_g]) <= 0).all(), "most rows first"
    np.testing.assert_array_equal(high_g - low_g, rows_g[group_g])
    first_g = (np.cumsum(rows_g) - rows_g)[group_g]
    np.testing.assert_array_equal(start_g + low_g, first_g)
    assert (start_g % ALIGNMENT == 0).all()
    assert (low_g < ALIGNMENT).all()
    is_empty_g = rows_g[group_g] == 0
    assert (steps_g[is_empty_g] == 0).all()
    needed_g = np.ceil(high_g / depth)
    np.testing.assert_array_equal(steps_g[~is_empty_g], needed_g[~is_empty_g])
