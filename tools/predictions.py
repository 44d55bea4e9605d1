"""How well the cost model predicts: its time of each step beside the measured one.

bias                 modelled over measured, minus 1: median over steps
correlation          Pearson's, of the two times of a step
rank correlation     Spearman's: the same of their ranks
"""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

MIN_STEPS = 3
"""Number of steps from which correlations are computed."""


def figures(measured_n: np.ndarray, modelled_n: np.ndarray) -> dict[str, Any]:
    """Return the figures of one run, by name."""
    return {
        "num_steps": len(measured_n),
        "step_msec": float(np.median(measured_n)),
        "modelled_step_msec": float(np.median(modelled_n)),
        "bias": float(np.median(modelled_n / measured_n)) - 1,
        "correlation": correlation(measured_n, modelled_n),
        "rank_correlation": correlation(*map(ranks, (measured_n, modelled_n))),
    }


def rank(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the order of the runs, the fastest first, by measured and by modelled
    time; the number of pairs of runs, and that of pairs in the same order by both."""
    fields = ("step_msec", "modelled_step_msec")
    orders = {f: sorted(runs, key=lambda name: runs[name][f]) for f in fields}
    pairs = list(itertools.combinations(orders["step_msec"], 2))
    modelled = orders["modelled_step_msec"]
    num_same = sum(modelled.index(a) < modelled.index(b) for a, b in pairs)
    return {
        "by_step_msec": orders["step_msec"],
        "by_modelled_step_msec": modelled,
        "num_pairs": len(pairs),
        "num_pairs_in_order": num_same,
    }


def correlation(x_n: np.ndarray, y_n: np.ndarray) -> float | None:
    """Return Pearson's correlation; None where it is not defined, because there are
    fewer than MIN_STEPS values or one of the two is constant."""
    if len(x_n) < MIN_STEPS or np.ptp(x_n) == 0 or np.ptp(y_n) == 0:
        return None
    return float(np.corrcoef(x_n, y_n)[0, 1])


def ranks(x_n: np.ndarray) -> np.ndarray:
    """Return the rank of each value, from 0; equal values have their mean rank."""
    _, group_n, size_g = np.unique(x_n, return_inverse=True, return_counts=True)
    return (np.cumsum(size_g) - (size_g + 1) / 2)[group_n]
