"""Expert parameters among all others: trees of params, and of moments shaped alike."""

import jax

from moejax.moe.weights.stores import EXPERT_PARAMS


def is_expert(path) -> bool:
    """Whether a leaf at this path of a tree is of an expert's masters or moments."""
    return getattr(path[-1], "key", None) in EXPERT_PARAMS


def take(params) -> tuple[dict, dict]:
    """Masters [l, e, ..] by name, and the parameters with None in their places."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    master_params = {path[-1].key: leaf for path, leaf in leaves if is_expert(path)}
    others = jax.tree_util.tree_map_with_path(
        lambda path, leaf: None if is_expert(path) else leaf, params
    )
    return master_params, others


def put(others, master_params: dict):
    """The inverse of take."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: master_params[path[-1].key] if is_expert(path) else leaf,
        others,
        is_leaf=lambda leaf: leaf is None,
    )
