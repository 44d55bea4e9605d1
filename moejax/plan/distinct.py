"""Rows that travel: one for each token and destination.

A *destination* is a device, a domain, or a node of several devices. A token with k
choices sends one row to each destination that computes any of them.
"""

import numpy as np


def distinct_share(
    share: float | np.ndarray, top_k: int, num_experts: int
) -> np.ndarray:
    """Return the expected share of tokens with at least one choice at a destination,
    which gets `share` of all choices.

    A token chooses `top_k` of `num_experts` different experts. If all experts are
    equally loaded and the destination has o = share * num_experts of them, this is
    1 - C(e - o, k) / C(e, k), exactly; for other loads it is an estimate.

        >>> float(distinct_share(1 / 8, 8, 64).round(3))  # 8 of 64 experts, top-8
        0.679
        >>> float(distinct_share(1 / 8, 2, 8).round(3))  # one expert: no two choices
        0.25
    """
    held = np.asarray(share, float) * num_experts
    missed = np.ones_like(held)
    for choice in range(top_k):
        missed *= np.clip(1.0 - held / (num_experts - choice), 0.0, 1.0)
    return 1.0 - missed


def distinct_rows(
    choices: np.ndarray, tokens: np.ndarray, top_k: int, num_experts: int
) -> np.ndarray:
    """Return the expected number of rows that carry a number of choices.

    `choices` are those of one source's tokens for each destination, and `tokens` the
    number of these tokens, of a shape that broadcasts. A row carries one choice at
    least, so rows are at most choices, and at most tokens.
    """
    share = choices / np.maximum(tokens * top_k, 1e-300)
    rows = tokens * distinct_share(np.minimum(share, 1.0), top_k, num_experts)
    return np.minimum(rows, np.minimum(choices, tokens))
