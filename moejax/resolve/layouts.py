"""Layouts of a run and settings of its balancer, from the configuration.

A field of `Dispatch` that is None gets the value that the balancing policy works with.
`Dispatch.overflow` depends on the devices.
"""

import dataclasses
import math
import typing

from jax.sharding import AbstractMesh, Mesh

from moejax.axes import devices_of
from moejax.balance.controller import Settings
from moejax.balance.methods import Method
from moejax.balance.policies import AUTO, POLICIES, Policy, check_policy
from moejax.choice import Choice
from moejax.config import Config
from moejax.kernels.device import device_here
from moejax.kernels.grouped_dot.choose import choose_grouped_dot
from moejax.kernels.tuning import align_rows_for
from moejax.perf.cost_model import CostModel
from moejax.plan import shadowing, top_up
from moejax.plan.layout import Layout, Overflow, Store
from moejax.plan.layout_checks import GATHERED_ONCE, MAX_SLACK
from moejax.resolve.kernels import product_widths
from moejax.resolve.partition import Partition, group_sizes, micro_batch_tokens


def step_layout(cfg: Config, partition: Partition, mesh: Mesh | AbstractMesh) -> Layout:
    """Return the layout of the first train step of a run, for one micro-batch."""
    layout = Layout.home(
        cfg.moe.num_experts,
        partition.num_owners,
        _source_choices(cfg, partition),
        cfg.dispatch.buffer_factor,
        **_choosing(cfg),
        num_nodes=_num_nodes(cfg, partition),
        transport=cfg.dispatch.transport,
        exchange=cfg.dispatch.exchange,
        kernels=cfg.dispatch.kernels,
        fp8=cfg.dispatch.fp8,
        halves=cfg.moe.halves,
        **partition.fields,
        **_store_fields(cfg, partition),
        prefetch=_prefetch(cfg, partition, mesh),
    )
    if cfg.router.training != "dense":
        layout.check_halves(micro_batch_tokens(cfg))
    between = first_policy(cfg).between_nodes(layout)
    layout = dataclasses.replace(layout, **between)
    layout = with_aligned_slots(cfg, layout, mesh)
    overflow = choose_overflow(cfg, layout, partition, mesh)
    return dataclasses.replace(layout, overflow=overflow.value)


def with_aligned_slots(
    cfg: Config, layout: Layout, mesh: Mesh | AbstractMesh
) -> Layout:
    """Return the layout with slots that begin at multiples of a tile's rows, if the
    Hopper kernels compute its products on the devices of the mesh."""
    if layout.kernels == "plain" or cfg.router.training == "dense":
        return layout
    view, is_fp8 = layout.exchanged.topped_up, layout.fp8 != "none"
    num_rows = view.num_sorted_rows(view.rows_per_device)
    align_rows = align_rows_for(num_rows, view.slots_per_device)
    dtype, widths = cfg.model.compute_dtype, product_widths(cfg, layout)
    with devices_of(mesh):
        choice = choose_grouped_dot(dtype, align_rows, *widths, is_fp8=is_fp8)
    if choice.value != "hopper":
        return layout
    return dataclasses.replace(layout, align_rows=align_rows)


def choose_overflow(
    cfg: Config, layout: Layout, partition: Partition, mesh: Mesh | AbstractMesh
) -> Choice[Overflow]:
    """Return how steps of a layout treat rows that round 0 cannot carry.

    An abstract mesh that names no device stands for the device of this machine.
    """
    if cfg.router.training == "dense":
        return Choice("rounds", "Router.training='dense' exchanges no rows")
    choices = -(-_source_choices(cfg, partition) // layout.num_exchanges)
    if not layout.with_rounds.has_loops(choices):
        why = "round 0 carries every row"
        if cfg.dispatch.exchange == "capacity":
            why = "Dispatch.exchange='capacity' drops the rest"
        return Choice("rounds", why)
    if cfg.dispatch.overflow is not None:
        named = cfg.dispatch.overflow
        return Choice(named, f"Dispatch.overflow={named!r}")
    if _is_cpu(mesh):
        return Choice("rounds", "on CPUs the host waits at no loop")
    return Choice("redo", "on GPUs the host waits at each loop")


def _is_cpu(mesh: Mesh | AbstractMesh) -> bool:
    """Return whether the devices of a mesh are CPUs. One that is abstract and names no
    device stands for the device of this machine."""
    with devices_of(mesh):
        return device_here().platform == "cpu"


def _num_nodes(cfg: Config, partition: Partition) -> int:
    """Return the number of nodes that the outer axis of the group makes: 1 where the
    group has one axis, and where no row travels."""
    outer, *inner = group_sizes(cfg).values()
    is_local = partition.tensor is not None and partition.tensor.is_local
    return outer if inner and not is_local else 1


def _choosing(cfg: Config) -> dict[str, int]:
    """Return the fields of a layout that say how tokens choose experts."""
    groups = cfg.router.num_groups, cfg.router.top_groups
    if cfg.router.kind == "recorded":  # choices follow the record
        groups = 1, 1
    return {"top_k": cfg.moe.top_k, "num_groups": groups[0], "top_groups": groups[1]}


def _source_choices(cfg: Config, partition: Partition) -> int:
    """Return the number of choices that the tokens of one source make in a
    micro-batch."""
    return partition.source_tokens(micro_batch_tokens(cfg)) * cfg.moe.top_k


def owning_layout(cfg: Config, partition: Partition) -> Layout:
    """Return the layout in which parameters and moments rest between steps.

    Every expert is at its owner and nowhere else, and there is no domain.
    """
    fields = partition.fields | {"domain": None}
    return Layout.home(cfg.moe.num_experts, partition.num_owners, 8, **fields)


def exact_layout(
    cfg: Config,
    partition: Partition,
    batch_size: int,
    width: int,
    mesh: Mesh | AbstractMesh,
) -> Layout:
    """Return a layout that drops no row, for a batch of `batch_size` sequences of
    `width` tokens on a mesh.

    Every expert is at its owner and nowhere else, and there is no domain.
    """
    tokens_per_device = batch_size // cfg.mesh.num_batch_shards * width
    run_partition, transport = partition, cfg.dispatch.transport
    partition = run_partition.for_any_batch(tokens_per_device)
    if partition != run_partition and transport == "ragged":
        transport = "padded"
    layout = Layout.home(
        cfg.moe.num_experts,
        partition.num_owners,
        partition.source_tokens(tokens_per_device) * cfg.moe.top_k,
        buffer_factor=cfg.dispatch.buffer_factor,
        **_choosing(cfg),
        num_nodes=_num_nodes(cfg, partition),
        transport=transport,
        kernels=cfg.dispatch.kernels,
        fp8=cfg.dispatch.fp8,
        **partition.fields | {"domain": None},
    )
    return with_aligned_slots(cfg, layout, mesh)


def first_policy(cfg: Config) -> Policy:
    """Return the policy of a run's first step: 'home' where it is 'auto'. Raises
    ValueError for a name that no policy has."""
    name = cfg.balance.policy
    return POLICIES["home"] if name == AUTO else check_policy(name)


def balancer_settings(
    cfg: Config,
    layout: Layout,
    ways: tuple[Layout, ...] = (),
    methods: tuple[Method, ...] = (),
) -> Settings:
    """Return the balancer's settings for a run that starts in `layout`. `ways` are the
    layouts under each schedule and domain that the configuration leaves open, and
    `methods` those that a run of policy 'auto' can have.

    Raises ValueError for a split or a store that the policy cannot work with.
    """
    policy = first_policy(cfg)
    is_auto = cfg.balance.policy == AUTO
    if cfg.dispatch.split == "water_filling" and not (policy.has_replicas or is_auto):
        raise ValueError(
            "Dispatch.split='water_filling' divides rows over replicas, and "
            f"Balance.policy='{cfg.balance.policy}' makes none: use 'micromoe' or "
            "another that does"
        )
    max_slots = cfg.balance.max_slots_per_device
    if max_slots is None:
        slots = max([layout.slots_per_device, *(_slots(m.layout) for m in methods)])
        max_slots = max(2 * layout.experts_per_device + 2, slots)
    stores, num_steps = _possible_stores(cfg), cfg.train.num_steps
    groups = cfg.router.num_groups
    # Compressed copies of a domain's experts are state of the run, which stays.
    may_change = cfg.dispatch.compression is None and cfg.balance.policy != "home"
    ways = tuple(way for way in ways if may_change and is_relayout(layout, way))
    args = max_slots, stores, num_steps, groups, ways, methods
    return Settings.of(cfg.balance, *args)


def _slots(layout: Layout) -> int:
    """Return the slots of a device, but for those of replicas that the step makes."""
    return (
        layout.experts_per_device if layout.makes_replicas else layout.slots_per_device
    )


def is_relayout(layout: Layout, way: Layout) -> bool:
    """Return whether a run can change to the schedule and domain of another layout:
    parameters rest in the same way, and steps treat overflows and slots alike."""
    kept = "num_devices", "axes", "shards", "overflow", "align_rows"
    return all(getattr(layout, name) == getattr(way, name) for name in kept)


def _possible_stores(cfg: Config) -> tuple[Store, ...]:
    """Return the stores that the run can have: Dispatch.store, or, if that is None, all
    that can gather as Dispatch.gather says.

    'sharded' is among all only where data x expert x tensor devices divide the widths
    of the experts' parameters.
    """
    if cfg.dispatch.store is not None:
        return (cfg.dispatch.store,)
    shards = cfg.mesh.data * cfg.mesh.expert * cfg.mesh.tensor
    stores = GATHERED_ONCE if cfg.dispatch.gather == "step" else typing.get_args(Store)
    is_uneven = any(width % shards for width in cfg.expert_widths.values())
    return tuple(set(stores) - {"sharded"}) if is_uneven else stores


def _store_sizes(
    cfg: Config, partition: Partition, store: Store
) -> tuple[int, int, int]:
    """Return the slots of a device, and the most copies that it can offer and hold.

    In a group of several axes a device has as many slots as it would have in a group of
    the expert axis alone, since data parallelism holds as many copies anyway. A split
    that makes replicas has a slot for one copy beside each own expert: for dynamic
    replication that is always enough. There is a copy for each slot beyond the own
    experts, and one at least, so that a plan may move an expert. A device offers as
    many of its own experts as it holds copies, since what may travel travels in each
    step; all of them in a group of several axes, and twice as many where each
    micro-batch has other copies.
    """
    moe, dispatch = cfg.moe, cfg.dispatch
    own = moe.num_experts // partition.num_owners
    most = moe.num_experts // partition.domain_size  # a domain needs an expert once
    alone, is_dynamic = moe.num_experts // cfg.mesh.expert, cfg.dispatch.makes_replicas
    slots = dispatch.slots_per_device
    if slots is None:
        slots = own
        if is_dynamic:
            slots = min(2 * own, most)
        elif first_policy(cfg).has_replicas and store != "owned":
            slots = min(max(alone, own + 1), most)
    elif cfg.balance.policy == AUTO and store == "owned":
        slots = own  # a relayout makes room for copies
    if store not in ("transient", "resident"):
        return slots, 0, 0
    copies = slots - own if is_dynamic else max(slots - own, 1)
    if alone > own:
        return slots, own, copies
    offers = 2 * copies if dispatch.split == "dynamic" else copies
    return slots, min(offers, own), copies


def with_shadow_prices(layout: Layout, cost: CostModel) -> Layout:
    """Return the layout of split 'shadow' with the price of a copy and the toll of the
    exchange by FasterMoE's Eq. 7 and 8, in rows of compute; others as they are.

    The price is 2 |expert| / W over 3 F / P, and a row's toll 4 H / W over 3 F / P.
    """
    if layout.split != "shadow":
        return layout
    row_sec = 3 * cost.flops_per_row / cost.flops_per_sec
    bytes_per_sec = cost.between_units(layout).bytes_per_sec
    price = 2 * cost.bytes_per_expert / bytes_per_sec / row_sec
    toll = 4 * cost.bytes_per_row / bytes_per_sec / row_sec
    return dataclasses.replace(
        layout,
        shadow_price=min(math.ceil(price), shadowing.MAX_PRICE),
        exchange_toll=min(round(toll * 2**shadowing.TOLL_BITS), shadowing.MAX_TOLL),
    )


def _store_fields(cfg: Config, partition: Partition) -> dict:
    """Return the fields of the Layout about slots, copies and splits, by name.

    Raises ValueError for settings that contradict one another.
    """
    moe, dispatch = cfg.moe, cfg.dispatch
    policy = first_policy(cfg)
    if dispatch.exchange == "capacity" and cfg.balance.policy != "home":
        raise ValueError(
            "Dispatch.exchange='capacity' drops rows by slot, so that another plan "
            "would drop other rows: use 'exact' with "
            f"Balance.policy='{cfg.balance.policy}'"
        )
    is_dynamic = cfg.dispatch.makes_replicas
    if is_dynamic and cfg.balance.policy != "home":
        raise ValueError(
            f"Dispatch.split='{dispatch.split}' makes the replicas that each "
            "micro-batch needs: "
            f"use Balance.policy='home' with it, not '{cfg.balance.policy}'"
        )
    if dispatch.compression is not None and cfg.balance.policy != "home":
        raise ValueError(
            f"Dispatch.compression={dispatch.compression:g} sends changes of experts "
            "that stay where they are: use Balance.policy='home', not "
            f"'{cfg.balance.policy}', or Dispatch.compression=None"
        )
    is_local = partition.tensor is not None and partition.tensor.is_local
    if is_local and cfg.balance.policy != "home":
        raise ValueError(
            f"Balance.policy='{cfg.balance.policy}' plans for owners between which all "
            "rows travel, and with schedule='local' some rows do not: use "
            "Balance.policy='home', or another Dispatch.schedule"
        )
    store = "transient" if is_dynamic else policy.stores[0]
    store = store if dispatch.store is None else dispatch.store
    slots, offers, copies = _store_sizes(cfg, partition, store)
    if slots * partition.domain_size > moe.num_experts:
        raise ValueError(
            f"Dispatch.slots_per_device={slots} would give a device or domain more "
            f"slots ({slots * partition.domain_size}) than there are experts "
            f"({moe.num_experts}), each of which it needs only once: use "
            f"{moe.num_experts // partition.domain_size} at most"
        )
    shards = cfg.mesh.data * cfg.mesh.expert * cfg.mesh.tensor
    for name, width in cfg.expert_widths.items():
        if store == "sharded" and width % shards:
            raise ValueError(
                f"store='sharded' splits {name}={width} over data x expert x tensor = "
                f"{shards} devices: use a multiple of {shards}, or another "
                "Dispatch.store and Balance.policy"
            )
    split = policy.split if dispatch.split is None else dispatch.split
    if cfg.balance.policy == AUTO and store == "owned":
        split = policy.split  # there are no replicas yet
    own = moe.num_experts // partition.num_owners
    return {
        "slots_per_device": slots,
        "store": store,
        "split": split,
        **(_top_up_fields(cfg, own) if split == "top_up" else {}),
        "offers_per_device": offers,
        "copies_per_device": copies,
        "gather": dispatch.gather or "layer",
        "counts_together": policy.needs_together,
    }


def _top_up_fields(cfg: Config, own: int) -> dict:
    """Return the fields of the Layout for split 'top_up', where each device owns `own`
    experts."""
    slack = (cfg.dispatch.top_up_above - 1) * (1 << top_up.SLACK_BITS)
    copies = min(cfg.dispatch.top_up_copies, cfg.moe.num_experts)
    return {
        "top_up_slack": int(min(slack, MAX_SLACK)),
        "top_up_copies": copies,
        "top_up_offers": min(2 * copies, own),
    }


def _prefetch(cfg: Config, partition: Partition, mesh: Mesh | AbstractMesh) -> bool:
    """Return Dispatch.prefetch or, if that is None, whether expert weights travel a
    layer ahead: those of a domain, those of a policy that says so, and on GPUs, where
    collectives travel beside other work, those that each layer gathers over data.

    Dense training has no slots.
    """
    if cfg.dispatch.prefetch is not None:
        return cfg.dispatch.prefetch
    policy = first_policy(cfg)
    store = cfg.dispatch.store or policy.stores[0]
    is_split = cfg.mesh.data > 1 and "data" not in cfg.dispatch.group_axes
    is_split = is_split and cfg.dispatch.gather != "step"
    is_gathered = is_split and cfg.router.training != "dense" and not _is_cpu(mesh)
    has_domain = partition.domain is not None
    return has_domain or is_gathered or policy.prefetches(store)
