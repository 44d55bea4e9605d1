"""Table of the tiles of a grouped product: which rows each tile computes.

The size of tiles is static, while the rows of groups are known at run time only:

    rows     0         13            40       57    64      group  START  LOW  HIGH
    groups   |----0----|------2------|---3----| padding       0      0     0    13
    tiles    [0 ...........]                                  2      8     5    16
    of 16           [8 .........][24 .........]               2     24     0    16
                                     [40 ........][56 ...     3     40     0    16
                                                              3     56     0     1
                                                  [56 ...     4     56     1     8

The first tile of a group begins at the last multiple of ALIGNMENT at or before the
group's first row, because a tiled copy (TMA) can only begin at such rows. So it loads
up to 7 rows of the group before, and the last tile loads rows of the group after. Tiles
do not store rows of other groups. Padding is one more group, whose result is zero.

Where every group has whole tiles, a tile is a number of rows of the buffer, and the
table has GROUP and START alone.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

ALIGNMENT = 8
"""Divisor of the first row of every tile."""
GROUP, START, LOW, HIGH = range(4)
"""Rows of a table: the tile's group (num_groups for padding), the tile's first row in
the buffer, and the range of its rows that belong to the group: LOW <= row < HIGH,
counted from START."""


def max_tiles(num_rows: int, num_groups: int, tile_rows: int) -> int:
    """Return the maximum number of tiles, for any distribution of rows over groups and
    padding."""
    several = (num_groups + 1) * (tile_rows + ALIGNMENT - 2)
    return (num_rows + several) // tile_rows


def row_tiles(
    rows_g: Int[Array, " g"], num_rows: int, tile_rows: int, is_aligned: bool = False
) -> tuple[Int[Array, "4 t"] | Int[Array, "2 t"], Int[Array, " 1"]]:
    """Return the table of all tiles, in the order of their rows, and their number.

    The table has max_tiles columns, and those from the number of tiles on are unused.
    `num_rows` counts the rows of the buffer, padding included. With `is_aligned`, which
    says that `tile_rows` divides `num_rows` and each number of rows, all of the
    num_rows / tile_rows columns are used.
    """
    if is_aligned:
        return _whole_tiles(rows_g, num_rows, tile_rows)
    num_groups = rows_g.shape[0]
    first_g, end_g = bounds(rows_g, num_rows)
    base_g = first_g - first_g % ALIGNMENT
    tiles_g = jnp.where(end_g > first_g, -(-(end_g - base_g) // tile_rows), 0)
    last_g = jnp.cumsum(tiles_g)
    tile_t = jnp.arange(max_tiles(num_rows, num_groups, tile_rows))
    group_t = jnp.searchsorted(last_g, tile_t, side="right", method="compare_all")
    group_t = jnp.minimum(group_t, num_groups)
    number_t = tile_t - (last_g - tiles_g)[group_t]
    start_t = base_g[group_t] + number_t * tile_rows
    low_t = jnp.maximum(first_g[group_t] - start_t, 0)
    high_t = jnp.minimum(end_g[group_t] - start_t, tile_rows)
    table = jnp.stack([group_t, start_t, low_t, high_t])
    return table.astype(jnp.int32), last_g[-1:].astype(jnp.int32)


def _whole_tiles(rows_g: Int[Array, " g"], num_rows: int, tile_rows: int):
    """Return the table of GROUP and START of whole tiles, and their number."""
    assert num_rows % tile_rows == 0, f"{num_rows} rows, in tiles of {tile_rows}"
    start_t = jnp.arange(0, num_rows, tile_rows, dtype=jnp.int32)
    end_g = jnp.cumsum(rows_g)
    group_t = jnp.searchsorted(end_g, start_t, side="right", method="compare_all")
    table = jnp.stack([group_t, start_t])
    return table.astype(jnp.int32), jnp.full(1, len(start_t), jnp.int32)


def bounds(rows_g: Int[Array, " g"], num_rows: int) -> tuple[Array, Array]:
    """Return the first row of each group and of the padding, and the row after its last
    one, each [g + 1]."""
    end_g = jnp.append(jnp.cumsum(rows_g), num_rows)
    return jnp.concatenate([jnp.zeros(1, end_g.dtype), end_g[:-1]]), end_g
