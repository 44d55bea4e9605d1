"""Extraction of one layer of a recorded routing, for configs that follow it."""

import pathlib

import numpy as np

from moejax.moe.array_file import read_npz
from tools.testbed.lock import say

LAYER = 16
"""Layer of the recorded routing that is followed, unless another one is named."""
FIRST_SAMPLE = 400
"""First sample that is used, of 501. Earlier ones are from the first iterations of a
run, whose loads are not yet typical."""


def bindings(trace: pathlib.Path, layer: int, folder: pathlib.Path) -> tuple[str, ...]:
    """Cut one layer of the trace out into a file in `folder`, and return the gin
    bindings that make a config follow it.

    If the trace does not exist, this is reported in one line and no binding is
    returned. The config's own load then remains.
    """
    if not trace.exists():
        say(f"there is no {trace}: using the config's synthetic load instead")
        return ()
    cut_layer(trace, layer, folder / "layer.npz")
    return (f"Recorded.source = '{folder / 'layer.npz'}'",)


def cut_layer(
    trace: pathlib.Path, layer: int, out: pathlib.Path, first: int = FIRST_SAMPLE
) -> np.ndarray:
    """Write layer `layer` (its number in the model), from sample `first` on, to `out`.

    Returns the layer's counts [samples, experts]. Raises ValueError for a file that is
    not a recorded routing, or has no such layer or sample.
    """
    arrays = read_npz(trace, ["tokens", "layer"])
    missing = {"tokens", "layer"} - set(arrays)
    if missing:
        raise ValueError(
            f"{trace} has no array {sorted(missing)[0]!r}: name a routing with "
            "tokens [samples, layers, .., experts] and layer [layers]"
        )
    tokens, layers = arrays["tokens"], arrays["layer"].tolist()
    if tokens.ndim < 3 or arrays["layer"].shape != tokens.shape[1:2]:
        raise ValueError(
            f"{trace} has tokens of shape {list(tokens.shape)} and layer of shape "
            f"{list(arrays['layer'].shape)}: they must be [samples, layers, .., "
            "experts] and [layers]"
        )
    if layer not in layers:
        raise ValueError(
            f"{trace} has layers {layers}, not {layer}: choose one of them"
        )
    if not 0 <= first < len(tokens):
        raise ValueError(
            f"{trace} has {len(tokens)} samples: the first one used must be 0 to "
            f"{len(tokens) - 1}, not {first}"
        )
    at = layers.index(layer)
    counts = tokens[first:, at : at + 1]
    np.savez(out, tokens=counts)
    return counts.sum(axis=tuple(range(1, counts.ndim - 1)), dtype=np.float64)
