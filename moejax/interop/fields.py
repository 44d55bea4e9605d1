"""Fields of the configuration that make up an architecture, as one flat dict.

Values are keyed "part.field", such as "model.d_model". In place of the fields that
repeat kinds of layers with periods, there are two tuples with an entry for each layer:

    layers.ff           'dense' or 'moe'
    layers.attention    kinds of attention (moejax.config.LayerAttention)
"""

import dataclasses
from typing import Any

from moejax.config import Attention, Config, Mla, Model, Moe, Network, Rope, Router

Values = dict[str, Any]

PARTS = {
    "model": Model,
    "attention": Attention,
    "rope": Rope,
    "mla": Mla,
    "moe": Moe,
    "router": Router,
}
COMPUTED = (
    "model.from_hf", "model.attention", "model.remat", "model.compute_dtype",
    "model.gradient_reduce_dtype", "moe.halves",
)  # fmt: skip
"""Fields that say where a model comes from and how it is computed, and not what."""
PERIODS = (
    "model.first_k_dense", "model.moe_every", "model.layers", "attention.layers",
)  # fmt: skip
ROUTER = (
    "kind", "normalise_gates", "gate_scale", "bias", "gate_input", "num_groups",
    "top_groups",
)  # fmt: skip
"""Fields of Router that change the function; the others are for training."""


def _names() -> tuple[str, ...]:
    names = []
    for part, kind in PARTS.items():
        fields = [field.name for field in dataclasses.fields(kind)]
        names += [f"{part}.{name}" for name in (ROUTER if part == "router" else fields)]
    return tuple(name for name in names if name not in COMPUTED)


NAMES = _names()
"""All fields of an architecture."""


def names_by_part() -> dict[str, set[str]]:
    """Return the names of the fields of an architecture, by part."""
    names = {part: set() for part in PARTS}
    for name in NAMES:
        part, field = name.split(".")
        names[part].add(field)
    return names


DEFAULTS: Values = {
    name: getattr(getattr(Config(), name.split(".")[0]), name.split(".")[1])
    for name in NAMES
}


def flatten(network: Network) -> Values:
    """Return the values of a network. Fields that have no effect in it, such as the
    limits of a scaling that is off, have their defaults."""
    values = {}
    for name in NAMES:
        part, field = name.split(".")
        values[name] = getattr(getattr(network, part), field)
    for name in PERIODS:
        del values[name]
    model, kinds = network.model, network.attention.layers
    rest = range(model.num_layers - model.first_k_dense)
    period = model.period
    values["layers.ff"] = ("dense",) * model.first_k_dense + tuple(
        period[i % len(period)] for i in rest
    )
    values["layers.attention"] = tuple(
        kinds[i % len(kinds)] for i in range(model.num_layers)
    )
    if network.moe.num_shared_experts:
        values["moe.d_shared"] = network.moe.shared_width
    if values["attention.scale"] == network.query_dim**-0.5:
        values["attention.scale"] = None
    for name in _inactive(network):
        values[name] = DEFAULTS[name]
    return values


def _inactive(network: Network) -> list[str]:
    """Return the fields that have no effect."""
    rope, moe, router = network.rope, network.moe, network.router
    off = []
    ramps = {
        "yarn": ("beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
        "llama3": ("low_freq_factor", "high_freq_factor"),
    }
    for scaling, names in ramps.items():
        if rope.scaling != scaling:
            off += [f"rope.{name}" for name in names]
    if rope.scaling not in ramps:
        off.append("rope.original_max_position_embeddings")
    if rope.scaling == "none":
        off.append("rope.factor")
    if network.is_latent:
        off.append("model.head_dim")
    else:
        off += [name for name in NAMES if name.startswith("mla.")]
    if not network.attention.temperature_scale:
        off.append("attention.temperature_floor")
    if moe.activation == "swiglu":
        off += ["moe.swiglu_limit", "moe.swiglu_alpha"]
    if not moe.num_shared_experts:
        off.append("moe.d_shared")
    if router.num_groups == 1:
        off.append("router.top_groups")
    return off


def difference(values: Values, others: Values) -> str | None:
    """Return the first field in which two models differ, or None. The width of dense
    layers is none where there are no dense layers, nor is the number of shared experts
    that make up one width."""
    for name, value in values.items():
        has_dense = "dense" in values["layers.ff"]
        if name == "model.d_ff" and not has_dense:
            continue
        if name == "moe.num_shared_experts" and value and others[name]:
            continue
        if value != others[name]:
            return name
    return None


def title(name: str) -> str:
    """Return the name of a field as gin and messages have it, such as Model.d_model."""
    part, field = name.split(".")
    return f"{part.title()}.{field}"


def nested(values: Values) -> dict[str, dict[str, Any]]:
    """Return fields by part, all of an architecture, from values that may be without
    some. Kinds of layers are written as the shortest periods."""
    values = dict(values)
    num_layers = values["model.num_layers"]
    ff = values.pop("layers.ff", ("moe",) * num_layers)
    attention = values.pop("layers.attention", ("full",) * num_layers)
    values |= _as_periods(ff, attention)
    values.setdefault("model.d_ff", values["moe.d_expert"])
    by_part: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for name in NAMES:
        part, field = name.split(".")
        by_part[part][field] = values.pop(name, DEFAULTS[name])
    assert not values, values
    return by_part


def make_network(fields: dict[str, dict[str, Any]]) -> Network:
    """Return the network of fields by part. Raises ValueError for values that are out
    of range or do not go together."""
    parts = {part: kind(**fields[part]) for part, kind in PARTS.items()}
    return Config(**parts).network


def _as_periods(ff: tuple[str, ...], attention: tuple[str, ...]) -> Values:
    """Return the fields that repeat kinds of layers.

    Dense layers at the start are a prefix if all others are MoE layers and all have
    attention of one kind.
    """
    first = ff.index("moe") if "moe" in ff else 0
    is_prefix = "dense" not in ff[first:] and len(set(attention)) == 1
    period = ("moe",) if is_prefix else _period(ff)
    is_every = period == ("dense",) * (len(period) - 1) + ("moe",)
    return {
        "model.first_k_dense": first if is_prefix else 0,
        "model.moe_every": len(period) if is_every else 1,
        "model.layers": None if is_every else period,
        "attention.layers": _period(attention),
    }


def _period(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Return the shortest part of which a tuple consists of whole copies."""
    num = len(kinds)
    sizes = (size for size in range(1, num + 1) if num % size == 0)
    return next(kinds[:s] for s in sizes if kinds == kinds[:s] * (num // s))
