"""The grouped products of each implementation, without their gradients."""

import functools
from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array

from moejax.kernels.grouped_dot import blocked, blocked_swiglu


class Products(NamedTuple):
    """Of one implementation. Rows past sum(rows_g) are not looked at, and zero in
    results; sums are taken in float32 at least. `into` has gate's columns first."""

    forward: Callable[[Array, Array, Array], Array]
    """(x_md, w_gdf, rows_g) -> y_mf"""
    dgrad: Callable[[Array, Array, Array], Array]
    """(dy_mf, w_gdf, rows_g) -> dx_md"""
    wgrad: Callable[[Array, Array, Array], Array]
    """(x_md, dy_mf, rows_g) -> dw_gdf"""
    swiglu: Callable[[Array, Array, Array], tuple[Array, Array]]
    """(x_md, into_gdh, rows_g) -> (h_mf, into_mh): [gate, up] = into = x @ w, and
    h = silu(gate) * up"""
    swiglu_dgrad: Callable[[Array, Array, Array, Array], tuple[Array, Array]]
    """(dy_md, down_gfd, into_mh, rows_g) -> (dinto_mh, h_mf): the gradient of into
    where dy is that of h @ down, and h once more"""


@functools.cache
def products(implementation: str, block_rows: int | None = None) -> Products:
    """Of 'blocked' or 'hopper'; `block_rows` is of the former."""
    if implementation == "blocked":
        return _blocked(block_rows)
    assert implementation == "hopper", implementation
    # Pallas takes half a second to import, and only this needs it.
    from moejax.kernels.grouped_dot import hopper

    return hopper.products()


def _blocked(block_rows: int | None) -> Products:
    def of(product):
        def bound(*arrays):
            num_rows, num_groups = arrays[0].shape[0], arrays[-1].shape[0]
            rows = block_rows or blocked.default_block_rows(num_rows, num_groups)
            return product(*arrays, min(rows, num_rows))

        return bound

    plain = blocked.forward, blocked.dgrad, blocked.wgrad
    fused = blocked_swiglu.swiglu, blocked_swiglu.swiglu_dgrad
    return Products(*map(of, plain + fused))
