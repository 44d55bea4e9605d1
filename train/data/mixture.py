"""Several corpora in fixed shares: which one a row comes from, by integers alone.

    shares      3 to 1
    period      0 0 1 0   0 0 1 0   0 0 1 0        of corpus c, item i ..
    item        0 1 0 2   3 4 1 5   6 7 2 8        .. so any row is known by itself

In every period of rows each corpus has its share exactly, spread evenly.
"""

import dataclasses

import numpy as np

PERIOD = 2**16


@dataclasses.dataclass(frozen=True)
class Mixture:
    """`corpus_j` and `item_j` say what row j of a period is; `share_c` is its items."""

    share_c: np.ndarray
    corpus_j: np.ndarray
    item_j: np.ndarray


def mix(weights: tuple[float, ...], period: int = PERIOD) -> Mixture:
    """Share out rows of corpora in proportion to `weights`; a single corpus has all."""
    share_c = shares(weights, period)
    corpus_j = np.repeat(np.arange(share_c.size), share_c)
    item_j = np.concatenate([np.arange(share) for share in share_c])
    # Item i of a corpus with share s belongs to the middle of the i-th of s equal parts
    # of the period; corpora that meet there stand in their order.
    order_j = np.lexsort([corpus_j, (2 * item_j + 1) / (2 * share_c[corpus_j])])
    return Mixture(share_c, corpus_j[order_j], item_j[order_j])


def pick(mixture: Mixture, row: int) -> tuple[int, int]:
    """Return the corpus of a row, and how many rows of that corpus came before."""
    period, j = divmod(row, mixture.corpus_j.size)
    corpus = int(mixture.corpus_j[j])
    return corpus, period * int(mixture.share_c[corpus]) + int(mixture.item_j[j])


def shares(weights: tuple[float, ...], total: int) -> np.ndarray:
    """Split `total` in integers as near the weights as can be; none is 0 if avoidable.

    shares((0.5, 0.3, 0.2), 4) is [2, 1, 1]: the largest remainders are rounded up.
    """
    exact_c = np.array(weights) / np.sum(weights) * total
    share_c = np.floor(exact_c).astype(np.int64)
    order_c = np.argsort(share_c - exact_c, kind="stable")
    share_c[order_c[: total - share_c.sum()]] += 1
    while total >= share_c.size and share_c.min() == 0:
        share_c[share_c.argmax()] -= 1
        share_c[share_c.argmin()] += 1
    return share_c
