"""Loads of a described run: shares of rows by expert, for any number of devices and
experts.

A plan is made from one sample and meets the next one, as in a run, so that loads which
jump find copies of yesterday's hot experts.
"""

import functools
import pathlib
from typing import NamedTuple

import numpy as np

from tools.bench import expert_loads

EVEN = "even"
PAIRS = ((4, 5), (9, 10), (14, 15))
"""Samples from which plans are made, and those that they meet. Synthetic loads jump
between samples 9 and 10 (tools/bench/expert_loads.py)."""
SEED = 0


class Pair(NamedTuple):
    """Shares of a layer's rows by source device and expert, [l, w, e]; each layer's sum
    is 1."""

    planned_lwe: np.ndarray
    """Shares from which plans are made."""
    met_lwe: np.ndarray
    """Shares that the plans meet."""


def pairs(
    kind: str, num_devices: int, num_experts: int, num_layers: int
) -> tuple[Pair, ...]:
    """Return pairs of loads of a kind, of `num_layers` layers at most: 'even', a
    synthetic kind such as 'zipf:1.0', or the path of recorded loads (.npz).

    Recorded loads of other numbers of devices and experts keep the curve of their
    shares, from the hottest expert to the coldest, and lose differences between source
    devices. Raises ValueError for an unknown kind, and for a file without loads.
    """
    found = _pairs(kind, num_devices, num_experts)
    return tuple(Pair(*(share[:num_layers] for share in pair)) for pair in found)


@functools.lru_cache(maxsize=256)
def _pairs(kind: str, num_devices: int, num_experts: int) -> tuple[Pair, ...]:
    if kind == EVEN:
        even_lwe = np.full((1, num_devices, num_experts), 1 / num_devices / num_experts)
        return (Pair(even_lwe, even_lwe),)
    if kind.endswith(".npz"):
        found = expert_loads.read_trace(pathlib.Path(kind)).load_tlwe
        last = len(found) - 2
        if last < 0:
            raise ValueError(f"{kind} has one sample, and a plan meets the next one")
        numbers = {round(x * last) for x in (0.1, 0.5, 0.9)}
        steps = [(t, t + 1) for t in sorted(numbers)]
        fit = functools.partial(_stretched, shape=(num_devices, num_experts))
        return tuple(Pair(fit(found[a]), fit(found[b])) for a, b in steps)
    count = max(max(pair) for pair in PAIRS) + 1
    loads = expert_loads.synthetic(kind, num_devices, num_experts, count, SEED)
    share_tlwe = loads.load_tlwe / loads.load_tlwe.sum(axis=(2, 3), keepdims=True)
    return tuple(Pair(share_tlwe[a], share_tlwe[b]) for a, b in PAIRS)


def _stretched(load_lwe: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return the shares of recorded loads for other numbers of devices and experts."""
    if load_lwe.shape[1:] == shape:
        return load_lwe / load_lwe.sum(axis=(1, 2), keepdims=True)
    num_devices, num_experts = shape
    order_e = np.random.default_rng(SEED).permutation(num_experts)
    load_le = load_lwe.sum(axis=1)
    found_lwe = np.empty((len(load_le), *shape))
    for layer, load_e in enumerate(load_le):
        curve_e = np.cumsum(np.concatenate([[0.0], np.sort(load_e)[::-1]]))
        place_e = np.linspace(0, len(load_e), num_experts + 1)
        share_e = np.diff(np.interp(place_e, np.arange(len(curve_e)), curve_e))
        found_lwe[layer] = (share_e / share_e.sum())[order_e] / num_devices
    return found_lwe
