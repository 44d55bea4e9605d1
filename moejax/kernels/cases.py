"""Cases of every kernel: arguments, the call, and what the definition says in float64.

This is the one table by which kernels are judged. The tests run it in the interpreter
of Mosaic GPU, `pytest --gpu` on a GPU, and `train/main.py --check` makes cases of the
same kind from the sizes of a run. Definitions are those of each room's reference.py,
and their gradients are derived by JAX.

A case is hard on purpose: groups without rows, tiles that end outside of the arrays,
more steps than a ring has slots, several tiles for each block, NaN wherever a kernel
must not read.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from moejax.kernels.attention import reference as attention_reference
from moejax.kernels.attention.reading import CAUSAL, Inputs, Rule
from moejax.kernels.attention.vjp import attention
from moejax.kernels.grouped_dot import reference as dot_reference
from moejax.kernels.grouped_dot.choose import products
from moejax.kernels.permute import reference as permute_reference
from moejax.kernels.permute.choose import make_moves
from moejax.kernels.tuning import FP8, PASSES, Pass
from moejax.kernels.water_fill import portable as water_fill_portable

TOLERANCES = {
    np.dtype(np.float64): 1e-12,
    np.dtype(np.float32): 1e-5,
    np.dtype(np.float16): 4e-3,
    np.dtype(ml_dtypes.bfloat16): 2e-2,
}
"""Largest error of a right result by dtype, over the largest expected value."""
FP8_TOLERANCE = 2**0.5 * 2**-4
"""The same for products of 8-bit values. Values have 3 bits after the leading one, so
that each is off by at most 1/16 of itself, independently in both operands."""
TF32_TOLERANCE = 2e-3
"""The same for products in float32 on GPUs, which XLA may compute with 10 bits."""
MOVES = ("take", "weighted_sum", "combine_backward")
IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(PASSES, ("hopper", "blocked")),
    **dict.fromkeys(MOVES, ("hopper", "xla")),
    "attention": ("cudnn", "blocked"),
    "water_fill": ("hopper",),
}
"""Implementations of each kernel, that for GPUs first."""
GPU_ONLY = ("hopper", "cudnn")
INTERPRETED = ("hopper",)
"""Implementations that Mosaic GPU's interpreter can run on a CPU."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of a kernel, and its definition."""

    kernel: str
    """A name of IMPLEMENTATIONS."""
    name: str
    draw: Callable[[], tuple[np.ndarray, ...]]
    """Return the arguments of the call, the same ones every time."""
    call: Callable[[str, bool], Callable[..., Any]]
    """(implementation, interpret) -> the kernel, a function of the arguments that can
    be jitted."""
    definition: Callable[..., Any]
    """Reference function, which takes the same arguments, with floats in float64, and
    returns the right results."""
    tolerance: float
    """Largest error that is right."""

    def expected(self, arguments: tuple[np.ndarray, ...]) -> Any:
        """Return the results by the definition, in float64."""
        wide = [_widened(array) for array in arguments]
        is_wide = any(array.dtype == np.float64 for array in wide)
        with jax.enable_x64(is_wide), jax.default_device(_cpu()):
            return jax.device_get(jax.jit(self.definition)(*wide))

    def error(self, results: Any, expected: Any) -> float:
        """Return the largest error over all arrays of the results."""
        pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
        return max(largest_error(*pair) for pair in pairs)


def largest_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return max |actual - expected| / max |expected|; infinite where a value is not
    finite. Where only zeros are expected, it is max |actual|."""
    expected = np.asarray(expected, np.float64)
    with np.errstate(invalid="ignore"):
        actual = np.asarray(actual).astype(np.float64)
    if actual.shape != expected.shape or not np.isfinite(actual).all():
        return np.inf
    largest = np.max(np.abs(expected), initial=0.0)
    return float(np.max(np.abs(actual - expected), initial=0.0) / (largest or 1.0))


def cases(kernel: str) -> list[Case]:
    """Return the cases of a kernel of IMPLEMENTATIONS."""
    if kernel in PASSES:
        # More steps than slots of the ring, and widths that end inside of a tile.
        widths = (640, 384) if kernel in FP8 else (320, 192)
        make = functools.partial(product_case, kernel)
        return [
            make("bfloat16", *widths, (64, 0, 128, 64), align_rows=64),
            make("float16", 128, 256, (128, 0, 256), align_rows=128, num_blocks=3),
            make("bfloat16", 128, 128, (0, 0), align_rows=64),
            scanned(make("bfloat16", 128, 128, (64, 64), align_rows=64)),
        ]
    if kernel in MOVES:
        make = functools.partial(move_case, kernel)
        moves = [
            *(make(dtype, 5, 3, 1024) for dtype in ("bfloat16", "float16", "float32")),
            make("bfloat16", 9, 8, 2048),
            make("bfloat16", 2, 10, 1024),
            make("bfloat16", 3, 1, 1024, kept=1.0),
            make("bfloat16", 3, 2, 1024, kept=0.0),
        ]
        if kernel == "weighted_sum":
            moves.append(make("bfloat16", 5, 3, 1024, has_gates=False))
        return moves
    if kernel == "attention":
        documents = (63, 1, 20, 65, 7, 100)
        return [
            attention_case("bfloat16", documents, (4, 2), 64),
            attention_case("float16", documents, (4, 4), 128),
            attention_case("bfloat16", documents, (4, 2), 64, Rule(window=17)),
        ]
    return [water_fill_case(24, 8), water_fill_case(12, 70), water_fill_case(6, 128)]


def product_case(
    which: Pass,
    dtype: str,
    d: int,
    f: int,
    rows_g: tuple[int, ...],
    *,
    align_rows: int,
    num_blocks: int | None = 2,
    fp8: str = "e4m3",
) -> Case:
    """Return a case of a pass of the grouped product, with `align_rows` rows of NaN
    behind the groups.

    Each number of `rows_g` is a multiple of `align_rows`. `num_blocks` is the number of
    blocks of the Hopper kernel; None is one for each multiprocessor.
    """
    num_rows, is_fp8 = sum(rows_g) + align_rows, which in FP8
    dims = operand_dims(which, num_rows, d, f, len(rows_g))

    def draw():
        random = np.random.default_rng(0)
        arrays = [random.standard_normal(shape) for shape in dims]
        for number, array in enumerate(arrays):
            if array.ndim == 2:  # into_mh is a result of swiglu, and zero in padding
                array[sum(rows_g) :] = 0 if number == 2 else np.nan
            else:
                np.multiply(array, array.shape[1] ** -0.5, out=array)
        floats = [array.astype(jnp.dtype(dtype)) for array in arrays]
        return *floats, np.array(rows_g, np.int32)

    def call(implementation, interpret):
        formats = {"fp8": fp8 if is_fp8 else "none", "align_rows": align_rows}
        if implementation == "hopper":
            # Importing Pallas takes half a second, and only these kernels need it.
            from moejax.kernels.grouped_dot.hopper import kernels

            run = kernels.KernelRun(
                num_blocks, kernels.INTERPRET if interpret else None
            )
            own = kernels.products(run, **formats)
        else:
            own = products(implementation, **formats)
        return getattr(own, which.removeprefix("fp8_"))

    tolerance = FP8_TOLERANCE if is_fp8 else _product_tolerance(dtype)
    name = f"{dtype} {d}x{f} rows {'+'.join(map(str, rows_g))}"
    definition = DEFINITIONS[which.removeprefix("fp8_")]
    return Case(which, name, draw, call, definition, tolerance)


def operand_dims(
    which: Pass, num_rows: int, d: int, f: int, num_groups: int
) -> list[tuple[int, ...]]:
    """Return the shapes of the arrays that a pass takes before rows_g."""
    m, g = num_rows, num_groups
    return {
        "forward": [(m, d), (g, d, f)],
        "dgrad": [(m, f), (g, d, f)],
        "wgrad": [(m, d), (m, f)],
        "swiglu": [(m, d), (g, d, 2 * f)],
        "swiglu_dgrad": [(m, d), (g, f, d), (m, 2 * f)],
    }[which.removeprefix("fp8_")]


def _dgrad(dy_mf, w_gdf, rows_g):
    x_md = jnp.zeros((dy_mf.shape[0], w_gdf.shape[1]), dy_mf.dtype)
    return jax.vjp(lambda x: dot_reference.grouped_dot(x, w_gdf, rows_g), x_md)[1](
        dy_mf
    )[0]


def _wgrad(x_md, dy_mf, rows_g):
    w_gdf = jnp.zeros((len(rows_g), x_md.shape[1], dy_mf.shape[1]), x_md.dtype)
    return jax.vjp(lambda w: dot_reference.grouped_dot(x_md, w, rows_g), w_gdf)[1](
        dy_mf
    )[0]


def _swiglu(x_md, into_gdh, rows_g):
    into_mh = dot_reference.grouped_dot(x_md, into_gdh, rows_g)
    return dot_reference.swiglu(into_mh), into_mh


def _swiglu_dgrad(dy_md, down_gfd, into_mh, rows_g):
    def expert(into_mh):
        h_mf = dot_reference.swiglu(into_mh)
        return dot_reference.grouped_dot(h_mf, down_gfd, rows_g), h_mf

    _, back, h_mf = jax.vjp(expert, into_mh, has_aux=True)
    return back(dy_md)[0], h_mf


DEFINITIONS = {
    "forward": dot_reference.grouped_dot,
    "dgrad": _dgrad,
    "wgrad": _wgrad,
    "swiglu": _swiglu,
    "swiglu_dgrad": _swiglu_dgrad,
}
"""Definition of each pass of the grouped product."""


def scanned(case: Case) -> Case:
    """Return a case in which a scan slices the arguments of two calls out of stacked
    arrays, which XLA may fuse into the kernel's call."""

    def over_two(function):
        def scan(*stacked):
            return jax.lax.scan(lambda _, own: (None, function(*own)), None, stacked)[1]

        return scan

    def draw():
        return tuple(np.stack([array, array[..., ::-1]]) for array in case.draw())

    def call(implementation, interpret):
        return over_two(case.call(implementation, interpret))

    name, definition = f"{case.name} in a scan", over_two(case.definition)
    return dataclasses.replace(
        case, name=name, draw=draw, call=call, definition=definition
    )


def move_case(
    move: str,
    dtype: str,
    tokens: int,
    choices: int,
    d: int,
    kept: float = 0.6,
    *,
    has_gates: bool = True,
) -> Case:
    """Return a case of one move of the row permutation, in which the share `kept` of
    all choices has a row. Four rows more than there are choices stay empty. Rows that
    no choice has, and tokens whose choices are all lost, hold NaN. Without gates,
    weighted_sum is the gradient of take."""

    def draw():
        random = np.random.default_rng(0)
        num_rows = tokens * choices + 4
        num_kept = round(kept * tokens * choices)
        kept_a = random.permutation(tokens * choices)[:num_kept]
        row_a = random.permutation(num_rows)[:num_kept]
        position_a = np.full(tokens * choices, -1, np.int32)
        assignment_m = np.full(num_rows, -1, np.int32)
        position_a[kept_a], assignment_m[row_a] = row_a, kept_a
        position_nk = position_a.reshape(tokens, choices)
        x_nd = random.standard_normal((tokens, d)).astype(jnp.dtype(dtype))
        y_md = random.standard_normal((num_rows, d)).astype(jnp.dtype(dtype))
        gate_nk = random.uniform(0.1, 1, (tokens, choices)).astype(np.float32)
        x_nd[(position_nk < 0).all(axis=1)] = np.nan
        y_md[assignment_m < 0] = np.nan
        if move == "take":
            source_m = np.where(assignment_m < 0, -1, assignment_m // choices)
            return x_nd, source_m.astype(np.int32)
        if move == "weighted_sum":
            return y_md, gate_nk if has_gates else np.ones_like(gate_nk), position_nk
        return x_nd, y_md, gate_nk, position_nk, assignment_m

    def call(implementation, interpret):
        moves = make_moves(implementation, interpret)
        if has_gates:
            return getattr(moves, move)
        return lambda y_md, _, position_nk: moves.weighted_sum(y_md, None, position_nk)

    def define(*arrays):
        if move == "take":
            return permute_reference.gather_rows(*arrays, None)
        if move == "weighted_sum":
            return permute_reference.combine_rows(*arrays, None)
        dout_nd, y_md, gate_nk, position_nk, _ = arrays
        y_md = jnp.nan_to_num(y_md)  # NaN would reach the gradient of its own zeros
        dout_nd = jnp.nan_to_num(dout_nd)

        def combine(y_md, gate_nk):
            return permute_reference.combine_rows(y_md, gate_nk, position_nk, None)

        return jax.vjp(combine, y_md, gate_nk)[1](dout_nd)

    name = (
        f"{dtype} {tokens}x{choices}x{d} {kept:.0%} kept{', plain' * (not has_gates)}"
    )
    return Case(move, name, draw, call, define, TOLERANCES[jnp.dtype(dtype)])


def attention_case(
    dtype: str,
    documents: tuple[int, ...],
    heads: tuple[int, int],
    width: int,
    rule: Rule = CAUSAL,
    *,
    value_width: int | None = None,
    num_sinks: int = 0,
) -> Case:
    """Return a case of both passes of attention over two rows with documents of these
    lengths, in the second row backwards. `heads` are those of queries and of keys."""
    (h, g), t = heads, sum(documents)

    def draw():
        random = np.random.default_rng(0)
        edges = [np.cumsum((0, *order)) for order in (documents, documents[::-1])]
        first_bt = np.stack([np.repeat(e[:-1], np.diff(e)) for e in edges])
        value = value_width or width
        shapes = [
            (2, t, h, width),
            (2, t, g, width),
            (2, t, g, value),
            (2, t, h, value),
        ]
        floats = [random.standard_normal(s).astype(jnp.dtype(dtype)) for s in shapes]
        sinks_h = random.standard_normal(num_sinks).astype(np.float32)
        return *floats, sinks_h, first_bt.astype(np.int32)

    def both_passes(forward):
        def run(q, k, v, dout, sinks_h, first_bt):
            out, back = jax.vjp(
                lambda *floats: forward(*floats, first_bt), q, k, v, sinks_h
            )
            dq, dk, dv, dsinks = back(dout)
            return out, dq, dk, dv, dsinks

        return run

    def call(implementation, interpret):
        def forward(q, k, v, sinks_h, first_bt):
            sinks_h = sinks_h if num_sinks else None
            options = {"rule": rule, "sinks_h": sinks_h}
            return attention(
                q, k, v, first_bt, implementation=implementation, **options
            )

        return both_passes(forward)

    def define(q, k, v, sinks_h, first_bt):
        inputs = Inputs(q, k, v, first_bt, jnp.int32(0))
        sinks_h = sinks_h if num_sinks else None
        return attention_reference.attention(inputs, rule, sinks_h)

    words = [dtype, f"{h}/{g} heads of {width}", f"{t} tokens"]
    words += [f"values of {value_width}"] if value_width else []
    words += [f"window {rule.window}"] if rule.window else []
    words += ["sinks"] if num_sinks else []
    tolerance = _product_tolerance(dtype)
    return Case(
        "attention", ", ".join(words), draw, call, both_passes(define), tolerance
    )


def water_fill_case(colors: int, bins: int, max_sweeps: int = 3) -> Case:
    """Return a case of water-filling with a random table, in which each color but the
    last two has one item on a few bins. Results are integers, and must be equal."""

    def draw():
        random = np.random.default_rng(0)
        item_cw = np.full((colors, bins), -1, np.int32)
        amount_cw = np.zeros((colors, bins), np.int32)
        for c in range(colors - 2):
            where = random.choice(bins, min(bins, random.integers(2, 6)), replace=False)
            item_cw[c, where] = c
            amount_cw[c, where] = random.integers(0, 1000, len(where))
        fixed_w = random.integers(0, 300, bins).astype(np.int32)
        return item_cw, amount_cw, fixed_w, np.int32(colors - 2), np.int32(0)

    def call(implementation, interpret):
        from moejax.kernels.water_fill import hopper

        return functools.partial(
            hopper.water_fill, max_sweeps=max_sweeps, interpret=interpret
        )

    define = functools.partial(water_fill_portable.water_fill, max_sweeps=max_sweeps)
    return Case("water_fill", f"{colors} colors {bins} bins", draw, call, define, 0.0)


def _product_tolerance(dtype: str) -> float:
    """Return the largest error of products, which XLA may round on GPUs."""
    is_rounded = dtype == "float32" and jax.default_backend() == "gpu"
    return TF32_TOLERANCE if is_rounded else TOLERANCES[jnp.dtype(dtype)]


def _cpu() -> jax.Device | None:
    """Return the CPU of this process; None, which is the default device, where JAX has
    GPUs alone."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def _widened(array: np.ndarray) -> np.ndarray:
    """Return floats in float64, and integers as they are."""
    array = np.asarray(array)
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return array.astype(np.float64) if is_float else array
