"""Expert plans in NumPy: which expert each slot holds, and which device owns it.

A plan can change between two steps without a compilation. Two examples with 4 experts
on 2 devices: on the left the home plan, with 2 slots on each device; on the right 3
slots on each device, with expert 0 replicated and one slot left empty.

    device            0        1                    0            1
    slot p          0   1    2   3              0   1   2    3   4   5
    expert          0   1    2   3              0   1   -    2   3   0

The float32 master parameters of an expert and their optimizer moments are on one
device, the expert's *owner*. Position i of `owned_le` is on device
i // (experts per device), just as slot p is on device p // (slots per device).
"""

import dataclasses
import hashlib
import json
from typing import NamedTuple

import numpy as np

from moejax.plan.layout import Layout
from moejax.rich import shown_by

EMPTY = -1
"""Marks a slot without an expert."""


class Needs(NamedTuple):
    """Budgets for copies that a plan needs, by the names that they have in a Layout:
    maxima over devices or nodes, and layers."""

    offers_per_device: int
    copies_per_device: int
    offers_per_node: int
    """0 where copies travel in one level, as the next one."""
    copies_per_node: int

    @classmethod
    def budgets(cls, layout: Layout) -> "Needs":
        """Return the budgets that a layout has."""
        return cls(*(getattr(layout, name) for name in cls._fields))

    def fit(self, layout: Layout) -> bool:
        """Return whether the budgets of a layout are large enough."""
        return all(need <= most for need, most in zip(self, Needs.budgets(layout)))


@shown_by("plan")
@dataclasses.dataclass(frozen=True, repr=False)
class ExpertPlan:
    """Assignment of experts to slots and to owners, in every MoE layer.

    A plan is a value on the host: immutable, hashable, and equal to every plan with the
    same tables.
    """

    slot_to_expert_lp: np.ndarray
    """Expert that each slot holds, int32 [layers, slots]; -1 marks an empty slot. Slots
    d*s .. d*s+s-1 belong to device d of the group, where s is the number of slots per
    device."""
    num_experts: int
    """Number of experts of each layer (e). Every one of them must have a slot in every
    layer."""
    owned_le: np.ndarray | None = None
    """Expert whose master parameters and moments lie at each position, int32 [layers,
    experts]; each row is a permutation. Positions d*o .. d*o+o-1 belong to device d,
    where o is the number of experts per device. None means logical order, in which
    expert i lies at position i. The store 'owned' needs the table of slots here, and
    the store 'sharded' needs None."""

    def __post_init__(self) -> None:
        owned_le = self.owned_le
        if owned_le is None:
            logical_e = np.arange(self.num_experts, dtype=np.int32)
            owned_le = np.tile(logical_e, (len(self.slot_to_expert_lp), 1))
        tables = {"slot_to_expert_lp": self.slot_to_expert_lp, "owned_le": owned_le}
        for name, values in tables.items():
            # Plans are keys of dicts: copy, so that no caller can change the table.
            table = np.array(values)
            table.flags.writeable = False
            object.__setattr__(self, name, table)

    @classmethod
    def home(cls, num_layers: int, num_experts: int) -> "ExpertPlan":
        """Return the plan in which slot p holds expert p, one slot for each expert."""
        row_p = np.arange(num_experts, dtype=np.int32)
        return cls(np.tile(row_p, (num_layers, 1)), num_experts)

    @classmethod
    def home_in(cls, layout: Layout, num_layers: int) -> "ExpertPlan":
        """Return the plan for a layout's slots in which each device holds the experts
        that it owns in its first slots, and its other slots are empty."""
        w, s = layout.num_devices, layout.slots_per_device
        table_ws = np.full((w, s), EMPTY, np.int32)
        own_wi = np.arange(layout.num_experts, dtype=np.int32).reshape(w, -1)
        table_ws[:, : own_wi.shape[1]] = own_wi
        return cls(np.tile(table_ws.reshape(-1), (num_layers, 1)), layout.num_experts)

    @property
    def num_layers(self) -> int:
        """Number of MoE layers."""
        return self.slot_to_expert_lp.shape[0]

    @property
    def num_slots(self) -> int:
        """Number of slots of all devices of the group, per layer."""
        return self.slot_to_expert_lp.shape[1]

    @property
    def is_home(self) -> bool:
        """Whether slot p holds expert p, with no further slots, in every layer, and
        master parameters lie in logical order."""
        return self == ExpertPlan.home(self.num_layers, self.num_experts)

    @property
    def is_logical(self) -> bool:
        """Whether the master parameters of expert i are at position i in all layers."""
        return bool((self.owned_le == np.arange(self.num_experts)).all())

    @property
    def digest(self) -> str:
        """Name of the plan in logs: four hex digits of the SHA-256 of its tables."""
        tables = [self.slot_to_expert_lp]
        tables += [] if self.is_logical else [self.owned_le]
        raw = b"".join(np.ascontiguousarray(t, dtype="<i4").tobytes() for t in tables)
        return hashlib.sha256(raw).hexdigest()[:4]

    def validate(self, layout: Layout | None = None) -> "ExpertPlan":
        """Return this plan, or raise ValueError if it breaks a rule.

        The tables must be int32 with two dims, slots must hold experts or -1, and every
        layer must have a slot and one owner for every expert. With a `layout` the plan
        must also fit its slots, its store and its budgets for copies.
        """
        _check_table("slot_to_expert_lp", self.slot_to_expert_lp)
        table_lp = self.slot_to_expert_lp
        if table_lp.size and not (
            -1 <= table_lp.min() <= table_lp.max() < self.num_experts
        ):
            raise ValueError(
                f"slots must hold experts 0..{self.num_experts - 1} or -1 (empty), and "
                f"they hold {table_lp.min()}..{table_lp.max()}"
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
                "owned_le must have shape "
                f"[{expected[0]}, {expected[1]}] and name every expert once in each "
                "layer, because each expert has one owner"
            )
        if layout is not None:
            self._check_layout(layout)
        return self

    def _check_layout(self, layout: Layout) -> None:
        if (layout.num_slots, layout.num_experts) != (self.num_slots, self.num_experts):
            raise ValueError(
                f"the plan has {self.num_experts} experts in {self.num_slots} slots, "
                f"and the layout has {layout.num_experts} in {layout.num_slots}: make "
                "a plan for this layout"
            )
        if layout.store == "owned":
            if not np.array_equal(self.slot_to_expert_lp, self.owned_le):
                raise ValueError(
                    "store='owned' computes each expert on its owner: the plan's "
                    "slot_to_expert_lp and owned_le must be the same permutation"
                )
        elif layout.store == "sharded":
            if not self.is_logical:
                raise ValueError(
                    "store='sharded' splits every expert over all devices and has no "
                    "owners to permute: leave owned_le out"
                )
        else:
            needs = self.needs(layout.num_devices, layout.num_copy_nodes)
            if not needs.fit(layout):
                fields = ", ".join(f"{n}={x}" for n, x in needs._asdict().items())
                raise ValueError(
                    f"the plan needs {fields}, and the layout has "
                    f"{', '.join(map(str, Needs.budgets(layout)))}: compile a layout "
                    "with larger budgets, or plan fewer copies"
                )

    def needs(self, num_devices: int, num_nodes: int = 1) -> Needs:
        """Return the budgets for copies that this plan needs with the store 'transient'
        or 'resident', where copies travel between this many nodes
        (`Layout.num_copy_nodes`)."""
        most_l = []
        for row_p, owned_e in zip(self.slot_to_expert_lp, self.owned_le):
            copied_we = find_copies(row_p, owned_e, num_devices)
            far_me = _far_copies(copied_we, owned_e, num_nodes)
            most_l.append(
                (
                    _offered(copied_we, owned_e).sum(axis=1).max(),
                    copied_we.sum(axis=1).max(),
                    _offered(far_me, owned_e).sum(axis=1).max(),
                    far_me.sum(axis=1).max(),
                )
            )
        return Needs(*np.max(most_l, axis=0).tolist())

    def moves(self, new: "ExpertPlan") -> np.ndarray:
        """Return the slots that `new` fills with another expert, int32 [moves, 3].

        Each row is (layer, slot, expert in `new`). Slots that `new` leaves empty are
        not listed.
        """
        changed = self.slot_to_expert_lp != new.slot_to_expert_lp
        layer_m, slot_m = np.nonzero(changed & (new.slot_to_expert_lp >= 0))
        expert_m = new.slot_to_expert_lp[layer_m, slot_m]
        return np.stack([layer_m, slot_m, expert_m], axis=1).astype(np.int32)

    def resized(self, layout: Layout) -> "ExpertPlan":
        """Return this plan with the number of slots per device that `layout` has.

        Added slots are empty. Where a device has too many experts for its slots, it
        drops replicas of experts that have another one, from its last slot backwards.
        Returns `ExpertPlan.home_in(layout, ...)` for the store 'owned', or where an
        expert would be left without a slot.
        """
        w, s = layout.num_devices, layout.slots_per_device
        rows = [_resize(r.reshape(w, -1), s) for r in self.slot_to_expert_lp]
        if layout.store == "owned" or any(row is None for row in rows):
            return ExpertPlan.home_in(layout, self.num_layers)
        owned_le = None if layout.store == "sharded" else self.owned_le
        return ExpertPlan(np.stack(rows), self.num_experts, owned_le)

    def to_json(self) -> str:
        """Return the plan as a JSON object, for `from_json`."""
        table = self.slot_to_expert_lp.tolist()
        record = {"num_experts": self.num_experts, "slot_to_expert_lp": table}
        if not self.is_logical:
            record["owned_le"] = self.owned_le.tolist()
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> "ExpertPlan":
        """Return the plan that `to_json` wrote. Raises ValueError if it is invalid."""
        record = json.loads(text)
        owned_le = record.get("owned_le")
        return cls(
            np.array(record["slot_to_expert_lp"], dtype=np.int32),
            record["num_experts"],
            None if owned_le is None else np.array(owned_le, dtype=np.int32),
        ).validate()

    def __repr__(self) -> str:
        num_empty = int((self.slot_to_expert_lp < 0).sum())
        return (
            f"ExpertPlan({self.digest}: {self.num_experts} experts in "
            f"{self.num_slots} slots, layers: {self.num_layers}, "
            f"empty slots: {num_empty})"
        )

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


def find_copies(row_p: np.ndarray, owned_e: np.ndarray, num_devices: int) -> np.ndarray:
    """Return whether each device holds a copy of each expert that it does not own, bool
    [w, e]. `row_p` is the expert of each slot, `owned_e` that at each position."""
    num_experts = len(owned_e)
    held_we = np.zeros((num_devices, num_experts), bool)
    slot_p = np.flatnonzero(row_p >= 0)
    held_we[slot_p // (len(row_p) // num_devices), row_p[slot_p]] = True
    own_we = np.zeros_like(held_we)
    own_we[np.arange(num_experts) // (num_experts // num_devices), owned_e] = True
    return held_we & ~own_we


def _far_copies(
    copied_we: np.ndarray, owned_e: np.ndarray, num_nodes: int
) -> np.ndarray:
    """Return whether devices of each node hold copies of each expert that another node
    owns, bool [m, e]."""
    e = len(owned_e)
    own_me = np.zeros((num_nodes, e), bool)
    own_me[np.arange(e) // (e // num_nodes), owned_e] = True
    return copied_we.reshape(num_nodes, -1, e).any(axis=1) & ~own_me


def _offered(copied_we: np.ndarray, owned_e: np.ndarray) -> np.ndarray:
    """Return whether another device, or node, holds a copy of the expert at each
    position, bool [w, experts of each]."""
    return copied_we.any(axis=0)[owned_e].reshape(len(copied_we), -1)


class CopyTables(NamedTuple):
    """Index tables by which expert copies reach their slots in one layer, int32.

    Each owner offers some of its experts. Each device takes some of the offers of its
    node, and of what its node takes from other nodes, as its copies, and fills its
    slots from its own experts and its copies. Where copies travel in one level
    (`Layout.num_copy_nodes`), all devices are one node. -1 marks an entry that is not
    used.
    """

    offer_wo: np.ndarray
    """Index of each offered expert among its owner's experts, [devices,
    offers_per_device]."""
    want_wc: np.ndarray
    """What becomes each copy, [devices, copies_per_device]. The offers of a node are
    numbered over its devices, device * offers_per_device + index, and what it takes
    from other nodes follows."""
    node_offer_mo: np.ndarray
    """Offer of the node that each node sends to others, [nodes, offers_per_node]."""
    node_want_mc: np.ndarray
    """What each node takes of these, counted over all nodes, [nodes,
    copies_per_node]."""
    fill_ws: np.ndarray
    """Index of each slot's expert in the concatenation of the device's own experts and
    its copies, [devices, slots_per_device]; -1 for an empty slot."""


def copy_tables(row_p: np.ndarray, owned_e: np.ndarray, layout: Layout) -> CopyTables:
    """Return the tables for one layer of a plan that fits `layout`.

    `row_p` is the expert of each slot, and `owned_e` the expert at each position. A
    device lists its offers by position and its copies by expert, and so does a node.
    For a store without copies the tables have no offers and no copies.
    """
    w, own, e = layout.num_devices, layout.experts_per_device, layout.num_experts
    nodes = layout.num_copy_nodes
    copied_we = find_copies(row_p, owned_e, w) & layout.has_copies
    far_me = _far_copies(copied_we, owned_e, nodes)
    sizes = (w, layout.offers_per_device), (nodes, layout.offers_per_node)
    (offer_wo, offer_e), (position_mo, node_offer_e) = (
        _offer_tables(copied_xe, owned_e, size)
        for copied_xe, size in zip((copied_we, far_me), sizes)
    )
    owned_me, num_offers = owned_e.reshape(nodes, -1), w // nodes * sizes[0][1]
    node_offer_mo = np.full(sizes[1], EMPTY, np.int32)
    want_wc = np.full((w, layout.copies_per_device), EMPTY, np.int32)
    node_want_mc = np.full((nodes, layout.copies_per_node), EMPTY, np.int32)
    fill_we = np.full((w, e), EMPTY, np.int32)
    fill_we[np.arange(e) // own, owned_e] = np.arange(e) % own
    for node, is_far_e in enumerate(far_me):
        expert = np.flatnonzero(is_far_e)
        node_want_mc[node, : len(expert)] = node_offer_e[expert]
        index_e = offer_e - node * num_offers
        index_e[expert] = num_offers + np.arange(len(expert))
        sent_o = index_e[owned_me[node, position_mo[node]]]
        node_offer_mo[node] = np.where(position_mo[node] < 0, EMPTY, sent_o)
        for device in range(node * w // nodes, (node + 1) * w // nodes):
            copied = np.flatnonzero(copied_we[device])
            want_wc[device, : len(copied)] = index_e[copied]
            fill_we[device, copied] = own + np.arange(len(copied))
    row_ws = row_p.reshape(w, -1)
    fill_ws = np.take_along_axis(fill_we, np.maximum(row_ws, 0), axis=1)
    fill_ws = np.where(row_ws < 0, EMPTY, fill_ws)
    return CopyTables(offer_wo, want_wc, node_offer_mo, node_want_mc, fill_ws)


def _offer_tables(
    copied_xe: np.ndarray, owned_e: np.ndarray, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the experts that each device, or node, offers, int32 [x,
    o], and the offer of each expert, counted over all of them, int32 [e]."""
    position_xo = np.full(shape, EMPTY, np.int32)
    offer_e = np.full(len(owned_e), EMPTY, np.int32)
    own = len(owned_e) // shape[0]
    for x, is_offered in enumerate(_offered(copied_xe, owned_e)):
        position = np.flatnonzero(is_offered)
        position_xo[x, : len(position)] = position
        offers = x * shape[1] + np.arange(len(position))
        offer_e[owned_e[x * own + position]] = offers
    return position_xo, offer_e


def _check_table(name: str, table: np.ndarray) -> None:
    if table.ndim != 2 or table.dtype != np.int32:
        raise ValueError(
            f"{name} must be int32 of two dims, [layers, ..], and it is {table.dtype} "
            f"{list(table.shape)}"
        )


def _resize(row_ws: np.ndarray, slots: int) -> np.ndarray | None:
    """Return one layer's table [w * slots] with this number of slots on each device, or
    None if an expert would have no slot."""
    w, old_slots = row_ws.shape
    if slots >= old_slots:
        pad_wx = np.full((w, slots - old_slots), EMPTY, np.int32)
        return np.concatenate([row_ws, pad_wx], axis=1).reshape(-1)
    replicas_e = np.bincount(row_ws[row_ws >= 0])
    new_ws = np.full((w, slots), EMPTY, np.int32)
    for device, row_s in enumerate(row_ws):
        experts = row_s[row_s >= 0].tolist()
        for i in reversed(range(len(experts))):
            if len(experts) > slots and replicas_e[experts[i]] > 1:
                replicas_e[experts.pop(i)] -= 1
        if len(experts) > slots:
            return None
        new_ws[device, : len(experts)] = experts
    return new_ws.reshape(-1)
