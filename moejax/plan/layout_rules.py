"""What a Layout must obey: ValueError, one line, with the rule and what to do."""

import math
import typing

if typing.TYPE_CHECKING:
    from moejax.plan.layout import Layout


def check(layout: "Layout") -> None:
    _check_group(layout)
    _check_copies(layout)
    _check_dynamic(layout)
    _check_tensor(layout)
    _check_domain(layout)
    _check_buffers(layout)


def group_name(axes: tuple[str, ...]) -> str:
    """As errors call it."""
    if len(axes) == 1:
        return f"the {axes[0]} axis"
    return f"the group {' x '.join(axes)}"


def uneven_group(num_experts: int, num_devices: int, axes: tuple[str, ...]) -> str:
    """What is wrong with so many experts in a group of so many devices; '' if nothing:
    each device owns as many as any other."""
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


def _check_group(layout: "Layout") -> None:
    from moejax.plan.layout import GROUP_AXES

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


def _check_copies(layout: "Layout") -> None:
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


def _check_dynamic(layout: "Layout") -> None:
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


def _check_tensor(layout: "Layout") -> None:
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
            f"schedule='s2' cuts rows_per_peer={layout.rows_per_peer} in "
            f"{layout.tensor.num_windows} parts: use a multiple of that"
        )
    if layout.transport == "ragged" and schedule != "s1h":
        raise ValueError(
            f"transport='ragged' is for schedule='s1h', and schedule is '{schedule}'"
        )
    has = (layout.store, layout.transport)
    if layout.is_local and has != ("owned", "local"):
        raise ValueError(
            "schedule='local' keeps each expert on one device of the tensor axis: it "
            f"takes store='owned' and transport='local', and has {has}"
        )


def _check_domain(layout: "Layout") -> None:
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


def _check_buffers(layout: "Layout") -> None:
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
