"""RoPE in config.json: its base and scaling, in the spellings of transformers 4 and 5.

    4   rope_theta, rope_scaling (null, or with rope_type or type), and
        partial_rotary_factor
    5   rope_parameters, which has all of them

The spelling of transformers 4 is written: transformers 5 reads it too.
"""

import dataclasses
from typing import Any

from moejax.interop.config_json import ConfigJson
from moejax.interop.settings import Record, Setting, inexpressible

TYPES = {"default": "none", "linear": "linear", "yarn": "yarn", "llama3": "llama3"}
IGNORED = frozenset(["finetuned"])
"""Keys of a scaling that transformers does not read."""


@dataclasses.dataclass(frozen=True)
class RopeKeys(Setting):
    """The rotary embedding."""

    theta: float = 10_000.0
    """Base if config.json has none."""
    has_mscale: bool = False
    """Whether mscale and mscale_all_dim scale the softmax too (DeepSeek)."""
    is_partial: bool = False
    """Whether there may be a partial_rotary_factor."""
    partial: float = 1.0
    """partial_rotary_factor if config.json has none."""
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
        partial = _one_of(config, scaling, "partial_rotary_factor", self.partial)
        if partial > 1 or (partial != 1 and not self.is_partial):
            at = scaling if "partial_rotary_factor" in scaling else config
            limit = "at most 1" if self.is_partial else "1 in this family"
            raise at.error("partial_rotary_factor", f"must be {limit}")
        values["rope.partial_rotary_factor"] = partial
        values["rope.scaling"] = self._type(scaling)
        if values["rope.scaling"] != "none":
            values["rope.factor"] = scaling.number("factor", least=1, above=False)
        longest = config.whole("max_position_embeddings", 4096, 4096)
        if values["rope.scaling"] in ("yarn", "llama3"):
            key = "original_max_position_embeddings"
            values[f"rope.{key}"] = scaling.whole(key, longest, longest)
        else:
            scaling.take("original_max_position_embeddings")
        if values["rope.scaling"] == "yarn":
            self._read_yarn(scaling, values)
        if values["rope.scaling"] == "llama3":
            for name, default in (("low_freq_factor", 1.0), ("high_freq_factor", 4.0)):
                values[f"rope.{name}"] = scaling.number(name, default, default)
        scaling.finish(IGNORED)

    def _read_yarn(self, scaling: ConfigJson, values) -> None:
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            values[f"rope.{name}"] = scaling.number(name, default, default)
        values["rope.truncate"] = scaling.flag("truncate", True)
        scaling.only("attention_factor")
        for name in ("mscale", "mscale_all_dim"):
            if self.has_mscale:
                values[f"rope.{name}"] = scaling.number(name, 0.0, 0.0, above=False)
            else:
                scaling.only(name, 0)

    @staticmethod
    def _type(scaling: ConfigJson) -> str:
        kinds = [
            scaling.choice(key, TYPES)
            for key in ("rope_type", "type")
            if key in scaling
        ]
        for key in ("rope_type", "type"):
            scaling.take(key)
        if len(set(kinds)) > 1:
            raise scaling.error("type", "contradicts rope_type")
        return kinds[0] if kinds else "none"

    def write(self, values, record: Record) -> None:
        record.pop("rope_parameters", None)
        record["rope_theta"] = values.pop("model.rope_theta")
        partial = values.pop("rope.partial_rotary_factor")
        if self.is_partial:
            record["partial_rotary_factor"] = partial
        elif partial != 1:
            raise inexpressible("rope.partial_rotary_factor", partial, "1.0")
        given = {
            name.removeprefix("rope."): values.pop(name)
            for name in [name for name in values if name.startswith("rope.")]
        }
        scaling = given.pop("scaling")
        title = next(title for title, name in TYPES.items() if name == scaling)
        if scaling == "none":
            record["rope_scaling"] = {"rope_type": title} if self.missing else None
            return
        names = {
            "linear": ("factor",),
            "yarn": (
                "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
                "truncate", "mscale", "mscale_all_dim",
            ),
            "llama3": (
                "factor", "original_max_position_embeddings", "low_freq_factor",
                "high_freq_factor",
            ),
        }[scaling]  # fmt: skip
        written = {"rope_type": title, "type": title}
        written |= {name: given[name] for name in names}
        for name in ("mscale", "mscale_all_dim"):
            if not self.has_mscale and written.get(name):
                raise inexpressible(f"rope.{name}", written[name], "0.0")
            if not written.get(name):
                written.pop(name, None)
        record["rope_scaling"] = written


def _one_of(config: ConfigJson, scaling: ConfigJson, key: str, default: float) -> float:
    """Return a number that either object may have."""
    found = [at.number(key) for at in (config, scaling) if key in at]
    for at in (config, scaling):
        at.take(key)
    if len(set(found)) > 1:
        raise scaling.error(key, f"contradicts {key}={found[0]:g} beside it")
    return found[0] if found else default
