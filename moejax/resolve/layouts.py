"""Which layouts a run may have: what its policy is made for, unless the configuration
says otherwise; and the balancer's settings that follow."""

import typing

from moejax.balance.controller import Settings
from moejax.balance.policies import check_policy
from moejax.config import Config
from moejax.plan.layout import Layout, Store
from moejax.resolve.communication import Partition, micro_batch_tokens


def step_layout(cfg: Config, parts: Partition) -> Layout:
    """Return the layout of the step that a run begins with, for one micro-batch."""
    return Layout.home(
        cfg.moe.num_experts,
        parts.num_owners,
        parts.source_tokens(micro_batch_tokens(cfg)) * cfg.moe.top_k,
        cfg.dispatch.rows_per_peer,
        cfg.dispatch.buffer_factor,
        transport=cfg.dispatch.transport,
        exchange=cfg.dispatch.exchange,
        kernels=cfg.dispatch.kernels,
        fp8=cfg.dispatch.fp8,
        **parts.fields,
        **_store_fields(cfg, parts),
    )


def owning_layout(cfg: Config, parts: Partition) -> Layout:
    """Return the layout with every expert at its owner and nowhere else, and without a
    domain: how parameters rest, and what an evaluation of another batch runs in."""
    fields = parts.fields | {"domain": None}
    return Layout.home(cfg.moe.num_experts, parts.num_owners, 8, **fields)


def exact_layout(cfg: Config, parts: Partition, batch_size: int, width: int) -> Layout:
    """Return the home layout for a batch of `batch_size` sequences of `width` tokens;
    it drops no row, whatever the run does."""
    tokens_per_device = batch_size // cfg.mesh.num_batch_shards * width
    run_parts, transport = parts, cfg.dispatch.transport
    parts = run_parts.for_any_batch(tokens_per_device)
    if parts != run_parts and transport == "ragged":
        transport = "padded"
    return Layout.home(
        cfg.moe.num_experts,
        parts.num_owners,
        parts.source_tokens(tokens_per_device) * cfg.moe.top_k,
        buffer_factor=cfg.dispatch.buffer_factor,
        transport=transport,
        kernels=cfg.dispatch.kernels,
        fp8=cfg.dispatch.fp8,
        **parts.fields | {"domain": None},
    )


def balancer_settings(cfg: Config, layout: Layout) -> Settings:
    """Return the balancer's settings for a run that begins in `layout`. Raises
    ValueError for a split or a store that the policy has no use for."""
    policy = check_policy(cfg.balance.policy)
    if cfg.dispatch.split == "water_filling" and not policy.has_replicas:
        raise ValueError(
            "Dispatch.split='water_filling' divides rows over replicas, and "
            f"Balance.policy='{cfg.balance.policy}' makes none: use 'micromoe' or "
            "another that does"
        )
    most = cfg.balance.max_slots_per_device
    if most is None:
        most = max(2 * layout.experts_per_device + 2, layout.slots_per_device)
    return Settings.of(cfg.balance, most, _possible_stores(cfg))


def _possible_stores(cfg: Config) -> tuple[Store, ...]:
    """The one that is named, else all, but 'sharded' only where hidden width divides
    over data x expert."""
    if cfg.dispatch.store is not None:
        return (cfg.dispatch.store,)
    shards = cfg.mesh.data * cfg.mesh.expert * cfg.mesh.tensor
    stores = typing.get_args(Store)
    return (
        stores if cfg.moe.d_expert % shards == 0 else tuple(set(stores) - {"sharded"})
    )


def _store_sizes(cfg: Config, parts: Partition, store: Store) -> tuple[int, int, int]:
    """Slots of a device, and what it can offer and hold of copies.

    In a merged group a device has the slots that it would have alone: data parallelism
    holds as many copies anyway. For dynamic replication it has a slot for a copy beside
    each own expert, which always is enough.
    """
    moe, dispatch = cfg.moe, cfg.dispatch
    own = moe.num_experts // parts.num_owners
    alone, is_dynamic = moe.num_experts // cfg.mesh.expert, dispatch.split == "dynamic"
    offers, copies, slots = (
        dispatch.offers_per_device, dispatch.copies_per_device,
        dispatch.slots_per_device,
    )  # fmt: skip
    if is_dynamic and copies is None:
        copies = min(own, moe.num_experts - own)
    if slots is None:
        slots = own
        if is_dynamic:
            slots = own + copies
        elif check_policy(cfg.balance.policy).has_replicas and store != "owned":
            slots = min(max(alone, own + 1), moe.num_experts)
    if store not in ("transient", "resident"):
        return slots, offers or 0, copies or 0
    if offers is None:
        offers = own if is_dynamic or alone > own else min(2, own)
    return slots, offers, max(slots - own, 1) if copies is None else copies


def _store_fields(cfg: Config, parts: Partition) -> dict:
    """Fields of the Layout that say how experts reach slots, and rows replicas."""
    moe, dispatch = cfg.moe, cfg.dispatch
    policy = check_policy(cfg.balance.policy)
    if dispatch.exchange == "capacity" and cfg.balance.policy != "home":
        raise ValueError(
            "Dispatch.exchange='capacity' drops rows by slot, and plans would change "
            "which: "
            f"use 'exact' with Balance.policy='{cfg.balance.policy}'"
        )
    is_dynamic = dispatch.split == "dynamic"
    if is_dynamic and cfg.balance.policy != "home":
        raise ValueError(
            "Dispatch.split='dynamic' makes the replicas that each micro-batch "
            "needs: use "
            f"Balance.policy='home' with it, and not '{cfg.balance.policy}'"
        )
    is_local = parts.tensor is not None and parts.tensor.is_local
    if (parts.domain is not None or is_local) and cfg.balance.policy != "home":
        raise ValueError(
            f"Balance.policy='{cfg.balance.policy}' plans for owners between which all "
            "rows travel, and a domain or schedule='local' keeps some at home: use "
            "Balance.policy='home', or Dispatch.domain=(1, 1) and another "
            "Dispatch.schedule"
        )
    store = "transient" if is_dynamic else policy.stores[0]
    store = store if dispatch.store is None else dispatch.store
    slots, offers, copies = _store_sizes(cfg, parts, store)
    if slots > moe.num_experts:
        raise ValueError(
            f"Dispatch.slots_per_device={slots} is more replicas than devices "
            f"({parts.num_owners}) for some expert: a device needs each "
            f"once, use num_experts={moe.num_experts} at most"
        )
    shards = cfg.mesh.data * cfg.mesh.expert * cfg.mesh.tensor
    if store == "sharded" and moe.d_expert % shards:
        raise ValueError(
            f"store='sharded' splits Moe.d_expert={moe.d_expert} over data x expert x "
            f"tensor = {shards} devices: use a multiple of {shards}, or another "
            "Dispatch.store and Balance.policy"
        )
    prefetch = dispatch.prefetch
    if prefetch is None:
        prefetch = policy.prefetch and store == "transient" and not is_dynamic
        prefetch = prefetch or parts.domain is not None
    return {
        "slots_per_device": slots,
        "store": store,
        "split": policy.split if dispatch.split is None else dispatch.split,
        "fused_split": dispatch.fused_split,
        "offers_per_device": offers,
        "copies_per_device": copies,
        "prefetch": prefetch,
    }
