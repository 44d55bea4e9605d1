"""The baseline of a run: a trigram table of the training bytes, interpolated.

Witten and Bell (1991): a context that was followed `total` times, by `distinct` other
bytes, trusts its own counts with weight total / (total + distinct) and leaves the rest
to the context that is one byte shorter; below the empty one all 256 bytes are equal.
Names end in `v` for the byte that follows and in `x` for a context (one or two bytes,
read as a number).
"""

import numpy as np

_CHUNK = 1 << 22
"""Positions counted at a time: bounds memory near 300 MiB for a text of any size."""


def trigram_loss(train_b: np.ndarray, windows_bt: np.ndarray) -> float:
    """Return nats per byte on bytes 1.. of each window, given the two bytes before.

    Byte 1 has only one byte before it in the window and is predicted from that.
    `train_b` is uint8 [any], `windows_bt` integers [b, t + 1], as a model gets them.
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
    """Interpolate elementwise; a context that never occurred passes `lower` through."""
    seen = total > 0
    return np.where(
        seen, (count + distinct * lower) / np.where(seen, total + distinct, 1), lower
    )


def _count(train_b: np.ndarray, order: int) -> np.ndarray:
    """Count each run of `order` bytes: int64 [256 ** (order - 1), 256]."""
    counts = np.zeros(256**order, np.int64)
    num_positions = train_b.size - order + 1
    for first in range(0, num_positions, _CHUNK):
        stop = min(first + _CHUNK, num_positions)
        code = np.zeros(stop - first, np.int64)
        for offset in range(order):
            code = code * 256 + train_b[first + offset : stop + offset]
        counts += np.bincount(code, minlength=counts.size)
    return counts.reshape(-1, 256)
