"""Cut a recorded routing to the samples that the tests need.

    python -m tests.support.cut_routing routing_gpt_e32.npz tests/golden/routing.npz

The recording is SmartMoE's artifact (USENIX ATC'23, moe_trace): a GPT with 32 experts
on 16 devices, 501 samples ten iterations apart. Kept are pairs of samples that follow
one another, at every 50th sample: a plan is made from the first and scored on the
second.
"""

import pathlib
import sys

import numpy as np

EVERY = 50
PATH = pathlib.Path(__file__).resolve().parents[1] / "golden" / "routing.npz"


def pairs() -> np.ndarray:
    """Return the loads as floats [pair, (planned from, scored on), l, w, e]."""
    with np.load(PATH) as arrays:
        tokens_nlwe = arrays["tokens"].astype(float)
    return tokens_nlwe.reshape(-1, 2, *tokens_nlwe.shape[1:])


if __name__ == "__main__":
    source, out = sys.argv[1:]
    with np.load(source) as arrays:
        tokens_nlwe, layer = arrays["tokens"], arrays["layer"]
    first = np.arange(0, len(tokens_nlwe) - 1, EVERY)
    kept = np.stack([first, first + 1], axis=1).ravel()
    np.savez_compressed(out, tokens=tokens_nlwe[kept], layer=layer)
