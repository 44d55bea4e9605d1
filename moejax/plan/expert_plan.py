"""What may change between two steps, in NumPy: which expert each slot holds.

    4 experts on 2 devices, 2 slots each, under the home plan; then with 3 slots each,
    expert 0 replicated and a slot left empty:

    device            0        1                    0            1
    slot p          0   1    2   3              0   1   2    3   4   5
    expert          0   1    2   3              0   1   -    2   3   0

An expert's masters and moments are at its *owner*: position i of `owned_le` is on
device i // (experts per device), as slot p is on device p // (slots per device).
"""

import dataclasses
import hashlib
import json
from typing import NamedTuple

import numpy as np

from moejax.plan.layout import Layout

EMPTY = -1


class Needs(NamedTuple):
    """Budgets of a Layout that a plan takes: most per device, over all layers."""

    offers: int
    copies: int


@dataclasses.dataclass(frozen=True)
class ExpertPlan:
    """Which expert each slot holds, in every MoE layer; host side, and immutable.

    `slot_to_expert_lp` is int32 [layers, slots]; -1 marks an empty slot. Slots
    d*s .. d*s+s-1 belong to device d of the group. `owned_le` is int32 [layers,
    positions]: whose masters lie where; None for logical order.
    """

    slot_to_expert_lp: np.ndarray
    num_experts: int
    owned_le: np.ndarray | None = None

    def __post_init__(self) -> None:
        owned_le = self.owned_le
        if owned_le is None:
            logical_e = np.arange(self.num_experts, dtype=np.int32)
            owned_le = np.tile(logical_e, (len(self.slot_to_expert_lp), 1))
        for name, given in (
            ("slot_to_expert_lp", self.slot_to_expert_lp),
            ("owned_le", owned_le),
        ):
            table = np.array(given)  # a key must not change: own copy
            table.flags.writeable = False
            object.__setattr__(self, name, table)

    @classmethod
    def home(cls, num_layers: int, num_experts: int) -> "ExpertPlan":
        """As many slots as experts; slot p holds expert p."""
        row_p = np.arange(num_experts, dtype=np.int32)
        return cls(np.tile(row_p, (num_layers, 1)), num_experts)

    @classmethod
    def home_in(cls, layout: Layout, num_layers: int) -> "ExpertPlan":
        """Each device holds its own experts in its first slots; the rest are empty."""
        w, s = layout.num_devices, layout.slots_per_device
        table_ws = np.full((w, s), EMPTY, np.int32)
        own = np.arange(layout.num_experts, dtype=np.int32).reshape(w, -1)
        table_ws[:, : own.shape[1]] = own
        return cls(np.tile(table_ws.reshape(-1), (num_layers, 1)), layout.num_experts)

    @property
    def num_layers(self) -> int:
        return self.slot_to_expert_lp.shape[0]

    @property
    def num_slots(self) -> int:
        return self.slot_to_expert_lp.shape[1]

    @property
    def is_home(self) -> bool:
        return self == ExpertPlan.home(self.num_layers, self.num_experts)

    @property
    def is_logical(self) -> bool:
        """Whether masters lie in logical order."""
        return bool((self.owned_le == np.arange(self.num_experts)).all())

    @property
    def digest(self) -> str:
        """Four hex letters that name the plan in logs."""
        tables = [self.slot_to_expert_lp]
        tables += [] if self.is_logical else [self.owned_le]
        raw = b"".join(np.ascontiguousarray(t, dtype="<i4").tobytes() for t in tables)
        return hashlib.sha256(raw).hexdigest()[:4]

    def validate(self, layout: Layout | None = None) -> "ExpertPlan":
        """This plan, or ValueError: an expert without a slot, a slot of no expert, or
        what the layout has no room for."""
        _check_table("slot_to_expert_lp", self.slot_to_expert_lp)
        table_lp = self.slot_to_expert_lp
        if table_lp.size and not (
            -1 <= table_lp.min() <= table_lp.max() < self.num_experts
        ):
            raise ValueError(
                f"slots must hold experts 0..{self.num_experts - 1} or -1 (empty), and "
                f"hold {table_lp.min()}..{table_lp.max()}"
            )
        for layer, row_p in enumerate(table_lp):
            missing = np.setdiff1d(np.arange(self.num_experts), row_p)
            if missing.size:
                raise ValueError(
                    f"layer {layer} has no slot for experts {missing[:8].tolist()}: "
                    "every expert needs one"
                )
        _check_table("owned_le", self.owned_le)
        all_e = np.arange(self.num_experts)
        expected = (self.num_layers, self.num_experts)
        if self.owned_le.shape != expected or np.any(
            np.sort(self.owned_le, axis=1) != all_e
        ):
            raise ValueError(
                "owned_le must name every expert once in each layer, "
                f"[{expected[0]}, {expected[1]}]: each has one owner"
            )
        if layout is not None:
            self._check_layout(layout)
        return self

    def _check_layout(self, layout: Layout) -> None:
        if (layout.num_slots, layout.num_experts) != (self.num_slots, self.num_experts):
            raise ValueError(
                f"the plan has {self.num_experts} experts in {self.num_slots} slots, "
                f"the layout {layout.num_experts} in {layout.num_slots}"
            )
        if layout.store == "owned":
            if not np.array_equal(self.slot_to_expert_lp, self.owned_le):
                raise ValueError(
                    "store='owned' computes an expert where its masters lie: slots "
                    "and owners of the plan must be the same permutation"
                )
        elif layout.store == "sharded":
            if not self.is_logical:
                raise ValueError(
                    "store='sharded' has no owners to permute: leave owned_le out"
                )
        else:
            needs = self.needs(layout.num_devices)
            has = Needs(layout.offers_per_device, layout.copies_per_device)
            if needs.offers > has.offers or needs.copies > has.copies:
                raise ValueError(
                    f"the plan needs offers_per_device={needs.offers} and "
                    f"copies_per_device={needs.copies}, and the layout has "
                    f"{has.offers} and {has.copies}: relayout, or plan fewer copies"
                )

    def needs(self, num_devices: int) -> Needs:
        """What store 'transient' or 'resident' must have room for."""
        offers = copies = 0
        for row_p, owned_e in zip(self.slot_to_expert_lp, self.owned_le):
            copied_we = copied(row_p, owned_e, num_devices)
            offers = max(offers, _offered(copied_we, owned_e).sum(axis=1).max())
            copies = max(copies, copied_we.sum(axis=1).max())
        return Needs(int(offers), int(copies))

    def moves(self, new: "ExpertPlan") -> np.ndarray:
        """Rows (layer, slot, expert) int32 of slots that `new` fills differently."""
        changed = self.slot_to_expert_lp != new.slot_to_expert_lp
        layer_m, slot_m = np.nonzero(changed & (new.slot_to_expert_lp >= 0))
        expert_m = new.slot_to_expert_lp[layer_m, slot_m]
        return np.stack([layer_m, slot_m, expert_m], axis=1).astype(np.int32)

    def resized(self, layout: Layout) -> "ExpertPlan":
        """The same in a layout of other slots: more are empty at first, of fewer those
        whose expert has another replica go; the home plan where that does not do."""
        w, s = layout.num_devices, layout.slots_per_device
        rows = [_resize(r.reshape(w, -1), s) for r in self.slot_to_expert_lp]
        if layout.store == "owned" or any(row is None for row in rows):
            return ExpertPlan.home_in(layout, self.num_layers)
        owned_le = None if layout.store == "sharded" else self.owned_le
        return ExpertPlan(np.stack(rows), self.num_experts, owned_le)

    def to_json(self) -> str:
        table = self.slot_to_expert_lp.tolist()
        record = {"num_experts": self.num_experts, "slot_to_expert_lp": table}
        if not self.is_logical:
            record["owned_le"] = self.owned_le.tolist()
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> "ExpertPlan":
        record = json.loads(text)
        owned = record.get("owned_le")
        return cls(
            np.array(record["slot_to_expert_lp"], dtype=np.int32),
            record["num_experts"],
            None if owned is None else np.array(owned, dtype=np.int32),
        ).validate()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ExpertPlan)
            and self.num_experts == other.num_experts
            and np.array_equal(self.slot_to_expert_lp, other.slot_to_expert_lp)
            and np.array_equal(self.owned_le, other.owned_le)
        )

    def __hash__(self) -> int:
        tables = (self.slot_to_expert_lp.tobytes(), self.owned_le.tobytes())
        return hash((self.num_experts, tables))


def copied(row_p: np.ndarray, owned_e: np.ndarray, num_devices: int) -> np.ndarray:
    """Whether a device holds a copy of an expert that it does not own: [w, e] bool."""
    num_experts = len(owned_e)
    held_we = np.zeros((num_devices, num_experts), bool)
    slot_p = np.flatnonzero(row_p >= 0)
    held_we[slot_p // (len(row_p) // num_devices), row_p[slot_p]] = True
    own_we = np.zeros_like(held_we)
    own_we[np.arange(num_experts) // (num_experts // num_devices), owned_e] = True
    return held_we & ~own_we


def _offered(copied_we: np.ndarray, owned_e: np.ndarray) -> np.ndarray:
    """Whether the expert at each position is copied anywhere: [w, own] bool."""
    return copied_we.any(axis=0)[owned_e].reshape(len(copied_we), -1)


class CopyTables(NamedTuple):
    """How copies reach their slots in one layer, int32; -1 is nothing.

    An owner *offers* experts; a device *wants* some of all offers and fills its slots
    from its own experts and from its copies.
    """

    offer_wo: np.ndarray
    """Position among the owner's experts of each of its offers."""
    want_wc: np.ndarray
    """Offer, counted over all devices, of each copy."""
    fill_ws: np.ndarray
    """Index of each slot's expert in (own experts, copies)."""


def copy_tables(row_p: np.ndarray, owned_e: np.ndarray, layout: Layout) -> CopyTables:
    """Of a plan that fits `layout`; offers, copies and slots are in rising order.
    A store without copies has none in its tables."""
    w, own = layout.num_devices, layout.experts_per_device
    copied_we = copied(row_p, owned_e, w) & layout.has_copies
    offer_wo = np.full((w, layout.offers_per_device), EMPTY, np.int32)
    want_wc = np.full((w, layout.copies_per_device), EMPTY, np.int32)
    fill_we = np.full((w, layout.num_experts), EMPTY, np.int32)
    offer_e = np.full(layout.num_experts, EMPTY, np.int32)
    for device, is_offered in enumerate(_offered(copied_we, owned_e)):
        position = np.flatnonzero(is_offered)
        offer_wo[device, : len(position)] = position
        offers = device * layout.offers_per_device + np.arange(len(position))
        offer_e[owned_e[device * own + position]] = offers
        fill_we[device, owned_e[device * own : (device + 1) * own]] = np.arange(own)
    for device, is_copied in enumerate(copied_we):
        expert = np.flatnonzero(is_copied)
        want_wc[device, : len(expert)] = offer_e[expert]
        fill_we[device, expert] = own + np.arange(len(expert))
    row_ws = row_p.reshape(w, -1)
    fill_ws = np.take_along_axis(fill_we, np.maximum(row_ws, 0), axis=1)
    return CopyTables(offer_wo, want_wc, np.where(row_ws < 0, EMPTY, fill_ws))


def _check_table(name: str, table: np.ndarray) -> None:
    if table.ndim != 2 or table.dtype != np.int32:
        raise ValueError(
            f"{name} must be int32 of two dims, [layers, ..], and is {table.dtype} "
            f"{list(table.shape)}"
        )


def _resize(row_ws: np.ndarray, slots: int) -> np.ndarray | None:
    """One layer's slots, more or fewer on each device; None if an expert is lost."""
    w, now = row_ws.shape
    if slots >= now:
        pad_wx = np.full((w, slots - now), EMPTY, np.int32)
        return np.concatenate([row_ws, pad_wx], axis=1).reshape(-1)
    copies_e = np.bincount(row_ws[row_ws >= 0])
    kept = np.full((w, slots), EMPTY, np.int32)
    for device, row_s in enumerate(row_ws):
        held = row_s[row_s >= 0].tolist()
        for place in reversed(range(len(held))):
            if len(held) > slots and copies_e[held[place]] > 1:
                copies_e[held.pop(place)] -= 1
        if len(held) > slots:
            return None
        kept[device, : len(held)] = held
    return kept.reshape(-1)
