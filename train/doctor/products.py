"""Checks of the grouped products of a layer's experts, each pass by itself.

Operands have the run's widths and number of rows, of which few are in use: the rest is
padding, and NaN. They are periodic (definitions.py), so that only small tables travel
to the devices, however large the run.
"""

import dataclasses
from collections.abc import Callable, Iterable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moejax.kernels.grouped_dot.choose import usable_products
from moejax.kernels.shapes import ProductShape
from moejax.kernels.tuning import Tiles, layer_products, tiles_for
from moejax.resolve.kernels import product_rows, product_widths
from moejax.resolve.resolved import Resolved
from train.doctor import definitions
from train.doctor.kernel_check import (
    KernelCheck,
    allowed_error,
    find_subject,
    largest_error,
)

PERIODS = (257, 263)
"""Periods of rows and of hidden rows; primes, which divide no tile."""
NUM_MATRICES = 4
"""Number of different matrices: group g has matrix g % NUM_MATRICES."""
SIZES = (65, 0, 1, 7)
"""Numbers of rows of groups: more than a tile of 64, none, one, less than 8."""
MAX_PLAIN_ROWS = 512
"""Largest number of rows for implementations that do not choose tiles by it."""
LAST = 9
"""Number of rows of the last group, where there are more groups than SIZES."""


def product_checks(run: Resolved) -> Iterable[KernelCheck]:
    """Return a check for each product of a layer, forward and backward.

    The number of rows is that of round 0 of the exchange and, if the Hopper kernels
    have other tiles for it, that of later rounds.
    """
    first, later = product_rows(run.layout)
    choice = run.kernels["grouped_dot"]
    by_rows = {first: choice}
    if choice.implementation == "hopper" and _tiles(run, first) != _tiles(run, later):
        by_rows[later] = run.kernels.get("grouped_dot in later rounds", choice)
    for num_rows, (implementation, _) in by_rows.items():
        limit = num_rows if implementation == "hopper" else MAX_PLAIN_ROWS
        yield from _Products(run, min(num_rows, limit), implementation).checks()


def _tiles(run: Resolved, num_rows: int) -> list[Tiles] | None:
    """Return the tiles of a layer's products of this many rows; None where there are no
    later rounds to have other ones."""
    layout = run.layout
    if layout.exchange != "exact":
        return None
    groups = layout.exchanged.slots_per_device
    shape = ProductShape(num_rows, *product_widths(run.cfg, layout), groups)
    products = layer_products(shape, is_fp8=layout.fp8 != "none")
    rest = run.cfg.model.compute_dtype, run.mesh.devices.flat[0].device_kind
    return [tiles_for(*product, *rest) for product in products]


def group_sizes(
    num_groups: int, num_rows: int, align_rows: int = 1
) -> list[Int[np.ndarray, " g"]]:
    """Return cases of the number of rows of each group: all SIZES in one case, or in
    several where there are fewer groups. They have `num_rows` in sum at most.

    Both numbers are multiples of `align_rows`: sizes are rounded up.

    >>> [rows_g.tolist() for rows_g in group_sizes(2, 66)]
    [[65, 0], [1, 7]]
    """
    cases = []
    for begin in range(0, len(SIZES), num_groups):
        sizes = list(SIZES[begin : begin + num_groups])
        sizes += [0] * (num_groups - len(sizes))
        if num_groups > len(SIZES):
            sizes[-1] = LAST
        sizes = [-(-size // align_rows) * align_rows for size in sizes]
        ends_g = np.minimum(np.cumsum(sizes), num_rows)
        cases.append(np.diff(ends_g, prepend=0))
    return cases


@dataclasses.dataclass(frozen=True)
class _Products:
    """The products of a layer, with their operands."""

    run: Resolved
    num_rows: int
    implementation: str

    @property
    def num_groups(self) -> int:
        return self.run.layout.exchanged.slots_per_device

    @property
    def fp8(self) -> str:
        return self.run.layout.fp8

    def checks(self) -> Iterable[KernelCheck]:
        """Return the check of each pass."""
        align_rows, rng = self.run.layout.align_rows, np.random.default_rng(0)
        sizes = group_sizes(self.num_groups, self.num_rows, align_rows)
        most = max(rows_g.sum() for rows_g in sizes)
        cases = [self._case(rng, rows_g, most) for rows_g in sizes]
        is_fp8, allowed = self.fp8 != "none", allowed_error(self.run)
        is_fused = self.run.cfg.moe.why_unfused is None
        for name, (*kernels, measure) in (PASSES if is_fused else UNFUSED).items():
            how, subject = find_subject(kernels[is_fp8], self.implementation, self.run)
            of = f"{how}{', fp8' if is_fp8 else ''}, {self.num_rows} rows"
            measured = self._measured(measure)
            yield KernelCheck(f"{name} ({of})", subject, allowed, measured, cases)

    def _measured(self, measure: Callable) -> Callable:
        """Return the function of a case that runs one pass on whole operands."""
        d, f = product_widths(self.run.cfg, self.run.layout)

        def call(case: dict) -> Float[Array, ""]:
            align_rows = self.run.layout.align_rows
            own = usable_products(self.implementation, self.fp8, align_rows)
            return measure(own, _Operands(case, d, f, self.num_rows, self.num_groups))

        return call

    def _case(self, rng: np.random.Generator, rows_g, most: int) -> dict:
        """Return operands and expected results as periodic tables, with rows up to
        `most`."""
        dtype, fp8 = jnp.dtype(self.run.cfg.model.compute_dtype), self.fp8
        forward = "none" if fp8 == "none" else "e4m3"
        d, f = product_widths(self.run.cfg, self.run.layout)
        p, q = (min(size, period) for size, period in zip((d, f), PERIODS))
        group_r = np.repeat(np.arange(len(rows_g)), rows_g)
        matrix_r, num = group_r % NUM_MATRICES, len(group_r)
        shown = np.unique([*range(min(len(SIZES), len(rows_g))), len(rows_g) - 1])

        def stored(values):
            """Round values to the run's dtype."""
            return values.astype(dtype).astype(np.float64)

        def dot(x, w, size, form=forward):
            low = definitions.rounded(w, forward)
            return definitions.dot(definitions.rounded(x, form), low, matrix_r, size)

        def outer(x, y):
            place_r = np.searchsorted(shown, group_r)
            return definitions.outer(x, y, place_r, len(shown))

        x, dy = (stored(rng.standard_normal((num, p))) for _ in range(2))
        gate, up, down = (
            stored(scale * rng.standard_normal((NUM_MATRICES, *shape)))
            for scale, shape in (
                (p**0.5 / d, (p, q)),
                (p**0.5 / d, (p, q)),
                (q**0.5 / f, (q, p)),
            )
        )
        gate_t, up_t, down_t = (w.swapaxes(1, 2) for w in (gate, up, down))
        into = [dot(x, w, d) for w in (gate, up)]
        into_stored = [stored(each) for each in into]
        h = definitions.swiglu(*into_stored)
        dh = dot(dy, down_t, d, fp8)
        dinto = definitions.swiglu_gradient(dh, *into_stored)
        dgate, dup = (stored(each) for each in dinto)
        dx = dot(dgate, gate_t, f, fp8) + dot(dup, up_t, f, fp8)

        rows = {"x": x, "dy": dy, "h": stored(h), "gate": into_stored[0]}
        rows |= {"up": into_stored[1], "dgate": dgate, "dup": dup}
        results = {"gate": into[0], "up": into[1], "h": h, "dx": dx}
        results |= {"dgate": dinto[0], "dup": dinto[1], "y": dot(stored(h), down, f)}
        results["dh"] = dh
        matrices = {"gate": outer(x, dgate), "up": outer(x, dup)}
        matrices["down"] = outer(stored(h), dy)
        return {
            "num": np.int32(num),
            "rows_g": rows_g.astype(np.int32),
            "shown": shown.astype(np.int32),
            "rows": {k: _to_length(v, most).astype(dtype) for k, v in rows.items()},
            "weights": {
                k: w.astype(dtype)
                for k, w in zip(("gate", "up", "down"), (gate, up, down))
            },
            "results": {k: np.float32(_to_length(v, most)) for k, v in results.items()},
            "gradients": {k: np.float32(v) for k, v in matrices.items()},
        }


def _to_length(values: np.ndarray, length: int) -> np.ndarray:
    """Return rows with rows of zeros behind them, `length` in all."""
    return np.pad(values, ((0, length - len(values)), (0, 0)))


@dataclasses.dataclass(frozen=True)
class _Operands:
    """Whole operands and expected results on a device, from the tables of a case."""

    case: dict
    d: int
    f: int
    num_rows: int
    num_groups: int

    @property
    def rows_g(self) -> Array:
        return self.case["rows_g"]

    def rows(self, size: int, *names: str, padding=jnp.nan) -> Float[Array, "m x"]:
        """Return rows of the tables side by side, each `size` wide, and padding."""
        parts = (_wide(self.case["rows"][name], size) for name in names)
        used = jnp.concatenate(list(parts), axis=1)
        is_used_r1 = (jnp.arange(len(used)) < self.case["num"])[:, None]
        used = jnp.where(is_used_r1, used, padding)
        height = self.num_rows - len(used)
        return jnp.pad(used, ((0, height), (0, 0)), constant_values=padding)

    def matrices(self, *names: str) -> Float[Array, "g x y"]:
        """Return the matrices of all groups; several side by side."""
        which_g = jnp.arange(self.num_groups) % NUM_MATRICES
        sides = (self.d, self.f) if names != ("down",) else (self.f, self.d)
        parts = (_wide(self.case["weights"][name], *sides) for name in names)
        return jnp.concatenate(list(parts), axis=2)[which_g]

    def errors(self, actual_mx: Array, size: int, *names: str) -> Float[Array, ""]:
        """Return the largest relative error of rows, padding included, which is
        zero."""
        parts = [_wide(self.case["results"][name], size) for name in names]
        expected_rx = jnp.concatenate(parts, axis=1)
        used, rest = jnp.split(actual_mx, [len(expected_rx)])
        error = largest_error(used, expected_rx)
        if not rest.size:
            return error
        beyond = jnp.max(jnp.abs(rest.astype(jnp.float32)))
        return jnp.maximum(error, beyond / jnp.max(jnp.abs(expected_rx)))

    def gradient_errors(self, actual_gxy: Array, *names: str) -> Float[Array, ""]:
        """Return the largest relative error of the gradients of matrices. Those of
        empty groups are zero."""
        sides = (self.d, self.f) if names != ("down",) else (self.f, self.d)
        parts = [_wide(self.case["gradients"][name], *sides) for name in names]
        expected_sxy = jnp.concatenate(parts, axis=2)
        error = largest_error(actual_gxy[self.case["shown"]], expected_sxy)
        is_empty_g11 = (self.rows_g == 0)[:, None, None]
        beyond_gxy = jnp.where(is_empty_g11, actual_gxy.astype(jnp.float32), 0)
        beyond = jnp.max(jnp.abs(beyond_gxy)) / jnp.max(jnp.abs(expected_sxy))
        return jnp.maximum(error, beyond)


def _wide(table: Array, *sizes: int) -> Array:
    """Return a periodic table with its last dims extended to `sizes`."""
    for dim, size in enumerate(sizes, table.ndim - len(sizes)):
        place = np.arange(size) % table.shape[dim]
        table = jnp.take(table, place, axis=dim)
    return table


def _swiglu(own, of: _Operands):
    into_gdh = of.matrices("gate", "up")
    h_mf, into_mh = own.swiglu(of.rows(of.d, "x"), into_gdh, of.rows_g)
    return jnp.maximum(
        of.errors(h_mf, of.f, "h"), of.errors(into_mh, of.f, "gate", "up")
    )


def _forward(own, of: _Operands):
    y_md = own.forward(of.rows(of.f, "h"), of.matrices("down"), of.rows_g)
    return of.errors(y_md, of.d, "y")


def _forward_into(own, of: _Operands):
    into_mh = own.forward(of.rows(of.d, "x"), of.matrices("gate", "up"), of.rows_g)
    return of.errors(into_mh, of.f, "gate", "up")


def _dgrad_down(own, of: _Operands):
    dh_mf = own.dgrad(of.rows(of.d, "dy"), of.matrices("down"), of.rows_g)
    return of.errors(dh_mf, of.f, "dh")


def _swiglu_dgrad(own, of: _Operands):
    into_mh = of.rows(of.f, "gate", "up", padding=0)
    dinto_mh, h_mf = own.swiglu_dgrad(
        of.rows(of.d, "dy"), of.matrices("down"), into_mh, of.rows_g
    )
    return jnp.maximum(
        of.errors(dinto_mh, of.f, "dgate", "dup"), of.errors(h_mf, of.f, "h")
    )


def _dgrad(own, of: _Operands):
    dinto_mh = of.rows(of.f, "dgate", "dup")
    dx_md = own.dgrad(dinto_mh, of.matrices("gate", "up"), of.rows_g)
    return of.errors(dx_md, of.d, "dx")


def _wgrad_into(own, of: _Operands):
    dinto_mh = of.rows(of.f, "dgate", "dup")
    dinto_gdh = own.wgrad(of.rows(of.d, "x"), dinto_mh, of.rows_g)
    return of.gradient_errors(dinto_gdh, "gate", "up")


def _wgrad_down(own, of: _Operands):
    ddown_gfd = own.wgrad(of.rows(of.f, "h"), of.rows(of.d, "dy"), of.rows_g)
    return of.gradient_errors(ddown_gfd, "down")


PASSES = {
    "swiglu": ("swiglu", "fp8_forward", _swiglu),
    "forward": ("forward", "fp8_forward", _forward),
    "swiglu_dgrad": ("swiglu_dgrad", "fp8_dgrad", _swiglu_dgrad),
    "dgrad": ("dgrad", "fp8_dgrad", _dgrad),
    "wgrad of gate and up": ("wgrad", "wgrad", _wgrad_into),
    "wgrad of down": ("wgrad", "wgrad", _wgrad_down),
}
"""Products of a layer by name: the kernel without fp8 and with it, and the function
from products and operands to the largest relative error."""
UNFUSED = {
    "forward of gate and up": ("forward", "fp8_forward", _forward_into),
    "dgrad of down": ("dgrad", "fp8_dgrad", _dgrad_down),
} | {name: entry for name, entry in PASSES.items() if "swiglu" not in name}
"""The same for experts whose activation no kernel fuses with a product
(Moe.why_unfused)."""
