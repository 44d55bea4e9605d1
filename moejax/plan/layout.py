"""What is compiled, in plain Python: Topology, Layout, and the rules of a Layout.

A *Topology* says which devices there are. A *Layout* holds what is compiled into the
step: shapes of buffers and the order of collectives. What may change between two steps
is an `moejax.plan.expert_plan.ExpertPlan`. Both sides, host and device, import these
two modules.

    store       how expert weights reach the slots            expert weights lie
    owned       a slot is the place of its expert's masters   by expert
    transient   copies travel in the step, layer by layer     by expert
    resident    copies travel once a step, all layers         by expert
    sharded     every slot is gathered from all devices       by hidden width
"""

import dataclasses
import math
from typing import Literal

from moejax.plan.parallel import Domain, Tensor
from moejax.plan.schedule_rules import SCHEDULES

Transport = Literal["local", "padded", "ragged", "hierarchical"]
Exchange = Literal["exact", "capacity"]
Store = Literal["owned", "transient", "resident", "sharded"]
Split = Literal["even", "local_first", "water_filling", "dynamic"]
Kernels = Literal["auto", "plain"]
Fp8 = Literal["none", "e4m3", "e5m2"]

Group = Literal["expert", "data_expert", "dc_expert"]
GROUP_AXES: dict[Group, tuple[str, ...]] = {
    "expert": ("expert",),
    "data_expert": ("data", "expert"),
    "dc_expert": ("dc", "expert"),
}
"""Mesh axes of a *group*: the devices between which rows travel, and that may hold
replicas of one expert. In merged groups the expert axis is innermost."""

ITEMSIZE = {"float32": 4, "bfloat16": 2}
"""Bytes of an element, by compute dtype."""
ROW_MULTIPLE = 8
"""Buffers are whole multiples of 8 rows, so that vector units and tiles divide them."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """Sizes of the mesh axes: data centres, data, expert and tensor parallelism; their
    product is the number of devices. gin files call it `Mesh`."""

    dc: int = 1
    data: int = 1
    expert: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name, size in zip(("dc", "data", "expert", "tensor"), self.sizes):
            if size < 1:
                raise ValueError(f"Mesh.{name}={size} must be at least 1")

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

    def __str__(self) -> str:
        names = [field.name for field in dataclasses.fields(self)]
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


PARTS = {"tensor": Tensor, "domain": Domain}
"""Fields of a Layout that are dataclasses."""


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
    kernels: Kernels = "auto"
    """What computes experts and permutes rows: kernels of the device where it has some
    (auto), or XLA's operations alone (plain)."""
    fp8: Fp8 = "none"
    """What experts multiply: rows and weights as they are, or rounded to 8 bits, with
    gradients in this format."""
    offers_per_device: int = 0
    """Own experts that one device can give to others as copies, per layer."""
    copies_per_device: int = 0
    """Copies of others' experts that one device can hold, per layer."""
    prefetch: bool = False
    """Transient copies of the next layer travel under the work of this one."""
    axes: tuple[str, ...] = GROUP_AXES["expert"]
    """Mesh axes of the group."""
    tensor: Tensor | None = None
    """Tensor axis and expert shards, if there are any."""
    domain: Domain | None = None
    """Devices that share gathered experts, if any do."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(self.axes))  # JSON makes it a list
        for name, kind in PARTS.items():  # and of these a dict
            if isinstance(given := getattr(self, name), dict):
                object.__setattr__(self, name, kind(**given))
        _check(self)

    @property
    def num_slots(self) -> int:
        return self.num_devices * self.slots_per_device

    @property
    def has_copies(self) -> bool:
        return self.store in ("transient", "resident")

    @property
    def is_local(self) -> bool:
        """Whether experts lie along the tensor axis, and no row travels."""
        return self.tensor is not None and self.tensor.is_local

    @property
    def num_sources(self) -> int:
        """Different sets of tokens between which and the devices rows travel."""
        num_owners = self.num_devices
        return (
            num_owners if self.tensor is None else self.tensor.num_sources(num_owners)
        )

    @property
    def num_senders(self) -> int:
        """Devices that a device gets rows from, itself included."""
        num_owners = self.num_devices
        return (
            num_owners if self.tensor is None else self.tensor.num_senders(num_owners)
        )

    @property
    def source_share(self) -> float:
        """Rows that one source has, over those of the tokens of one owner's devices."""
        if self.tensor is None:
            return 1.0
        shards = 1 if self.is_local else self.tensor.expert_shards
        routed = self.tensor.num_gathered / self.tensor.num_parts
        return routed * self.tensor.size / shards

    @property
    def num_windows(self) -> int:
        """Parts in which the tensor axis sends each buffer."""
        return 1 if self.tensor is None else self.tensor.num_windows

    @property
    def domain_size(self) -> int:
        """Devices that share gathered experts."""
        return 1 if self.domain is None else self.domain.num_devices

    @property
    def exchanged(self) -> "Layout":
        """As rows see it: each domain is one device, that has the slots of all of its
        devices, one after the other."""
        if self.domain is None:
            return self
        return dataclasses.replace(
            self,
            num_devices=self.num_devices // self.domain_size,
            slots_per_device=self.slots_per_device * self.domain_size,
            domain=None,
            prefetch=False,
        )

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
        parts = 4 * self.num_windows
        return -(-self.rows_per_peer // parts) * self.num_windows

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
        n*k/w, rounded up to a multiple of 8; with one device it is the exact n*k. With
        domains w counts those; n are the tokens of one source (num_sources).
        """
        tensor, domain = kwargs.get("tensor"), kwargs.get("domain")
        num_peers = num_devices if domain is None else num_devices // domain.num_devices
        senders = num_peers if tensor is None else tensor.num_senders(num_peers)
        if senders == 1:
            kwargs["transport"] = "local"
        if num_peers == 1:
            buffer_factor = 1.0
        if rows_per_peer is None:
            rows = math.ceil(buffer_factor * assignments_per_device / num_peers)
            rows_per_peer = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
        rows_per_peer = min(rows_per_peer, max(assignments_per_device, 1))
        windows = 1 if tensor is None else tensor.num_windows
        return cls(
            num_experts=num_experts,
            num_devices=num_devices,
            slots_per_device=slots_per_device or num_experts // num_devices,
            rows_per_peer=-(-rows_per_peer // windows) * windows,
            **kwargs,
        )


def group_name(axes: tuple[str, ...]) -> str:
    """Return the name of a group in error messages."""
    if len(axes) == 1:
        return f"the {axes[0]} axis"
    return f"the group {' x '.join(axes)}"


def uneven_group(num_experts: int, num_devices: int, axes: tuple[str, ...]) -> str:
    """Return what is wrong with this number of experts in this group, or '' where each
    device owns as many as any other."""
    if num_experts % num_devices == 0:
        return ""
    near = num_experts // num_devices * num_devices or num_devices
    found, fix = f"({num_devices})", "Mesh.expert"
    if len(axes) > 1:
        found, fix = f"({num_devices}), and is a group of uneven size", "Dispatch.group"
    return (
        f"num_experts={num_experts} must be divisible by {group_name(axes)} {found}: "
        f"use {near} or {near + num_devices}, or another {fix}"
    )


def _check(layout: Layout) -> None:
    """Raise ValueError for the first rule that the layout breaks, and what to do."""
    _check_group(layout)
    _check_copies(layout)
    _check_dynamic(layout)
    _check_tensor(layout)
    _check_domain(layout)
    _check_buffers(layout)


def _check_group(layout: Layout) -> None:
    groups = list(GROUP_AXES.values())
    if layout.is_local:
        groups = [("tensor",)]
    if layout.axes not in groups:
        raise ValueError(
            f"axes={layout.axes} are no group: use {' or '.join(map(str, groups))}"
        )
    uneven = uneven_group(layout.num_experts, layout.num_devices, layout.axes)
    if uneven:
        raise ValueError(uneven)


def _check_copies(layout: Layout) -> None:
    budgets = (layout.offers_per_device, layout.copies_per_device)
    limits = (layout.experts_per_device, layout.slots_per_device)
    if layout.has_copies and any(not 0 <= b <= n for b, n in zip(budgets, limits)):
        raise ValueError(
            f"offers_per_device={budgets[0]} and copies_per_device={budgets[1]} "
            f"must be at most the {limits[0]} experts and {limits[1]} slots of a "
            "device, and not negative"
        )
    if not layout.has_copies and any(budgets):
        raise ValueError(
            f"store='{layout.store}' has no copies: offers_per_device and "
            f"copies_per_device must be 0, and are {budgets[0]} and {budgets[1]}"
        )
    if layout.store == "owned" and layout.num_slots > layout.num_experts:
        raise ValueError(
            f"store='owned' has a slot for each of {layout.num_experts} experts and "
            f"no more, and the layout has {layout.num_slots}: use 'transient', "
            "'resident' or 'sharded'"
        )
    if layout.kernels not in ("auto", "plain"):
        raise ValueError(f"kernels='{layout.kernels}' must be 'auto' or 'plain'")
    if layout.fp8 not in ("none", "e4m3", "e5m2"):
        raise ValueError(f"fp8='{layout.fp8}' must be 'none', 'e4m3' or 'e5m2'")
    if layout.fused_split and layout.split != "water_filling":
        raise ValueError(
            "fused_split is for split='water_filling', and split is "
            f"'{layout.split}': leave it out"
        )
    if layout.prefetch and layout.store != "transient" and not layout.domain:
        raise ValueError(
            "prefetch is for store='transient' and for domains, and store is "
            f"'{layout.store}' without a domain"
        )


def _check_dynamic(layout: Layout) -> None:
    if layout.split != "dynamic":
        return
    if layout.store != "transient" or layout.prefetch:
        raise ValueError(
            "split='dynamic' plans the copies of a layer when its loads are known: "
            f"it takes store='transient' without prefetch, and has '{layout.store}', "
            f"prefetch={layout.prefetch}"
        )
    budgets = (layout.offers_per_device, layout.copies_per_device)
    if layout.num_devices > 1 and not all(budgets):
        raise ValueError(
            "split='dynamic' needs offers_per_device and copies_per_device of 1 or "
            f"more, and has {budgets[0]} and {budgets[1]}: "
            f"{layout.experts_per_device} of each are always enough"
        )
    if layout.exchange == "capacity":
        raise ValueError(
            "split='dynamic' makes other replicas for each micro-batch, and "
            "exchange='capacity' would drop other rows with them: use 'exact'"
        )
    slots = layout.experts_per_device + layout.copies_per_device
    if layout.slots_per_device != slots:
        raise ValueError(
            f"split='dynamic' has a slot for each of {layout.experts_per_device} own "
            f"experts and {layout.copies_per_device} copies, and slots_per_device="
            f"{layout.slots_per_device}: use {slots}, or other copies_per_device"
        )


def _check_tensor(layout: Layout) -> None:
    if layout.tensor is None:
        return
    schedule = layout.tensor.schedule
    if layout.split != "even" and layout.num_sources % layout.num_devices:
        raise ValueError(
            f"schedule='{schedule}' with expert_shards={layout.tensor.expert_shards} "
            f"has {layout.num_sources} sets of tokens for {layout.num_devices} owners, "
            f"and split='{layout.split}' wants some for each: use 's1h' or 's1'"
        )
    if layout.rows_per_peer % layout.tensor.num_windows:
        raise ValueError(
            f"schedule='{schedule}' cuts rows_per_peer={layout.rows_per_peer} in "
            f"{layout.tensor.num_windows} parts: use a multiple of that"
        )
    if layout.transport == "ragged" and not layout.tensor.rules.takes_ragged:
        known = [repr(name) for name, rules in SCHEDULES.items() if rules.takes_ragged]
        raise ValueError(
            f"transport='ragged' is for schedule={' or '.join(known)}, and schedule is "
            f"'{schedule}'"
        )
    has = (layout.store, layout.transport)
    if layout.is_local and has != ("owned", "local"):
        raise ValueError(
            f"schedule='{schedule}' keeps each expert on one device of the tensor "
            f"axis: it takes store='owned' and transport='local', and has {has}"
        )


def _check_domain(layout: Layout) -> None:
    domain = layout.domain
    if domain is None:
        return
    if math.prod(domain.sizes) != layout.num_devices or (
        len(domain.sizes) != len(layout.axes)
    ):
        raise ValueError(
            f"a domain of {domain.sizes} devices is not one of "
            f"{group_name(layout.axes)} ({layout.num_devices}): give its axes' sizes"
        )
    if layout.store != "owned" or layout.split != "even":
        raise ValueError(
            f"domain={domain.shared} gathers the experts of their owners: it takes "
            f"store='owned', split='even', and has '{layout.store}', '{layout.split}'"
        )
    if layout.tensor is not None and layout.tensor.inner:
        raise ValueError(
            f"domain={domain.shared} takes as many expert shards as the tensor axis "
            f"has devices ({layout.tensor.size}), and there are "
            f"{layout.tensor.expert_shards}"
        )


def _check_buffers(layout: Layout) -> None:
    if layout.num_slots < layout.num_experts:
        raise ValueError(
            f"{layout.num_devices} x {layout.slots_per_device} slots hold fewer than "
            f"num_experts={layout.num_experts}: raise slots_per_device to at least "
            f"{-(-layout.num_experts // layout.num_devices)}"
        )
    rows = layout.rows_per_peer
    if rows < 1:
        raise ValueError(f"rows_per_peer={rows} must be at least 1")
    slots = layout.slots_per_device * layout.domain_size
    if layout.exchange == "capacity" and rows < slots:
        raise ValueError(
            f"rows_per_peer={rows} is less than a row for each of {slots} slots: raise "
            "Dispatch.rows_per_peer or Dispatch.buffer_factor, or use "
            "Dispatch.exchange = 'exact'"
        )
    if layout.transport == "local" and layout.num_senders > layout.domain_size:
        raise ValueError(
            f"transport='local' sends nothing, and {group_name(layout.axes)} has "
            f"{layout.num_devices} devices: use 'padded' or 'ragged'"
        )
    if layout.transport == "hierarchical" and len(layout.axes) < 2:
        raise ValueError(
            "transport='hierarchical' goes over one mesh axis after the other, and "
            f"{group_name(layout.axes)} is one: use Dispatch.group = 'dc_expert' or "
            "'data_expert', or 'padded'"
        )
