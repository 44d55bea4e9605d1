"""Tables of tiles: each tile of rows has one group, and each group all of its rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.grouped_dot.hopper.row_tiles import (
    GROUP,
    START,
    STEPS,
    group_of_tiles,
    groups_table,
)


def draw_rows(tile_rows: int, num_groups: int, seed: int) -> np.ndarray:
    """Return rows of groups, multiples of a tile; some groups are empty."""
    return tile_rows * np.random.default_rng(seed).choice([0, 1, 3], num_groups)


@pytest.mark.parametrize("tile_rows", [64, 128])
@pytest.mark.parametrize("num_groups", [1, 12])
def test_each_tile_has_the_group_of_its_rows(tile_rows, num_groups):
    for seed in range(5):
        rows_g = draw_rows(tile_rows, num_groups, seed)
        num_rows = int(rows_g.sum()) + 2 * tile_rows
        owner_m = np.repeat(np.arange(num_groups), rows_g)
        owner_m = np.append(owner_m, [num_groups] * 2 * tile_rows)
        group_t = group_of_tiles(jnp.asarray(rows_g), num_rows, tile_rows)
        assert group_t.dtype == jnp.int32
        assert group_t.tolist() == owner_m[::tile_rows].tolist()


@pytest.mark.parametrize("depth", [64, 128])
def test_the_table_of_groups_has_each_once_most_rows_first(depth):
    for seed in range(5):
        rows_g = draw_rows(128, 12, seed)
        table = np.asarray(groups_table(jnp.asarray(rows_g), depth))
        group_g = table[GROUP]
        assert sorted(group_g) == list(range(12))
        assert (np.diff(rows_g[group_g]) <= 0).all()
        first_g = np.cumsum(rows_g) - rows_g
        assert table[START].tolist() == first_g[group_g].tolist()
        assert (table[STEPS] * depth).tolist() == rows_g[group_g].tolist()
