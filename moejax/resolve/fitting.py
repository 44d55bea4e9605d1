"""Changes of a configuration after which a run fits into the memory of a device."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from moejax.config import Config

MAX_DOUBLINGS = 6
"""Number of times that micro-batches or devices are doubled, at most."""


class Change(NamedTuple):
    """A change of a configuration after which a run fits."""

    why: str
    """Effect of the change, and its cost."""
    params: tuple[str, ...]
    """Values for --gin_param: 'Mesh.data = 2'."""
    total_bytes: int
    """Predicted bytes of one device after the change."""
    cfg: Config
    """Configuration with the change."""


class _Remedy(NamedTuple):
    """One way to take less memory."""

    why: str
    values: dict[str, Any]
    """New values of fields, by the names that gin gives them."""


def find_changes(
    cfg: Config, usable_bytes: int, total_of: Callable[[Config], int], count: int
) -> list[Change]:
    """Return up to `count` changes after which a device needs at most `usable_bytes`.

    Single remedies come first: those that change neither the function nor the devices,
    then more devices, then what the run computes. Pairs follow where too few of them
    help by themselves. Of one remedy in several sizes the smallest that helps is taken.
    `total_of` predicts the bytes of a device; a configuration for which it raises
    ValueError or NotImplementedError is not valid.
    """
    families = [list(family) for family in _families(cfg)]
    found: list[Change] = []
    alone = set()
    for size in (1, 2):
        for chosen in itertools.combinations(range(len(families)), size):
            if alone & set(chosen):
                continue  # a part of it helps already
            change = _smallest(
                cfg, [families[i] for i in chosen], usable_bytes, total_of
            )
            if change is None:
                continue
            found.append(change)
            if size == 1:
                alone.add(chosen[0])
            if len(found) == count:
                return found
    return found


def _smallest(cfg, families, usable_bytes, total_of) -> Change | None:
    """Return the first combination of one remedy of each family that helps."""
    for remedies in itertools.product(*families):
        values = {name: x for remedy in remedies for name, x in remedy.values.items()}
        try:
            changed = _with_values(cfg, values)
            total = total_of(changed)
        except (ValueError, NotImplementedError):
            continue
        if total <= usable_bytes:
            why = "; ".join(remedy.why for remedy in remedies)
            params = tuple(f"{name} = {json.dumps(x)}" for name, x in values.items())
            return Change(why, params, total, changed)
    return None


def _families(cfg: Config) -> Iterator[Iterator[_Remedy]]:
    """Return the remedies for a configuration, by family; a family has one remedy in
    several sizes, the smallest first."""
    yield _smaller_moments(cfg)
    yield _less_kept(cfg)
    yield _smaller_micro_batches(cfg)
    for axis in ("data", "expert", "tensor"):
        yield _more_devices(cfg, axis)
    yield _shorter_windows(cfg)


def _smaller_moments(cfg: Config) -> Iterator[_Remedy]:
    if cfg.optimizer.mu_dtype != "bfloat16":
        why = "first moments in bfloat16: a change of precision"
        yield _Remedy(why, {"Optimizer.mu_dtype": "bfloat16"})


def _less_kept(cfg: Config) -> Iterator[_Remedy]:
    if cfg.model.remat in ("none", "dispatch"):
        why = "layers keep their routes alone, and compute the rest again"
        yield _Remedy(why, {"Model.remat": "full"})
    if cfg.model.remat != "offload" and not cfg.train.num_simulated_devices:
        why = "inputs of layers rest in the host's memory"
        yield _Remedy(why, {"Model.remat": "offload"})


def _smaller_micro_batches(cfg: Config) -> Iterator[_Remedy]:
    rows = cfg.train.batch_size // cfg.mesh.num_batch_shards
    for factor in _doublings():
        steps = cfg.train.accumulate_steps * factor
        if rows % steps == 0:
            why = f"{factor} times as many micro-batches, each smaller: the same batch"
            yield _Remedy(why, {"Train.accumulate_steps": steps})


def _more_devices(cfg: Config, axis: str) -> Iterator[_Remedy]:
    """Return meshes that are longer along one axis. If the axis splits the batch and
    the batch has too few sequences, there are fewer micro-batches."""
    for factor in _doublings():
        values: dict[str, Any] = {f"Mesh.{axis}": getattr(cfg.mesh, axis) * factor}
        rows = cfg.train.batch_size // cfg.mesh.num_batch_shards
        rows //= 1 if axis == "tensor" else factor
        if 0 < rows < cfg.train.accumulate_steps:
            values["Train.accumulate_steps"] = rows
        if cfg.train.num_simulated_devices:
            values["Train.num_simulated_devices"] = cfg.mesh.num_devices * factor
        yield _Remedy(f"{factor} times as many devices, along {axis}", values)


def _shorter_windows(cfg: Config) -> Iterator[_Remedy]:
    for factor in _doublings():
        if cfg.data.seq_len % factor == 0:
            why = f"windows of 1/{factor} of the tokens: another batch and attention"
            yield _Remedy(why, {"Data.seq_len": cfg.data.seq_len // factor})


def _doublings() -> Iterator[int]:
    return (2**i for i in range(1, MAX_DOUBLINGS + 1))


def _with_values(cfg: Config, values: dict[str, Any]) -> Config:
    """Return the configuration with new values, named as gin names fields."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, _, field = name.lower().partition(".")
        sections.setdefault(section, {})[field] = value
    return dataclasses.replace(
        cfg,
        **{
            section: dataclasses.replace(getattr(cfg, section), **fields)
            for section, fields in sections.items()
        },
    )
