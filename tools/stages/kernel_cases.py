"""Cases of the stage 'numerics': inputs of each kernel, calls of it, and what it must
return, in float64 by the definition.

A case is hard on purpose: groups and documents end beside the borders of tiles, unused
rows hold NaN. On a GPU kernels run as they are; in a dry run the interpreter of Mosaic
GPU runs them, on fewer and smaller cases.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from moejax.kernels.attention.hopper import kernels as hopper_attention
from moejax.kernels.attention.reading import CAUSAL, Inputs
from moejax.kernels.grouped_dot.hopper import kernels as products
from moejax.kernels.grouped_dot.hopper.ring import KernelRun
from moejax.kernels.permute import hopper as permute
from moejax.kernels.shapes import ProductShape
from moejax.kernels.tuning import FP8, PASSES, Pass, Tiles
from moejax.kernels.water_fill import hopper as water_fill
from moejax.plan.water_filling import MAX_SWEEPS, Expert, certificate, pour
from tools.bench import grouped_dot_cases as product_cases
from tools.bench import tune_search
from tools.stages.stage import DRY_SECOND

ROWS = (0, 1, 7, 8, 9, 63, 65, 127, 129)
"""Rows of groups, and tokens of documents: beside the multiples of 8, 64 and 128 at
which copies and tiles end."""
DRY_ROWS = (0, 1, 7, 9)
PADDING = {True: 40, False: 39}
"""Rows that belong to no group, by Settings.is_dry."""
DTYPES = ("bfloat16", "float16")
MAX_ERROR = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}
"""Largest ||out - ref|| / ||ref|| of permutations and attention, by dtype."""
SECOND_FORMS: tuple[dict[str, Any], ...] = (
    {"halves": "turns"},
    {"barriers": "own"},
    {"cluster": 2},
    {"math": "approx"},
)
"""Fields of Tiles that choose a second form of a kernel, each tried by itself."""
ALIGNED_ROWS = 128
"""Divisor of the rows of groups in the aligned form, the last of the second forms."""


class KernelCase(NamedTuple):
    """One call of a kernel, and the judgement of its results."""

    name: str
    call: Callable[..., Any]
    """The kernel: a function of arrays that can be jitted."""
    arguments: tuple[Array, ...]
    error: Callable[[Any], float]
    """A function of the results: ||out - ref|| / ||ref||, infinite if not finite."""
    max_error: float


def make_cases(kernel: str, form: str, *, is_dry: bool) -> Iterator[KernelCase]:
    """Yield the cases of a kernel of quarantine.KERNELS in one of its forms; none if it
    has no such form."""
    if kernel in PASSES:
        yield from _product_cases(kernel, form, is_dry=is_dry)
    elif form == "first":
        make = {
            "permute": _permute_cases,
            "attention": _attention_cases,
            "attention_cudnn": _cudnn_cases,
            "water_fill": _water_fill_cases,
        }[kernel]
        yield from make(is_dry=is_dry)


def tile_forms(which: Pass, form: str, *, is_dry: bool) -> list[tuple[Tiles, bool]]:
    """Return the tiles of a form of a pass, of 64 and of 128 rows, and whether groups
    are aligned."""
    depth = 128 if which in FP8 else 64
    high = Tiles(128, 128, depth=depth, stages=2 if is_dry else 4)
    low = dataclasses.replace(high, rows=64, halves="columns")
    both = [high] if which == "wgrad" else [low, high]
    chosen = both[:1] if is_dry else both
    if form == "first":
        return [(tiles, False) for tiles in chosen]
    changed = (_change(tiles, own) for own in SECOND_FORMS for tiles in chosen)
    second = [t for t in changed if t and tune_search.is_possible(which, t)]
    every = [(t, False) for t in second] + [(t, True) for t in chosen]
    if is_dry:
        return every[:1] if which in DRY_SECOND else []
    return every


def _change(tiles: Tiles, fields: dict[str, Any]) -> Tiles | None:
    """Return tiles with other fields; None if such tiles do not exist."""
    try:
        return dataclasses.replace(tiles, **fields)
    except ValueError:
        return None


def _product_cases(which: Pass, form: str, *, is_dry: bool) -> Iterator[KernelCase]:
    """Yield the cases of a pass of the grouped product: tiles, dtypes, patterns of
    rows, and the kernel inside a scan over stacked operands."""
    run = KernelRun(2, plgpu.InterpretGPUParams()) if is_dry else KernelRun()
    width = 128 if which in FP8 or not is_dry else 64
    for tiles, is_aligned in tile_forms(which, form, is_dry=is_dry):
        multiple = ALIGNED_ROWS if is_aligned else 1
        rows = tuple(_round_up(each, multiple) for each in _rows(is_dry))
        shape = ProductShape(
            rows=_round_up(sum(rows) + PADDING[is_dry], max(64, multiple)),
            d=width * (1 if is_dry else 3),
            f=width * (1 if is_dry else 2),
            groups=len(rows),
        )
        own_run = dataclasses.replace(run, is_aligned=is_aligned)
        call = functools.partial(getattr(products, which), tiles=tiles, run=own_run)
        for dtype in DTYPES[:1] if is_dry else DTYPES:
            name = f"{dtype}, tiles {_short(tiles)}{', aligned' * is_aligned}"
            is_scanned = which == "forward" if is_dry else dtype == DTYPES[0]
            for rows_g in () if is_dry and is_scanned else _patterns(rows, is_dry):
                operands = product_cases.operands(which, shape, dtype, 0)
                yield _product_case(f"{name}, rows {rows_g}", which, call, operands,
                                    rows_g)  # fmt: skip
            if is_scanned:
                yield _scanned(name, which, call, (shape, rows), dtype)


def _product_case(name, which, call, operands, rows_g) -> KernelCase:
    case = product_cases.ProductCase(operands, np.array(rows_g, np.int32)).poisoned()

    def error(results) -> float:
        return product_cases.largest_error(which, results, case, has_zero_padding=True)

    arguments = (*case.operands, jnp.asarray(case.rows_g))
    dtype = str(operands[0].dtype)
    return KernelCase(name, call, arguments, error, _max_product_error(which, dtype))


def _scanned(name: str, which, call, sizes, dtype: str) -> KernelCase:
    """Return a case in which a scan slices the operands of two products out of stacked
    arrays, which XLA may fuse into the call."""
    shape, rows_g = sizes
    each = [
        _product_case(name, which, call,
                      product_cases.operands(which, shape, dtype, seed), rows_g)
        for seed in (1, 2)
    ]  # fmt: skip
    *floats, rows = (jnp.stack(pair) for pair in zip(*(c.arguments for c in each)))

    def scan(*stacked):
        return jax.lax.scan(lambda _, own: (None, call(*own)), None, stacked)[1]

    def error(results) -> float:
        layers = [jax.tree.map(lambda a, i=i: a[i], results) for i in range(2)]
        return max(c.error(layer) for c, layer in zip(each, layers))

    limit = each[0].max_error
    return KernelCase(f"{name}, in a scan", scan, (*floats, rows), error, limit)


def _max_product_error(which: str, dtype: str) -> float:
    return product_cases.max_error(dtype, "gpu", which, is_fp8=which in FP8)


def _rows(is_dry: bool) -> tuple[int, ...]:
    return DRY_ROWS if is_dry else ROWS


def _patterns(rows: tuple[int, ...], is_dry: bool) -> list[tuple[int, ...]]:
    """Return numbers of rows of the groups: mixed, backwards, one group with all, and
    none with any."""
    if is_dry:
        return [rows]
    one = (0,) * (len(rows) - 1)
    return [rows, rows[::-1], (*one, sum(rows)), (*one, 0)]


def _permute_cases(*, is_dry: bool) -> Iterator[KernelCase]:
    """Yield the three moves for dispatches that keep no, some and all choices."""
    tokens, choices, d = (5, 3, 1024) if is_dry else (129, 8, 2048)
    for dtype in DTYPES[:1] if is_dry else (*DTYPES, "float32"):
        for kept in (0.6,) if is_dry else (0.0, 0.6, 1.0):
            yield from _moves(dtype, kept, (tokens, choices, d), is_dry)


def _moves(dtype: str, kept: float, sizes, interpret: bool) -> Iterator[KernelCase]:
    tokens, choices, d = sizes
    num_rows = tokens * choices + 4
    random = np.random.default_rng(0)
    num_kept = round(kept * tokens * choices)
    kept_a = random.permutation(tokens * choices)[:num_kept]
    row_a = random.permutation(num_rows)[:num_kept]
    positions_a = np.full(tokens * choices, -1, np.int32)
    assignment_m = np.full(num_rows, -1, np.int32)
    positions_a[kept_a], assignment_m[row_a] = row_a, kept_a
    positions_nk = positions_a.reshape(tokens, choices)
    source_m = np.where(assignment_m < 0, -1, assignment_m // choices)
    x_nd, dout_nd = (random.standard_normal((tokens, d)) for _ in range(2))
    y_md = random.standard_normal((num_rows, d))
    gate_nk = random.uniform(0.1, 1, (tokens, choices)).astype(np.float32)
    is_lost_n = (positions_nk < 0).all(axis=1)
    for array_nd in (x_nd, dout_nd):
        array_nd[is_lost_n] = np.nan
    y_md[assignment_m < 0] = np.nan
    x_nd, dout_nd, y_md = (jnp.asarray(a, dtype) for a in (x_nd, dout_nd, y_md))
    x, dout, y = map(_float64, (x_nd, dout_nd, y_md))
    is_here_nk, is_row_m = positions_nk >= 0, assignment_m >= 0
    y_nkd = np.where(is_here_nk[..., None], y[positions_nk], 0)
    from_m = np.where(is_row_m[:, None], dout[source_m], 0)
    gate_m = np.where(is_row_m, gate_nk.reshape(-1)[assignment_m], 0)
    dot_nk = np.where(is_here_nk, np.nansum(dout[:, None] * y_nkd, axis=-1), 0)
    integers = jnp.asarray(positions_nk), jnp.asarray(assignment_m)
    gates = jnp.asarray(gate_nk)
    table = {
        "take": (
            (x_nd, jnp.asarray(source_m)),
            (np.where(is_row_m[:, None], x[source_m], 0),),
        ),
        "weighted_sum": (
            (y_md, gates, integers[0]),
            (np.einsum("nk,nkd->nd", gate_nk, y_nkd),),
        ),
        "combine_backward": (
            (dout_nd, y_md, gates, *integers),
            (gate_m[:, None] * from_m, dot_nk),
        ),
    }
    for move, (arguments, expected) in table.items():
        call = _move(move, interpret)
        yield KernelCase(
            f"{move}, {dtype}, {kept:.0%} kept",
            call,
            arguments,
            functools.partial(_error, expected),
            MAX_ERROR[dtype],
        )


@functools.cache
def _move(name: str, interpret: bool) -> Callable:
    """Return a move, the same object for the same arguments."""
    return functools.partial(getattr(permute, name), interpret=interpret)


def _attention_cases(*, is_dry: bool) -> Iterator[KernelCase]:
    """Yield both passes of our attention, with documents that end beside the borders of
    tiles."""

    def both(*arrays):
        *floats, dout_bthj, first_bt = arrays
        inputs = Inputs(*floats, first_bt, jnp.int32(0))
        out, lse = hopper_attention.forward(inputs, CAUSAL, interpret=is_dry)
        back = hopper_attention.backward(
            inputs, CAUSAL, out, lse, dout_bthj, interpret=is_dry
        )
        return out, *back

    for dtype in DTYPES[:1] if is_dry else DTYPES:
        for width in (64,) if is_dry else (64, 128):
            yield _attention_case(both, dtype, width, is_dry)


def _cudnn_cases(*, is_dry: bool) -> Iterator[KernelCase]:
    """Yield both passes of cuDNN's attention; none where there is no GPU."""
    from moejax.kernels.attention import cudnn

    if is_dry:
        return

    def both(*arrays):
        *floats, dout_bthj, first_bt = arrays
        inputs = Inputs(*floats, first_bt, jnp.int32(0))
        out, lse = cudnn.forward(inputs, CAUSAL)
        return out, *cudnn.backward(inputs, CAUSAL, out, lse, dout_bthj)

    for dtype in DTYPES:
        for width in (64, 128):
            yield _attention_case(both, dtype, width, is_dry)


def _attention_case(call, dtype: str, width: int, is_dry: bool) -> KernelCase:
    documents = (63, 1, 20) if is_dry else ROWS[1:]
    t = sum(documents) if is_dry else sum(documents) + 103
    (b, h, g), random = (1, 1, 1) if is_dry else (2, 4, 2), np.random.default_rng(0)
    begin_d = np.cumsum((0, *documents))
    edges = [begin_d, np.cumsum((0, *documents[::-1]))][:b]
    place_t = np.arange(t)
    first_bt = np.stack([e[np.searchsorted(e, place_t, "right") - 1] for e in edges])
    shapes = [(b, t, h, width), (b, t, g, width), (b, t, g, width), (b, t, h, width)]
    floats = [jnp.asarray(random.standard_normal(s), dtype) for s in shapes]
    expected = _define_attention(*map(_float64, floats), first_bt)
    arguments = (*floats, jnp.asarray(first_bt, jnp.int32))
    error = functools.partial(_error, expected)
    name = f"{dtype}, heads of {width}"
    return KernelCase(name, call, arguments, error, MAX_ERROR[dtype])


def _define_attention(q, k, v, dout, first_bt) -> tuple[np.ndarray, ...]:
    """Return output and gradients of causal attention over documents, in float64."""
    (b, t, h, i), g = q.shape, k.shape[2]
    k, v = (np.repeat(a, h // g, axis=2) for a in (k, v))
    key_u = np.arange(t)
    is_read = (key_u <= np.arange(t)[:, None]) & (key_u >= first_bt[:, :, None])
    scores = np.einsum("bthi,buhi->bhtu", q, k) * i**-0.5
    scores = np.where(is_read[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    out = np.einsum("bhtu,buhj->bthj", weights, v)
    dweights = np.einsum("bthj,buhj->bhtu", dout, v)
    mean = (weights * dweights).sum(axis=-1, keepdims=True)
    dscores = weights * (dweights - mean) * i**-0.5
    dq = np.einsum("bhtu,buhi->bthi", dscores, k)
    dk = np.einsum("bhtu,bthi->buhi", dscores, q)
    dv = np.einsum("bhtu,bthj->buhj", weights, dout)
    dk, dv = (a.reshape(b, t, g, h // g, -1).sum(axis=3) for a in (dk, dv))
    return out, dq, dk, dv


def _water_fill_cases(*, is_dry: bool) -> Iterator[KernelCase]:
    """Yield tables of 8 bins, and on a GPU also of 70, which take two blocks."""
    for colors, bins in ((24, 8),) if is_dry else ((24, 8), (64, 70), (16, 128)):
        arguments = _water_table(colors, bins)
        expected = _define_water_fill(*arguments)

        def error(filled, expected=expected) -> float:
            actual = [np.asarray(leaf) for leaf in filled]
            pairs = zip(actual, expected, strict=True)
            return 0.0 if all(np.array_equal(a, b) for a, b in pairs) else np.inf

        call = functools.partial(
            water_fill.water_fill, max_sweeps=MAX_SWEEPS, interpret=is_dry
        )
        arrays = tuple(map(jnp.asarray, arguments))
        yield KernelCase(f"{colors} colors, {bins} bins", call, arrays, error, 0.0)


def _water_table(colors: int, bins: int) -> tuple[np.ndarray, ...]:
    """Return a random table: each color has one item on a few bins."""
    random = np.random.default_rng(0)
    item_cw = np.full((colors, bins), -1, np.int32)
    amount_cw = np.zeros((colors, bins), np.int32)
    for c in range(colors - 2):
        where = random.choice(bins, min(bins, random.integers(2, 6)), replace=False)
        item_cw[c, where] = c
        amount_cw[c, where] = random.integers(0, 1000, len(where))
    fixed_w = random.integers(0, 500, bins).astype(np.int32)
    return item_cw, amount_cw, fixed_w, np.int32(colors - 2), np.int32(5)


def _define_water_fill(item_cw, amount_cw, fixed_w, colors, tolerance) -> tuple:
    """Return amounts, levels, bound and number of sweeps by moejax.plan.water_filling,
    one item after another."""
    amount_cw = amount_cw.astype(np.int64)
    level = (fixed_w + amount_cw.sum(axis=0)).tolist()
    items = [
        (c, np.flatnonzero(item_cw[c] == item))
        for c in range(colors)
        for item in np.unique(item_cw[c][item_cw[c] >= 0])
    ]
    experts = [Expert(int(x), [], [w]) for w, x in enumerate(fixed_w)]
    experts += [Expert(int(amount_cw[c, bins].sum()), [], [*bins]) for c, bins in items]
    bound, sweeps, changed = certificate(experts, level), 0, True
    while max(level) > bound + tolerance and changed and sweeps < MAX_SWEEPS:
        changed = False
        for c, bins in items:
            before = amount_cw[c, bins].tolist()
            ground = [level[w] - x for w, x in zip(bins, before)]
            after = pour(ground, sum(before))
            changed |= after != before
            for w, low, x in zip(bins, ground, after):
                amount_cw[c, w], level[w] = x, low + x
        bound, sweeps = certificate(experts, level), sweeps + 1
    return amount_cw, np.array(level), bound, sweeps


def _error(expected: tuple[np.ndarray, ...], results) -> float:
    """Return the largest error of the results, each against its definition."""
    pairs = zip(expected, jax.tree.leaves(results), strict=True)
    return max(product_cases.relative_error(_float64(out), ref) for ref, out in pairs)


def _float64(array) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.asarray(jax.device_get(array)).astype(np.float64)


def _short(tiles: Tiles) -> str:
    """Return the sizes of a tile, and its other fields that are not the default's."""
    plain = Tiles(128, 128)
    fields = {
        name: value
        for name, value in dataclasses.asdict(tiles).items()
        if name not in ("rows", "columns") and value != getattr(plain, name)
    }
    rest = "".join(f", {name} {value}" for name, value in fields.items())
    return f"{tiles.rows} x {tiles.columns}{rest}"


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
