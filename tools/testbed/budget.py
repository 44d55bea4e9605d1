"""Bytes of one device that a layout takes for slots and exchange buffers.

slots      weights in slots beside the master parameters, in the compute dtype, of
           all layers that have them at once
buffers    rows that one exchange sends and receives, in the compute dtype
"""

import dataclasses
from collections.abc import Iterable, Mapping

from moejax.config import Config
from moejax.plan.layout import ITEMSIZE

AHEAD = 3
"""Layers whose slots are there at once where they are fetched a layer ahead and are not
kept for the backward pass."""


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Bytes of one device."""

    slots: int
    buffers: int

    @property
    def total(self) -> int:
        return self.slots + self.buffers


def used(layout: Mapping, cfg: Config) -> Bytes:
    """Return the bytes of a layout, given as the dict of its fields."""
    itemsize = ITEMSIZE[cfg.model.compute_dtype]
    expert = 3 * cfg.model.d_model * cfg.moe.d_expert * itemsize
    row = cfg.model.d_model * itemsize
    chunks = layout["num_devices"] + layout["home_chunks"] - 1
    return Bytes(
        slots=_slot_layers(layout, cfg) * layout["slots_per_device"] * expert,
        buffers=2 * chunks * layout["rows_per_peer"] * row,
    )


def most_used(layout: Mapping, decisions: Iterable[Mapping], cfg: Config) -> Bytes:
    """Return the bytes of the largest of a run's layouts: the first one, and those of
    the relayouts among its decisions, as metrics.jsonl has them."""
    layout = dict(layout)
    largest = used(layout, cfg)
    for decision in decisions:
        for field, (_, after) in (decision.get("changes") or {}).items():
            layout[field] = after
        largest = max(largest, used(layout, cfg), key=lambda x: x.total)
    return largest


def limit(home: Mapping, slots_per_device: int, cfg: Config) -> int:
    """Return the budget of every arm: the buffers of the layout `home`, and
    `slots_per_device` slots in each MoE layer."""
    resident = dict(home, store="resident", slots_per_device=slots_per_device)
    return used(resident, cfg).total


def require_within(name: str, layout: Mapping, most_bytes: int, cfg: Config) -> None:
    """Raise ValueError if the first layout of an arm exceeds the budget."""
    total = used(layout, cfg).total
    if total > most_bytes:
        raise ValueError(
            f"arm {name} takes {total} bytes a device for slots and buffers, and the "
            f"budget is {most_bytes}: give it fewer slots or smaller buffers in "
            "tools/testbed/arms.py"
        )


def _slot_layers(layout: Mapping, cfg: Config) -> int:
    """Return the number of MoE layers whose slots a device has at once beside its
    master parameters (docs/balance.md has the same table in words)."""
    num_layers, store = cfg.model.num_moe_layers, layout["store"]
    if store == "owned":
        return 0
    if store == "resident" or cfg.model.remat == "none":
        return num_layers
    return min(AHEAD if layout["prefetch"] else 1, num_layers)
