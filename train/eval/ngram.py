"""Baseline for a run's loss: an interpolated trigram model of the training bytes.

Smoothing is that of Witten and Bell (1991). Take a context that occurred `total` times,
followed by `distinct` different bytes. Its own counts have the weight
total / (total + distinct), and the context that is one byte shorter has the rest. Below
the empty context, all 256 bytes are equally likely. Names end in `v` for the next byte
and in `x` for a context (one or two bytes, read as a number).
"""

import numpy as np

_CHUNK = 1 << 22
"""Number of positions counted at a time. It limits memory to about 300 MiB for a text
of any size."""


def trigram_loss(train_b: np.ndarray, windows_bt: np.ndarray) -> float:
    """Return the loss of the trigram model in nats per byte of the windows.

    Each byte but the first of a window is predicted from the two bytes before it; byte
    1 is predicted from byte 0 alone. `train_b` is uint8 [any], and `windows_bt` holds
    integers [b, t + 1], the same windows that a model gets.
    """
    count_v = _count(train_b, 1).reshape(256)
    prob_v = _witten_bell(count_v, count_v.sum(), np.count_nonzero(count_v), 1 / 256)
    count_xv = _count(train_b, 2)
    total_x, distinct_x = count_xv.sum(1), np.count_nonzero(count_xv, axis=1)
    prob_xv = _witten_bell(count_xv, total_x[:, None], distinct_x[:, None], prob_v)

    count_xv = _count(train_b, 3)
    total_x, distinct_x = count_xv.sum(1), np.count_nonzero(count_xv, axis=1)
    bytes_bt = windows_bt.astype(np.int64)
    before_bt, last_bt, next_bt = bytes_bt[:, :-2], bytes_bt[:, 1:-1], bytes_bt[:, 2:]
    x_bt = before_bt * 256 + last_bt
    prob_bt = _witten_bell(
        count_xv[x_bt, next_bt],
        total_x[x_bt],
        distinct_x[x_bt],
        prob_xv[last_bt, next_bt],
    )
    first_b = prob_xv[bytes_bt[:, 0], bytes_bt[:, 1]]
    nats = -np.log(first_b).sum() - np.log(prob_bt).sum()
    return float(nats / (first_b.size + prob_bt.size))


def _witten_bell(
    count: np.ndarray,
    total: np.ndarray,
    distinct: np.ndarray | int,
    lower: np.ndarray | float,
) -> np.ndarray:
    """Return n-gram probabilities by Witten-Bell interpolation with the probability
    `lower` of a shorter context; `lower` itself for a context that never occurred."""
    occurred = total > 0
    scale = np.where(occurred, total + distinct, 1)
    return np.where(occurred, (count + distinct * lower) / scale, lower)


def _count(train_b: np.ndarray, order: int) -> np.ndarray:
    """Count the n-grams of `order` bytes: int64 [256 ** (order - 1), 256]."""
    counts = np.zeros(256**order, np.int64)
    num_positions = train_b.size - order + 1
    for first in range(0, num_positions, _CHUNK):
        stop = min(first + _CHUNK, num_positions)
        code = np.zeros(stop - first, np.int64)
        for offset in range(order):
            code = code * 256 + train_b[first + offset : stop + offset]
        counts += np.bincount(code, minlength=counts.size)
    return counts.reshape(-1, 256)
