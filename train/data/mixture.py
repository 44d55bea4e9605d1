"""Mix several corpora in fixed shares: integer arithmetic assigns rows to corpora.

    weights     3 to 1
    corpus      0 0 1 0   0 0 1 0   0 0 1 0        corpus of each row
    item        0 1 0 2   3 4 1 5   6 7 2 8        earlier rows of the same corpus

In every period of rows, each corpus has exactly its share, spread evenly. The corpus
and item of any row are computed directly, without going through the rows before it.
"""

import dataclasses

import numpy as np

PERIOD = 2**16


@dataclasses.dataclass(frozen=True)
class Mixture:
    """One period of a mixture of corpora."""

    share_c: np.ndarray
    """Number of rows of each corpus in a period."""
    corpus_j: np.ndarray
    """Corpus of row j of the period."""
    item_j: np.ndarray
    """Number of rows of the same corpus before row j in the period."""


def make_mixture(weights: tuple[float, ...], period: int = PERIOD) -> Mixture:
    """Assign the rows of a period to corpora, in proportion to the weights."""
    share_c = apportion(weights, period)
    corpus_j = np.repeat(np.arange(share_c.size), share_c)
    item_j = np.concatenate([np.arange(share) for share in share_c])
    # Item i of a corpus with share s is placed at the middle of the i-th of s equal
    # parts of the period. Items at the same place are in the order of their corpora.
    order_j = np.lexsort([corpus_j, (2 * item_j + 1) / (2 * share_c[corpus_j])])
    return Mixture(share_c, corpus_j[order_j], item_j[order_j])


def find_row(mixture: Mixture, row: int) -> tuple[int, int]:
    """Return the corpus of a row, and the number of earlier rows of that corpus."""
    period, j = divmod(row, mixture.corpus_j.size)
    corpus = int(mixture.corpus_j[j])
    return corpus, period * int(mixture.share_c[corpus]) + int(mixture.item_j[j])


def apportion(weights: tuple[float, ...], total: int) -> np.ndarray:
    """Split an integer total in proportion to the weights, into integers.

    The shares with the largest remainders are rounded up: apportion((0.5, 0.3, 0.2), 4)
    is [2, 1, 1]. If the total is at least the number of weights, no share is 0.
    """
    exact_c = np.array(weights) / np.sum(weights) * total
    share_c = np.floor(exact_c).astype(np.int64)
    order_c = np.argsort(share_c - exact_c, kind="stable")
    share_c[order_c[: total - share_c.sum()]] += 1
    while total >= share_c.size and share_c.min() == 0:
        share_c[share_c.argmax()] -= 1
        share_c[share_c.argmin()] += 1
    return share_c
