"""RoPE in config.json: its base and scaling, in the spellings of transformers 4 and 5.

    4   rope_theta, rope_scaling (null, or with rope_type or type), and
        partial_rotary_factor
    5   rope_parameters, which has all of them

The spelling of transformers 4 is written: transformers 5 reads it too.
"""

import dataclasses
from typing import Any

from moejax.interop.config_json import ConfigJson
from moejax.interop.settings import Setting, inexpressible

TYPES = {"default": "none", "linear": "linear", "yarn": "yarn", "llama3": "llama3"}
KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
"""Keys of both spellings at the top of config.json."""
IGNORED = frozenset(["finetuned"])
"""Keys of a scaling that transformers does not read."""
LONGEST = "original_max_position_embeddings"
NUMBERS = {
    "none": {},
    "linear": {},
    "yarn": {"beta_fast": 32.0, "beta_slow": 1.0},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
"""Numbers of each scaling beside its factor, with their defaults."""


@dataclasses.dataclass(frozen=True)
class RopeKeys(Setting):
    """The rotary embedding."""

    theta: float = 10_000.0
    """Base if config.json has none."""
    has_mscale: bool = False
    """Whether mscale and mscale_all_dim scale the softmax too (DeepSeek)."""
    partial: float | None = None
    """partial_rotary_factor if config.json has none; None: it must be 1."""
    missing: dict[str, Any] | None = None
    """Scaling if config.json says nothing of RoPE but its base. Null is this for
    transformers 5 and no scaling for 4, and is refused."""

    def read(self, config, values) -> None:
        old, new = config.object("rope_scaling"), config.object("rope_parameters")
        if old is not None and new is not None:
            raise config.error("rope_scaling", "contradicts rope_parameters: keep one")
        scaling = old or new
        if scaling is None:
            is_null = not {"rope_scaling", "rope_parameters"}.isdisjoint(config.record)
            if self.missing and is_null:
                raise config.error(
                    "rope_scaling", "is ambiguous: say the rope_type, such as 'default'"
                )
            scaling = ConfigJson(dict(self.missing or {}), "")
        theta = _one_of(config, scaling, "rope_theta", self.theta)
        values["model.rope_theta"] = theta
        key = "partial_rotary_factor"
        partial = _one_of(config, scaling, key, self.partial or 1.0)
        if partial > 1 or (partial != 1 and self.partial is None):
            limit = "at most 1" if self.partial else "1 in this family"
            at = scaling if key in scaling else config
            raise at.error(key, f"must be {limit}")
        values["rope.partial_rotary_factor"] = partial
        kind = values["rope.scaling"] = _scaling_type(scaling)
        if kind != "none":
            values["rope.factor"] = scaling.get("factor", "number from 1")
        longest = config.get("max_position_embeddings", "whole", 4096, 4096)
        scaling.take(LONGEST)
        if NUMBERS[kind]:
            values[f"rope.{LONGEST}"] = scaling.get(LONGEST, "whole", longest, longest)
        for name, default in NUMBERS[kind].items():
            values[f"rope.{name}"] = scaling.get(name, "number", default, default)
        if kind == "yarn":
            values["rope.truncate"] = scaling.get("truncate", "flag", True)
            scaling.only("attention_factor")
            for name in ("mscale", "mscale_all_dim"):
                if self.has_mscale:
                    number = scaling.get(name, "number from 0", 0.0, 0.0)
                    values[f"rope.{name}"] = number
                else:
                    scaling.only(name, 0)
        scaling.finish(IGNORED)

    def write(self, values, record) -> None:
        record["rope_theta"] = values.pop("model.rope_theta")
        given = {
            name.removeprefix("rope."): values.pop(name)
            for name in [name for name in values if name.startswith("rope.")]
        }
        partial, kind = given.pop("partial_rotary_factor"), given.pop("scaling")
        if self.partial is not None:
            record["partial_rotary_factor"] = partial
        elif partial != 1:
            raise inexpressible("rope.partial_rotary_factor", partial, "1.0")
        title = next(title for title, name in TYPES.items() if name == kind)
        if kind == "none":
            record["rope_scaling"] = {"rope_type": title} if self.missing else None
            return
        scaling = {"rope_type": title, "type": title, "factor": given["factor"]}
        if NUMBERS[kind]:
            names = (LONGEST, *NUMBERS[kind])
            scaling |= {name: given[name] for name in names}
        if kind == "yarn":
            scaling["truncate"] = given["truncate"]
            for name in ("mscale", "mscale_all_dim"):
                if given[name] and not self.has_mscale:
                    raise inexpressible(f"rope.{name}", given[name], "0.0")
                if given[name]:
                    scaling[name] = given[name]
        record["rope_scaling"] = scaling


def _scaling_type(scaling: ConfigJson) -> str:
    """Return the kind of a scaling, which has two names."""
    names = ("rope_type", "type")
    kinds = {scaling.choice(key, TYPES) for key in names if key in scaling}
    for key in names:
        scaling.take(key)
    if len(kinds) > 1:
        raise scaling.error("type", "contradicts rope_type")
    return kinds.pop() if kinds else "none"


def _one_of(config: ConfigJson, scaling: ConfigJson, key: str, default: float) -> float:
    """Return a number that either object may have."""
    found = [at.get(key, "number") for at in (config, scaling) if key in at]
    for at in (config, scaling):
        at.take(key)
    if len(set(found)) > 1:
        raise scaling.error(key, f"contradicts {key}={found[0]:g} beside it")
    return found[0] if found else default
