"""A picture of the load of each expert, for trackers and for tools/plots."""

import numpy as np

from moejax.perf.traffic import over_mean

EVERY_STEPS = 50
"""A picture is drawn at each multiple of this step."""
COLORS = (
    (20, 60, 140),
    (105, 160, 205),
    (246, 245, 241),
    (232, 150, 85),
    (150, 45, 5),
)
"""Red, green and blue from a quarter of the mean load to four times the mean. The white
in the middle is the mean."""
MAX_LOG2 = 2.0


def heat_map(tokens_le: np.ndarray) -> np.ndarray:
    """Draw the load of each expert, relative to its layer's mean, as a picture: uint8
    [height, width, 3].

    A row of cells is a layer, the first on top; a column is an expert. White is the
    mean, blue is less and orange is more. The colors end at a quarter of the mean and
    at four times the mean.
    """
    num_layers, num_experts = tokens_le.shape
    ratio_le = over_mean(tokens_le)
    rgb_lec = color(np.log2(np.maximum(ratio_le, 2**-MAX_LOG2)))
    side = int(np.clip(768 // max(num_layers, num_experts), 4, 24))
    return rgb_lec.repeat(side, axis=0).repeat(side, axis=1)


def color(log2_ratio: np.ndarray) -> np.ndarray:
    """Return uint8 [.., 3]: COLORS interpolated, and the last one beyond MAX_LOG2."""
    anchors = np.linspace(-MAX_LOG2, MAX_LOG2, len(COLORS))
    channels = [np.interp(log2_ratio, anchors, line) for line in np.transpose(COLORS)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)
