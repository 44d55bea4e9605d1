"""Experts that tokens choose together, and how many rows travel for them.

`together_ee[i, j]` is the number of tokens whose choices include the experts i and j,
and on the diagonal the load of each expert. It is counted in the step
(`Layout.counts_together`). A token sends one row to each destination of its choices, so
that experts which are chosen together make fewer rows where they share one.
"""

from typing import NamedTuple

import numpy as np

from moejax.plan.distinct import distinct_share
from moejax.plan.layout import Layout


class Shares(NamedTuple):
    """Choices of a layer per token: a summary of `together_ee`."""

    first_e: np.ndarray
    """Share of tokens that choose each expert."""
    both_ee: np.ndarray
    """Share of tokens that choose both of two experts; 0 on the diagonal."""

    @classmethod
    def of(cls, together_ee: np.ndarray, top_k: int) -> "Shares":
        """Return the shares of tokens that choose `top_k` experts each."""
        count_ee = np.asarray(together_ee, float)
        tokens = max(np.trace(count_ee) / top_k, 1e-300)
        both_ee = count_ee / tokens
        first_e = both_ee.diagonal().copy()
        np.fill_diagonal(both_ee, 0.0)
        return cls(first_e, both_ee)

    @classmethod
    def independent(cls, load_e: np.ndarray, top_k: int) -> "Shares":
        """Return the shares for a load of which nothing else is known: choices without
        repetition, which have nothing else in common. They are exact for even loads."""
        e = len(load_e)
        first_e = np.minimum(load_e * top_k / max(load_e.sum(), 1e-300), 1.0)
        both_ee = np.outer(first_e, first_e) * (1 - 1 / top_k) * e / max(e - 1, 1)
        np.fill_diagonal(both_ee, 0.0)
        return cls(first_e, both_ee)


class RowRatios(NamedTuple):
    """Rows that travel over those of `distinct_rows`, which knows loads alone."""

    device_w: np.ndarray
    """Ratio at each device."""
    node_f: np.ndarray
    """Ratio at each node; one node where rows travel in one level."""


def row_ratios(
    together_ee: np.ndarray, expert_we: np.ndarray, layout: Layout
) -> RowRatios:
    """Return the ratios of a plan without replicas. `expert_we` are the experts of each
    device, and `layout` is that of the exchange."""
    shares, k = Shares.of(together_ee, layout.top_k), layout.top_k

    def ratio(expert_de: np.ndarray) -> np.ndarray:
        first_d = shares.first_e[expert_de].sum(axis=1)
        pairs = expert_de[:, :, None], expert_de[:, None, :]
        both_d = shares.both_ee[pairs].sum(axis=(1, 2))
        alone_d = distinct_share(first_d / k, layout.choosing)
        most = min(k, expert_de.shape[1])
        return met_share(first_d, both_d, k, most) / np.maximum(alone_d, 1e-300)

    return RowRatios(ratio(expert_we), ratio(expert_we.reshape(layout.num_nodes, -1)))


def met_share(first: np.ndarray, both: np.ndarray, top_k: int, most: int) -> np.ndarray:
    """Return the expected share of tokens with at least one choice at a destination.

    A token has N choices there, at most `most` of its `top_k`. `first` is the mean of
    N, and `both` that of N (N - 1). The share is exact for top_k <= 2, for even loads
    that are chosen independently, and where N is 0 or top_k. Elsewhere it is that of
    Polya's urn with these two moments, and lies within `met_bounds`: q is the share of
    choices, and each choice there changes the odds of the next ones by g.

        share = 1 - product over i < k of (1 - q + i g) / (1 + i g)

        >>> float(met_share(1.0, 0.0, 2, 1))  # one expert of two: every token meets it
        1.0
        >>> float(met_share(0.5, 0.5, 2, 2))  # both choices or none
        0.25
    """
    first, both = np.asarray(first, float), np.asarray(both, float)
    low, high = met_bounds(first, both, most)
    share = first / top_k
    again = both / max(top_k * (top_k - 1), 1)
    odds = (again - share**2) / np.maximum(share - again, 1e-12)
    missed = 1.0 - share
    for choice in range(1, top_k):
        left = np.maximum(1.0 - share + choice * odds, 0.0)
        missed = missed * left / np.maximum(1.0 + choice * odds, 1e-12)
    return np.clip(1.0 - missed, low, high)


def met_bounds(
    first: np.ndarray, both: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest share of tokens with a choice at a
    destination that the two moments of `met_share` allow.

    Sources: Dawson and Sankoff (1967) for the smallest share, Kwerel (1975) for the
    largest one. No other bounds of these moments are tighter.
    """
    first = np.asarray(first, float)
    times = np.floor(both / np.maximum(first, 1e-300) + 1e-9) + 1
    low = (2 * first - both / times) / (times + 1)
    high = np.minimum(first - both / max(most, 1), 1.0)
    return np.minimum(np.maximum(low, 0.0), high), high
