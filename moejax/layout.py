"""The treaty between host and device, in NumPy: Topology, Layout, ExpertPlan.

A *Topology* says which devices there are. A *Layout* holds what is compiled into the
step: shapes of buffers and the order of collectives. An *ExpertPlan* holds what may
change between two steps: which expert each slot holds, layer by layer.

    4 experts on 2 devices with 2 slots each, under the home plan:

    device            0        1
    slot p          0   1    2   3
    expert          0   1    2   3        slot_to_expert_lp = [[0, 1, 2, 3]]
"""

import dataclasses
import hashlib
import json
import math
from typing import Literal

import numpy as np

Transport = Literal["local", "padded", "ragged"]
Exchange = Literal["exact", "capacity"]

ROW_MULTIPLE = 8
"""Buffers are whole multiples of 8 rows, so that vector units and tiles divide them."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Sizes of the mesh axes: data centres, data, expert and tensor parallelism."""

    dc: int = 1
    data: int = 1
    expert: int = 1
    tensor: int = 1

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return (self.dc, self.data, self.expert, self.tensor)

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def num_batch_shards(self) -> int:
        """Over how many devices a batch is split: dc * data * expert."""
        return self.dc * self.data * self.expert

    def _repr_html_(self) -> str:
        from moejax import show

        return show.mesh(self)._repr_html_()

    def __str__(self) -> str:
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in _fields(self))


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the compiled step of an MoE layer is shaped by. A new one is a new program.

    `rows_per_peer` (c) is how many rows one device can send to one other in round 0; in
    exact mode later rounds carry `rows_per_round` each until all rows have come, in
    capacity mode what does not fit is dropped and counted.
    """

    num_experts: int
    num_devices: int
    """Devices w on the expert axis."""
    slots_per_device: int
    rows_per_peer: int
    transport: Transport = "padded"
    exchange: Exchange = "exact"

    def __post_init__(self) -> None:
        if self.num_slots < self.num_experts:
            raise ValueError(
                f"{self.num_devices} x {self.slots_per_device} slots hold fewer than "
                f"num_experts={self.num_experts}: raise slots_per_device to at least "
                f"{-(-self.num_experts // self.num_devices)}"
            )
        if self.rows_per_peer < 1:
            raise ValueError(f"rows_per_peer={self.rows_per_peer} must be at least 1")
        if self.exchange == "capacity" and self.rows_per_peer < self.slots_per_device:
            raise ValueError(
                f"rows_per_peer={self.rows_per_peer} is less than a row for each of "
                f"{self.slots_per_device} slots: raise Moe.rows_per_peer or "
                "Moe.buffer_factor, or use Moe.exchange = 'exact'"
            )
        if self.transport == "local" and self.num_devices != 1:
            raise ValueError(
                f"transport='local' sends nothing, and the expert axis has "
                f"{self.num_devices} devices: use 'padded' or 'ragged'"
            )

    @property
    def num_slots(self) -> int:
        return self.num_devices * self.slots_per_device

    @property
    def rows_per_round(self) -> int:
        """Rows per peer in each round after the first: a quarter of round 0's."""
        return max(1, -(-self.rows_per_peer // 4))

    @property
    def rows_per_slot(self) -> int:
        """Capacity mode: rows that one device may send to one slot."""
        return max(1, self.rows_per_peer // self.slots_per_device)

    @classmethod
    def home(
        cls,
        num_experts: int,
        num_devices: int,
        assignments_per_device: int,
        rows_per_peer: int | None = None,
        buffer_factor: float = 1.5,
        **kwargs,
    ) -> "Layout":
        """The layout of plain expert parallelism: as many slots as experts.

        Without `rows_per_peer` the buffer is `buffer_factor` times the even share
        n*k/w, rounded up to a multiple of 8; with one device it is the exact n*k.
        """
        if num_experts % num_devices:
            near = num_experts // num_devices * num_devices or num_devices
            raise ValueError(
                f"num_experts={num_experts} must be divisible by the expert axis "
                f"({num_devices}): use {near} or {near + num_devices}, or another "
                "Mesh.expert"
            )
        if num_devices == 1:
            kwargs["transport"] = "local"
            buffer_factor = 1.0
        if rows_per_peer is None:
            rows = math.ceil(buffer_factor * assignments_per_device / num_devices)
            rows_per_peer = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
        return cls(
            num_experts=num_experts,
            num_devices=num_devices,
            slots_per_device=num_experts // num_devices,
            rows_per_peer=min(rows_per_peer, max(assignments_per_device, 1)),
            **kwargs,
        )


@dataclasses.dataclass(frozen=True)
class ExpertPlan:
    """Which expert each slot holds, in every MoE layer; host side, and immutable.

    `slot_to_expert_lp` is int32 [layers, slots]; -1 marks an empty slot. Slots
    d*s .. d*s+s-1 belong to device d of the expert axis.
    """

    slot_to_expert_lp: np.ndarray
    num_experts: int

    def __post_init__(self) -> None:
        table_lp = np.array(self.slot_to_expert_lp)  # a key must not change: own copy
        table_lp.flags.writeable = False
        object.__setattr__(self, "slot_to_expert_lp", table_lp)

    @classmethod
    def home(cls, num_layers: int, num_experts: int) -> "ExpertPlan":
        """Slot p holds expert p."""
        row_p = np.arange(num_experts, dtype=np.int32)
        return cls(np.tile(row_p, (num_layers, 1)), num_experts)

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
    def digest(self) -> str:
        """Four hex letters that name the plan in logs."""
        table = np.ascontiguousarray(self.slot_to_expert_lp, dtype="<i4")
        return hashlib.sha256(table.tobytes()).hexdigest()[:4]

    def validate(self, layout: Layout | None = None) -> "ExpertPlan":
        """This plan, or ValueError: an expert without a slot, a slot of no expert."""
        table_lp = self.slot_to_expert_lp
        if table_lp.ndim != 2 or table_lp.dtype != np.int32:
            raise ValueError(
                f"slot_to_expert_lp must be int32 [layers, slots], and is "
                f"{table_lp.dtype} {list(table_lp.shape)}"
            )
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
        if layout is not None and (layout.num_slots, layout.num_experts) != (
            self.num_slots,
            self.num_experts,
        ):
            raise ValueError(
                f"the plan has {self.num_experts} experts in {self.num_slots} slots, "
                f"the layout {layout.num_experts} in {layout.num_slots}"
            )
        return self

    def moves(self, new: "ExpertPlan") -> np.ndarray:
        """Rows (layer, slot, expert) int32 of slots that `new` fills differently."""
        changed = self.slot_to_expert_lp != new.slot_to_expert_lp
        layer_m, slot_m = np.nonzero(changed & (new.slot_to_expert_lp >= 0))
        expert_m = new.slot_to_expert_lp[layer_m, slot_m]
        return np.stack([layer_m, slot_m, expert_m], axis=1).astype(np.int32)

    def to_json(self) -> str:
        table = self.slot_to_expert_lp.tolist()
        return json.dumps({"num_experts": self.num_experts, "slot_to_expert_lp": table})

    @classmethod
    def from_json(cls, text: str) -> "ExpertPlan":
        record = json.loads(text)
        table_lp = np.array(record["slot_to_expert_lp"], dtype=np.int32)
        return cls(table_lp, record["num_experts"]).validate()

    def _repr_html_(self) -> str:
        from moejax import show

        return show.plan(self)._repr_html_()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ExpertPlan)
            and self.num_experts == other.num_experts
            and np.array_equal(self.slot_to_expert_lp, other.slot_to_expert_lp)
        )

    def __hash__(self) -> int:
        return hash((self.num_experts, self.slot_to_expert_lp.tobytes()))


def _fields(instance) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(instance)
