"""The tree of a network's parameters, and the tensors of a folder that it consists of.

Our tree has the layers of the dense prefix and of each place in the cycle stacked, and
those of all MoE layers in their order. Paths have dots: cycles.blocks.0.moe.gate_edf.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from moejax.config import Network
from moejax.interop import views
from moejax.interop.families import Family, top_rows
from moejax.interop.rows import Row
from moejax.interop.views import View

Leaves = dict[str, View]
"""Views of parameters by path."""
TensorOf = Callable[[str, tuple[int, ...]], View]
"""Signature of tensor(name, shape) -> view."""
Place = tuple[str, int | None]
"""Path of a parameter in our tree, and the layer's index in an array of stacked
layers; None outside of layers."""
BIAS = "moe.bias_e"
"""Path within a layer of the bias that moves the choice of experts."""


def load(family: Family, network: Network, tensor: TensorOf) -> tuple[Leaves, Leaves]:
    """Return parameters and biases of routers, made from tensors; zeros if the family
    has no such biases."""
    leaves: Leaves = {}
    layers: dict[str, list[View]] = {}
    for row, places in placed_rows(family, network):
        arrays = row.load([tensor(name, row.shape) for name in row.tensors])
        for (path, index), array in zip(places, arrays, strict=True):
            if index is None:
                leaves[path] = array
            else:
                layers.setdefault(path, []).append(array)
    leaves |= {path: views.stacked(parts) for path, parts in layers.items()}
    shape = network.model.num_moe_layers, network.moe.num_experts
    zeros = views.held(np.zeros(shape, np.float32))
    path = bias_path(network)
    return leaves, {path: leaves.pop(path, zeros)}


def save(family: Family, network: Network, leaves: Leaves) -> dict[str, View]:
    """Return the tensors by name, made from parameters and biases of routers. A bias
    that the family does not have is left out."""
    tensors: dict[str, View] = {}
    for row, places in placed_rows(family, network):
        arrays = [
            leaves[path] if index is None else views.item(leaves[path], 0, index)
            for path, index in places
        ]
        tensors |= zip(row.tensors, row.save(arrays), strict=True)
    return tensors


def placed_rows(family: Family, network: Network) -> Iterator[tuple[Row, list[Place]]]:
    """Yield all rows, with whole names of tensors, and the places of their parameters.
    Layers follow each other as in the arrays that stack them."""
    for row in top_rows(network):
        yield row, [(param, None) for param in row.params]
    first, cycle, num_moe = network.model.first_k_dense, network.cycle, 0
    for i in range(network.model.num_layers):
        block, index, is_moe = "prefix", i, False
        if i >= first:
            index, place = divmod(i - first, len(cycle))
            block, is_moe = f"cycles.blocks.{place}", cycle[place].is_moe
        at = f"model.layers.{i}."
        for row in family.layer(network, is_moe):
            places = [
                (f"{_moe_block(network)}.{param}", num_moe)
                if param.startswith("moe.")
                else (f"{block}.{param}", index)
                for param in row.params
            ]
            names = tuple(at + name for name in row.tensors)
            yield dataclasses.replace(row, tensors=names), places
        num_moe += is_moe


def abstract(family: Family, network: Network) -> tuple[Leaves, Leaves]:
    """Return parameters and biases of zeros that take no memory, for their shapes."""

    def tensor(_, shape):
        return views.held(np.broadcast_to(np.float32(0), shape))

    return load(family, network, tensor)


def has_bias(family: Family, network: Network) -> bool:
    """Return whether the family has a bias that moves the choice of experts."""
    return any(BIAS in row.params for row in family.layer(network, True))


def bias_path(network: Network) -> str:
    """Return the path of the biases of routers."""
    return f"{_moe_block(network)}.{BIAS}"


def as_tree(leaves: Leaves) -> dict[str, Any]:
    """Return nested dicts; numbers in paths are keys that are numbers."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = [int(p) if p.isdigit() else p for p in path.split(".")]
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def as_leaves(tree: Mapping[Any, Any], at: str = "") -> dict[str, Any]:
    """Return the leaves of nested dicts by path: the inverse of `as_tree`."""
    leaves: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            leaves |= as_leaves(value, f"{at}{name}.")
        else:
            leaves[f"{at}{name}"] = value
    return leaves


def _moe_block(network: Network) -> str:
    """Return the path of the block that has the parameters of all MoE layers."""
    last = max(i for i, kind in enumerate(network.cycle) if kind.is_moe)
    return f"cycles.blocks.{last}"
