"""Print what a run would be: first whether it fits a target, and how long a step is
predicted to take there; then parameters, memory, FLOPs and the plan.

A run that does not fit is told what would make it fit. With a number of devices, the
meshes that the run can have on them are printed.
"""

import dataclasses
import shlex
from typing import NamedTuple

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from moejax.axes import AXES
from moejax.config import Config
from moejax.model.flops import flops_per_token, num_params
from moejax.perf.cluster import NODE_DEVICES, Cluster, Device, nodes_of
from moejax.perf.stated import stated_calibration
from moejax.perf.target import Target
from moejax.perf.target import load as load_target
from moejax.perf.target import names as target_names
from moejax.plan.expert_plan import ExpertPlan
from moejax.resolve.fitting import find_changes
from moejax.resolve.gather import SAFE
from moejax.resolve.inert import inert_parts
from moejax.resolve.memory import step_memory
from moejax.resolve.meshes import RULE, propose_meshes
from moejax.resolve.resolved import Resolved, resolve
from moejax.resolve.step_time import predict
from moejax.resolve.strategies import find_strategies, link_time
from train.launch.program import usable_bytes
from train.logs.peak import speed
from train.replicas import coverage
from train.step.compiled import make_model
from train.step.ragged import check_ragged
from train.step.state import abstract_state, bytes_per_device

GIB = 2**30
MAX_MESHES = 8
"""Number of meshes that are shown at most."""
NUM_CHANGES = 3
"""Number of changes that are shown where a run does not fit."""

CLOSE = 0.1
"""Share of the memory within which a prediction may be wrong about what fits."""
NEAR = " (predicted; tools/aot.py compiles it, and is sure)"


class Fit(NamedTuple):
    """Comparison of a run's predicted memory with the memory of a target."""

    target: Target
    total_bytes: int
    """Predicted bytes at the peak of a train step."""
    usable_bytes: int
    """Bytes of the target that a run may use."""

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.usable_bytes

    def __str__(self) -> str:
        """Return the line about the target."""
        share = self.usable_bytes / self.target.memory_bytes
        left = (self.usable_bytes - self.total_bytes) / GIB
        verdict = f"fits, and {left:.1f} GiB are left"
        if not self.fits:
            verdict = f"does not fit: {-left:.1f} GiB too much"
        return (
            f"{self.target.name}: {self.target.memory_bytes / GIB:.1f} GiB, of which a "
            f"run may use {share:.0%}, {self.usable_bytes / GIB:.1f} GiB: {verdict}"
            + (NEAR if abs(left) * GIB < CLOSE * self.usable_bytes else "")
        )


def dry_run(cfg: Config, target: Target | None = None) -> dict:
    """Print the sizes of a run, and return them. None of its devices is needed.

    `target` is the GPU whose memory and kernels count; None: this machine's kernels,
    and no limit of memory.
    """
    run = _resolve(cfg, target)
    run.check_policy()
    run.recorded_sha256()
    usable = None if target is None else usable_bytes(target.memory_bytes)
    memory, flops = _memory(run), flops_per_token(cfg.network)
    plan = run.home_plan()
    state = _abstract_state(run)
    covered = coverage(state)
    record = {
        "params": num_params(cfg.network),
        "memory": memory,
        "checkpoint_bytes": sum(
            leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)
        ),
        "flops_per_token": dataclasses.asdict(flops) | {"train": flops.train},
        "layout": dataclasses.asdict(run.layout),
        "kernels": {k: [c.value, c.why] for k, c in run.kernels.items()},
        "plan": plan.digest,
        "replicas": dataclasses.asdict(covered),
        "steps": cfg.train.num_steps,
        "tokens": cfg.train.num_steps * cfg.train.batch_size * cfg.data.seq_len,
    }
    if target is not None:
        fit = Fit(target, sum(memory.values()), usable)
        print(f"target             {fit}")
        record["step"] = _show_time(run, target, memory["masters"])
        record["fit"] = _show_changes(cfg, fit)
    elif run.calibration.is_measured:
        record["step"] = _show_time(run, None, memory["masters"])
    else:
        print(
            "step               not predicted: measure these devices with "
            "tools/calibrate.py, and name its file in Balance.calibration"
        )
    _print(run, record, plan)
    print(f"replicas           {covered}")
    if target is not None:
        record["strategies"] = _show_strategies(run, target)
    return record


def _show_time(run: Resolved, target: Target | None, master_bytes: int) -> dict:
    """Print the predicted time of a step, on a target or at the calibration's speeds,
    and return it as a record."""
    cfg, device = run.cfg, None if target is None else Device.of_target(target)
    time = predict(run, device, master_bytes)
    parts = dataclasses.asdict(time)
    kind = run.calibration.device_kind if target is None else target.name
    record = {"sec": time.total, "parts": parts} | speed(cfg, time.total, kind)
    beside = "an H100 took 1.15 times as long, an H200 1.12"
    if target is None:
        beside = "simulated devices took 2.6 to 4.5 times as long"
    elif cfg.model.compute_dtype == "float32":
        record["mfu"] = None
        beside = "products of float32 take several times as long as these of bfloat16"
    mfu = "" if record["mfu"] is None else f", {record['mfu']:.1%} MFU"
    print(
        f"step               {time.total:.3g} s predicted, "
        f"{record['tok_per_sec']:,.0f} tokens/s{mfu}, for an even load; {beside}"
    )
    shown = ", ".join(f"{name} {sec:.3g}" for name, sec in parts.items() if sec)
    print(f"  seconds of       {shown}")
    at = f"speeds {run.speeds}; the update and casts of weights are in no part"
    if device is not None:
        at = (
            f"{device.dense_flops_per_sec / 1e12:g} TF/s in the head, "
            f"{run.cost.flops_per_sec / 1e12:g} TF/s elsewhere, "
            f"{device.hbm_bytes_per_sec / 1e12:g} TB/s of memory"
        )
    print(f"  at               {at}; no work hides an exchange")
    return record


def show_meshes(cfg: Config, num_devices: int, target: Target | None = None) -> dict:
    """Print the best meshes of `num_devices` devices, with the flags that set them and
    the bytes per device; return them. Raises ValueError where there is none.

    Kernels are those of `target`, as in `dry_run`.
    """
    meshes, problem = [], ""
    for proposal in propose_meshes(cfg, num_devices):
        try:
            memory = _memory(_resolve(proposal.cfg, target))
        except (ValueError, NotImplementedError) as fault:
            problem = problem or f"Mesh ({proposal.cfg.mesh}): {fault}"
            continue
        meshes.append(
            {
                "mesh": dataclasses.asdict(proposal.cfg.mesh),
                "gin_params": list(proposal.params),
                "memory": memory,
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
        print(f"{sizes}: {sum(mesh['memory'].values()) / GIB:.2f} GiB/device")
        flags = " ".join(map(_flag, mesh["gin_params"]))
        print(f"    {flags or 'as configured'}")
    print("GiB/device: predicted for the peak of a step; the same flags without")
    print("--num_devices print its parts")
    return {"num_devices": num_devices, "rule": RULE, "meshes": meshes}


def _resolve(cfg: Config, target: Target | None) -> Resolved:
    """Return the run on an abstract mesh, which has no devices. Kernels are chosen for
    the target, or for this machine."""
    if target is None:
        here = jax.devices()[0]
        return resolve_on(cfg, AbstractDevice(here.device_kind, None, here.platform))
    usable = usable_bytes(target.memory_bytes)
    return resolve_on(
        cfg, abstract_gpu(target.name), usable, nodes_of(target, cfg.mesh.num_devices)
    )


def abstract_gpu(kind: str) -> AbstractDevice:
    """Return a GPU of this kind that need not be here."""
    return AbstractDevice(kind, None, "gpu")


def resolve_on(
    cfg: Config,
    device: AbstractDevice,
    usable: int | None = None,
    cluster: Cluster | None = None,
) -> Resolved:
    """Return the run on an abstract mesh of such devices, of whose memory a run may use
    `usable` bytes; None: they are not known. `cluster` has their links."""
    run = resolve(cfg, abstract_mesh(cfg, device), usable, cluster)
    check_ragged(run.mesh_layout, device.platform)
    return run


def abstract_mesh(cfg: Config, device: AbstractDevice) -> AbstractMesh:
    """Return the mesh of a configuration, of devices that need not be here."""
    return AbstractMesh(
        cfg.mesh.sizes, AXES, axis_types=(AxisType.Auto,) * 4, abstract_device=device
    )


def _memory(run: Resolved) -> dict[str, int]:
    """Return the predicted bytes of one device at the peak of a step, by kind."""
    held = bytes_per_device(_abstract_state(run), run.cfg.optimizer)
    attention = run.kernels["attention"].value
    return step_memory(run.cfg, run.layout, held, attention)


def _abstract_state(run: Resolved):
    return abstract_state(run, make_model(run).optimizer, run.layout.store)


def _show_changes(cfg: Config, fit: Fit) -> dict:
    """Print what would make a run fit the target, if it does not; return that, and
    whether it fits, as a record."""
    record = {
        "target": fit.target.name,
        "usable_bytes": fit.usable_bytes,
        "fits": fit.fits,
    }
    if fit.fits:
        return record

    def total_of(changed: Config) -> int:
        return sum(_memory(_resolve(changed, fit.target)).values())

    changes = find_changes(cfg, fit.usable_bytes, total_of, NUM_CHANGES)
    record["changes"] = [
        {
            "why": change.why,
            "flags": [_flag(x) for x in change.params],
            "total_bytes": change.total_bytes,
        }
        for change in changes
    ]
    record["changes"] += [
        {"why": f"on {gpu.name}", "flags": [f"--target={name}"], "total_bytes": total}
        for name, gpu, total in _larger(fit)
    ][: NUM_CHANGES - len(changes)]
    if not record["changes"]:
        print("no change that was tried makes it fit")
        return record
    print("each of these makes it fit:")
    for change in record["changes"]:
        print(f"  {change['total_bytes'] / GIB:.1f} GiB: {change['why']}")
        print(f"    {' '.join(change['flags'])}")
    return record


def _show_strategies(run: Resolved, target: Target) -> list[dict]:
    """Print the ways to compute the experts on these devices, with the seconds of their
    links at the target's stated rates and their memory; return them as records."""
    usable, rows = usable_bytes(target.memory_bytes), []
    for strategy in find_strategies(run):
        try:
            there = _resolve(strategy.cfg, target)
        except (ValueError, NotImplementedError) as fault:
            print(f"{strategy.name}: {fault}")
            continue
        calibration = stated_calibration(target, strategy.cfg.mesh)
        time, total_bytes = link_time(there, calibration), sum(_memory(there).values())
        is_same = (there.layout, there.cfg.mesh) == (run.layout, run.cfg.mesh)
        row = {
            "name": strategy.name,
            "mesh": dataclasses.asdict(strategy.cfg.mesh),
            "gin_params": list(strategy.params),
            "rows_sec": time.rows_sec,
            "weights_sec": time.weights_sec,
            "sec": time.sec,
            "total_bytes": total_bytes,
            "room": _room(total_bytes, usable),
            "is_this_run": is_same,
            "is_fastest": False,
        }
        rows.append(row)
    if rows:
        roomy = [row for row in rows if row["room"] == ROOMY]
        best = min(roomy, key=lambda row: row["sec"], default=None)
        if best is not None:
            best["is_fastest"] = True
        _print_strategies(rows, best, target)
    return rows


ROOMY = "fits"


def _room(total_bytes: int, usable: int) -> str:
    """Return in words whether predicted bytes fit, with room for a wrong prediction."""
    if total_bytes <= SAFE * usable:
        return ROOMY
    return "near the limit" if total_bytes <= usable else "does not fit"


def _print_strategies(rows: list[dict], best: dict | None, target: Target) -> None:
    """Print the table of strategies, and one sentence about the fastest that fits."""
    rates = target.rates
    print(
        f"experts on nodes of {NODE_DEVICES} x {target.name}: seconds of links in a "
        f"step at stated rates ({rates.nvlink_bytes_per_sec / 1e9:g} GB/s inside a "
        f"node, {rates.infiniband_bytes_per_sec / 1e9:g} GB/s between), before other "
        "work hides any"
    )
    print(f"  {'':<52} {'rows':>6} {'weights':>8} {'sum':>6} {'GiB':>6}")
    for row in rows:
        notes = [
            row["room"],
            "fastest of those" * row["is_fastest"],
            "this run" * row["is_this_run"],
        ]
        print(
            f"  {row['name']:<52} {row['rows_sec']:6.2f} {row['weights_sec']:8.2f} "
            f"{row['sec']:6.2f} {row['total_bytes'] / GIB:6.1f}  "
            + ", ".join(filter(None, notes))
        )
    if best is None:
        return
    print(f"  {_why(rows, best)}")
    if not best["is_this_run"]:
        print(f"    {' '.join(map(_flag, best['gin_params']))}")


def _flag(binding: str) -> str:
    """Return the flag of a binding, as one types it in a shell."""
    quoted = f'"{binding}"' if not set('"$`\\!') & set(binding) else None
    return f"--gin_param={quoted or shlex.quote(binding)}"


def _why(rows: list[dict], best: dict) -> str:
    """Return the sentence that says why a strategy is the fastest that fits."""
    part = "rows" if best["rows_sec"] > best["weights_sec"] else "weights"
    words = f"{best['name']}: its links work {best['sec']:.2f} s, mostly for {part}"
    roomy = [row for row in rows if row["room"] == ROOMY and row is not best]
    if roomy and best["sec"]:
        second = min(roomy, key=lambda row: row["sec"])
        ratio = second["sec"] / best["sec"]
        words += f", and those of {second['name']} {ratio:.1f} times as long"
    for row in rows:
        if row["sec"] < best["sec"]:
            need = f"{row['total_bytes'] / GIB:.1f} GiB"
            words += f"; {row['name']} is faster, but {row['room']} with {need}"
    return words


def _larger(fit: Fit) -> list[tuple[str, Target, int]]:
    """Return the GPUs that ship in which the run fits, the smallest first: the name,
    the GPU, and the bytes that the run needs."""
    gpus = {name: load_target(name) for name in target_names()}
    return [
        (name, gpu, fit.total_bytes)
        for name, gpu in sorted(gpus.items(), key=lambda item: item[1].memory_bytes)
        if usable_bytes(gpu.memory_bytes) >= fit.total_bytes
    ]


def _print(run: Resolved, record: dict, plan: ExpertPlan) -> None:
    """Print the record of a dry run, and how each open question was answered."""
    params, memory, flops = (
        record[name] for name in ("params", "memory", "flops_per_token")
    )
    layout = ", ".join(
        f"{field.name}={getattr(run.layout, field.name)!r}"
        for field in dataclasses.fields(run.layout)
        if getattr(run.layout, field.name) != field.default
    )
    print(f"mesh               {run.cfg.mesh}")
    print(f"parameters         {params['total']:,} ({params['active']:,} per token)")
    print("memory per device, predicted for the peak of a step")
    for kind, size in memory.items():
        print(f"  {kind:<16} {size / GIB:10.4f} GiB")
    print(f"  {'total':<16} {sum(memory.values()) / GIB:10.4f} GiB")
    print(f"checkpoint         {record['checkpoint_bytes'] / 1e9:.4g} GB")
    print("forward FLOPs per token")
    for part, count in flops.items():
        if part != "train":
            print(f"  {part:<22} {count:.4g}")
    print(f"training FLOPs per token {flops['train']:.4g}")
    print(f"layout             {layout}")
    platform = run.mesh.abstract_device.platform
    warnings = check_ragged(run.mesh_layout, platform)
    for line in (*run.lines(), *inert_parts(run.cfg), *warnings):
        print(line)
    home = "home: slot p holds expert p" if plan.is_home else "not home"
    print(f"plan               {plan.digest} ({home}; {plan.num_layers} layers)")
    tokens = f"{record['tokens']:,} tokens"
    print(f"run                {record['steps']} steps, {tokens}; nothing was run")
