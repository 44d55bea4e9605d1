"""Implementations that tools/bench/grouped_dot.py compares: ours and those of others.

    hopper, blocked  ours: moejax.kernels.grouped_dot.choose
    hopper_fp8       ours too: forward and dgrad of 8-bit values, including the rounding
                     of x, dy and w to them; gradients are in e4m3
    ragged_dot       jax.lax.ragged_dot_general, with the dims of ragged_dot's gradients
    mgpu             ragged_dot and transposed_ragged_dot of JAX's pallas.ops.gpu
    tokamax_mosaic   tokamax.ragged_dot_general by its Pallas kernels for Hopper
    tokamax_triton   the same by its Triton kernels (Pallas)
    torch            PyTorch's grouped_mm, eager
    batched          rows padded to the fullest group, then one batched matmul
    dense            one matmul of equal FLOPs, without groups: the speed of light

An implementation that takes tile sizes has several variants, of which the benchmark
keeps the fastest. The sizes are from the implementation's own search. `make peers`
installs tokamax, in a folder of its own.
"""

import dataclasses
import functools
import importlib.util
import pathlib
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

OURS = ("hopper", "blocked", "hopper_fp8")
IN_FP8 = ("hopper_fp8",)
MGPU_TILES = ((128, 128, 64, 4, 4), (64, 128, 64, 6, 4), (128, 192, 64, 4, 2))
"""block_m, block_n, block_k, max_concurrent_steps, grid_block_n of JAX's kernels."""
MGPU_WGRAD_TILES = ((128, 128, 64, 4, 4), (64, 128, 64, 6, 4), (128, 128, 128, 2, 4))
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
"""Tiles of tokamax that were the fastest most often in its own search on an H100
(tokamax_h100.json has the source), and one for groups of few rows. Without them tokamax
takes tiles by rule on every GPU that it has not searched, an H200 included."""
TOKAMAX_SIZES = {
    "mosaic_gpu": {"block_m": 128, "block_n": 64, "block_k": 128, "split_k": 1},
    "triton": {"block_m": 128, "split_k": 1},
}
"""Sizes that the tiles above have in common."""
PEERS = pathlib.Path(__file__).resolve().parents[2] / ".peers"
"""Folder of `make peers`."""
XPROF = "xprof.cli.tools.get_kernel_stats_tool"
"""Module that tokamax imports for a timing of its own, which is not used here."""


class Products(NamedTuple):
    """Products of one implementation, as defined in
    tools/bench/grouped_dot_cases.py."""

    forward: Callable
    """(x_md, w_gdf, rows_g) -> y_mf"""
    dgrad: Callable
    """(dy_mf, w_gdf, rows_g) -> dx_md"""
    wgrad: Callable
    """(x_md, dy_mf, rows_g) -> dw_gdf"""
    swiglu: Callable
    """(x_md, into_gdh, rows_g) -> (h_mf, into_mh)"""


@dataclasses.dataclass(frozen=True)
class Variant:
    """One implementation of one pass."""

    run: Callable
    """Function that is timed, as run(*arguments(operands, rows_g))."""
    arguments: Callable[[Sequence[Array], Array], tuple] = lambda ops, rows: (
        *ops,
        rows,
    )
    wait: Callable = jax.block_until_ready
    results: Callable[[Any], Any] = lambda out: out
    """Function that turns run's result into JAX arrays."""
    tiles: str = ""
    """Name of this variant, if an implementation has several."""

    def run_results(self, arguments: tuple):
        return self.results(self.wait(self.run(*arguments)))


@functools.cache
def variants(impl: str, which: str, fullest_rows: int) -> tuple[Variant, ...]:
    """Return the variants of an implementation of a pass.

    `fullest_rows` is the capacity of `batched`, and 0 for the others. Raises
    ImportError if a library is not installed, NotImplementedError if the implementation
    does not have the pass.
    """
    if impl in IN_FP8 and which == "wgrad":
        raise NotImplementedError("wgrad has no 8-bit values: see hopper")
    make = IMPLEMENTATIONS[impl]
    by_tiles = make(fullest_rows) if fullest_rows else make()
    if impl == "torch":
        return (_torch_variant(pass_function(by_tiles[""], which)),)
    operands = {"arguments": _without_groups} if impl == "dense" else {}
    return tuple(
        Variant(jax.jit(pass_function(products, which)), tiles=tiles, **operands)
        for tiles, products in by_tiles.items()
    )


def pass_function(products: Products, which: str) -> Callable:
    """Return the function that computes a pass with an implementation's products. The
    pass `grads` is forward and both gradients in one program."""
    if which != "grads":
        return getattr(products, "swiglu" if which == "fused" else which)

    def grads(x_md, w_gdf, dy_mf, rows_g):
        y_mf = products.forward(x_md, w_gdf, rows_g)
        dx_md = products.dgrad(dy_mf, w_gdf, rows_g)
        return y_mf, dx_md, products.wgrad(x_md, dy_mf, rows_g)

    return grads


def ours(implementation: str, fp8: str = "none") -> dict[str, Products]:
    """Return our products by one of our implementations."""
    from moejax.kernels.grouped_dot.choose import products

    return {"": products(implementation, fp8=fp8)}


def ragged_dot() -> dict[str, Products]:
    """Return the products of jax.lax.ragged_dot_general."""
    return {"": _ragged_dot_general(lax.ragged_dot_general)}


def mgpu() -> dict[str, Products]:
    """Return the products of JAX's Pallas kernels for Hopper, by tiles."""
    from jax.experimental.pallas.ops.gpu import (
        ragged_dot_mgpu,
        transposed_ragged_dot_mgpu,
    )

    names = "block_m", "block_n", "block_k", "max_concurrent_steps", "grid_block_n"

    def make_products(rows_tiles: tuple, wgrad_tiles: tuple) -> Products:
        dot = partial(ragged_dot_mgpu.ragged_dot, **dict(zip(names, rows_tiles)))
        transposed = partial(
            transposed_ragged_dot_mgpu.transposed_ragged_dot,
            **dict(zip(names, wgrad_tiles)),
        )

        def forward(x_md, w_gdf, rows_g):
            return dot(x_md, w_gdf, group_sizes=rows_g)

        def dgrad(dy_mf, w_gdf, rows_g):
            return dot(dy_mf, w_gdf, group_sizes=rows_g, transpose_rhs=True)

        def wgrad(x_md, dy_mf, rows_g):
            return transposed(x_md, dy_mf, group_sizes=rows_g)

        return Products(forward, dgrad, wgrad, swiglu_over(forward))

    both = zip(MGPU_TILES, MGPU_WGRAD_TILES)
    return {f"{rows} {wgrad}": make_products(rows, wgrad) for rows, wgrad in both}


def tokamax(implementation: str) -> dict[str, Products]:
    """Return the grouped products of one of tokamax's implementations, by the name of
    their tiles."""
    library = import_tokamax()
    from tokamax._src.ops.ragged_dot.api import IMPLEMENTATIONS

    if implementation not in IMPLEMENTATIONS:
        raise ImportError(f"this tokamax has no {implementation}")
    op = IMPLEMENTATIONS[implementation]
    variants = {"its own choice": op}
    for tiles in TOKAMAX_TILES[implementation]:
        config = type(op).config_cls(**TOKAMAX_SIZES[implementation] | tiles)
        variants[str(tiles)] = op.replace(config=config)

    general = library.ragged_dot_general
    return {
        tiles: _ragged_dot_general(partial(general, implementation=[op]))
        for tiles, op in variants.items()
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
    """Return the products of PyTorch's grouped_mm, which takes the ends of groups."""
    import torch

    public = getattr(torch.nn.functional, "grouped_mm", None)
    grouped_mm = public or getattr(torch, "_grouped_mm", None)
    if grouped_mm is None:
        raise ImportError(f"torch {torch.__version__} has no grouped_mm")

    def forward(x_md, w_gdf, ends_g):
        return grouped_mm(x_md, w_gdf, offs=ends_g)

    def dgrad(dy_mf, w_gdf, ends_g):
        return grouped_mm(dy_mf, w_gdf.transpose(1, 2), offs=ends_g)

    def wgrad(x_md, dy_mf, ends_g):
        return grouped_mm(x_md.t(), dy_mf, offs=ends_g)

    def swiglu(x_md, into_gdh, ends_g):
        into_mh = forward(x_md, into_gdh, ends_g)
        gate_mf, up_mf = into_mh.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate_mf) * up_mf, into_mh

    return {"": Products(forward, dgrad, wgrad, swiglu)}


def batched(capacity: int) -> dict[str, Products]:
    """Return products that pad each group to `capacity` rows and use one batched
    matmul."""

    def forward(x_md, w_gdf, rows_g):
        y_gcf = jnp.einsum("gcd,gdf->gcf", padded(x_md, rows_g, capacity), w_gdf)
        return unpadded(y_gcf, rows_g, x_md.shape[0])

    def dgrad(dy_mf, w_gdf, rows_g):
        dx_gcd = jnp.einsum("gcf,gdf->gcd", padded(dy_mf, rows_g, capacity), w_gdf)
        return unpadded(dx_gcd, rows_g, dy_mf.shape[0])

    def wgrad(x_md, dy_mf, rows_g):
        x_gcd, dy_gcf = (padded(a, rows_g, capacity) for a in (x_md, dy_mf))
        return jnp.einsum("gcd,gcf->gdf", x_gcd, dy_gcf)

    return {"": Products(forward, dgrad, wgrad, swiglu_over(forward))}


def dense() -> dict[str, Products]:
    """Return products without groups: one matmul of the same FLOPs."""

    def forward(x_md, w_df, rows_g):
        return x_md @ w_df

    def dgrad(dy_mf, w_df, rows_g):
        return dy_mf @ w_df.T

    def wgrad(x_md, dy_mf, rows_g):
        return (x_md.T @ dy_mf)[None]

    return {"": Products(forward, dgrad, wgrad, swiglu_over(forward))}


IMPLEMENTATIONS: dict[str, Callable[..., dict[str, Products]]] = {
    "hopper": partial(ours, "hopper"),
    "hopper_fp8": partial(ours, "hopper", "e4m3"),
    "blocked": partial(ours, "blocked"),
    "ragged_dot": ragged_dot,
    "mgpu": mgpu,
    "tokamax_mosaic": partial(tokamax, "mosaic_gpu"),
    "tokamax_triton": partial(tokamax, "triton"),
    "torch": torch,
    "batched": batched,
    "dense": dense,
}
ON_CPU = ("blocked", "ragged_dot", "batched", "dense")
"""Implementations that run on a CPU. The others need a GPU."""


def swiglu_over(forward: Callable) -> Callable:
    """Return the pass `fused` made of a forward product: silu(gate) * up after one
    product for both. XLA fuses the operations after the product."""

    def swiglu(x_md, into_gdh, rows_g):
        into_mh = forward(x_md, into_gdh, rows_g)
        gate_mf, up_mf = jnp.split(into_mh, 2, axis=-1)
        return jax.nn.silu(gate_mf) * up_mf, into_mh

    return swiglu


def padded(
    x_md: Float[Array, "m d"], rows_g: Int[Array, " g"], capacity: int
) -> Float[Array, "g c d"]:
    """Return the rows of each group, followed by zeros up to the capacity."""
    position_c = jnp.arange(capacity)
    row_gc = (jnp.cumsum(rows_g) - rows_g)[:, None] + position_c
    is_row_gc = position_c < rows_g[:, None]
    x_gcd = x_md.at[row_gc].get(mode="clip")
    return jnp.where(is_row_gc[:, :, None], x_gcd, 0)


def unpadded(
    y_gcf: Float[Array, "g c f"], rows_g: Int[Array, " g"], num_rows: int
) -> Float[Array, "m f"]:
    """Return the rows of all groups end to end: the inverse of `padded`. Rows that no
    group owns have undefined values."""
    row_m, ends_g = jnp.arange(num_rows), jnp.cumsum(rows_g)
    owner_m = jnp.searchsorted(ends_g, row_m, side="right")
    owner_m = jnp.minimum(owner_m, len(rows_g) - 1)
    position_m = row_m - (ends_g - rows_g)[owner_m]
    return y_gcf.at[owner_m, position_m].get(mode="clip")


def _ragged_dot_general(general: Callable) -> Products:
    """Return the products of a function with the interface of ragged_dot_general."""

    def with_dims(contract: tuple[int, int], grouped: list[int]) -> Callable:
        dot = (((contract[0],), (contract[1],)), ((), ()))
        dims = lax.RaggedDotDimensionNumbers(dot, [0], grouped)
        return partial(general, ragged_dot_dimension_numbers=dims)

    forward, dgrad = with_dims((1, 1), [0]), with_dims((1, 2), [0])
    wgrad = with_dims((0, 0), [])
    return Products(forward, dgrad, wgrad, swiglu_over(forward))


def _without_groups(operands: Sequence[Array], rows_g: Array) -> tuple:
    """Return the operands with only the first matrix. The slice is taken here, so that
    it is not timed."""
    return *(a[0] if a.ndim == 3 else a for a in operands), rows_g


def _torch_variant(run: Callable) -> Variant:
    """Return the variant of a PyTorch function. It shares the memory of JAX's arrays,
    and takes the ends of groups, which are computed before the timing."""
    import torch

    def arguments(operands, rows_g):
        ends_g = jnp.cumsum(rows_g, dtype=jnp.int32)
        return tuple(torch.from_dlpack(a) for a in (*operands, ends_g))

    def wait(out):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return out

    def results(out):
        return jax.tree.map(lambda a: jnp.from_dlpack(a.contiguous()), out)

    return Variant(run, arguments, wait, results)
