"""Extraction of one layer of a recorded routing, for configs that follow it."""

import pathlib

import numpy as np

from tools.bench.expert_loads import read_trace, some_layers
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
    returned. The config's own load then remains. Raises ValueError for a file that is
    not a recorded routing, or has no such layer or too few samples.
    """
    if not trace.exists():
        say(f"there is no {trace}: using the config's synthetic load instead")
        return ()
    load_tlwe = some_layers(read_trace(trace), str(layer)).load_tlwe
    if len(load_tlwe) <= FIRST_SAMPLE:
        raise ValueError(
            f"{trace} has {len(load_tlwe)} samples, of which those after the first "
            f"{FIRST_SAMPLE} are followed: name a longer one"
        )
    np.savez(folder / "layer.npz", tokens=load_tlwe[FIRST_SAMPLE:])
    return (f"Recorded.source = '{folder / 'layer.npz'}'",)
