"""What a run would be: parameters, bytes per device, FLOPs per token, the plan."""

import dataclasses

import jax
from jax.sharding import AbstractMesh, AxisType

from moejax.axes import AXES
from moejax.config import Config
from moejax.model.flops import flops_per_token, num_params
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.resolve.resolved import Resolved, resolve
from train.step.compiled import make_model
from train.step.state import abstract_state, bytes_per_device, compresses_gradients

GIB = 2**30


def dry_run(cfg: Config) -> dict:
    """Prints the sizes of a run and returns them; needs none of its devices."""
    mesh = AbstractMesh(cfg.mesh.sizes, AXES, axis_types=(AxisType.Auto,) * 4)
    run = resolve(cfg, mesh)
    optimizer, layout = make_model(run).optimizer, run.layout
    held = bytes_per_device(abstract_state(run, optimizer))
    held["gradients"] = held["params"]
    held |= layer_bytes(cfg, layout)
    flops = flops_per_token(cfg.network)
    plan = run.home_plan()
    record = {
        "params": num_params(cfg.network),
        "bytes_per_device": held,
        "flops_per_token": dataclasses.asdict(flops) | {"train": flops.train},
        "layout": dataclasses.asdict(layout),
        "kernels": {k: c._asdict() for k, c in run.kernels.items()},
        "plan": plan.digest,
        "steps": cfg.train.num_steps,
        "tokens": cfg.train.num_steps * cfg.train.batch_size * cfg.data.seq_len,
    }
    _print(run, record, plan)
    return record


def layer_bytes(cfg: Config, layout: Layout) -> dict[str, int]:
    """Of one MoE layer at work on one device: slots in the compute dtype (those that a
    domain prefetched, of all layers), and the four buffers of rows (sent, received, and
    both on the way back). Where gradients travel compressed, slots of all layers and
    their gradients, which are float32 at least if micro-batches add to them."""
    itemsize = jax.numpy.dtype(cfg.model.compute_dtype).itemsize
    d, view = cfg.model.d_model, layout.exchanged
    shards = 1 if layout.is_local else cfg.expert_shards
    arriving = view.num_senders * view.rows_per_peer // view.num_windows
    rows = 1 if layout.is_local else view.num_devices
    rows = rows * view.rows_per_peer + arriving
    slots, is_compressed = view.slots_per_device, compresses_gradients(layout)
    is_kept = layout.prefetch or is_compressed
    if layout.domain is not None and is_kept:  # for the way back
        slots *= cfg.model.num_moe_layers
    weights = slots * 3 * d * cfg.moe.d_expert // shards
    held = {"slots": weights * itemsize, "exchange": 2 * rows * d * itemsize}
    if is_compressed:
        wide = itemsize if cfg.train.accumulate_steps == 1 else max(itemsize, 4)
        held["slot_gradients"] = weights * wide
    return held


def _print(run: Resolved, record: dict, plan: ExpertPlan) -> None:
    params, held, flops = (
        record[name] for name in ("params", "bytes_per_device", "flops_per_token")
    )
    layout = record["layout"]
    print(f"mesh               {run.cfg.mesh}")
    print(f"parameters         {params['total']:,} ({params['active']:,} per token)")
    print("bytes per device")
    for kind, size in held.items():
        print(f"  {kind:<16} {size / GIB:10.4f} GiB")
    print("forward FLOPs per token")
    for part, count in flops.items():
        if part != "train":
            print(f"  {part:<22} {count:.4g}")
    print(f"training FLOPs per token {flops['train']:.4g}")
    print(f"layout             {layout}")
    for line in run.lines():
        print(line)
    home = "home: slot p holds expert p" if plan.is_home else "not home"
    print(f"plan               {plan.digest} ({home}; {plan.num_layers} layers)")
    tokens = f"{record['tokens']:,} tokens"
    print(f"run                {record['steps']} steps, {tokens}; nothing was run")
