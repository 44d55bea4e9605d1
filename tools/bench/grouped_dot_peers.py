"""Implementations that tools/bench/grouped_dot.py compares: ours and those of others.

    hopper, blocked  ours: moejax.kernels.grouped_dot.choose
    hopper_fp8       ours too: forward and dgrad of 8-bit values, including the rounding
                     of x, dy and w to them; gradients are in e4m3
    ragged_dot       jax.lax.ragged_dot_general, with the dims of ragged_dot's gradients
    tokamax_mosaic   tokamax.ragged_dot_general by its Pallas kernels for Hopper
    tokamax_triton   the same by its Triton kernels (Pallas)
    torch            PyTorch's grouped_mm, eager, on the memory of JAX's arrays
    dense            one matmul of equal FLOPs, without groups: the speed of light

An implementation that takes tile sizes has several variants, of which the benchmark
keeps the fastest. `make peers` installs tokamax, in a folder of its own.
"""

import functools
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moejax.kernels.grouped_dot import choose
from moejax.kernels.grouped_dot.products import Products, compose_products

OURS = ("hopper", "hopper_fp8", "blocked")
ALIGNED = ("hopper", "hopper_fp8")
"""Implementations for groups whose rows are multiples of a tile's."""
ON_CPU = ("blocked", "ragged_dot", "dense")
"""Implementations that run on a CPU. The others need a GPU."""
TOKAMAX_TILES = {
    "mosaic_gpu": (
        {"persistent": True, "num_stages": 4, "grid_tile_width": 8},
        {"persistent": True, "num_stages": 4, "grid_tile_width": 4},
        {"persistent": False, "num_stages": 2, "grid_tile_width": 1},
        {"persistent": True, "num_stages": 4, "block_m": 64, "grid_tile_width": 4},
    ),
    "triton": (
        {"block_n": 128, "block_k": 32, "num_stages": 4, "num_warps": 4},
        {"block_n": 256, "block_k": 64, "num_stages": 3, "num_warps": 8},
        {"block_n": 256, "block_k": 32, "num_stages": 6, "num_warps": 8},
    ),
}
"""Tiles of tokamax that were the fastest most often in its own search on an H100, and
one for groups of few rows. Without them tokamax takes tiles by rule on every GPU that
it has not searched, an H200 included."""
TOKAMAX_SIZES = {
    "mosaic_gpu": {"block_m": 128, "block_n": 64, "block_k": 128, "split_k": 1},
    "triton": {"block_m": 128, "split_k": 1},
}
"""Sizes that the tiles above have in common."""
PEERS = pathlib.Path(__file__).resolve().parents[2] / ".peers"
"""Folder of `make peers`."""
XPROF = "xprof.cli.tools.get_kernel_stats_tool"
"""Module that tokamax imports for a timing of its own, which is not used here."""


@functools.cache
def variants(impl: str, which: str, align_rows: int = 1) -> dict[str, Callable]:
    """Return the compiled functions of an implementation for a pass, by their tiles.
    Only those of ALIGNED use `align_rows`, which divides the rows of every group.

    The pass `grads` is a function (x_md, w_gdf, dy_mf, rows_g) of forward and both
    gradients. Raises ImportError if a library is not installed, NotImplementedError if
    the implementation does not have the pass.
    """
    if impl == "hopper_fp8" and which == "wgrad":
        raise NotImplementedError("wgrad has no 8-bit values: see hopper")
    options = {"align_rows": align_rows} if impl in ALIGNED else {}
    by_tiles = IMPLEMENTATIONS[impl](**options)
    functions = {tiles: _function(own, which) for tiles, own in by_tiles.items()}
    if impl == "torch":
        return functions
    return {tiles: jax.jit(function) for tiles, function in functions.items()}


def _function(own: Products, which: str) -> Callable:
    if which != "grads":
        return getattr(own, which)

    def grads(x_md, w_gdf, dy_mf, rows_g):
        y_mf, dx_md = own.forward(x_md, w_gdf, rows_g), own.dgrad(dy_mf, w_gdf, rows_g)
        return y_mf, dx_md, own.wgrad(x_md, dy_mf, rows_g)

    return grads


def ours(name: str, fp8: str = "none", align_rows: int = 1) -> dict[str, Products]:
    """Return our products by one of our implementations."""
    return {"": choose.products(name, fp8=fp8, align_rows=align_rows)}


def ragged_dot() -> dict[str, Products]:
    """Return the products of jax.lax.ragged_dot_general."""
    return {"": _general_products(lax.ragged_dot_general)}


def tokamax(name: str) -> dict[str, Products]:
    """Return the products of one of tokamax's implementations, by tiles."""
    library = import_tokamax()
    from tokamax._src.ops.ragged_dot.api import IMPLEMENTATIONS

    if name not in IMPLEMENTATIONS:
        raise ImportError(f"this tokamax has no {name}")
    op = IMPLEMENTATIONS[name]
    by_tiles = {"its own choice": op}
    for tiles in TOKAMAX_TILES[name]:
        config = type(op).config_cls(**TOKAMAX_SIZES[name] | tiles)
        by_tiles[str(tiles)] = op.replace(config=config)
    general = library.ragged_dot_general
    return {
        tiles: _general_products(partial(general, implementation=[op]))
        for tiles, op in by_tiles.items()
    }


def missing_tokamax() -> str | None:
    """Return why tokamax cannot be imported, or None if it can."""
    if importlib.util.find_spec("tokamax") or (PEERS / "tokamax").is_dir():
        return None
    return f"tokamax is not in {PEERS.name}: run `make peers`"


def import_tokamax() -> types.ModuleType:
    """Return tokamax, from the folder of `make peers` unless it is installed. Raises
    ImportError where it is in neither.

    Where xprof is not installed (100 MB, and 50 packages that it needs), an empty
    module stands for the one that tokamax imports of it.
    """
    if why := missing_tokamax():
        raise ImportError(why)
    if importlib.util.find_spec("tokamax") is None:
        sys.path.append(str(PEERS))
    if XPROF not in sys.modules and importlib.util.find_spec("xprof") is None:
        parts = XPROF.split(".")
        names = [".".join(parts[: n + 1]) for n in range(len(parts))]
        sys.modules |= {name: types.ModuleType(name) for name in names}
        setattr(sys.modules[names[-2]], parts[-1], sys.modules[XPROF])
    import tokamax

    return tokamax


def torch() -> dict[str, Products]:
    """Return the products of PyTorch's grouped_mm. They take arrays of JAX and return
    tensors."""
    import torch

    public = getattr(torch.nn.functional, "grouped_mm", None)
    grouped_mm = public or torch._grouped_mm

    def tensors(*arrays):
        *floats, rows_g = map(torch.from_dlpack, arrays)
        return *floats, {"offs": rows_g.cumsum(0, dtype=torch.int32)}

    def forward(x_md, w_gdf, rows_g):
        x_md, w_gdf, ends = tensors(x_md, w_gdf, rows_g)
        return grouped_mm(x_md, w_gdf, **ends)

    def dgrad(dy_mf, w_gdf, rows_g):
        dy_mf, w_gdf, ends = tensors(dy_mf, w_gdf, rows_g)
        return grouped_mm(dy_mf, w_gdf.transpose(1, 2), **ends)

    def wgrad(x_md, dy_mf, rows_g):
        x_md, dy_mf, ends = tensors(x_md, dy_mf, rows_g)
        return grouped_mm(x_md.t(), dy_mf, **ends)

    return {"": Products(forward, dgrad, wgrad, swiglu=None, swiglu_dgrad=None)}


def wait(results: Any) -> Any:
    """Wait for results of JAX or of PyTorch, and return them."""
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.synchronize()
    return jax.block_until_ready(results)


def as_jax(results: Any) -> Any:
    """Return results as arrays of JAX. Tensors share their memory."""

    def convert(array):
        is_tensor = not isinstance(array, jax.Array)
        return jnp.from_dlpack(array.contiguous()) if is_tensor else array

    return jax.tree.map(convert, wait(results))


def dense() -> dict[str, Products]:
    """Return products without groups: one matmul of the same FLOPs, with the first
    matrix."""

    def forward(x_md, w_gdf, rows_g):
        return x_md @ w_gdf[0]

    def dgrad(dy_mf, w_gdf, rows_g):
        return dy_mf @ w_gdf[0].T

    def wgrad(x_md, dy_mf, rows_g):
        return (x_md.T @ dy_mf)[None]

    return {"": compose_products(forward, dgrad, wgrad)}


def _general_products(general: Callable) -> Products:
    """Return the products of a function with the interface of ragged_dot_general."""

    def with_dims(contract: tuple[int, int], grouped: list[int]) -> Callable:
        dot = (((contract[0],), (contract[1],)), ((), ()))
        dims = lax.RaggedDotDimensionNumbers(dot, [0], grouped)
        return partial(general, ragged_dot_dimension_numbers=dims)

    forward, dgrad = with_dims((1, 1), [0]), with_dims((1, 2), [0])
    return compose_products(forward, dgrad, with_dims((0, 0), []))


IMPLEMENTATIONS: dict[str, Callable[..., dict[str, Products]]] = {
    "hopper": partial(ours, "hopper"),
    "hopper_fp8": partial(ours, "hopper", "e4m3"),
    "blocked": partial(ours, "blocked"),
    "ragged_dot": ragged_dot,
    "tokamax_mosaic": partial(tokamax, "mosaic_gpu"),
    "tokamax_triton": partial(tokamax, "triton"),
    "torch": torch,
    "dense": dense,
}
"""Functions that return an implementation's products by their tiles. They raise
ImportError if a library is not installed."""
