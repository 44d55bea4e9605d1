"""Print what a run would be: parameters, bytes per device, FLOPs per token, the plan.

With a number of devices, print the meshes that the run can have on them.
"""

import dataclasses
import shlex

import jax
from jax.sharding import AbstractMesh, AxisType

from moejax.axes import AXES
from moejax.config import Config
from moejax.model.flops import flops_per_token, num_params
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.resolve.meshes import RULE, propose_meshes
from moejax.resolve.resolved import Resolved, resolve
from train.replicas.shards import Coverage, coverage
from train.step.compiled import make_model
from train.step.state import abstract_state, bytes_per_device, compresses_gradients

GIB = 2**30
MAX_MESHES = 8
"""Number of meshes that are shown at most."""


def dry_run(cfg: Config) -> dict:
    """Print the sizes of a run, and return them. None of its devices is needed."""
    run = _resolve(cfg)
    run.check_policy()
    run.recorded_sha256()
    held, layout = _bytes_per_device(run), run.layout
    flops = flops_per_token(cfg.network)
    plan = run.home_plan()
    covered = coverage(_abstract_state(run))
    record = {
        "params": num_params(cfg.network),
        "bytes_per_device": held,
        "flops_per_token": dataclasses.asdict(flops) | {"train": flops.train},
        "layout": dataclasses.asdict(layout),
        "kernels": {k: c._asdict() for k, c in run.kernels.items()},
        "plan": plan.digest,
        "replicas": dataclasses.asdict(covered),
        "steps": cfg.train.num_steps,
        "tokens": cfg.train.num_steps * cfg.train.batch_size * cfg.data.seq_len,
    }
    _print(run, record, plan)
    _print_covered(covered)
    return record


def show_meshes(cfg: Config, num_devices: int) -> dict:
    """Print the best meshes of `num_devices` devices, with the flags that set them and
    the bytes per device; return them. Raises ValueError where there is none."""
    meshes, problem = [], ""
    for proposal in propose_meshes(cfg, num_devices):
        try:
            held = _bytes_per_device(_resolve(proposal.cfg))
        except (ValueError, NotImplementedError) as fault:
            problem = problem or f"Mesh ({proposal.cfg.mesh}): {fault}"
            continue
        meshes.append(
            {
                "mesh": dataclasses.asdict(proposal.cfg.mesh),
                "gin_params": list(proposal.params),
                "bytes_per_device": held,
            }
        )
        if len(meshes) == MAX_MESHES:
            break
    if not meshes:
        raise ValueError(
            f"no mesh of {num_devices} devices can run; the first of them, {problem}"
        )
    print(f"meshes of {num_devices} devices, best first: {RULE}")
    for mesh in meshes:
        sizes = ", ".join(f"{axis}={size}" for axis, size in mesh["mesh"].items())
        print(f"{sizes}: {sum(mesh['bytes_per_device'].values()) / GIB:.2f} GiB/device")
        flags = " ".join(f"--gin_param={shlex.quote(x)}" for x in mesh["gin_params"])
        print(f"    {flags or 'as configured'}")
    print(
        "GiB/device: parameters, moments, gradients and one layer's exchange, without"
    )
    print("activations; the same flags without --num_devices print each of them")
    return {"num_devices": num_devices, "rule": RULE, "meshes": meshes}


def _resolve(cfg: Config) -> Resolved:
    """Return the run on an abstract mesh, which has no devices."""
    mesh = AbstractMesh(cfg.mesh.sizes, AXES, axis_types=(AxisType.Auto,) * 4)
    return resolve(cfg, mesh)


def _bytes_per_device(run: Resolved) -> dict[str, int]:
    """Return the bytes that one device holds, by kind: training state, gradients, and
    one MoE layer at work."""
    held = bytes_per_device(_abstract_state(run))
    held["gradients"] = held["params"]
    return held | layer_bytes(run.cfg, run.layout)


def _abstract_state(run: Resolved):
    return abstract_state(run, make_model(run).optimizer, run.layout.store)


def layer_bytes(cfg: Config, layout: Layout) -> dict[str, int]:
    """Return the bytes of one MoE layer at work on one device, by kind.

    `slots`: expert weights in the compute dtype; where a domain prefetches, those of
    all layers. `exchange`: the four buffers of rows (sent, received, and both on the
    way back). `slot_gradients`, where gradients travel compressed: the gradients of the
    slots of all layers, in float32 at least if micro-batches add to them.
    """
    itemsize = jax.numpy.dtype(cfg.model.compute_dtype).itemsize
    d, view = cfg.model.d_model, layout.exchanged
    shards = 1 if layout.is_local else cfg.expert_shards
    arriving = view.num_senders * view.rows_per_peer // view.num_windows
    rows = 1 if layout.is_local else view.num_devices
    rows = rows * view.rows_per_peer + arriving
    slots, is_compressed = view.slots_per_device, compresses_gradients(layout)
    keeps_all_layers = layout.prefetch or is_compressed
    if layout.domain is not None and keeps_all_layers:  # for the backward pass
        slots *= cfg.model.num_moe_layers
    weights = slots * 3 * d * cfg.moe.d_expert // shards
    held = {"slots": weights * itemsize, "exchange": 2 * rows * d * itemsize}
    if is_compressed:
        wide = itemsize if cfg.train.accumulate_steps == 1 else max(itemsize, 4)
        held["slot_gradients"] = weights * wide
    return held


def _print(run: Resolved, record: dict, plan: ExpertPlan) -> None:
    """Print the record of a dry run, and how each open question was answered."""
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


def _print_covered(covered: Coverage) -> None:
    """Print the leaves of the state that several devices hold, which a run compares,
    and the others."""
    print(f"replicas           {covered}")
    for what, sizes in (("compared", covered.compared), ("once", covered.single)):
        for name, size in sizes.items():
            print(f"  {what:<16} {size:14,} bytes  {name}")
