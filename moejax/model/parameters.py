"""The parameters of a model by name: which are frozen, and which are matrices.

A name is the path of a parameter in the model's tree, such as
`cycles/blocks/0/attention/q_dhi`. Layers are stacked, so that a name stands for one
kind of parameter in all cycles of layers.
"""

import difflib
import functools
import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

import jax
from flax import nnx

from moejax.config import Network, Optimizer
from moejax.model.transformer import Transformer

PARTS = {
    "embedding": ("embed_vd",),
    "head": ("head_vd",),
    "attention": ("*/attention/*",),
    "router": ("*/router_de", "*/logit_bias_e", "*/moe/bias_e"),
    "experts": ("*/moe/gate_*", "*/moe/up_*", "*/moe/down_*"),
    "shared": ("*/shared/*", "*/shared_gate_d"),
    "dense": ("*/dense/*",),
    "norms": ("*norm/scale_d",),
}
"""Patterns of the parameters that Optimizer.frozen names as one part. Norms within
attention belong to both."""


class Counts(NamedTuple):
    """Numbers of elements of a model's parameters."""

    total: int
    trained: int
    """Those that are not frozen."""
    matrices: int
    """Trained ones that `is_matrix`."""
    matrix_flops: int
    """FLOPs of one product X X^T of each trained matrix X [m, n], m <= n."""
    square_flops: int
    """FLOPs of one product of two matrices [m, m] for each of them."""


def name_of(path) -> str:
    """Return the name of a parameter from its path in a tree."""
    return "/".join(str(getattr(key, "key", key)) for key in path)


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter is a stack of matrices, its last two dims, which
    multiply activations in every layer.

    Embedding, head, router, norms, biases and vectors are none.
    """
    last = name.rpartition("/")[2]
    return len(shape) >= 3 and last != "router_de" and "bias" not in last


def is_frozen(name: str, frozen: Iterable[str]) -> bool:
    """Return whether one of the entries of Optimizer.frozen names a parameter."""
    return any(_matches(entry, name) for entry in frozen)


def _matches(entry: str, name: str) -> bool:
    return any(fnmatchcase(name, p) for p in PARTS.get(entry, (entry,)))


@functools.lru_cache(maxsize=64)
def shapes_by_name(network: Network) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters, with the leading dim of layers."""
    model = nnx.eval_shape(lambda: Transformer(network, None, nnx.Rngs(0)))
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {name_of(path): leaf.shape for path, leaf in leaves}


def check_frozen(network: Network, frozen: tuple[str, ...]) -> None:
    """Raise ValueError where an entry of Optimizer.frozen names no parameter of the
    model, or where all of them are frozen."""
    if not frozen:
        return
    names = list(shapes_by_name(network))
    for entry in frozen:
        if not any(_matches(entry, name) for name in names):
            last = {
                name.rpartition("/")[2]: f"*/{name.rpartition('/')[2]}"
                for name in names
            }
            known = [*PARTS, *names, *last]
            near = difflib.get_close_matches(entry.strip("*/"), known, 3, 0.5)
            hint = f"nearest is {', '.join(near)}" if near else ", ".join(PARTS)
            raise ValueError(
                f"Optimizer.frozen: {entry!r} matches no parameter of this model: give "
                f"a part ({', '.join(PARTS)}) or a pattern of names such as "
                f"'*/attention/q_dhi'; {hint}"
            )
    if all(is_frozen(name, frozen) for name in names):
        raise ValueError(
            f"Optimizer.frozen={frozen} freezes all {len(names)} parameters of the "
            "model, and nothing trains: leave a part out, or evaluate the model with "
            "train/evaluate.py"
        )


def trains_experts(network: Network, optimizer: Optimizer) -> bool:
    """Return whether some parameter of experts is not frozen."""
    return any(
        _matches("experts", name) and not is_frozen(name, optimizer.frozen)
        for name in shapes_by_name(network)
    )


def count(network: Network, optimizer: Optimizer) -> Counts:
    """Return the numbers of elements of a model's parameters."""
    total = trained = matrices = matrix_flops = square_flops = 0
    for name, shape in shapes_by_name(network).items():
        size = math.prod(shape)
        total += size
        if is_frozen(name, optimizer.frozen):
            continue
        trained += size
        if is_matrix(name, shape):
            narrow = min(shape[-2:])
            matrices += size
            matrix_flops += 2 * size * narrow
            square_flops += 2 * math.prod(shape[:-2]) * narrow**3
    return Counts(total, trained, matrices, matrix_flops, square_flops)
