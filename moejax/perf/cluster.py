"""Descriptions of clusters: a device, and levels of links between such devices.

    level   consists of                     link of a device, in one direction
    node    8 GPUs                          to the other GPUs of its node
    rack    4 nodes                         out of its node
    site    2 racks                         out of its rack

Levels are listed from the inside out, and devices are numbered so that those of a unit
follow one another. `clusters/` has those that ship, one TOML file each; a user's own
file has the same fields:

    target = "h100"            # a GPU of moejax/perf/targets, or a table [device]

    [[level]]
    name = "node"
    size = 8
    rate = "350 GB/s"          # what large transfers reach; GB/s or Gb/s
    latency = "10 us"          # of one collective (default: 0 s)
    sharing = 1                # devices that share a link of this rate (default: 1)
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping

from moejax.perf import descriptions
from moejax.perf import target as targets
from moejax.perf.target import Target

FOLDER = pathlib.Path(__file__).parent / "clusters"
NODE_DEVICES = 8
"""GPUs of a node, where nothing else is known of it."""
MAX_DEVICES = 2**20
UNITS = {
    "rate": {"GB/s": 1e9, "MB/s": 1e6, "TB/s": 1e12, "Gb/s": 1e9 / 8, "Mb/s": 1e6 / 8},
    "time": {"s": 1.0, "ms": 1e-3, "us": 1e-6},
    "speed": {"TFLOP/s": 1e12, "GFLOP/s": 1e9},
    "size": {"GiB": 2.0**30, "GB": 1e9, "MiB": 2.0**20},
}
"""Units that numbers of a file can have, by what is measured: GB is bytes, Gb bits."""
DEVICE_FIELDS = {
    "memory": ("memory_bytes", "size"),
    "dense": ("dense_flops_per_sec", "speed"),
    "grouped": ("grouped_flops_per_sec", "speed"),
    "hbm": ("hbm_bytes_per_sec", "rate"),
}
"""Keys of a table [device], with the fields of a Device and their units."""


@dataclasses.dataclass(frozen=True)
class Device:
    """One device of a cluster, with stated rates."""

    name: str
    """Kind of the device, as jax names it."""
    memory_bytes: float
    dense_flops_per_sec: float
    """Rate of dense products and attention."""
    grouped_flops_per_sec: float
    """Rate of the products of experts."""
    hbm_bytes_per_sec: float

    @classmethod
    def of_target(cls, target: Target) -> "Device":
        """Return the device of a target."""
        rates = target.rates
        return cls(
            target.name,
            target.memory_bytes,
            rates.dense_flops_per_sec,
            rates.grouped_flops_per_sec,
            rates.hbm_bytes_per_sec,
        )


@dataclasses.dataclass(frozen=True)
class Level:
    """A level of links, between the units of the level below it."""

    name: str
    size: int
    """Number of units of the level below it, or of devices, that it connects."""
    bytes_per_sec: float
    """Rate of one link in one direction."""
    latency_sec: float = 0.0
    """Latency of a collective that crosses this level."""
    sharing: int = 1
    """Number of devices that share a link out of their unit."""

    @property
    def device_bytes_per_sec(self) -> float:
        """Rate of one device, if all that share its link send."""
        return self.bytes_per_sec / self.sharing


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A number of equal devices, and the links between them."""

    name: str
    device: Device
    levels: tuple[Level, ...]
    """Levels of links, from the inside out."""

    @property
    def num_devices(self) -> int:
        """Number of devices of the whole cluster."""
        return math.prod(level.size for level in self.levels)

    def with_outer(self, size: int) -> "Cluster":
        """Return this cluster with another number of units in its outermost level."""
        *inner, outer = self.levels
        levels = (*inner, dataclasses.replace(outer, size=size))
        return dataclasses.replace(self, levels=levels)

    def __str__(self) -> str:
        sizes = " x ".join(str(level.size) for level in reversed(self.levels))
        return f"{self.name}: {sizes} {self.device.name}"


def nodes_of(target: Target, num_devices: int) -> Cluster:
    """Return `num_devices` GPUs of a target on nodes of NODE_DEVICES, at its rates."""
    rates, nodes = target.rates, -(-num_devices // NODE_DEVICES)
    levels = (
        Level("node", NODE_DEVICES, rates.nvlink_bytes_per_sec),
        Level("InfiniBand", nodes, rates.infiniband_bytes_per_sec),
    )
    return Cluster(target.name, Device.of_target(target), levels)


def of_device(kind: str, num_devices: int) -> Cluster | None:
    """Return devices of a kind, as jax names it, on nodes of NODE_DEVICES, or None for
    a kind of which no target ships."""
    target = targets.of_device(kind)
    return None if target is None else nodes_of(target, num_devices)


def names() -> list[str]:
    """Return the names of the clusters that ship."""
    return descriptions.names(FOLDER)


def load(name: str) -> Cluster:
    """Return the cluster of a name such as 'h100_2x8', or of a user's TOML file.

    Raises ValueError, in one line, for an unknown name, for a file that cannot be read,
    and for a missing, unknown or wrong field, with its line.
    """
    found = descriptions.read(FOLDER, name, "cluster", "h100_2x8")
    return _Reader(found.path, found.text.splitlines()).cluster(found.fields)


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reader of one file, whose errors name its lines."""

    path: pathlib.Path
    lines: list[str]

    def cluster(self, fields: Mapping) -> Cluster:
        """Return the cluster of a file's fields."""
        self._require_known(fields, {"target", "device", "level"}, 0)
        tables = fields.get("level")
        if not isinstance(tables, list) or not tables:
            raise ValueError(f"{self.path}: no table [[level]]: give one or more")
        levels = tuple(self._level(x, n) for n, x in enumerate(tables, 1))
        cluster = Cluster(self.path.stem, self._device(fields), levels)
        self._check_sharing(cluster)
        return cluster

    def _check_sharing(self, cluster: Cluster) -> None:
        """Raise ValueError for more devices at a link than there are in its unit, and
        for more devices than can be numbered."""
        inside = 1
        for number, level in enumerate(cluster.levels, 1):
            if level.sharing > max(inside, 1):
                raise ValueError(
                    f"{self._at('sharing', number)}: sharing = {level.sharing}, and a "
                    f"unit below level {level.name!r} has {inside} devices: use a "
                    f"number from 1 to {inside}"
                )
            inside *= level.size
        if inside > MAX_DEVICES:
            raise ValueError(
                f"{self.path}: {inside} devices, and at most {MAX_DEVICES} are counted"
            )

    def _device(self, fields: Mapping) -> Device:
        given = [name for name in ("target", "device") if name in fields]
        if len(given) != 1:
            raise ValueError(
                f"{self.path}: give one of target and [device], and not "
                f"{'both' if given else 'none'}"
            )
        if given == ["target"]:
            try:
                return Device.of_target(targets.load(fields["target"]))
            except (ValueError, TypeError) as fault:
                raise ValueError(f"{self._at('target')}: {fault}") from None
        table = fields["device"]
        self._require_known(table, {"name", *DEVICE_FIELDS}, 0)
        values = {
            field: self._quantity(table, key, unit, 0)
            for key, (field, unit) in DEVICE_FIELDS.items()
        }
        return Device(self._word(table, 0), **values)

    def _level(self, table: Mapping, number: int) -> Level:
        self._require_known(
            table, {"name", "size", "rate", "latency", "sharing"}, number
        )
        latency_sec = 0.0
        if "latency" in table:
            latency_sec = self._quantity(table, "latency", "time", number)
        return Level(
            self._word(table, number),
            self._count(table, "size", number),
            self._quantity(table, "rate", "rate", number),
            latency_sec,
            self._count(table, "sharing", number) if "sharing" in table else 1,
        )

    def _require_known(self, table, known: set[str], number: int) -> None:
        if not isinstance(table, Mapping):
            raise ValueError(f"{self.path}: {table!r} must be a table")
        for key in table:
            if key not in known:
                raise ValueError(
                    f"{self._at(key, number)}: unknown field {key!r}: the fields are "
                    f"{', '.join(sorted(known))}"
                )

    def _word(self, table: Mapping, number: int) -> str:
        word = table.get("name")
        if not isinstance(word, str) or not word:
            raise ValueError(f"{self._at('name', number)}: name must be a word")
        return word

    def _count(self, table: Mapping, key: str, number: int) -> int:
        value = table.get(key)
        if type(value) is not int or not 1 <= value <= MAX_DEVICES:
            raise ValueError(
                f"{self._at(key, number)}: {key} = {value!r} must be a whole number "
                f"from 1 to {MAX_DEVICES}"
            )
        return value

    def _quantity(self, table: Mapping, key: str, unit: str, number: int) -> float:
        """Return a number with a unit, in base units."""
        units, value = UNITS[unit], table.get(key)
        found = re.fullmatch(r"([0-9.]+(?:[eE][-+]?[0-9]+)?) *([A-Za-z/]+)", str(value))
        least = 0.0 if key == "latency" else 1e-300
        try:
            size = float(found[1]) * units[found[2]]
            if least <= size < math.inf:
                return size
        except (TypeError, ValueError, KeyError):
            pass
        example = {"rate": "45 GB/s", "time": "10 us"}.get(
            unit, f"80 {next(iter(units))}"
        )
        raise ValueError(
            f"{self._at(key, number)}: {key} = {value!r} must be a number above 0 with "
            f"a unit of {', '.join(units)}, such as {example!r}"
        )

    def _at(self, key: str, number: int = 0) -> str:
        """Return the file, and the line of a key in the `number`-th level, or outside
        of all levels; the line of the level where the key is missing."""
        level, header = 0, None
        for place, line in enumerate(self.lines, 1):
            if line.strip().startswith("[[level]]"):
                level += 1
                header = place if level == number else header
            elif level == number and re.match(rf"\s*{re.escape(key)}\s*=", line):
                return f"{self.path}, line {place}"
        return f"{self.path}, line {header}" if header else str(self.path)
