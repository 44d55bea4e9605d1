"""The static configuration of a compiled MoE layer, in plain Python: Topology, Layout.

A *Topology* gives the sizes of the mesh axes. A *Layout* holds everything that is
compiled into the step: buffer shapes, slot counts and the order of collectives. Which
expert each slot holds can change between two steps without a compilation; this is an
ExpertPlan (`moejax.plan.expert_plan`). Host and device code import both modules.

A *slot* holds the weights of one expert on one device. The *store* says how weights get
from the float32 master parameters into the slots:

    store       how expert weights reach the slots              parameters are split
    owned       a device computes only the experts that it owns   by expert
    transient   copies are sent in the step, layer by layer       by expert
    resident    copies are sent once a step, for all layers       by expert
    sharded     every slot is gathered from all devices           by hidden width
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from moejax.plan.distinct import Choosing, distinct_share
from moejax.plan.groups import GROUP_AXES
from moejax.plan.layout_checks import check
from moejax.plan.parallel import Domain, Tensor
from moejax.rich import shown_by

Transport = Literal["local", "padded", "ragged", "hierarchical"]
Exchange = Literal["exact", "capacity"]
Overflow = Literal["rounds", "redo"]
Store = Literal["owned", "transient", "resident", "sharded"]
Gather = Literal["layer", "step"]
Split = Literal["even", "local_first", "water_filling", "top_up", "dynamic", "shadow"]
REPLICATING_SPLITS: tuple[Split, ...] = ("dynamic", "shadow")
"""Splits that make the replicas too, in each micro-batch."""
Kernels = Literal["auto", "plain"]
Fp8 = Literal["none", "e4m3", "e5m2"]
RowAlignment = Literal[1, 64, 128]
"""Divisors of the row at which a slot begins: none, or the rows of a tile."""

ITEMSIZE = {"float32": 4, "bfloat16": 2}
"""Bytes of one array element, by compute dtype."""
MAX_AXIS = 2**16
"""Largest number of devices along one axis of a mesh."""
ROUNDING = 1e-12
"""Relative error of a number of rows that was computed in floats."""
ROW_MULTIPLE = 8
"""Buffer sizes are rounded up to a multiple of 8 rows, so that vector units and tiles
divide them."""


@shown_by("mesh")
@dataclasses.dataclass(frozen=True)
class Topology:
    """Sizes of the mesh axes. Their product is the number of devices. gin files call
    this class `Mesh`."""

    dc: int = 1
    """Number of data centres, over which the batch is split."""
    data: int = 1
    """Size of data parallelism: the number of parts into which this axis splits the
    batch."""
    expert: int = 1
    """Size of expert parallelism: the number of parts into which this axis splits the
    batch and the experts."""
    tensor: int = 1
    """Size of tensor parallelism: the number of parts into which this axis splits
    attention heads and hidden widths. All devices of this axis have the whole batch."""

    def __post_init__(self) -> None:
        for name, size in zip(("dc", "data", "expert", "tensor"), self.sizes):
            if size < 1:
                raise ValueError(f"Mesh.{name}={size} must be at least 1")
            if size > MAX_AXIS:
                raise ValueError(
                    f"Mesh.{name}={size} must be at most {MAX_AXIS}: device numbers "
                    "of a mesh are int32, and plans have an entry for each device"
                )

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes of the axes (dc, data, expert, tensor)."""
        return (self.dc, self.data, self.expert, self.tensor)

    @property
    def num_devices(self) -> int:
        """Number of devices of the whole mesh."""
        return math.prod(self.sizes)

    @property
    def num_batch_shards(self) -> int:
        """Number of parts into which a batch is split: dc * data * expert."""
        return self.dc * self.data * self.expert

    def __str__(self) -> str:
        names = [field.name for field in dataclasses.fields(self)]
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


@shown_by("layout")
@dataclasses.dataclass(frozen=True)
class Layout:
    """Static configuration of a compiled MoE layer: its slots, buffers and collectives.

    A step compiled for one layout cannot run another one: a changed layout is a new
    program. Layouts are hashable, and compiled steps are found by them. All fields mean
    the same in every MoE layer of the model. A *row* is a copy of one token on its way
    to one device, whatever number of its experts are there. Where experts compute rows,
    there is one for each token and slot.
    """

    num_experts: int
    """Number of experts of each MoE layer, replicas not counted (e)."""
    num_devices: int
    """Number of devices in the group, between which rows travel (w). With a tensor axis
    or expert shards it is the number of owners, and an owner can be several devices."""
    slots_per_device: int
    """Number of slots of one device, per layer (s). Each holds one expert's weights or
    is empty."""
    rows_per_peer: int
    """Number of rows that one device can send to one other device in round 0 of an
    exchange (c). Each device has a send buffer of this size for every other device, and
    with `halves` one for each half."""
    transport: Transport = "padded"
    """How rows travel between devices: 'local' where there is no other device, 'padded'
    sends whole buffers, 'ragged' only the rows in use, and 'hierarchical' whole buffers
    over one mesh axis after the other: one row for each token and node, and from there
    one for each device."""
    exchange: Exchange = "exact"
    """Handling of rows that do not fit into round 0. 'exact' runs further rounds of
    `rows_per_round` rows each until all rows have arrived. 'capacity' drops and counts
    the rest."""
    overflow: Overflow = "rounds"
    """Handling of an exact step in which round 0 cannot carry all rows. 'rounds' runs
    later rounds within the step. 'redo' has no loops: the step changes nothing, and its
    batch runs again in the step of 'rounds', which is compiled too."""
    store: Store = "owned"
    """How expert weights reach the slots: see the table at the top of this module."""
    split: Split = "even"
    """Which replica of its expert computes a row. 'even' gives every replica an equal
    share. 'local_first' prefers a replica on the row's own device. 'water_filling'
    minimises the rows of the fullest device. 'top_up' does so too and, where the
    fullest device is still above a limit, copies a few more experts in that layer of
    that micro-batch (the next three fields). 'dynamic' chooses all replicas then, from
    the loads of the micro-batch. 'shadow' copies the hottest experts to all devices
    then, where that pays by `shadow_price` and `exchange_toll`."""
    top_up_slack: int = 0
    """Rows that a device may have above the mean before split 'top_up' copies experts,
    in 1/1024 of the mean."""
    top_up_copies: int = 0
    """Maximum number of copies that one device takes in a layer of a micro-batch with
    split 'top_up'. Each has a slot of its own, beyond `slots_per_device`."""
    top_up_offers: int = 0
    """Maximum number of experts in its slots that one device offers for these
    copies."""
    shadow_price: int = 0
    """Time of a copied expert, weights and gradients, in rows of compute. For split
    'shadow'; 0 takes copies for free."""
    exchange_toll: int = 0
    """Time of the exchanges of a row in 1/256 of its compute. For split 'shadow'."""
    kernels: Kernels = "auto"
    """Implementation of the grouped products and of the row permutations. 'auto' takes
    the kernels written for the device where there are any. 'plain' takes XLA's
    operations on every device."""
    fp8: Fp8 = "none"
    """8-bit matrix products of the experts. 'none' multiplies rows and weights in their
    own dtype. 'e4m3' and 'e5m2' round rows and weights to e4m3, and the gradients of
    rows to the format named."""
    align_rows: RowAlignment = 1
    """Divisor of the row at which the rows of each slot begin, where experts compute
    them: that of the tiles of the Hopper kernels where these compute the experts, with
    zero rows between slots, and 1 elsewhere."""
    offers_per_device: int = 0
    """Maximum number of its own experts that one device sends to others as copies, per
    layer. Only the stores 'transient' and 'resident' have copies."""
    copies_per_device: int = 0
    """Maximum number of copies of other devices' experts that one device holds, per
    layer. Only the stores 'transient' and 'resident' have copies."""
    offers_per_node: int = 0
    """Maximum number of its devices' experts that one node sends to others as copies,
    per layer, where copies travel in two levels (`num_copy_nodes`)."""
    copies_per_node: int = 0
    """Maximum number of different experts of other nodes of which the devices of one
    node hold copies, per layer, where copies travel in two levels."""
    rows_per_device: int = 0
    """Number of rows that one device can compute in round 0 (M): one for each token and
    slot. 0 stands for as many as full buffers of all sources can make."""
    top_k: int = 1
    """Number of experts that a token chooses at most (k)."""
    num_groups: int = 1
    """Number of groups of consecutive experts (Router.num_groups)."""
    top_groups: int = 1
    """Number of groups from which a token chooses (Router.top_groups). Where each group
    lies in one node, a token sends rows to no more nodes."""
    num_nodes: int = 1
    """Number of nodes into which the outer mesh axis cuts the group. Links between them
    are slow; 1 where the group has one axis."""
    rows_per_node: int = 0
    """Number of rows that one device can send to one other node in round 0, if rows
    travel in two levels."""
    halves: bool = False
    """Whether the tokens of a device are exchanged in two independent halves, so that
    the rows of one travel while the other one's are computed."""
    prefetch: bool = False
    """Whether the weights of the next layer travel while this layer computes: copies,
    slots of the store 'sharded', the experts that a domain gathers, and what is
    gathered over data. Copies of a split that makes the replicas follow the loads, and
    travel in the layer."""
    gather: Gather = "layer"
    """When slots are gathered over the data axis, along which their hidden width is
    split while parameters rest. 'layer' gathers those of a layer whenever it computes,
    in each micro-batch. 'step' gathers those of all layers once a step, keeps them
    whole, and scatters their gradients once."""
    counts_together: bool = False
    """Whether the step counts the tokens that choose both of two experts
    (`moejax.plan.together`), for a policy that plans by them."""
    axes: tuple[str, ...] = GROUP_AXES["expert"]
    """Mesh axes of the group, the innermost last."""
    tensor: Tensor | None = None
    """Tensor axis, expert shards and schedule of the layer; None without a tensor axis
    and with whole experts."""
    domain: Domain | None = None
    """Domains of the group. The devices of a domain gather one another's experts, and
    rows travel between domains only. None: every device is alone."""

    def __post_init__(self) -> None:
        if self.rows_per_device == 0:
            most = self.num_sources * self.rows_per_peer * self.max_choices
            object.__setattr__(self, "rows_per_device", most)
        check(self)

    @classmethod
    def from_record(cls, fields: Mapping[str, Any]) -> "Layout":
        """Return the layout of fields as JSON has them, such as those in plans.jsonl:
        with a list for a tuple, and a dict for `tensor` and `domain`."""
        tensor, domain = fields["tensor"], fields["domain"]
        if domain is not None:
            sizes = {name: tuple(domain[name]) for name in ("sizes", "shared")}
            domain = Domain(**domain | sizes)
        parts = {"tensor": tensor and Tensor(**tensor), "domain": domain}
        return cls(**fields | {"axes": tuple(fields["axes"])} | parts)

    @property
    def num_slots(self) -> int:
        """Number of slots of all devices of the group, per layer."""
        return self.num_devices * self.slots_per_device

    @property
    def has_copies(self) -> bool:
        """Whether slots can hold copies of experts that other devices own."""
        return self.store in ("transient", "resident")

    @property
    def copies_after_gather(self) -> bool:
        """Whether copies travel between domains whose own experts are gathered, and not
        between devices before that.

        They do so where a domain spans the outer axes of the group, which are slow, and
        the inner ones separate domains: then no copy crosses a slow axis. Elsewhere a
        copy crosses to a domain once, to one of its members. Copies of splits that make
        the replicas travel in the layer.
        """
        if self.domain is None or not self.has_copies or self.makes_replicas:
            return False
        sizes, shared = self.domain.sizes, self.domain.shared
        spans_outer = shared[:-1] == sizes[:-1] and len(sizes) > 1
        return spans_outer and shared[-1] == 1

    @property
    def of_copies(self) -> "Layout":
        """Layout by whose tables a plan's copies reach slots: this one, or where copies
        travel after the gather the exchanged one, with the budgets of all members."""
        if not self.copies_after_gather:
            return self
        offers = self.offers_per_device * self.domain_size
        return dataclasses.replace(self.exchanged, offers_per_device=offers)

    @property
    def num_copy_nodes(self) -> int:
        """Number of nodes to each of which an expert crosses once, for all devices
        there that hold copies of it; 1 where copies travel in one level.

        They have two levels where the group has several nodes of several devices.
        Copies of splits that make the replicas go from any device to any other.
        """
        view = self.of_copies
        has_nodes = 1 < view.num_nodes < view.num_devices
        has_levels = has_nodes and self.has_copies and not self.makes_replicas
        return view.num_nodes if has_levels else 1

    @property
    def most_between_nodes(self) -> dict[str, int]:
        """Budgets of nodes for all copies that the budgets of devices allow."""
        view, nodes = self.of_copies, self.num_copy_nodes
        per_node = view.num_devices // nodes
        offers = per_node * view.offers_per_device
        copies = per_node * view.copies_per_device
        return {
            "offers_per_node": min(offers, (nodes - 1) * copies),
            "copies_per_node": min(copies, (nodes - 1) * offers),
        }

    @property
    def keeps_slots(self) -> bool:
        """Whether slots of all layers are made once a step, and kept until its end."""
        return self.store == "resident" or self.gather == "step"

    @property
    def is_local(self) -> bool:
        """Whether experts are split over the tensor axis, so that no row travels."""
        return self.tensor is not None and self.tensor.is_local

    @property
    def shards(self) -> tuple[int, int]:
        """Size of the tensor axis, and number of parts of an expert: how parameters
        rest. Schedules other than 'local' and domains share them."""
        if self.tensor is None:
            return 1, 1
        return self.tensor.size, self.tensor.expert_shards

    @property
    def num_sources(self) -> int:
        """Number of sources: sets of tokens that are routed together and from which a
        device receives rows. Without a tensor axis each device is one source."""
        num_owners = self.num_devices
        return (
            num_owners if self.tensor is None else self.tensor.num_sources(num_owners)
        )

    @property
    def num_senders(self) -> int:
        """Number of devices from which a device receives rows, itself included."""
        num_owners = self.num_devices
        return (
            num_owners if self.tensor is None else self.tensor.num_senders(num_owners)
        )

    @property
    def choosing(self) -> Choosing:
        """How a token chooses its experts."""
        return Choosing(self.top_k, self.num_experts, self.num_groups, self.top_groups)

    @property
    def max_choices(self) -> int:
        """Number of choices that one row can carry."""
        return min(self.top_k, self.slots_per_device)

    @property
    def num_received_rows(self) -> int:
        """Number of rows from which those of slots are copied in round 0, where they
        lie together: those that can arrive. Tokens that stay are not among them."""
        if not self.sends_rows:
            return 0
        if self.has_levels:
            per_node = self.num_devices // self.num_nodes
            return self.num_nodes * self.rows_per_node + per_node * self.rows_per_peer
        return self.num_senders * self.rows_per_peer // self.num_windows

    @property
    def keeps_home_rows(self) -> bool:
        """Whether tokens stay out of the buffers where a device computes them itself.

        With a tensor axis, or shards of experts, they may be needed elsewhere too. With
        split 'even' a device keeps no more rows than it sends to any other.
        """
        if self.tensor is not None:
            return self.is_local
        return self.split != "even" or self.num_senders == 1

    @property
    def deals_evenly(self) -> bool:
        """Whether a split that may choose looks at the fullest pair of devices: rows
        travel in whole buffers, so that keeping more of them at home saves nothing."""
        return self.transport == "padded"

    @property
    def sends_rows(self) -> bool:
        """Whether there are buffers of rows: there are none where all tokens stay."""
        return not self.keeps_home_rows or self.num_senders > 1

    @property
    def num_destinations(self) -> int:
        """Number of destinations to which a source sends rows: nodes, if rows travel in
        two levels, or devices."""
        return self.num_nodes if self.has_levels else self.num_devices

    @property
    def has_levels(self) -> bool:
        """Whether rows travel to nodes first, and from there to devices."""
        return self.has_nodes and self.transport == "hierarchical"

    @property
    def num_relayed(self) -> int:
        """Number of sources whose rows a device sends to the devices of its node: one
        of each node, or without levels itself alone."""
        return self.num_nodes if self.has_levels else 1

    @property
    def has_nodes(self) -> bool:
        """Whether the group has several nodes of several devices, and no tensor axis
        orders the collectives of rows."""
        return self.tensor is None and 1 < self.num_nodes < self.num_devices

    @property
    def deals_near(self) -> bool:
        """Whether a split that may choose gives rows to replicas on their own node
        first. With whole buffers between all devices it would save nothing, and fill
        some of them more than others."""
        return self.has_nodes and self.transport in ("hierarchical", "ragged")

    @property
    def gathers_choices(self) -> bool:
        """Whether a source gives the choices of a token to as few devices as the split
        allows: where replicas leave it a choice, and fewer rows then travel."""
        has_replicas = self.num_slots > self.num_experts or self.split == "top_up"
        is_sent = self.sends_rows and self.exchange == "exact"
        return has_replicas and is_sent and self.top_k > 1

    @property
    def source_share(self) -> float:
        """Rows of one source, as a fraction of the rows that all tokens on the devices
        of one owner make."""
        if self.tensor is None:
            return 1.0
        shards = 1 if self.is_local else self.tensor.expert_shards
        routed = self.tensor.num_gathered / self.tensor.num_parts
        return routed * self.tensor.size / shards

    @property
    def num_windows(self) -> int:
        """Number of parts into which each send buffer is cut; every device of the
        tensor axis sends one."""
        return 1 if self.tensor is None else self.tensor.num_windows

    @property
    def num_exchanges(self) -> int:
        """Number of exchanges of rows in each layer and micro-batch: 2 with halves."""
        return 2 if self.halves else 1

    def check_halves(self, tokens: int) -> None:
        """Raise ValueError if the layout asks for halves of an odd number of tokens.
        `tokens` are those of a device in one micro-batch, which the devices of a tensor
        group share out if the schedule says so."""
        routed = tokens if self.tensor is None else tokens // self.tensor.num_parts
        if self.halves and routed % 2:
            raise ValueError(
                f"Moe.halves cuts the {routed} tokens that a device routes in two: use "
                "a batch or length that makes them even, or Moe.halves = False"
            )

    @property
    def domain_size(self) -> int:
        """Number of devices in one domain; 1 without domains."""
        return 1 if self.domain is None else self.domain.num_devices

    @property
    def exchanged(self) -> "Layout":
        """Layout of the exchange of rows, in which each domain counts as one device
        that has the slots of all its members, member after member.

        Its budgets are those that any members can meet. A domain holds the copies of
        all its members. It offers what one of them may, unless each may offer all of
        its experts: all offers could be experts of the same member. Where a domain is a
        node, the budgets of nodes are its own.
        """
        if self.domain is None:
            return self
        size, offers = self.domain_size, self.offers_per_device
        copies, num_peers = self.copies_per_device * size, self.num_devices // size
        if offers == self.experts_per_device:
            offers *= size
        is_in_node = self.domain.shared[0] == 1 and not self.copies_after_gather
        if is_in_node and 1 < self.num_copy_nodes == num_peers:
            offers = min(offers, self.offers_per_node)
            copies = min(copies, self.copies_per_node)
        return dataclasses.replace(
            self,
            num_devices=num_peers,
            slots_per_device=self.slots_per_device * size,
            offers_per_device=offers,
            copies_per_device=copies,
            num_nodes=max(self.num_nodes // self.domain.shared[0], 1),
            domain=None,
        )

    @property
    def topped_up(self) -> "Layout":
        """Same layout, whose slots include those for the copies of split 'top_up'; they
        are the last ones of each device."""
        if self.split != "top_up":
            return self
        slots = self.slots_per_device + self.top_up_copies
        return dataclasses.replace(self, slots_per_device=slots)

    def has_loops(self, assignments_per_device: int) -> bool:
        """Return whether an exchange has later rounds, if a source has this many
        choices."""
        is_exact = self.exchange == "exact" and self.overflow == "rounds"
        tokens = -(-assignments_per_device // self.top_k)
        return is_exact and not self.exchanged._carries(tokens)

    def _carries(self, tokens: int) -> bool:
        """Return whether round 0 carries everything that sources of this many tokens
        can send, and devices can compute it."""
        reach = tokens * self.num_relayed
        sends_all = not self.sends_rows or self.rows_per_peer >= reach
        sends_all &= not self.has_levels or self.rows_per_node >= tokens
        choices = min(self.top_k, self.slots_per_device + self.top_up_copies)
        return sends_all and (
            self.rows_per_device >= self.num_sources * tokens * choices
        )

    @property
    def with_rounds(self) -> "Layout":
        """Same layout, whose exact exchange runs later rounds within the step."""
        return dataclasses.replace(self, overflow="rounds")

    @property
    def yields_home_rows(self) -> bool:
        """Whether the split keeps a row on its own device only while the buffer of
        round 0 has room for it."""
        return self.split in ("water_filling", "top_up", "dynamic")

    @property
    def makes_replicas(self) -> bool:
        """Whether the split makes the replicas, in each micro-batch."""
        return self.split in REPLICATING_SPLITS

    @property
    def experts_per_device(self) -> int:
        """Number of experts whose parameters one device owns, per layer."""
        return self.num_experts // self.num_devices

    @property
    def rows_per_round(self) -> int:
        """Number of rows that one source can send to one device (or node) in each round
        after the first. However many choices they carry, a device has about a quarter
        of `rows_per_device` to compute."""
        most = 4 * self.num_sources * self.max_choices
        first = self.rows_per_node if self.has_levels else self.rows_per_peer
        rows = max(1, min(-(-self.rows_per_device // most), first))
        return -(-rows // self.num_windows) * self.num_windows

    @property
    def computed_per_round(self) -> int:
        """Number of rows that one device can compute in each round after the first."""
        return self.num_sources * self.rows_per_round * self.max_choices

    def num_sorted_rows(self, num_rows: int) -> int:
        """Return the number of rows of the buffer that experts compute, in slot order:
        `num_rows`, and the most zero rows that aligning slots can take."""
        return max_aligned_rows(num_rows, self.slots_per_device, self.align_rows)

    @property
    def rows_per_slot(self) -> int:
        """Number of rows that one source may send to one slot in capacity mode."""
        return max(
            1, self.rows_per_device // (self.num_sources * self.slots_per_device)
        )

    @classmethod
    def home(
        cls,
        num_experts: int,
        num_devices: int,
        assignments_per_device: int,
        buffer_factor: float = 1.5,
        slots_per_device: int | None = None,
        *,
        top_k: int = 1,
        num_nodes: int = 1,
        **kwargs,
    ) -> "Layout":
        """Return the layout of plain expert parallelism, with one slot for each expert.

        `slots_per_device`, and a store in `kwargs`, add slots for replicas.
        `assignments_per_device` is n*k: n tokens of one source (`num_sources`) with k
        experts (`top_k`) each; with halves n is that of one half. Buffers hold
        `buffer_factor` times the rows of an even load: for each peer those of the
        tokens with a choice there (moejax.plan.distinct), n at most, and on each device
        its share of all choices. They are rounded up to a multiple of 8 rows. Peers are
        devices, or domains where there are any. Raises ValueError for fields that do
        not fit together.
        """
        tokens = -(-assignments_per_device // top_k)
        if kwargs.get("halves"):
            tokens = -(-tokens // 2)
        tensor, domain = kwargs.get("tensor"), kwargs.get("domain")
        domain_size = 1 if domain is None else domain.num_devices
        num_peers = max(num_devices // domain_size, 1)  # 0: _check_domain says why
        senders = sources = num_peers
        if tensor is not None:
            senders = tensor.num_senders(num_peers)
            sources = tensor.num_sources(num_peers)
        if senders == 1:
            kwargs["transport"] = "local"
        windows = 1 if tensor is None else tensor.num_windows
        slots = slots_per_device or num_experts // max(num_devices, 1)
        reachable = slots * domain_size + kwargs.get("top_up_copies", 0)
        per_row, most = min(top_k, reachable), max(tokens, 1)
        rows_per_device = min(
            _rounded_up(buffer_factor * sources * tokens * top_k / num_peers),
            max(sources * most * per_row, 1),
        )
        reached = 1 if domain is None else domain.shared[0]
        far_nodes = max(num_nodes // reached, 1)

        groups = (kwargs.get(name, 1) for name in ("num_groups", "top_groups"))
        choosing = Choosing(top_k, num_experts, *groups)

        def rows_to(num_destinations: int) -> int:
            share = distinct_share(1 / num_destinations, choosing)
            return min(_rounded_up(buffer_factor * tokens * float(share)), most)

        rows_per_peer, rows_per_node = rows_to(num_peers), 0
        is_hierarchical = kwargs.get("transport") == "hierarchical"
        if is_hierarchical and 1 < far_nodes < num_peers:
            rows_per_node = rows_to(far_nodes)
            rows_per_peer = min(far_nodes * rows_per_peer, far_nodes * most)
        if kwargs.get("exchange") == "capacity":
            kept = max(1, rows_per_device // (sources * slots * domain_size))
            rows_per_peer = min(slots * domain_size * kept, most)
        return cls(
            num_experts=num_experts,
            num_devices=num_devices,
            slots_per_device=slots,
            rows_per_peer=-(-rows_per_peer // windows) * windows,
            rows_per_device=rows_per_device,
            top_k=top_k,
            num_nodes=num_nodes,
            rows_per_node=rows_per_node,
            **kwargs,
        )


def _rounded_up(rows: float) -> int:
    """Return a number of rows, rounded up to a multiple of ROW_MULTIPLE. Shares of rows
    are floats, so that a multiple may come as the next larger number."""
    rows *= 1 - ROUNDING
    return math.ceil(rows / ROW_MULTIPLE) * ROW_MULTIPLE


def max_aligned_rows(num_rows: int, num_groups: int, multiple: int) -> int:
    """Return the largest sum of rows of groups, each rounded up to a multiple, that
    `num_rows` rows in `num_groups` groups can have.

    It has groups of one row, as many as there can be, and all other rows in whole
    multiples:

        >>> max_aligned_rows(300, 3, 128)  # groups of 1, 1 and 298 rows
        640
    """
    groups = min(num_groups, num_rows)
    return (groups + (num_rows - groups) // multiple) * multiple
