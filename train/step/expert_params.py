"""Expert parameters among all others: trees of params, and of moments shaped alike."""

import jax

from moejax.moe.weights.stores import MASTERS


def is_expert(path) -> bool:
    """Whether a leaf at this path of a tree is of an expert's masters or moments."""
    return getattr(path[-1], "key", None) in MASTERS


def take(params) -> tuple[dict, dict]:
    """Masters [l, e, ..] by name, and the parameters with None in their places."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    masters = {path[-1].key: leaf for path, leaf in leaves if is_expert(path)}
    others = jax.tree_util.tree_map_with_path(
        lambda path, leaf: None if is_expert(path) else leaf, params
    )
    return masters, others


def put(others, masters: dict):
    """The inverse of take."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: masters[path[-1].key] if is_expert(path) else leaf,
        others,
        is_leaf=lambda leaf: leaf is None,
    )
