"""Published models: config.json and tensors as our configuration and parameters.

    with open_model("olmoe") as model:
        model.network                 moejax.config.Network
        model.params["embed_vd"]      a view, as all leaves of the tree
        model.notes                   lines to print

`open_model` reads config.json and the headers of the files, checks both against each
other, and reads no tensor.
"""

import dataclasses
import os
import pathlib
import re
from typing import Any

import numpy as np

from moejax.config import Network
from moejax.interop import fields, views
from moejax.interop.config_json import ConfigJson
from moejax.interop.families import (
    deepseek_v2,
    deepseek_v3,
    ernie4_5_moe,
    glm4_moe,
    gpt_oss,
    granitemoe,
    llama4_text,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
from moejax.interop.families.shared import Family
from moejax.interop.folder import TensorFolder
from moejax.interop.strict_json import quoted, read_json
from moejax.interop.table import Row
from moejax.interop.views import View

CONFIG = "config.json"
FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        mixtral, olmoe, qwen3_moe, qwen2_moe, granitemoe, glm4_moe, deepseek_v3,
        deepseek_v2, ernie4_5_moe, gpt_oss, llama4_text,
    )
}  # fmt: skip
"""Families by name, in the order in which one is looked for that can express a
network."""
DTYPES = {
    "float32": "float32", "bfloat16": "bfloat16", "float16": "float32",
}  # fmt: skip
"""Dtype that holds the weights of a published one exactly."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The model that a config.json describes."""

    family: str
    """Name of the family, such as 'mixtral'."""
    fields: dict[str, dict[str, Any]]
    """Fields by part of `moejax.config.Config`: all that make up an architecture, also
    where a value is our default."""
    record: dict[str, Any]
    """config.json as it was read."""
    notes: tuple[str, ...]
    """Lines to print: what is read past."""
    dtype: str
    """Dtype that holds the published weights: 'bfloat16' or 'float32'."""


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """A folder whose config.json and headers of tensors agree. No tensor has been read.

    It is a context manager that closes the files.
    """

    architecture: Architecture
    network: Network
    folder: TensorFolder
    notes: tuple[str, ...]
    """Lines to print."""
    params: dict[str, Any]
    """Views in a tree like the parameters of a Transformer, with stacked layers."""
    router_bias: dict[str, Any]
    """Views in a tree like the biases of its routers, which are zeros if the folder has
    none."""

    def __enter__(self) -> "PublishedModel":
        return self

    def __exit__(self, *_exception) -> None:
        self.folder.close()


def read_architecture(folder: str | os.PathLike) -> Architecture:
    """Read config.json alone; no tensors need be there.

    Raises OSError, and ValueError, one line, for a config.json that does not describe a
    model of a known family.
    """
    path = pathlib.Path(folder) / CONFIG
    return _as_architecture(read_json(path, "it"), f"{path}: ")


def open_model(folder: str | os.PathLike) -> PublishedModel:
    """Open a folder with config.json and tensors.

    Raises OSError, and ValueError, one line, as `read_architecture` and `TensorFolder`
    do, and where config.json and the tensors contradict each other.
    """
    architecture = read_architecture(folder)
    network = fields.make_network(architecture.fields)
    opened = TensorFolder(folder)
    try:
        source = _Source(opened)
        family = FAMILIES[architecture.family]
        params, router_bias = _load(family, network, source)
        notes = source.judge_rest(family, network)
    except BaseException:
        opened.close()
        raise
    notes = (*architecture.notes, *opened.notes, *notes)
    return PublishedModel(architecture, network, opened, notes, params, router_bias)


def _as_architecture(record: dict[str, Any], label: str) -> Architecture:
    family = _find_family(record, label)
    config = ConfigJson(record, label)
    values: fields.Values = {}
    for setting in family.settings:
        setting.read(config, values)
    dtype = config.choice(
        "torch_dtype" if "torch_dtype" in record else "dtype", DTYPES, "float32"
    )
    config.finish()
    by_part = fields.nested(values)
    try:
        fields.make_network(by_part)
    except ValueError as error:
        raise ValueError(f"{label}{error}") from None
    return Architecture(family.name, by_part, record, (), dtype)


def _find_family(record: dict[str, Any], label: str) -> Family:
    found = record.get("model_type")
    for family in FAMILIES.values():
        if found in family.model_types:
            return family
    known = ", ".join(name for f in FAMILIES.values() for name in f.model_types)
    raise ValueError(
        f"{label}model_type={quoted(found)} is not supported: it must be one of {known}"
    )


class _Source:
    """The tensors of a folder, and which of them are in use."""

    def __init__(self, folder: TensorFolder):
        self._folder = folder
        self._unused = set(folder.entries)

    def __contains__(self, name: str) -> bool:
        return name in self._folder

    def view(self, name: str, shape: tuple[int, ...]) -> View:
        """Return a tensor as weights."""
        view = self._folder.view(name, shape)
        self._unused.discard(name)
        return view

    def judge_rest(self, family: Family, network: Network) -> tuple[str, ...]:
        """Return lines about tensors that are read past. Raises ValueError for one that
        the model should not have."""
        for name in sorted(self._unused):
            if not re.search(r"rotary_emb\.inv_freq$", name):
                raise ValueError(
                    f"{self._folder.path} has tensor {quoted(name)}, and the model "
                    "that config.json describes has none of this name"
                )
        return ()


def top_rows(family: Family, network: Network) -> list[Row]:
    """Return the rows outside of layers."""
    embed, norm, head = family.top
    v, d = network.model.vocab_size, network.model.d_model
    rows = [Row((embed,), (v, d), ("embed_vd",)), Row((norm,), (d,), ("norm.scale_d",))]
    if not network.model.tie_embeddings:
        rows.append(Row((head,), (v, d), ("head_vd",)))
    return rows


def _places(network: Network) -> list[tuple[str, bool]]:
    """Return for each layer the path of its parameters in our tree, and whether it is
    an MoE layer."""
    first, cycle = network.model.first_k_dense, network.cycle
    places = [("prefix", False)] * first
    for i in range(network.model.num_layers - first):
        block = i % len(cycle)
        places.append((f"cycles.blocks.{block}", cycle[block].is_moe))
    return places


def _our_path(network: Network, place: str, param: str) -> str:
    """Return the path in our tree of a parameter of a layer. Those of all MoE layers
    are in one block of the cycle."""
    if not param.startswith("moe."):
        return f"{place}.{param}"
    last = max(i for i, kind in enumerate(network.cycle) if kind.is_moe)
    return f"cycles.blocks.{last}.{param}"


def _load(family: Family, network: Network, source: _Source):
    """Return the trees of parameters and of router biases."""
    leaves: dict[str, View] = {}
    for row in top_rows(family, network):
        leaves |= row.load([source.view(name, row.shape) for name in row.tensors])
    layers: dict[str, list[View]] = {}
    for i, (place, is_moe) in enumerate(_places(network)):
        at = family.layer_name.format(i)
        for row in family.layer(network, is_moe):
            tensors = [source.view(at + name, row.shape) for name in row.tensors]
            for param, view in row.load(tensors).items():
                path = _our_path(network, place, param)
                layers.setdefault(path, []).append(view)
    leaves |= {path: views.stacked(parts) for path, parts in layers.items()}
    bias_path = _our_path(network, "", "moe.bias_e")
    shape = network.model.num_moe_layers, network.moe.num_experts
    bias = leaves.pop(bias_path, None) or views.held(np.zeros(shape, np.float32))
    return _as_tree(leaves), _as_tree({bias_path: bias})


def _as_tree(leaves: dict[str, View]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = [int(p) if p.isdigit() else p for p in path.split(".")]
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree
