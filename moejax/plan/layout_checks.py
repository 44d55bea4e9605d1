"""Rules that the fields of a Layout keep. Each error names the field, what was found,
and what would do.

`layout` is a moejax.plan.layout.Layout, which calls `check` when it is made.
"""

import math
from typing import Any

from moejax.plan.groups import GROUP_AXES, group_name, uneven_group
from moejax.plan.schedule_rules import SCHEDULES

GATHERED_ONCE = ("owned", "resident")
"""Stores whose slots can be gathered over data once a step (Layout.gather)."""
MAX_SLACK = 2**20
"""Largest Layout.top_up_slack: 1024 times the mean, above which nothing is copied."""


def check(layout: Any) -> None:
    """Raise ValueError for the first rule that the layout breaks, with a remedy."""
    _check_group(layout)
    _check_copies(layout)
    _check_gather(layout)
    _check_replicas_of_steps(layout)
    _check_top_up(layout)
    _check_tensor(layout)
    _check_domain(layout)
    _check_buffers(layout)


def _check_group(layout: Any) -> None:
    """Check that rows travel along axes that may form a group, and that the group
    splits the experts evenly."""
    groups = list(GROUP_AXES.values())
    if layout.is_local:
        groups = [("tensor",)]
    if layout.axes not in groups:
        raise ValueError(
            f"axes={layout.axes} must be those of a group: use "
            f"{' or '.join(map(str, groups))}"
        )
    uneven = uneven_group(layout.num_experts, layout.num_devices, layout.axes)
    if uneven:
        raise ValueError(uneven)


def _check_copies(layout: Any) -> None:
    """Check that the store agrees with slots, budgets, kernels and split."""
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
            f"store='{layout.store}' has no copies of experts: offers_per_device and "
            f"copies_per_device must be 0, and are {budgets[0]} and {budgets[1]}"
        )
    budgets = (layout.offers_per_node, layout.copies_per_node)
    limits = (layout.num_experts // layout.num_nodes, layout.num_experts)
    if any(not 0 <= budget <= limit for budget, limit in zip(budgets, limits)):
        raise ValueError(
            f"offers_per_node={budgets[0]} and copies_per_node={budgets[1]} must be at "
            f"most {limits[0]}, the experts of a node, and {limits[1]}, and not "
            "negative"
        )
    most_slots = layout.num_experts
    if layout.split == "top_up":
        most_slots += layout.num_devices * layout.top_up_copies
    if layout.store == "owned" and layout.num_slots > most_slots:
        raise ValueError(
            f"store='owned' has exactly one slot for each of {layout.num_experts} "
            f"experts, and the layout has {layout.num_slots} slots: use 'transient', "
            "'resident' or 'sharded'"
        )
    if layout.kernels not in ("auto", "plain"):
        raise ValueError(f"kernels='{layout.kernels}' must be 'auto' or 'plain'")
    if layout.fp8 not in ("none", "e4m3", "e5m2"):
        raise ValueError(f"fp8='{layout.fp8}' must be 'none', 'e4m3' or 'e5m2'")
    if layout.align_rows not in (1, 64, 128):
        raise ValueError(
            f"align_rows={layout.align_rows} must be 1, 64 or 128, the rows of a tile"
        )


def _check_gather(layout: Any) -> None:
    """Check that slots which are gathered once a step are made once a step."""
    if layout.gather == "layer":
        return
    if layout.store not in GATHERED_ONCE and not layout.makes_replicas:
        raise ValueError(
            f"gather='step' keeps the slots of all layers for a step, and store="
            f"'{layout.store}' makes those of a layer in each micro-batch: use store="
            f"{' or '.join(map(repr, GATHERED_ONCE))}, or gather='layer'"
        )


def _check_replicas_of_steps(layout: Any) -> None:
    """Check what a split that makes the replicas needs."""
    if not layout.makes_replicas:
        return
    here = f"split='{layout.split}'"
    if layout.store != "transient":
        raise ValueError(
            f"{here} plans the copies of a layer once its loads are known: use "
            f"store='transient', not '{layout.store}'"
        )
    budgets = (layout.offers_per_device, layout.copies_per_device)
    if layout.num_devices > layout.domain_size and not all(budgets):
        raise ValueError(
            f"{here} needs offers_per_device and copies_per_device of at least "
            f"1, and they are {budgets[0]} and {budgets[1]}: "
            f"{layout.experts_per_device} of each are always enough, which "
            f"Dispatch.slots_per_device={2 * layout.experts_per_device} gives"
        )
    if layout.exchange == "capacity":
        raise ValueError(
            f"{here} chooses replicas for each micro-batch, and with "
            "exchange='capacity' they would decide which rows are dropped: use 'exact'"
        )
    slots = layout.experts_per_device + layout.copies_per_device
    if layout.slots_per_device != slots:
        raise ValueError(
            f"{here} needs a slot for each of {layout.experts_per_device} own "
            f"experts and {layout.copies_per_device} copies of a device, and "
            f"slots_per_device={layout.slots_per_device}: use {slots}, or another "
            "copies_per_device"
        )


def _check_top_up(layout: Any) -> None:
    """Check the limit and the budgets of split 'top_up'."""
    if layout.split != "top_up":
        return
    sizes = (layout.top_up_slack, layout.top_up_copies, layout.top_up_offers)
    names = "top_up_slack, top_up_copies, top_up_offers"
    num_slots, num_experts = layout.slots_per_device, layout.num_experts
    limits = (MAX_SLACK, num_experts, num_slots)
    if any(not 0 <= size <= limit for size, limit in zip(sizes, limits)):
        raise ValueError(
            f"{names}={sizes} must be at most {limits}, the last two the number of "
            "experts and of slots of a device, and not negative"
        )
    if not all(sizes[1:]):
        raise ValueError(
            "split='top_up' needs top_up_copies and top_up_offers of at least 1, and "
            f"they are {sizes[1]} and {sizes[2]}: use split='water_filling' for none"
        )
    if layout.exchange == "capacity":
        raise ValueError(
            "split='top_up' copies experts for each micro-batch, and with "
            "exchange='capacity' copies would decide which rows are dropped: use "
            "'exact'"
        )
    if layout.is_local:
        raise ValueError(
            "split='top_up' sends rows to copies on other devices, and with "
            "schedule='local' no row travels: use another schedule or split"
        )


def _check_tensor(layout: Any) -> None:
    """Check that the schedule agrees with split, buffers, transport and store."""
    if layout.tensor is None:
        return
    schedule = layout.tensor.schedule
    if layout.split != "even" and layout.num_sources % layout.num_devices:
        raise ValueError(
            f"schedule='{schedule}' with expert_shards={layout.tensor.expert_shards} "
            f"has {layout.num_sources} sets of tokens for {layout.num_devices} owners, "
            f"and split='{layout.split}' needs the same number for each owner: use "
            "'s1h' or 's1'"
        )
    if layout.rows_per_peer % layout.tensor.num_windows:
        raise ValueError(
            f"schedule='{schedule}' cuts a buffer of rows_per_peer="
            f"{layout.rows_per_peer} into {layout.tensor.num_windows} parts: use a "
            f"multiple of {layout.tensor.num_windows}"
        )
    if layout.transport == "ragged" and not layout.tensor.rules.takes_ragged:
        known = [repr(name) for name, rules in SCHEDULES.items() if rules.takes_ragged]
        raise ValueError(
            f"transport='ragged' works with schedule={' or '.join(known)} only, and "
            f"schedule is '{schedule}'"
        )
    actual = (layout.store, layout.transport)
    if layout.is_local and actual != ("owned", "local"):
        raise ValueError(
            f"schedule='{schedule}' puts each expert on one device of the tensor axis: "
            "use store='owned' and transport='local', not "
            f"store='{layout.store}' and transport='{layout.transport}'"
        )


def _check_domain(layout: Any) -> None:
    """Check that domains agree with group, store, split and expert shards."""
    domain = layout.domain
    if domain is None:
        return
    if layout.tensor is not None and layout.tensor.inner:
        raise ValueError(
            f"domain={domain.shared} needs as many expert shards as the tensor axis "
            f"has devices ({layout.tensor.size}), and expert_shards="
            f"{layout.tensor.expert_shards}: use {layout.tensor.size}"
        )
    if math.prod(domain.sizes) != layout.num_devices or (
        len(domain.sizes) != len(layout.axes)
    ):
        raise ValueError(
            f"the domain's axis sizes {domain.sizes} are not those of "
            f"{group_name(layout.axes)} ({layout.num_devices} devices): give one size "
            "for each of its axes"
        )
    kept = (layout.store, layout.split, layout.gather)
    if domain.compression is not None and kept != ("owned", "even", "layer"):
        raise ValueError(
            f"compression={domain.compression:g} sends changes of the experts that "
            "each device owns: use store='owned', split='even' and gather='layer', not "
            f"store='{layout.store}', split='{layout.split}' and "
            f"gather='{layout.gather}'"
        )


def _check_buffers(layout: Any) -> None:
    """Check the numbers of slots and of rows, and that the transport can carry them."""
    if layout.num_slots < layout.num_experts:
        raise ValueError(
            f"{layout.num_devices} x {layout.slots_per_device} slots hold fewer than "
            f"num_experts={layout.num_experts}: raise slots_per_device to at least "
            f"{-(-layout.num_experts // layout.num_devices)}"
        )
    rows = layout.rows_per_peer
    if rows < 1:
        raise ValueError(f"rows_per_peer={rows} must be at least 1")
    if layout.overflow == "redo" and layout.exchange == "capacity":
        raise ValueError(
            "overflow='redo' runs a batch again whose rows do not fit, and "
            "exchange='capacity' drops those rows: use overflow='rounds' or 'exact'"
        )
    sources = layout.exchanged.num_sources
    slots = sources * layout.slots_per_device * layout.domain_size
    if layout.exchange == "capacity" and layout.rows_per_device < slots:
        raise ValueError(
            f"rows_per_device={layout.rows_per_device} is less than one row from each "
            f"of {sources} sources to each slot: raise Dispatch.buffer_factor, or use "
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
            f"{group_name(layout.axes)} is only one: use Dispatch.group = 'dc_expert' "
            "or 'data_expert', or transport='padded'"
        )
