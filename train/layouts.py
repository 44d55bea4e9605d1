"""Which layouts a run has: what its policy is made for, unless the configuration says
otherwise."""

import pathlib
import typing

from moejax.balance.calibration import (
    Calibration,
    check,
    cost_model,
    read_calibration,
)
from moejax.balance.controller import Settings
from moejax.balance.cost import NOTES, CostModel
from moejax.balance.policies import check_policy
from moejax.config import Config
from moejax.layout import Layout, Store
from moejax.model.flops import flops_per_token
from moejax.wire import Wire

ITEMSIZE = {"float32": 4, "bfloat16": 2}


def layout_of(cfg: Config) -> Layout:
    """For one micro-batch of this run, at its start."""
    shards = cfg.mesh.topology.num_batch_shards * cfg.train.accumulate_steps
    tokens_per_device = cfg.train.batch_size // shards * cfg.data.seq_len
    return Layout.home(
        cfg.moe.num_experts,
        cfg.group_size,
        tokens_per_device * cfg.moe.top_k,
        cfg.moe.rows_per_peer,
        cfg.moe.buffer_factor,
        transport=cfg.moe.transport,
        exchange=cfg.moe.exchange,
        axes=cfg.moe.group_axes,
        **_store_of(cfg),
    )


def exact_layout(cfg: Config, batch_size: int, width: int) -> Layout:
    """The home layout for these tokens, that drops none whatever the run does."""
    tokens_per_device = batch_size // cfg.mesh.topology.num_batch_shards * width
    return Layout.home(
        cfg.moe.num_experts,
        cfg.group_size,
        tokens_per_device * cfg.moe.top_k,
        buffer_factor=cfg.moe.buffer_factor,
        transport=cfg.moe.transport,
        axes=cfg.moe.group_axes,
    )


def settings_of(cfg: Config) -> Settings:
    """The balancer's; ValueError for thresholds in the wrong order and the like."""
    policy = check_policy(cfg.balance.policy)
    if cfg.moe.split == "water_filling" and not policy.has_replicas:
        raise ValueError(
            "Moe.split='water_filling' divides rows over replicas, and Balance.policy="
            f"'{cfg.balance.policy}' makes none: use 'micromoe' or another that does"
        )
    balance, own = cfg.balance, cfg.moe.num_experts // cfg.group_size
    most = balance.max_slots_per_device
    if most is None:
        most = max(2 * own + 2, layout_of(cfg).slots_per_device)
    return Settings(
        policy=balance.policy,
        every_steps=balance.every_steps,
        lag_steps=balance.lag_steps,
        relayout_lag_steps=balance.relayout_lag_steps,
        stores=_possible_stores(cfg),
        act_above=balance.act_above,
        rest_below=balance.rest_below,
        margin=balance.margin,
        cooldown_steps=balance.cooldown_steps,
        horizon_steps=balance.horizon_steps,
        half_life_steps=balance.half_life_steps,
        max_slots_per_device=most,
    )


def cost_of(cfg: Config, device_kind: str) -> CostModel:
    """Of this model's sizes at presumed speeds, or at those that Balance.calibration
    has; ValueError if that was measured elsewhere."""
    sizes = dict(zip(("dc", "data", "expert", "tensor"), cfg.mesh.topology.sizes))
    if cfg.balance.calibration is None:
        calibration = presumed(sizes, device_kind)
    else:
        calibration = read_calibration(_found(cfg.balance.calibration))
        check(calibration, sizes, device_kind, cfg.model.compute_dtype)
    flops, accumulate = flops_per_token(cfg), cfg.train.accumulate_steps
    rest = flops.attention_projections + flops.attention_scores + flops.shared
    tokens = cfg.train.batch_size * cfg.data.seq_len / accumulate
    tokens_per_device = tokens / cfg.mesh.topology.num_batch_shards
    return cost_model(
        calibration,
        d_model=cfg.model.d_model,
        d_expert=cfg.moe.d_expert,
        itemsize=ITEMSIZE[cfg.model.compute_dtype],
        micro_batches=accumulate,
        other_flops_per_device=rest / cfg.model.num_layers * tokens_per_device,
        remat=cfg.model.remat,
        group=cfg.moe.group_axes,
    )


def presumed(mesh_sizes: dict[str, int], device_kind: str) -> Calibration:
    """The speeds of moejax.balance.cost.NOTES, and half a minute to compile."""
    line = {"latency_sec": 0.0, "bytes_per_sec": NOTES.bytes_per_sec, "r2": 1.0}
    return Calibration(
        device_kind=device_kind,
        mesh=mesh_sizes,
        compute_dtype="bfloat16",
        collectives={
            "all_to_all": {"data": line, "expert": line},
            "all_gather": {"data": line},
        },
        flops_per_sec=NOTES.flops_per_sec,
        matmul_r2=1.0,
        compile_sec=30.0,
        when="presumed",
    )


def _found(path: str) -> pathlib.Path:
    """A path from the working directory or, as shipped configs have it, from the folder
    that holds train/."""
    here = pathlib.Path(path)
    return here if here.exists() else pathlib.Path(__file__).parents[1] / path


def _possible_stores(cfg: Config) -> tuple[Store, ...]:
    """The one that is named, else all, but 'sharded' only where hidden width divides
    over data x expert."""
    if cfg.moe.store is not None:
        return (cfg.moe.store,)
    shards = cfg.mesh.data * cfg.mesh.expert
    stores = typing.get_args(Store)
    return (
        stores if cfg.moe.d_expert % shards == 0 else tuple(set(stores) - {"sharded"})
    )


def _sizes_of(cfg: Config, store: Store) -> tuple[int, int, int]:
    """Slots of a device, and what it can offer and hold of copies.

    In a merged group a device has the slots that it would have alone: data parallelism
    holds as many copies anyway. For dynamic replication it has a slot for a copy beside
    each own expert, which always is enough.
    """
    moe, own = cfg.moe, cfg.moe.num_experts // cfg.group_size
    alone, is_dynamic = moe.num_experts // cfg.mesh.expert, moe.split == "dynamic"
    offers, copies, slots = (
        moe.offers_per_device, moe.copies_per_device, moe.slots_per_device,
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


def _store_of(cfg: Config) -> dict:
    """Fields of the Layout that say how experts reach slots, and rows replicas."""
    moe, policy = cfg.moe, check_policy(cfg.balance.policy)
    if moe.exchange == "capacity" and cfg.balance.policy != "home":
        raise ValueError(
            "Moe.exchange='capacity' drops rows by slot, and plans would change which: "
            f"use 'exact' with Balance.policy='{cfg.balance.policy}'"
        )
    is_dynamic = moe.split == "dynamic"
    if is_dynamic and cfg.balance.policy != "home":
        raise ValueError(
            "Moe.split='dynamic' makes the replicas that each micro-batch needs: use "
            f"Balance.policy='home' with it, and not '{cfg.balance.policy}'"
        )
    store = "transient" if is_dynamic else policy.stores[0]
    store = store if moe.store is None else moe.store
    slots, offers, copies = _sizes_of(cfg, store)
    if slots > moe.num_experts:
        raise ValueError(
            f"Moe.slots_per_device={slots} is more replicas than devices "
            f"({cfg.group_size}) for some expert: a device needs each once, use "
            f"num_experts={moe.num_experts} at most"
        )
    shards = cfg.mesh.data * cfg.mesh.expert
    if store == "sharded" and moe.d_expert % shards:
        raise ValueError(
            f"store='sharded' splits Moe.d_expert={moe.d_expert} over data x expert = "
            f"{shards} devices: use a multiple of {shards}, or another Moe.store and "
            "Balance.policy"
        )
    prefetch = moe.prefetch
    if prefetch is None:
        prefetch = policy.prefetch and store == "transient" and not is_dynamic
    return {
        "slots_per_device": slots,
        "store": store,
        "split": policy.split if moe.split is None else moe.split,
        "fused_split": moe.fused_split,
        "offers_per_device": offers,
        "copies_per_device": copies,
        "prefetch": prefetch,
        "wire": _wire_of(cfg),
    }


def _wire_of(cfg: Config) -> Wire | None:
    moe = cfg.moe
    if not (moe.near_weight or moe.far_weight):
        return None
    per_node = moe.devices_per_node or cfg.group_size
    return Wire(per_node, moe.near_weight, moe.far_weight)
