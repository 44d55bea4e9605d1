"""What is compiled, in plain Python: Topology and Layout.

A *Topology* says which devices there are. A *Layout* holds what is compiled into the
step: shapes of buffers and the order of collectives. What may change between two steps
is an `moejax.plan.ExpertPlan`. Both sides, host and device, import these two modules.

    store       how expert weights reach the slots            expert weights lie
    owned       a slot is the place of its expert's masters   by expert
    transient   copies travel in the step, layer by layer     by expert
    resident    copies travel once a step, all layers         by expert
    sharded     every slot is gathered from all devices       by hidden width
"""

import dataclasses
import math
from typing import Literal

from moejax.wire import Wire

Transport = Literal["local", "padded", "ragged"]
Exchange = Literal["exact", "capacity"]
Store = Literal["owned", "transient", "resident", "sharded"]
Split = Literal["even", "local_first", "water_filling", "dynamic"]

Group = Literal["expert", "data_expert"]
GROUP_AXES: dict[Group, tuple[str, ...]] = {
    "expert": ("expert",),
    "data_expert": ("data", "expert"),
}
"""Mesh axes of a *group*: the devices between which rows travel, and that may hold
replicas of one expert. In the merged group devices are numbered data-major."""

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
    """Devices w of the group."""
    slots_per_device: int
    rows_per_peer: int
    transport: Transport = "padded"
    exchange: Exchange = "exact"
    store: Store = "owned"
    split: Split = "even"
    """Which replica a row goes to: an even share each; one on its own device where it
    has one; as the fullest device needs it (water_filling); and 'dynamic', which makes
    the replicas too, in each layer of each micro-batch, from the loads there."""
    fused_split: bool = False
    """Water-filling as one kernel, on Hopper GPUs."""
    offers_per_device: int = 0
    """Own experts that one device can give to others as copies, per layer."""
    copies_per_device: int = 0
    """Copies of others' experts that one device can hold, per layer."""
    prefetch: bool = False
    """Transient copies of the next layer travel under the work of this one."""
    axes: tuple[str, ...] = GROUP_AXES["expert"]
    """Mesh axes of the group."""
    wire: Wire | None = None
    """Makes water_filling weigh rows that devices receive too; None: rows computed."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))  # JSON makes it a list
        if isinstance(self.wire, dict):  # and of this a dict
            object.__setattr__(self, "wire", Wire(**self.wire))
        if self.axes not in GROUP_AXES.values():
            raise ValueError(
                f"axes={self.axes} are no group: use ('expert',) or ('data', 'expert')"
            )
        self._check_store()
        self._check_wire()
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
                f"transport='local' sends nothing, and {group_name(self.axes)} has "
                f"{self.num_devices} devices: use 'padded' or 'ragged'"
            )

    def _check_store(self) -> None:
        uneven = uneven_group(self.num_experts, self.num_devices, self.axes)
        if uneven:
            raise ValueError(uneven)
        budgets = (self.offers_per_device, self.copies_per_device)
        limits = (self.experts_per_device, self.slots_per_device)
        if self.has_copies and any(not 0 <= b <= n for b, n in zip(budgets, limits)):
            raise ValueError(
                f"offers_per_device={budgets[0]} and copies_per_device={budgets[1]} "
                f"must be at most the {limits[0]} experts and {limits[1]} slots of a "
                "device, and not negative"
            )
        if not self.has_copies and any(budgets):
            raise ValueError(
                f"store='{self.store}' has no copies: offers_per_device and "
                f"copies_per_device must be 0, and are {budgets[0]} and {budgets[1]}"
            )
        if self.store == "owned" and self.num_slots > self.num_experts:
            raise ValueError(
                f"store='owned' has a slot for each of {self.num_experts} experts and "
                f"no more, and the layout has {self.num_slots}: use 'transient', "
                "'resident' or 'sharded'"
            )
        self._check_dynamic()
        if self.fused_split and self.split != "water_filling":
            raise ValueError(
                "fused_split is for split='water_filling', and split is "
                f"'{self.split}': leave it out"
            )
        if self.prefetch and self.store != "transient":
            raise ValueError(
                f"prefetch is for store='transient', and store is '{self.store}'"
            )

    def _check_dynamic(self) -> None:
        if self.split != "dynamic":
            return
        if self.store != "transient" or self.prefetch:
            raise ValueError(
                "split='dynamic' plans the copies of a layer when its loads are known: "
                f"it takes store='transient' without prefetch, and has '{self.store}', "
                f"prefetch={self.prefetch}"
            )
        budgets = (self.offers_per_device, self.copies_per_device)
        if self.num_devices > 1 and not all(budgets):
            raise ValueError(
                "split='dynamic' needs offers_per_device and copies_per_device of 1 or "
                f"more, and has {budgets[0]} and {budgets[1]}: "
                f"{self.experts_per_device} of each are always enough"
            )
        if self.exchange == "capacity":
            raise ValueError(
                "split='dynamic' makes other replicas for each micro-batch, and "
                "exchange='capacity' would drop other rows with them: use 'exact'"
            )
        slots = self.experts_per_device + self.copies_per_device
        if self.slots_per_device != slots:
            raise ValueError(
                f"split='dynamic' has a slot for each of {self.experts_per_device} own "
                f"experts and {self.copies_per_device} copies, and slots_per_device="
                f"{self.slots_per_device}: use {slots}, or other copies_per_device"
            )

    def _check_wire(self) -> None:
        if self.wire is None:
            return
        if self.split != "water_filling":
            raise ValueError(
                "near_weight and far_weight are for split='water_filling', and split "
                f"is '{self.split}': set both to 0, or use 'water_filling'"
            )
        per_node = self.wire.devices_per_node
        if per_node < 1 or self.num_devices % per_node:
            raise ValueError(
                f"devices_per_node={per_node} must divide {group_name(self.axes)} "
                f"({self.num_devices}): nodes have the same number of its devices"
            )

    @property
    def num_slots(self) -> int:
        return self.num_devices * self.slots_per_device

    @property
    def has_copies(self) -> bool:
        return self.store in ("transient", "resident")

    @property
    def yields_home_rows(self) -> bool:
        """Whether rows stay on their device only as far as round 0 has room."""
        return self.split in ("water_filling", "dynamic")

    @property
    def experts_per_device(self) -> int:
        """Experts whose masters one device owns."""
        return self.num_experts // self.num_devices

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
        slots_per_device: int | None = None,
        **kwargs,
    ) -> "Layout":
        """The layout of plain expert parallelism, as many slots as experts, unless
        `slots_per_device` and a store in `kwargs` say otherwise.

        Without `rows_per_peer` the buffer is `buffer_factor` times the even share
        n*k/w, rounded up to a multiple of 8; with one device it is the exact n*k.
        """
        if num_devices == 1:
            kwargs["transport"] = "local"
            buffer_factor = 1.0
        if rows_per_peer is None:
            rows = math.ceil(buffer_factor * assignments_per_device / num_devices)
            rows_per_peer = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
        return cls(
            num_experts=num_experts,
            num_devices=num_devices,
            slots_per_device=slots_per_device or num_experts // num_devices,
            rows_per_peer=min(rows_per_peer, max(assignments_per_device, 1)),
            **kwargs,
        )


def group_name(axes: tuple[str, ...]) -> str:
    """As errors call it."""
    return "the expert axis" if axes == ("expert",) else f"the group {' x '.join(axes)}"


def uneven_group(num_experts: int, num_devices: int, axes: tuple[str, ...]) -> str:
    """What is wrong with so many experts in a group of so many devices; '' if nothing:
    each device owns as many as any other."""
    if num_experts % num_devices == 0:
        return ""
    near = num_experts // num_devices * num_devices or num_devices
    found, fix = f"({num_devices})", "Mesh.expert"
    if len(axes) > 1:
        found, fix = f"({num_devices}), and is a group of uneven size", "Moe.group"
    return (
        f"num_experts={num_experts} must be divisible by {group_name(axes)} {found}: "
        f"use {near} or {near + num_devices}, or another {fix}"
    )


def _fields(instance) -> tuple[dataclasses.Field, ...]:
    return dataclasses.fields(instance)
