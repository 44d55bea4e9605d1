"""Settings: what ties keys of config.json to fields of our configuration, both ways.

A family is a tuple of settings. Each one reads its keys into values (fields.py), and
takes its values out again to write its keys; values that no setting takes must be those
that a family without that option has.
"""

import dataclasses
from typing import Any

from moejax.interop.config_json import REQUIRED, ConfigJson
from moejax.interop.fields import DEFAULTS, Values, title

Record = dict[str, Any]


class Setting:
    """Some keys of config.json and the fields that they say."""

    def read(self, config: ConfigJson, values: Values) -> None:
        """Set fields by keys. Raises ValueError, one line, for a value that is not
        supported."""
        raise NotImplementedError

    def write(self, values: Values, record: Record) -> None:
        """Take fields out of the values, and set the keys that say them, if any. Raises
        ValueError, one line, for a value that the keys cannot say."""


@dataclasses.dataclass(frozen=True)
class Key(Setting):
    """A key whose number is a field."""

    key: str
    field: str
    default: Any = REQUIRED
    """Value if the key is absent."""
    null: Any = REQUIRED
    """Value if it is null."""
    rule: str = "whole"
    """Rule of RULES."""
    others: tuple[str, ...] = ()
    """Other names of the key; all that are there must agree."""

    def read(self, config, values) -> None:
        given = [key for key in (self.key, *self.others) if key in config]
        for key in self.others:
            config.take(key)
        found = [config.get(key, self.rule) for key in given]
        for key, value in zip(given, found):
            if value != found[0]:
                raise config.error(key, f"contradicts {given[0]}={found[0]}")
        values[self.field] = (
            found[0] if found else config.take(self.key, self.default, self.null)
        )

    def write(self, values, record) -> None:
        for key in self.others:
            record.pop(key, None)
        record[self.key] = values.pop(self.field)


@dataclasses.dataclass(frozen=True)
class Flag(Setting):
    """A key whose true and false are two values of a field."""

    key: str
    field: str
    default: Any = REQUIRED
    off: Any = False
    on: Any = True

    def read(self, config, values) -> None:
        is_on = config.get(self.key, "flag", self.default)
        values[self.field] = self.on if is_on else self.off

    def write(self, values, record) -> None:
        value = values.pop(self.field)
        if value not in (self.off, self.on):
            raise inexpressible(self.field, value, f"{self.off!r} or {self.on!r}")
        record[self.key] = value == self.on


@dataclasses.dataclass(frozen=True)
class Constant(Setting):
    """A field that all models of a family share, and no key says."""

    field: str
    value: Any

    def read(self, config, values) -> None:
        values[self.field] = self.value

    def write(self, values, record) -> None:
        value = values.pop(self.field)
        if value != self.value:
            raise inexpressible(self.field, value, repr(self.value))


@dataclasses.dataclass(frozen=True)
class Only(Setting):
    """A key that is supported with one value alone, or only null. The value is written
    if `is_written`."""

    key: str
    value: object
    is_written: bool = True

    def read(self, config, values) -> None:
        config.only(self.key, *(() if self.value is None else (self.value,)))

    def write(self, values, record) -> None:
        if self.is_written and self.value is not None:
            record[self.key] = self.value


@dataclasses.dataclass(frozen=True)
class NullAlone(Setting):
    """A key that must be there and null, because transformers takes a number for it
    where it is absent."""

    key: str

    def read(self, config, values) -> None:
        if self.key in config or self.key not in config.record:
            raise config.error(self.key, "is not supported: it must be there, and null")
        config.take(self.key)


@dataclasses.dataclass(frozen=True)
class Ignored(Setting):
    """Keys that change nothing beside the other keys of their family."""

    keys: tuple[str, ...]

    def read(self, config, values) -> None:
        for key in self.keys:
            config.take(key)


class KeyHeads(Setting):
    """Number of key heads; without the key, the number of query heads."""

    def read(self, config, values) -> None:
        num_heads = values["model.num_heads"]
        num = config.get("num_key_value_heads", "whole", num_heads, num_heads)
        values["model.num_kv_heads"] = num

    def write(self, values, record) -> None:
        record["num_key_value_heads"] = values.pop("model.num_kv_heads")


@dataclasses.dataclass(frozen=True)
class HeadDim(Setting):
    """The width of a head: hidden_size over num_attention_heads if it is not given."""

    default: int | None = None
    """Width if the key is absent, in families that have one."""
    is_usual: bool = True
    """Whether the family's config.json has the key also where it says nothing new."""

    def read(self, config, values) -> None:
        heads, width = values["model.num_heads"], values["model.d_model"]
        even = REQUIRED if width % heads else width // heads
        default = self.default or even
        values["model.head_dim"] = config.get("head_dim", "whole", default, even)

    def write(self, values, record) -> None:
        head_dim = values.pop("model.head_dim")
        total = head_dim * record["num_attention_heads"]
        if self.is_usual or total != record["hidden_size"]:
            record["head_dim"] = head_dim


@dataclasses.dataclass(frozen=True)
class SharedExperts(Setting):
    """The number of shared experts that are as wide as a routed one."""

    key: str
    default: int

    def read(self, config, values) -> None:
        num = config.get(self.key, "count", self.default, 0)
        values["moe.num_shared_experts"] = num

    def write(self, values, record) -> None:
        num = values.pop("moe.num_shared_experts")
        width, d_expert = values.pop("moe.d_shared"), record["moe_intermediate_size"]
        if num and width % d_expert:
            multiple = f"a multiple of Moe.d_expert={d_expert} all together"
            raise inexpressible("moe.d_shared", width, multiple)
        record[self.key] = width // d_expert if num else 0


@dataclasses.dataclass(frozen=True)
class OneSharedExpert(Setting):
    """The one shared expert. `key` is its width; None: that of a routed one."""

    key: str | None = None

    def read(self, config, values) -> None:
        values["moe.num_shared_experts"] = 1
        if self.key is not None:
            values["moe.d_shared"] = config.get(self.key, "whole")

    def write(self, values, record) -> None:
        num, width = values.pop("moe.num_shared_experts"), values.pop("moe.d_shared")
        if not num or (self.key is None and width != record["intermediate_size"]):
            allowed = "1 or more" if self.key else "1, as wide as others"
            raise inexpressible("moe.num_shared_experts", num, allowed)
        if self.key is not None:
            record[self.key] = width


@dataclasses.dataclass(frozen=True)
class Groups(Setting):
    """The groups of experts that a choice is limited to; null is one group."""

    num_groups: int = 1
    """Number of groups if it is not given."""
    top_groups: int = 1
    can_be_greedy: bool = False
    """Whether topk_method may say that there are no groups (DeepSeek-V2)."""

    def read(self, config, values) -> None:
        num_groups = config.get("n_group", "whole", self.num_groups, 1)
        top_groups = config.get("topk_group", "whole", self.top_groups, 1)
        if self.can_be_greedy:
            methods = {"greedy": False, "group_limited_greedy": True}
            if not config.choice("topk_method", methods, False):
                num_groups = top_groups = 1
        values["router.num_groups"] = num_groups
        values["router.top_groups"] = top_groups

    def write(self, values, record) -> None:
        record["n_group"] = values.pop("router.num_groups")
        record["topk_group"] = values.pop("router.top_groups")
        if self.can_be_greedy:
            has_groups = record["n_group"] > 1
            record["topk_method"] = "group_limited_greedy" if has_groups else "greedy"


class AttentionMultiplier(Setting):
    """The softmax scale of Granite, which is always given."""

    def read(self, config, values) -> None:
        values["attention.scale"] = config.get("attention_multiplier", "number", 1.0)

    def write(self, values, record) -> None:
        width = record["hidden_size"] // record["num_attention_heads"]
        usual = record.get("head_dim", width) ** -0.5
        record["attention_multiplier"] = values.pop("attention.scale") or usual


class SmallestSum(Setting):
    """The least sum by which ERNIE divides gates, which no sum is below: the gates of
    top_k experts sum to at least top_k / num_experts."""

    MAX = 1e-6

    def read(self, config, values) -> None:
        if config.get("moe_norm_min", "number from 0", 1e-12) > self.MAX:
            raise config.error("moe_norm_min", f"must be at most {self.MAX:g}")

    def write(self, values, record) -> None:
        record["moe_norm_min"] = 1e-12


def inexpressible(field: str, value: object, allowed: str) -> ValueError:
    """Return the error that a family has no key for a field's value."""
    return ValueError(f"{title(field)}={value!r}: it must be {allowed}")


def check_rest(values: Values) -> None:
    """Raise ValueError if a value that no setting took is not its default."""
    for name, kind in (("layers.ff", "moe"), ("layers.attention", "full")):
        others = sorted(set(values.pop(name, ())) - {kind})
        if others:
            raise ValueError(f"layers of kind {others[0]!r}: all must be {kind!r}")
    for name, value in values.items():
        if value != DEFAULTS[name]:
            raise inexpressible(name, value, repr(DEFAULTS[name]))
