"""Settings: what ties keys of config.json to fields of our configuration, both ways.

A family is a tuple of settings. Each one reads its keys into values (fields.py), and
takes its values out again to write its keys; values that no setting takes must be those
that a family without that option has.
"""

import abc
import dataclasses
from typing import Any

from moejax.config.checks import MAX_LAYERS
from moejax.interop.config_json import REQUIRED, ConfigJson
from moejax.interop.fields import DEFAULTS, Values, title

Record = dict[str, Any]


class Setting(abc.ABC):
    """Some keys of config.json and the fields that they say."""

    @abc.abstractmethod
    def read(self, config: ConfigJson, values: Values) -> None:
        """Set fields by keys. Raises ValueError, one line, for a value that is not
        supported."""

    @abc.abstractmethod
    def write(self, values: Values, record: Record) -> None:
        """Take fields out of the values, and set the keys that say them. Raises
        ValueError, one line, for a value that the keys cannot say."""


@dataclasses.dataclass(frozen=True)
class Whole(Setting):
    """A key whose whole number is a field."""

    key: str
    field: str
    default: Any = REQUIRED
    """Value if the key is absent."""
    null: Any = REQUIRED
    """Value if it is null."""
    other_keys: tuple[str, ...] = ()
    """Other names of the key; all that are there must agree."""

    def read(self, config, values) -> None:
        most = MAX_LAYERS if self.field == "model.num_layers" else 2**31 - 1
        keys = [key for key in (self.key, *self.other_keys) if key in config]
        found = [config.whole(key, most=most) for key in keys]
        for key in {self.key, *self.other_keys} - set(keys):
            config.take(key)
        if not found:
            found = [config.take(self.key, self.default, self.null)]
        for key, value in zip(keys, found):
            if value != found[0]:
                raise config.error(key, f"contradicts {keys[0]}={found[0]}")
        values[self.field] = found[0]

    def write(self, values, record) -> None:
        for key in self.other_keys:
            record.pop(key, None)
        record[self.key] = values.pop(self.field)


@dataclasses.dataclass(frozen=True)
class Number(Setting):
    """A key whose number, above 0, is a field."""

    key: str
    field: str
    default: Any = REQUIRED
    null: Any = REQUIRED

    def read(self, config, values) -> None:
        values[self.field] = config.number(self.key, self.default, self.null)

    def write(self, values, record) -> None:
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
        is_on = config.flag(self.key, self.default)
        values[self.field] = self.on if is_on else self.off

    def write(self, values, record) -> None:
        value = values.pop(self.field)
        if value not in (self.off, self.on):
            allowed = f"{self.off!r} or {self.on!r}"
            raise inexpressible(self.field, value, allowed)
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
    """A key that is supported with one value alone, or with several that mean the same.
    The first one is written, if the key is new and `is_written`."""

    key: str
    values: tuple[object, ...]
    is_written: bool = True

    def read(self, config, values) -> None:
        config.only(self.key, *self.values)

    def write(self, values, record) -> None:
        if self.is_written and self.values:
            record.setdefault(self.key, self.values[0])


@dataclasses.dataclass(frozen=True)
class Ignored(Setting):
    """A key that changes nothing beside the other keys of its family."""

    key: str

    def read(self, config, values) -> None:
        config.take(self.key)

    def write(self, values, record) -> None:
        """Leave the key as it is."""


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
        values["model.head_dim"] = config.whole("head_dim", self.default or even, even)

    def write(self, values, record) -> None:
        head_dim = values.pop("model.head_dim")
        total = head_dim * record["num_attention_heads"]
        if self.is_usual or total != record["hidden_size"]:
            record["head_dim"] = head_dim
        else:
            record.pop("head_dim", None)


@dataclasses.dataclass(frozen=True)
class DensePrefix(Setting):
    """The number of dense layers before all others, which are MoE layers."""

    key: str
    default: int

    def read(self, config, values) -> None:
        num_layers = values["model.num_layers"]
        num = min(config.whole(self.key, self.default, least=0), num_layers)
        values["layers.ff"] = ("dense",) * num + ("moe",) * (num_layers - num)

    def write(self, values, record) -> None:
        kinds = values["layers.ff"]
        num = kinds.index("moe")
        if "dense" in kinds[num:]:
            raise ValueError("a dense layer after an MoE layer: all must be before")
        record[self.key] = num
        values["layers.ff"] = ("moe",)


class FullAttention(Setting):
    """Kinds of attention, in families that have full attention alone."""

    def read(self, config, values) -> None:
        num_layers = values["model.num_layers"]
        config.names("layer_types", {"full_attention": "full"}, num_layers)

    def write(self, values, record) -> None:
        """Leave the key as it is."""


@dataclasses.dataclass(frozen=True)
class SharedExperts(Setting):
    """The number of shared experts that are as wide as a routed one."""

    key: str
    default: Any = 0

    def read(self, config, values) -> None:
        num = config.whole(self.key, self.default, null=0, least=0)
        values["moe.num_shared_experts"] = num

    def write(self, values, record) -> None:
        num = values.pop("moe.num_shared_experts")
        width, d_expert = values.pop("moe.d_shared"), record["moe_intermediate_size"]
        if num and width % d_expert:
            multiple = f"a multiple of Moe.d_expert={d_expert} all together"
            raise inexpressible("moe.d_shared", width, multiple)
        record[self.key] = width // d_expert if num else 0


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
