"""Tables of the tiles of a grouped product: which group each tile of rows belongs to.

The size of tiles is static, while the rows of groups are known at run time only. Every
group begins at a multiple of a tile's rows, so that a tile belongs to one group:

    rows     0    16    32    48    64    80
    groups   |--0--|-----2-----|--3--|padding
    tiles    [ 0  ][ 2  ][ 2  ][ 3  ][ 4  ]       4 groups; tiles of padding are zero
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

GROUP, START, STEPS = range(3)
"""Rows of the table of groups: see groups_table."""


def group_of_tiles(
    rows_g: Int[Array, " g"], num_rows: int, tile_rows: int
) -> Int[Array, " t"]:
    """Return the group of each tile of `tile_rows` rows of the buffer, g for padding.

    `tile_rows` divides `num_rows`, the rows of the buffer, and each number of rows.
    """
    assert num_rows % tile_rows == 0, f"{num_rows} rows, in tiles of {tile_rows}"
    start_t = jnp.arange(0, num_rows, tile_rows, dtype=jnp.int32)
    end_g = jnp.cumsum(rows_g)
    group_t = jnp.searchsorted(end_g, start_t, side="right", method="compare_all")
    return group_t.astype(jnp.int32)


def groups_table(rows_g: Int[Array, " g"], depth: int) -> Int[Array, "3 g"]:
    """Return the table of groups for wgrad, whose steps are `depth` rows of a group.

    Each column has a group's number, its first row (START) and its number of steps. The
    group with most rows comes first, so that the longest tiles begin first.
    """
    group_g = jnp.argsort(-rows_g)
    start_g = jnp.cumsum(rows_g) - rows_g
    return jnp.stack([group_g, start_g[group_g], rows_g[group_g] // depth]).astype(
        jnp.int32
    )
