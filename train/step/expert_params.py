"""Separation of expert parameters from all others.

The functions work on trees of parameters, and on trees of moments, which have the same
structure.
"""

import jax

from moejax.moe.weights.stores import EXPERT_BIASES, EXPERT_PARAMS


def is_expert(path) -> bool:
    """Return whether the leaf at this path of a tree belongs to experts."""
    return getattr(path[-1], "key", None) in (*EXPERT_PARAMS, *EXPERT_BIASES)


def take(params) -> tuple[dict, dict]:
    """Return the experts' parameters [l, e, ..] by name, and a tree of the others.

    The tree has None where the experts' parameters were.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    master_params = {path[-1].key: leaf for path, leaf in leaves if is_expert(path)}
    others = jax.tree_util.tree_map_with_path(
        lambda path, leaf: None if is_expert(path) else leaf, params
    )
    return master_params, others


def put(others, master_params: dict):
    """Return the tree of all parameters: the inverse of `take`."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: master_params[path[-1].key] if is_expert(path) else leaf,
        others,
        is_leaf=lambda leaf: leaf is None,
    )
