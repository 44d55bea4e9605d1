"""Build choices of experts that belong together, and count by definition what they
meet."""

import itertools

import numpy as np


def clique_choices(
    num_tokens: int, num_experts: int, top_k: int, seed: int = 0, size: int = 8
) -> np.ndarray:
    """Return distinct experts of each token, int32 [n, k]. Tokens belong to cliques of
    `size` random experts in turn; of five tokens of a clique four choose within it, and
    one any experts."""
    rng = np.random.default_rng(seed)
    clique_ci = rng.permutation(num_experts).reshape(-1, size)
    number_n, num_cliques = np.arange(num_tokens), len(clique_ci)
    clique_n, stays_n = number_n % num_cliques, number_n // num_cliques % 5 > 0
    within_nk = _distinct(rng, num_tokens, size, top_k)
    any_nk = _distinct(rng, num_tokens, num_experts, top_k)
    together_nk = np.take_along_axis(clique_ci[clique_n], within_nk, axis=1)
    return np.where(stays_n[:, None], together_nk, any_nk).astype(np.int32)


def topic_choices(
    num_tokens: int, num_experts: int, top_k: int, seed: int = 0
) -> np.ndarray:
    """Return the best experts of each token by a random router of four hidden topics
    with noise, int32 [n, k]: loads are uneven, and choices correlated."""
    rng = np.random.default_rng(seed)
    score_ne = rng.normal(size=(num_tokens, 4)) @ rng.normal(size=(4, num_experts))
    score_ne += rng.gumbel(size=score_ne.shape)
    return np.argsort(-score_ne, axis=1)[:, :top_k].astype(np.int32)


def _distinct(rng, num_tokens: int, num_experts: int, top_k: int) -> np.ndarray:
    """Return random distinct experts of each token, [n, k]."""
    return np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :top_k]


def count_together(expert_nk: np.ndarray, num_experts: int) -> np.ndarray:
    """Return the number of tokens that choose both of two experts, int64 [e, e]; unused
    choices are -1."""
    together_ee = np.zeros((num_experts, num_experts), np.int64)
    for one_n, other_n in itertools.product(expert_nk.T, repeat=2):
        is_used_n = (one_n >= 0) & (other_n >= 0)
        np.add.at(together_ee, (one_n[is_used_n], other_n[is_used_n]), 1)
    return together_ee


def home_devices(num_experts: int, num_devices: int) -> np.ndarray:
    """Return the experts of each device under the home plan, [w, e / w]."""
    return np.arange(num_experts).reshape(num_devices, -1)


def met_of_choices(expert_nk: np.ndarray, expert_we: np.ndarray) -> np.ndarray:
    """Return whether each token has a choice on each device, bool [n, w]."""
    device_e = np.empty(expert_we.size, int)
    device_e[expert_we] = np.arange(len(expert_we))[:, None]
    is_met_nkw = device_e[expert_nk][:, :, None] == np.arange(len(expert_we))
    return is_met_nkw.any(axis=1)
