"""One layer of a recorded routing, in a file that Recorded.source reads."""

import pathlib
import zipfile

import numpy as np

from tools.testbed.lock import say

FIRST_SAMPLE = 400
"""Of 501: the load of the first thousands of iterations is not yet that of a run."""


def bindings(trace: pathlib.Path, layer: int, folder: pathlib.Path) -> tuple[str, ...]:
    """What makes a config follow this layer of the trace, cut out into `folder`.

    Nothing, said in one line, when there is no such file: the config's own load, Zipf's
    in configs/testbed_skew.gin, stands in.
    """
    if not trace.exists():
        say(f"there is no {trace}: the config's synthetic load stands in for it")
        return ()
    cut_layer(trace, layer, folder / "layer.npz")
    return (f"Recorded.source = '{folder / 'layer.npz'}'",)


def cut_layer(
    trace: pathlib.Path, layer: int, out: pathlib.Path, first: int = FIRST_SAMPLE
) -> np.ndarray:
    """Writes layer `layer` (its number in the model) from sample `first` on to `out`.

    Returns its counts [samples, experts]. Raises ValueError for a file that is none, or
    has no such layer or sample.
    """
    if not zipfile.is_zipfile(trace):
        raise ValueError(f"{trace} is no .npz file: name a recorded routing, or none")
    with np.load(trace, allow_pickle=False) as arrays:
        missing = {"tokens", "layer"} - set(arrays)
        if missing:
            raise ValueError(
                f"{trace} has no array {sorted(missing)[0]!r}: name a routing with "
                "tokens [samples, layers, .., experts] and layer [layers]"
            )
        tokens, layers = arrays["tokens"], arrays["layer"].tolist()
    if layer not in layers:
        raise ValueError(
            f"{trace} has layers {layers}, not {layer}: choose one of them"
        )
    if not 0 <= first < len(tokens):
        raise ValueError(
            f"{trace} has {len(tokens)} samples: the first must be below, not {first}"
        )
    at = layers.index(layer)
    counts = tokens[first:, at : at + 1]
    np.savez(out, tokens=counts)
    return counts.sum(axis=tuple(range(1, counts.ndim - 1)), dtype=np.float64)
