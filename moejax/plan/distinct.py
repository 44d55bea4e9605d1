"""Rows that travel: one for each token and destination.

A *destination* is a device, a domain, or a node of several devices. A token with k
choices sends one row to each destination that computes any of them.
"""

from typing import NamedTuple

import numpy as np


class Choosing(NamedTuple):
    """How a token chooses its experts, as far as the number of its rows depends on
    that."""

    top_k: int
    """Number of experts that a token chooses."""
    num_experts: int
    num_groups: int = 1
    """Number of groups of experts (Router.num_groups)."""
    top_groups: int = 1
    """Number of groups from which a token chooses (Router.top_groups)."""


def distinct_share(share: float | np.ndarray, choosing: Choosing) -> np.ndarray:
    """Return the expected share of tokens with at least one choice at a destination,
    which gets `share` of all choices.

    A token chooses k of e different experts. If all experts are equally loaded and the
    destination has o = share * e of them, this is 1 - C(e - o, k) / C(e, k), exactly;
    for other loads it is an estimate. Where a token chooses from t of g groups, and the
    destination has whole groups, it is taken to have choices in each group that it
    chose; where the destination is a part of a group, the same holds within t groups.

        >>> float(distinct_share(1 / 8, Choosing(8, 64)).round(3))  # 8 of 64 experts
        0.679
        >>> float(distinct_share(1 / 8, Choosing(2, 8)).round(3))  # no two choices
        0.25
        >>> float(distinct_share(1 / 8, Choosing(8, 256)).round(3))  # a node of 8
        0.661
        >>> float(distinct_share(1 / 8, Choosing(8, 256, 8, 4)).round(3))  # 4 groups
        0.452
    """
    k, e, groups, top = choosing
    share = np.asarray(share, float)
    inside = top / groups * _any_of(share * e, k, e * top / groups)
    if groups == 1:
        return inside
    return np.where(share * groups > 1, _any_of(share * groups, top, groups), inside)


def _any_of(held: np.ndarray, chosen: int, total: float) -> np.ndarray:
    """Return the chance that one of `held` things at least is among `chosen` different
    ones of `total`."""
    missed = np.ones_like(held)
    for choice in range(chosen):
        missed *= np.clip(1.0 - held / (total - choice), 0.0, 1.0)
    return 1.0 - missed


def distinct_rows(
    choices: np.ndarray, tokens: np.ndarray, choosing: Choosing
) -> np.ndarray:
    """Return the expected number of rows that carry a number of choices.

    `choices` are those of one source's tokens for each destination, and `tokens` the
    number of these tokens, of a shape that broadcasts. A row carries one choice at
    least, so rows are at most choices, and at most tokens.
    """
    share = choices / np.maximum(tokens * choosing.top_k, 1e-300)
    rows = tokens * distinct_share(np.minimum(share, 1.0), choosing)
    return np.minimum(rows, np.minimum(choices, tokens))
