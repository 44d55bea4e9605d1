"""The tree of a network's parameters, and the tensors of a folder that it consists of.

Our tree has the layers of the dense prefix and of each place in the cycle stacked, and
those of all MoE layers in their order. Paths have dots: cycles.blocks.0.moe.gate_edf.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

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
BIAS = "moe.bias_e"
"""Path within a layer of the bias that moves the choice of experts."""


class Layer(NamedTuple):
    """A layer, and where its parameters are."""

    index: int
    place: str
    """Path of its block in our tree."""
    row: int
    """Its index among the layers of that block."""
    moe_row: int | None
    """Its index among the MoE layers; None: it is dense."""


def load(family: Family, network: Network, tensor: TensorOf) -> tuple[Leaves, Leaves]:
    """Return parameters and biases of routers, made from tensors; zeros if the family
    has no such biases."""
    leaves: Leaves = {}
    for row in top_rows(network):
        leaves |= row.load([tensor(name, row.shape) for name in row.tensors])
    layers: dict[str, list[View]] = {}
    for layer in _layers(network):
        for row in _rows(family, network, layer):
            tensors = [tensor(name, row.shape) for name in row.tensors]
            for param, view in row.load(tensors).items():
                layers.setdefault(_path(network, layer, param), []).append(view)
    leaves |= {path: views.stacked(parts) for path, parts in layers.items()}
    shape = network.model.num_moe_layers, network.moe.num_experts
    zeros = views.held(np.zeros(shape, np.float32))
    path = bias_path(network)
    return leaves, {path: leaves.pop(path, zeros)}


def save(family: Family, network: Network, leaves: Leaves) -> dict[str, View]:
    """Return the tensors by name, made from parameters and biases of routers. A bias
    that the family does not have is left out."""
    tensors: dict[str, View] = {}
    for row in top_rows(network):
        tensors |= row.save(leaves)
    for layer in _layers(network):
        for row in _rows(family, network, layer):
            params = {
                param: views.item(
                    leaves[_path(network, layer, param)], 0, _row(layer, param)
                )
                for param in row.params
            }
            tensors |= row.save(params)
    return tensors


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


def _layers(network: Network) -> Iterator[Layer]:
    first, cycle = network.model.first_k_dense, network.cycle
    num_moe = 0
    for i in range(network.model.num_layers):
        if i < first:
            yield Layer(i, "prefix", i, None)
            continue
        row, block = divmod(i - first, len(cycle))
        is_moe = cycle[block].is_moe
        yield Layer(i, f"cycles.blocks.{block}", row, num_moe if is_moe else None)
        num_moe += is_moe


def _rows(family: Family, network: Network, layer: Layer) -> list[Row]:
    """Return the rows of a layer, with whole names of tensors."""
    at = f"model.layers.{layer.index}."
    rows = family.layer(network, layer.moe_row is not None)
    return [
        Row(tuple(at + name for name in row.tensors), row.shape, row.params, row.steps)
        for row in rows
    ]


def _path(network: Network, layer: Layer, param: str) -> str:
    """Return the path in our tree of a parameter of a layer."""
    is_shared = param.startswith("moe.")
    return f"{_moe_block(network) if is_shared else layer.place}.{param}"


def _row(layer: Layer, param: str) -> int:
    """Return the index of a layer in an array of stacked layers."""
    return layer.moe_row if param.startswith("moe.") else layer.row


def _moe_block(network: Network) -> str:
    """Return the path of the block that has the parameters of all MoE layers."""
    last = max(i for i, kind in enumerate(network.cycle) if kind.is_moe)
    return f"cycles.blocks.{last}"
