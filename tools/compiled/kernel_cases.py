"""The kernels whose machine code tools/kernel_code.py reads: grouped products by shape,
pass and tiles, and the kernels of the other operations, each at one size."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.kernels.shapes import MODEL_SHAPES, ProductShape
from moejax.kernels.tuning import FUSED, Pass, Tiles, default_tiles
from tools.bench.grouped_dot_cases import OPERANDS

PRODUCTS: tuple[Pass, ...] = ("swiglu", "forward", "swiglu_dgrad", "dgrad", "wgrad")
"""Passes of an expert layer in 2-byte dtypes, in the order in which training runs
them."""
OTHERS = ("attention_forward", "attention_backward", "permute", "water_fill")
"""Kernels of the other operations: rows of OLMoE, heads of 128 values, eight bins."""
ROWS_PASSES = PRODUCTS[:-1]


class Form(NamedTuple):
    """A form of the kernel of a product."""

    fields: Mapping[str, Any] = {}
    """Fields of Tiles that differ from the default tiles."""
    is_aligned: bool = False
    """Whether groups consist of whole tiles (KernelRun.is_aligned)."""


_TURNS = {"halves": "turns", "columns": 128}
FORMS: dict[str, dict[Pass, Form]] = {
    "first": {which: Form() for which in PRODUCTS},
    "approx": {which: Form({"math": "approx"}) for which in FUSED},
    "own": {which: Form({"barriers": "own"}) for which in PRODUCTS[:-1]},
    "cluster": {which: Form({"cluster": 2}) for which in PRODUCTS},
    "turns": {
        "swiglu": Form(_TURNS | {"rows": 64, "stages": 4}),
        "swiglu_dgrad": Form(_TURNS | {"rows": 64, "stages": 6}),
        "forward": Form(_TURNS | {"rows": 128, "stages": 5}),
        "dgrad": Form(_TURNS | {"rows": 128, "stages": 5}),
        "wgrad": Form(_TURNS | {"rows": 128, "stages": 5}),
    },
    "aligned": {which: Form(is_aligned=True) for which in PRODUCTS},
    "lean": {
        which: Form(
            {"barriers": "own"} | ({"math": "approx"} if which in FUSED else {}),
            is_aligned=True,
        )
        for which in PRODUCTS
    },
}
"""Forms of the products, by the passes that have them; `lean` is aligned, approx and
own at once. A warpgroup that takes turns has the sums of a whole tile in its registers,
so that its tiles are smaller."""


class KernelCase(NamedTuple):
    """A program of kernels to compile."""

    name: str
    """Pass, or name of the operation."""
    shape: str
    """Name of the shape; '' for other operations."""
    form: str
    tiles: Tiles | None
    """Tiles of a product; None for other operations."""
    function: Callable
    arguments: tuple
    """Shapes of the arguments."""


def products(
    shapes: Sequence[str],
    passes: Sequence[Pass],
    forms: Mapping[str, Mapping[Pass, Form]],
    dtype: str = "bfloat16",
) -> Iterator[KernelCase]:
    """Yield the cases of grouped products by shape, pass and form.

    `forms` is like FORMS. A form that is the same as one before it, or whose tiles are
    impossible, has no case.
    """
    for name in shapes:
        for which in passes:
            known = set()
            default = default_tiles(which, MODEL_SHAPES[name])
            for form in (form for form in forms if which in forms[form]):
                fields, is_aligned = forms[form][which]
                tiles = changed_tiles(default, fields)
                if tiles is not None and (tiles, is_aligned) not in known:
                    known.add((tiles, is_aligned))
                    case = product(name, which, tiles, dtype, is_aligned=is_aligned)
                    yield case._replace(form=form)


def changed_tiles(tiles: Tiles, fields: Mapping[str, Any]) -> Tiles | None:
    """Return the tiles with some fields changed, or None if there are no such tiles.
    Raises ValueError for an unknown field."""
    if unknown := set(fields) - {field.name for field in dataclasses.fields(Tiles)}:
        raise ValueError(f"Tiles has no field {min(unknown)!r}: see {Tiles.__module__}")
    try:
        return dataclasses.replace(tiles, **fields)
    except ValueError:
        return None


def product(
    shape: str, which: Pass, tiles: Tiles, dtype: str, *, is_aligned: bool
) -> KernelCase:
    """Return the case of one grouped product."""
    from moejax.kernels.grouped_dot.hopper import kernels, ring

    sizes, run = MODEL_SHAPES[shape], ring.KernelRun(is_aligned=is_aligned)
    function = functools.partial(getattr(kernels, which), tiles=tiles, run=run)
    rows_g = jax.ShapeDtypeStruct((sizes.groups,), jnp.int32)
    arguments = (*operands(which, sizes, dtype), rows_g)
    return KernelCase(which, shape, "", tiles, function, arguments)


def operands(which: str, shape: ProductShape, dtype: str) -> tuple:
    """Return the shapes of a pass's arguments before rows_g."""
    sizes = {"m": shape.rows, "d": shape.d, "f": shape.f, "h": 2 * shape.f}
    sizes["g"] = shape.groups
    dims = (name.rpartition("_")[2] for name in OPERANDS[which])
    return tuple(
        jax.ShapeDtypeStruct(tuple(sizes[dim] for dim in name), dtype) for name in dims
    )


def other(name: str) -> KernelCase:
    """Return the case of one of OTHERS."""
    function, arguments = {
        "attention_forward": _attention_forward,
        "attention_backward": _attention_backward,
        "permute": _permute,
        "water_fill": _water_fill,
    }[name]()
    return KernelCase(name, "", "first", None, function, arguments)


def _attention_forward() -> tuple[Callable, tuple]:
    from moejax.kernels.attention.hopper import kernels
    from moejax.kernels.attention.reading import CAUSAL, Inputs

    return lambda *arrays: kernels.forward(Inputs(*arrays), CAUSAL), _attention_inputs()


def _attention_backward() -> tuple[Callable, tuple]:
    from moejax.kernels.attention.hopper import kernels
    from moejax.kernels.attention.reading import CAUSAL, Inputs

    def backward(*arrays):
        *inputs, out_bthj, lse_bht, dout_bthj = arrays
        return kernels.backward(Inputs(*inputs), CAUSAL, out_bthj, lse_bht, dout_bthj)

    inputs = _attention_inputs()
    b, t, h, _ = inputs[0].shape
    lse_bht = jax.ShapeDtypeStruct((b, h, t), jnp.float32)
    return backward, (*inputs, inputs[2], lse_bht, inputs[2])


def _attention_inputs() -> tuple:
    """Return queries, keys, values, first keys and start of one row of OLMoE."""
    heads = jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)
    first_bt = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    return heads, heads, heads, first_bt, jax.ShapeDtypeStruct((), jnp.int32)


def _permute() -> tuple[Callable, tuple]:
    from moejax.kernels.permute import hopper

    def all_moves(x_nd, y_md, gate_nk, positions_nk, assignment_m):
        return (
            hopper.take(x_nd, assignment_m),
            hopper.weighted_sum(y_md, gate_nk, positions_nk),
            hopper.combine_backward(x_nd, y_md, gate_nk, positions_nk, assignment_m),
        )

    n, k, d = 4096, 8, 2048
    x_nd, y_md = (jax.ShapeDtypeStruct((rows, d), jnp.bfloat16) for rows in (n, n * k))
    gate_nk = jax.ShapeDtypeStruct((n, k), jnp.float32)
    positions_nk = jax.ShapeDtypeStruct((n, k), jnp.int32)
    assignment_m = jax.ShapeDtypeStruct((n * k,), jnp.int32)
    return all_moves, (x_nd, y_md, gate_nk, positions_nk, assignment_m)


def _water_fill() -> tuple[Callable, tuple]:
    from moejax.kernels.water_fill import hopper

    table_cw = jax.ShapeDtypeStruct((64, 8), jnp.int32)
    line_w, number = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((8,), ()))
    function = functools.partial(hopper.water_fill, max_sweeps=8)
    return function, (table_cw, table_cw, line_w, number, number)
