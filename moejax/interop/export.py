"""Write a network's parameters as the folder of a published model.

config.json has the spelling of transformers 4 (rope_theta, rope_scaling, torch_dtype),
which transformers 5 reads too.
"""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from moejax.config import Network
from moejax.interop import fields, tree, views
from moejax.interop.architecture import CONFIG, as_architecture
from moejax.interop.companions import GENERATION
from moejax.interop.families import FAMILIES, Family
from moejax.interop.rope_json import KEYS as ROPE_KEYS
from moejax.interop.settings import check_rest
from moejax.interop.views import View
from moejax.interop.write import MAX_SHARD_BYTES, Plan, plan_folder, write_folder

WRITTEN_DTYPES = {
    "float32": np.dtype("float32"), "bfloat16": np.dtype(ml_dtypes.bfloat16),
}  # fmt: skip
CORRECTION = "e_score_correction_bias"
"""End of the names of biases that move the choice of experts."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DROPPED = ("quantization_config", "auto_map", "dtype", "torch_dtype", "text_config")
"""Keys that do not hold of what is written: weights are not quantised, and no code is
in the folder."""

Leaf = View | np.ndarray
"""A view, or an array, which is copied to the host whole if it is on devices."""


@dataclasses.dataclass(frozen=True)
class Export:
    """A folder to be written: its tensors and its other files."""

    family: str
    dtype: str
    plan: Plan
    tensors: Mapping[str, View]
    files: Mapping[str, bytes]

    def value(self, name: str) -> np.ndarray:
        """Return a tensor, as float32 or narrower."""
        return self.tensors[name].read()


def write_model(
    out: str | os.PathLike,
    network: Network,
    params: Mapping[str, Any],
    router_bias: Mapping[str, Any],
    **options: Any,
) -> Export:
    """Write a folder, as `plan_model` says, and return what was written; `options` are
    those of `plan_model`. All files are written, or none.

    Raises what `plan_model` and `write_folder` raise.
    """
    export = plan_model(network, params, router_bias, **options)
    write_folder(out, export.plan, export.value, export.files)
    return export


def plan_model(
    network: Network,
    params: Mapping[str, Any],
    router_bias: Mapping[str, Any],
    *,
    dtype: str,
    family: str | None = None,
    record: dict[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    token_ids: Mapping[str, int] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Export:
    """Return the tensors and files of a folder. Leaves of `params` and `router_bias`
    (Leaf) have logical experts and stacked layers, as a Transformer's parameters.

    `record` is the config.json that the model came from, if any. Of it, keys that no
    field of ours says are kept; the others are written from `network`. `family` None is
    that of `record`, or else the first one that can express the network. `token_ids`
    are those of TOKEN_IDS that are not as `record` says. `files` are others by name,
    such as tokenizer.json; ids in a generation_config.json are replaced too.

    Weights are written in `dtype`, 'bfloat16' or 'float32'; biases that move the choice
    of experts always in float32.

    Raises ValueError, one line, if the family cannot express the network, or `record`
    contradicts it.
    """
    if dtype not in WRITTEN_DTYPES:
        known = ", ".join(WRITTEN_DTYPES)
        raise ValueError(f"dtype {dtype!r}: it must be one of {known}")
    chosen, config = make_config(network, family, record)
    config |= token_ids or {}
    leaves = _leaves(chosen, network, params, router_bias)
    tensors = tree.save(chosen, network, leaves)
    specs = {}
    for name, view in sorted(tensors.items()):
        kept = "float32" if name.endswith(CORRECTION) else dtype
        specs[name] = WRITTEN_DTYPES[kept], view.shape
    plan = plan_folder(specs, max_shard_bytes)
    ids = {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}
    files = {GENERATION: _as_bytes({"_from_model_config": True, **ids})} | (files or {})
    if token_ids:
        generation = json.loads(files[GENERATION])
        files[GENERATION] = _as_bytes(generation | token_ids)
    written = files | {CONFIG: _as_bytes(config | {"torch_dtype": dtype})}
    return Export(chosen.name, dtype, plan, tensors, written)


def make_config(
    network: Network,
    name: str | None = None,
    record: dict[str, Any] | None = None,
) -> tuple[Family, dict[str, Any]]:
    """Return a family and its config.json, but for the dtype. Arguments and errors are
    those of `plan_model`."""
    values = fields.flatten(network)
    if record is not None:
        came_from = as_architecture(record, f"{CONFIG} of the original: ")
        if name not in (None, came_from.family):
            raise ValueError(
                f"the model came from {came_from.family}, and would be written as "
                f"{name}: leave out one of the two"
            )
        name = came_from.family
        before = fields.flatten(fields.make_network(came_from.fields))
        if (field := fields.difference(values, before)) is not None:
            raise ValueError(
                f"{fields.title(field)}={values[field]!r}, and {CONFIG} of the "
                f"original says {before[field]!r}: a model is written as it was "
                "imported"
            )
    if name is not None and name not in FAMILIES:
        raise ValueError(f"no family {name!r}: it must be one of {', '.join(FAMILIES)}")
    reasons = []
    for family in FAMILIES.values() if name is None else (FAMILIES[name],):
        try:
            return family, config_of(family, network, record)
        except ValueError as error:
            reasons.append(f"as {family.name} ({error})")
    raise ValueError(f"the model cannot be written {'; '.join(reasons)}")


def config_of(
    family: Family, network: Network, record: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the config.json of a network as this family, with the keys of `record`
    that no field of ours says. Raises ValueError if it cannot say what the network
    is."""
    values = fields.flatten(network)
    has_dense = "dense" in values["layers.ff"]
    dropped = (*DROPPED, *ROPE_KEYS)
    config = {key: v for key, v in (record or {}).items() if key not in dropped}
    if record is None:
        config = {"max_position_embeddings": network.seq_len}
        config |= dict.fromkeys(TOKEN_IDS)
    for setting in family.settings:
        setting.write(values, config)
    config |= {"architectures": [family.class_name], "model_type": family.name}
    if config.get("num_nextn_predict_layers"):
        config["num_nextn_predict_layers"] = 0  # they are not written
    if not has_dense:
        values.pop("model.d_ff", None)
    check_rest(values)
    again = as_architecture(config, "").fields
    before, after = map(fields.flatten, (network, fields.make_network(again)))
    assert fields.difference(before, after) is None, (before, after)
    return config


def _leaves(family: Family, network: Network, params, router_bias) -> tree.Leaves:
    """Return all leaves as views, checked against the shapes of the network."""
    shapes, bias_shapes = tree.abstract(family, network)
    given, given_bias = tree.as_leaves(params), tree.as_leaves(router_bias)
    assert given.keys() == shapes.keys(), given.keys() ^ shapes.keys()
    assert given_bias.keys() == bias_shapes.keys()
    leaves = {}
    for path, leaf in (given | given_bias).items():
        view = leaf if isinstance(leaf, View) else views.held(np.asarray(leaf))
        assert view.shape == (shapes | bias_shapes)[path].shape, path
        leaves[path] = view
    if not tree.has_bias(family, network):
        bias_le = leaves.pop(tree.bias_path(network)).read()
        if bias_le.any():
            raise ValueError(
                f"{family.name} has no correction bias of the router, and that of the "
                "run is not zero (Router.bias_rate): name another family"
            )
    return leaves


def _as_bytes(record: Mapping[str, Any]) -> bytes:
    return (json.dumps(record, indent=2, sort_keys=True) + "\n").encode()
