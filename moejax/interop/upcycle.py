"""A dense model as a Mixture of Experts, in views of the dense folder's tensors.

Every expert is a copy of the layer's MLP, and the router is random. The gates of equal
experts sum to 1, so that the model computes what the dense one computed.

With granularity G, each copy is cut along its hidden units into G experts, a *virtual
group*, whose rows of the router are equal (He et al., arXiv 2410.07524). A token
chooses whole groups: it chooses top_k * G experts, and each has 1/G of its group's
gate, which a factor G in the weights makes up for.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

from moejax.config import Network
from moejax.interop import fields, tree, views
from moejax.interop.architecture import CONFIG, as_architecture
from moejax.interop.export import config_of
from moejax.interop.families import DENSE, FAMILIES, DenseFamily
from moejax.interop.folder import TensorFolder, resolve
from moejax.interop.rows import Row
from moejax.interop.settings import Setting
from moejax.interop.source import Source
from moejax.interop.strict_json import quoted, read_json
from moejax.interop.views import View

ROUTER_STD = 0.02
"""Standard deviation of the router's weights, that of Megatron-LM."""
MATRICES = {
    "moe.gate_edf": ("gate_proj", 0),
    "moe.up_edf": ("up_proj", 0),
    "moe.down_efd": ("down_proj", 1),
}
"""Product of the dense MLP that an expert's matrix is made of, and the dim of the
hidden units on disk."""
ZERO = ("dense.gate_df", "dense.up_df", "dense.down_fd", "shared_gate_d")
"""Parameters of a shared expert, which a dense model does not have. All are zeros: then
so are their gradients, and they stay zeros."""


@dataclasses.dataclass(frozen=True)
class Upcycling(Setting):
    """How experts are made of an MLP. It reads the MLP's width from config.json."""

    experts: int
    """Number of copies of the MLP."""
    top_k: int
    """Number of copies that a token chooses."""
    granularity: int = 1
    """Number of experts that a copy is cut into, along its hidden units."""
    noise: float = 0.0
    """Share of the hidden units of each expert whose weights are drawn anew, from a
    normal distribution with the mean and the standard deviation of those that they
    replace (Drop-Upcycling, arXiv 2502.19261)."""
    seed: int = 0

    def __post_init__(self):
        for name, low, high in (
            ("experts", 1, math.inf),
            ("top_k", 1, self.experts),
            ("granularity", 1, math.inf),
            ("noise", 0, 1),
            ("seed", 0, math.inf),
        ):
            if not low <= getattr(self, name) <= high:
                to = f"from {low} to {high}" if high < math.inf else f"at least {low}"
                raise ValueError(f"{name}={getattr(self, name)} must be {to}")

    def read(self, config, values) -> None:
        width = config.get("intermediate_size", "whole")
        if width % self.granularity:
            raise config.error(
                "intermediate_size", f"must be a multiple of {self.granularity} pieces"
            )
        values["model.d_ff"] = width
        values["moe.d_expert"] = width // self.granularity
        values["moe.num_experts"] = self.experts * self.granularity
        values["moe.top_k"] = self.top_k * self.granularity

    def factor(self, param: str) -> float:
        """Return the factor of an expert's matrix.

        The output is linear in `up` and in `down`, whose factors multiply to the
        granularity. That of `up` is the power of two next to its square root, so that
        no weight is rounded where the granularity is a power of two.
        """
        up = 2.0 ** round(math.log2(self.granularity) / 2)
        by_param = {"moe.up_edf": up, "moe.down_efd": self.granularity / up}
        return by_param.get(param, 1.0)


@dataclasses.dataclass(frozen=True)
class Upcycled:
    """An MoE model made of a dense folder, of which no tensor has been read."""

    family: str
    """Name of the MoE family."""
    network: Network
    params: dict[str, Any]
    """Views in a tree like the parameters of a Transformer."""
    router_bias: dict[str, Any]
    record: dict[str, Any]
    """config.json of the MoE model, with the keys of the dense one that say no size."""
    dtype: str
    """Dtype that holds the dense weights."""
    notes: tuple[str, ...]
    """Lines to print."""


def upcycle(folder: str | os.PathLike, how: Upcycling) -> Upcycled:
    """Open a dense folder as an MoE model.

    Raises OSError, and ValueError, one line, for a folder that is not of a family of
    DENSE, or that `open_model` would refuse if dense models were read.
    """
    path = resolve(pathlib.Path(folder), CONFIG)
    record, label = read_json(path, "the configuration"), f"{path}: "
    dense = _find_dense(record, label)
    read_as = dense.becomes._replace(
        name=dense.name, settings=(*dense.settings, how), other_types=()
    )
    architecture = as_architecture(record, label, read_as)
    network = fields.make_network(architecture.fields)
    source = Source(TensorFolder(folder), read_as, network, architecture.quantization)
    new = {
        name: _new_tensor(source, network, how, row, places[0][1], expert)
        for row, places in tree.placed_rows(dense.becomes, network)
        for expert, name in enumerate(row.tensors)
    }
    trees = tree.load(dense.becomes, network, lambda name, _: new[name])
    params, router_bias = map(tree.as_tree, trees)
    notes = (*architecture.notes, *source.notes(architecture.record))
    if network.moe.num_shared_experts:
        notes += (
            f"{dense.becomes.name} has a shared expert: it is {network.moe.d_shared} "
            "wide, and its weights are zeros, which training leaves as they are.",
        )
    config = config_of(dense.becomes, network, architecture.record)
    return Upcycled(
        dense.becomes.name, network, params, router_bias, config, architecture.dtype,
        notes,
    )  # fmt: skip


def _find_dense(record: dict[str, Any], label: str) -> DenseFamily:
    found = record.get("model_type")
    if isinstance(found, str) and found in DENSE:
        return DENSE[found]
    is_moe = any(found in (f.name, *f.other_types) for f in FAMILIES.values())
    why = "has experts already" if is_moe else "is not supported"
    raise ValueError(
        f"{label}model_type={quoted(found)} {why}: give a dense model, one of "
        f"{', '.join(DENSE)}"
    )


def _new_tensor(
    source: Source, network: Network, how: Upcycling, row: Row, layer: int, expert: int
) -> View:
    """Return a tensor of the MoE model: the one of index `expert` in a row of a
    layer."""
    param, name = row.params[0], row.tensors[expert]
    if param in MATRICES:
        return _expert_matrix(source, network, how, param, layer, expert)
    if param == "moe.router_de":
        rng = np.random.default_rng((how.seed, layer, 0, 0))
        shape = how.experts, network.model.d_model
        router_ed = ROUTER_STD * rng.standard_normal(shape, np.float32)
        return views.held(np.repeat(router_ed, how.granularity, axis=0))
    if param in ZERO:
        return views.held(np.broadcast_to(np.float32(0), row.shape))
    return source.tensor(name, row.shape)


def _expert_matrix(
    source: Source,
    network: Network,
    how: Upcycling,
    param: str,
    layer: int,
    expert: int,
) -> View:
    """Return a matrix of an expert: the units of its piece of the MLP, scaled, and with
    noise."""
    product, dim = MATRICES[param]
    d, f = network.model.d_model, network.moe.d_expert
    shape = (how.granularity * f, d) if dim == 0 else (d, how.granularity * f)
    whole = source.tensor(f"model.layers.{layer}.mlp.{product}.weight", shape)
    first = expert % how.granularity * f
    piece = views.taken(whole, dim, range(first, first + f))
    factor = how.factor(param)
    if factor == 1 and not how.noise:
        return piece

    def change(matrix: np.ndarray) -> None:
        rng = np.random.default_rng((how.seed, layer, expert, 1))
        units = rng.choice(f, math.ceil(how.noise * f), replace=False)
        at = (units,) if dim == 0 else (slice(None), units)
        old = matrix[at]
        if old.size:
            number = 2 + list(MATRICES).index(param)
            rng = np.random.default_rng((how.seed, layer, expert, number))
            fresh = rng.standard_normal(old.shape, np.float32)
            matrix[at] = old.mean() + old.std() * fresh
        matrix *= factor

    return _changed(piece, change)


def _changed(view: View, change: Callable[[np.ndarray], None]) -> View:
    """Return a view in float32 after `change`, which acts on the whole array in
    place."""

    def fill(out, box):
        whole = view.read(dtype=np.dtype(np.float32))
        change(whole)
        views.assign(out, whole[tuple(slice(r.start, r.stop, r.step) for r in box)])

    return dataclasses.replace(views.cast(view, np.dtype(np.float32)), fill=fill)
