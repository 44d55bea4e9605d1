"""Published models: a folder of config.json and tensors as our configuration and
parameters, and back.

    model = open_model("olmoe")
    model.network                 moejax.config.Network
    model.params["embed_vd"]      a view, as all leaves of the tree
    model.notes                   lines to print

`open_model` reads config.json and the headers of the files, checks both against each
other, and reads no tensor. `write_model` is in `export.py`.
"""

import dataclasses
import os
import pathlib
from typing import Any

from moejax.config import Network
from moejax.interop import fields, tree
from moejax.interop.architecture import (
    CONFIG,
    Architecture,
    as_architecture,
)
from moejax.interop.export import Export, plan_model, write_model
from moejax.interop.families import FAMILIES
from moejax.interop.folder import TensorFolder, resolve
from moejax.interop.source import Source
from moejax.interop.strict_json import read_json

__all__ = [
    "Architecture", "Export", "PublishedModel", "open_model", "plan_model",
    "read_architecture", "write_model",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PublishedModel:
    """A folder whose config.json and headers of tensors agree. No tensor has been
    read."""

    architecture: Architecture
    network: Network
    folder: TensorFolder
    notes: tuple[str, ...]
    """Lines to print: what is unusual, and what is read past."""
    params: dict[str, Any]
    """Views in a tree like the parameters of a Transformer, with stacked layers."""
    router_bias: dict[str, Any]
    """Views in a tree like the biases of its routers, which are zeros if the folder has
    none."""


def read_architecture(folder: str | os.PathLike) -> Architecture:
    """Read config.json alone; no tensors need be there.

    Raises OSError, and ValueError, one line, for a config.json that does not describe a
    model of a known family, or is a link that leaves the folder.
    """
    path = resolve(pathlib.Path(folder), CONFIG)
    return as_architecture(read_json(path, "the configuration"), f"{path}: ")


def open_model(folder: str | os.PathLike) -> PublishedModel:
    """Open a folder with config.json and tensors.

    Raises OSError, and ValueError, one line, as `read_architecture` and `TensorFolder`
    do, and where config.json and the tensors contradict each other.
    """
    architecture = read_architecture(folder)
    network = fields.make_network(architecture.fields)
    family = FAMILIES[architecture.family]
    opened = TensorFolder(folder)
    source = Source(opened, family, network, architecture.quantization)
    params, router_bias = map(tree.as_tree, tree.load(family, network, source.tensor))
    notes = (*architecture.notes, *source.notes(architecture.record))
    return PublishedModel(architecture, network, opened, notes, params, router_bias)
