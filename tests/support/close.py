"""Compare arrays within the tolerances of moejax/kernels/cases.py."""

import jax
import ml_dtypes
import numpy as np

from moejax.kernels.cases import TOLERANCES

ABSOLUTE = {
    np.dtype(np.float64): 1e-15,
    np.dtype(np.float32): 1e-8,
    np.dtype(np.float16): 1e-5,
    np.dtype(ml_dtypes.bfloat16): 1e-5,
}
"""What is added to the tolerance of a leaf, which is TOLERANCES times its largest
|expected|. It matters only where a leaf is nearly zero. Integers and booleans must be
equal."""


def assert_close(actual, expected, *, dtype=None, factor=1.0, reason="") -> None:
    """Raise AssertionError, naming the leaf, unless two pytrees agree in structure,
    shapes and values.

    The tolerance of a leaf is that of the coarser of its two dtypes. `dtype` replaces
    both; give the dtype of the computation when the results are wider than that.
    Infinities must be equal, and NaN is never close. A test that needs `factor` times
    the table's tolerance says why in `reason`.
    """
    if (factor != 1.0) != bool(reason):
        raise ValueError(f"factor={factor} and reason={reason!r} go together")
    actual_leaves, actual_tree = jax.tree_util.tree_flatten_with_path(actual)
    expected_leaves, expected_tree = jax.tree_util.tree_flatten_with_path(expected)
    assert actual_tree == expected_tree, (
        f"structures differ:\nactual   {actual_tree}\nexpected {expected_tree}"
    )
    wrong = [
        line
        for (path, a), (_, b) in zip(actual_leaves, expected_leaves, strict=True)
        if (line := _difference(jax.tree_util.keystr(path), a, b, dtype, factor))
    ]
    assert not wrong, "\n".join(wrong)


def are_same_bits(actual, expected) -> bool:
    """Return whether two lists of float32 arrays agree bit for bit, NaNs too."""
    pairs = zip(jax.device_get(actual), jax.device_get(expected), strict=True)
    return all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in pairs)


def _difference(path: str, actual, expected, dtype, factor: float) -> str:
    """Return one line that says how two leaves differ, or '' if they are close."""
    name = f"leaf {path or 'itself'}"
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape:
        return f"{name}: shape {actual.shape}, expected {expected.shape}"
    relative, absolute = _tolerance(actual.dtype, expected.dtype, dtype)
    is_same = actual == expected  # before widening, which would round int64
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    finite = expected[np.isfinite(expected)]
    largest = np.max(np.abs(finite), initial=0.0)
    allowed = factor * (relative * largest + absolute)
    with np.errstate(invalid="ignore"):
        error = np.where(is_same, 0.0, np.abs(actual - expected))
    is_wrong = ~(is_same | (error < allowed))
    if not is_wrong.any():
        return ""
    worst = np.unravel_index(
        np.argmax(np.where(np.isnan(error), np.inf, error)), error.shape
    )
    index = f"[{', '.join(map(str, worst))}]" if worst else ""
    return (
        f"{name}: {is_wrong.sum()} of {is_wrong.size} values off; worst {index} is "
        f"{actual[worst]:.9g}, expected {expected[worst]:.9g}, error "
        f"{error[worst]:.3g}, allowed {allowed:.3g} (largest |expected| {largest:.3g})"
    )


def _tolerance(actual, expected, override) -> tuple[float, float]:
    """Return the (relative, absolute) tolerance of the coarser dtype, or of `override`
    if it is not None."""
    kinds = (actual, expected) if override is None else (np.dtype(override),)
    return max(
        ((TOLERANCES[kind], ABSOLUTE[kind]) for kind in kinds if kind in TOLERANCES),
        default=(0.0, 0.0),
    )
