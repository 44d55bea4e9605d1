"""Which rows a tile of a grouped product has, for kernels whose tiles are static.

    rows     0         13            40       57    64      group  START  LOW  HIGH
    groups   |----0----|------2------|---3----| padding       0      0     0    13
    tiles    [0 ...........]                                  2      8     5    16
    of 16           [8 .........][24 .........]               2     24     0    16
                                     [40 ........][56 ...     3     40     0    16
                                                              3     56     0     1
                                                  [56 ...     4     56     1     8

A tile begins at the last multiple of ALIGNMENT at or before its group's first row, for
that is how far an offset of a tiled copy (TMA) may be moved. So it sees up to 7 rows of
the group before, and in its last tile rows of the one after: those it does not store.
Padding is one more group, whose product is zero.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

ALIGNMENT = 8
GROUP, START, LOW, HIGH = range(4)
"""Rows of a table: the tile's group (num_groups for padding), its first row in the
buffer, and which of its rows are the group's: LOW <= row < HIGH."""


def max_tiles(num_rows: int, num_groups: int, tile_rows: int) -> int:
    """At most so many tiles, however rows fall on groups and padding."""
    several = (num_groups + 1) * (tile_rows + ALIGNMENT - 2)
    return (num_rows + several) // tile_rows


def row_tiles(
    rows_g: Int[Array, " g"], num_rows: int, tile_rows: int
) -> tuple[Int[Array, "4 t"], Int[Array, " 1"]]:
    """The table of all tiles, in the order of rows, and how many there are."""
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


def bounds(rows_g: Int[Array, " g"], num_rows: int) -> tuple[Array, Array]:
    """First row, and the one after the last, of each group and then of the padding."""
    end_g = jnp.append(jnp.cumsum(rows_g), num_rows)
    return jnp.concatenate([jnp.zeros(1, end_g.dtype), end_g[:-1]]), end_g
