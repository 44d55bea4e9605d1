"""Rank what a configuration can be on a cluster that is not here, by predicted time:
meshes, domains, schedules and methods of balancing.

    meshes          every division of the devices over dc, data, expert and tensor
    groups          experts along expert, data x expert or dc x expert
    ways            communication schedule and domain, by 'auto' of a run
    methods         policies in their stores, and splits that make replicas
    gather          slots in each layer or once a step, by 'auto' of a run

Each is resolved and priced as a run would be (`moejax.resolve`). What does not fit into
the memory is tried with more repeated work, or with smaller micro-batches.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np

from moejax.balance.candidates import (
    Question,
    fitted,
    method_changes,
    plan_at_layers,
    with_pairs,
)
from moejax.balance.methods import Method, first_of_the_race
from moejax.balance.policies import AUTO
from moejax.balance.settings import find_policy
from moejax.config import Config
from moejax.perf.cluster import Cluster, Device
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.groups import GROUP_AXES
from moejax.plan.layout import Layout
from moejax.resolve.fitting import find_changes
from moejax.resolve.gather import SAFE
from moejax.resolve.memory import state_bytes, step_memory
from moejax.resolve.meshes import propose_meshes
from moejax.resolve.partition import rows_per_step
from moejax.resolve.resolved import Resolved
from moejax.resolve.step_time import Scene, StepTime, predict
from tools.simulated.loads import Pair, pairs
from train.dry_run import abstract_gpu, resolve_on
from train.launch.program import usable_bytes
from train.logs.peak import speed

MAX_MESHES = 24
"""Number of meshes that are tried for each size of dc, the most promising ones by the
rule of `moejax.resolve.meshes`: narrow tensor axes, and expert axes that nodes
allow."""
STEPS = 1000
"""Steps over which a change pays. It decides nothing here, since all methods are
compared by their steps."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """One way to run the configuration on the cluster."""

    cfg: Config
    """Configuration with every choice by name."""
    method: Method
    time: StepTime
    """Predicted seconds of a step, the mean over loads."""
    total_bytes: int
    """Predicted bytes of one device at the peak of a step."""
    tok_per_sec: float
    mfu: float | None

    @property
    def sec_per_token(self) -> float:
        return 1 / self.tok_per_sec


@dataclasses.dataclass(frozen=True)
class Answers:
    """All ways that can run, the fastest first, and what cannot."""

    cluster: Cluster
    load: str
    found: tuple[Answer, ...]
    refused: dict[str, str]
    """Why a mesh and a group cannot run, by their names."""


def what_if(cfg: Config, cluster: Cluster, load: str, count: int = 8) -> Answers:
    """Return the ways to run a configuration on all devices of a cluster.

    What the configuration says of its mesh, experts' devices, schedule, domain, store,
    slots, split and policy is left open; the model, the optimizer, the batch and
    numbers of bits stay. Methods of balancing are tried where they can make one of the
    `count` fastest ways; the others stay at home. Raises ValueError where nothing can
    run.
    """
    runs, refused = [], {}
    for proposed in _proposed(cfg, cluster, refused):
        for opened in _opened(proposed):
            try:
                runs.append(_run(opened, cluster))
            except (ValueError, NotImplementedError) as fault:
                refused[f"{opened.mesh}, {opened.dispatch.group}"] = str(fault)
    if not runs:
        first = next(iter(refused.items()), ("", "no mesh"))
        raise ValueError(
            f"nothing can run on {cluster}: {len(refused)} meshes were tried; the "
            f"first, {first[0]}: {first[1]}"
        )
    found = _ranked(runs, cluster, load, count)
    return Answers(cluster, load, tuple(found), refused)


def plain(cfg: Config, cluster: Cluster, load: str) -> Answer:
    """Return plain expert parallelism on a cluster: the fastest mesh with several
    devices along expert, rows along that axis alone, experts at home, and no domain.
    Raises ValueError where none can run."""
    fields = {"group": "expert"}
    fields |= dict.fromkeys(("domain", "compression", "split"))
    fields |= dict.fromkeys(("store", "slots_per_device", "gather"))
    dispatch = dataclasses.replace(cfg.dispatch, **fields)
    balance = dataclasses.replace(cfg.balance, policy="home", calibration=None)
    found, problem = [], "no mesh has several devices along expert"
    for proposed in _proposed(cfg, cluster, {}):
        if proposed.mesh.expert == 1:
            continue
        try:
            named = dataclasses.replace(proposed, dispatch=dispatch, balance=balance)
            run = _run(named, cluster)
            found.append(_best_method(run, cluster.device, load))
        except (ValueError, NotImplementedError) as fault:
            problem = str(fault)
    if not found:
        raise ValueError(f"plain expert parallelism cannot run on {cluster}: {problem}")
    return min(found, key=lambda answer: answer.sec_per_token)


def _ranked(
    runs: list[Resolved], cluster: Cluster, load: str, count: int
) -> list[Answer]:
    """Return the answers of runs, the fastest first."""
    device = cluster.device
    homes = [_best_method(run, device, load) for run in runs]
    least = [
        _least_sec(run, device, home) * home.sec_per_token / home.time.total
        for run, home in zip(runs, homes)
    ]
    found: list[Answer] = []
    for number in np.argsort(least, kind="stable"):
        found.sort(key=lambda answer: answer.sec_per_token)
        can_win = len(found) < count or least[number] < found[count - 1].sec_per_token
        answer = homes[number]
        if can_win and answer.time.wait + answer.time.exchange:
            run = _balanced(runs[number], cluster)
            answer = _best_method(run, device, load)
        found.append(answer)
    return sorted(found, key=lambda answer: answer.sec_per_token)


def _least_sec(run: Resolved, device: Device, home: Answer) -> float:
    """Return the seconds of a step that no method of balancing undercuts: none waits
    less than not at all, or sends fewer rows than an even load."""
    even = predict(run, device, state_bytes(run.cfg)["params"])
    uneven_sec = max(0.0, home.time.exchange - even.exchange)
    return home.time.total - home.time.wait - uneven_sec


def _proposed(
    cfg: Config, cluster: Cluster, refused: dict[str, str]
) -> Iterator[Config]:
    """Yield the configuration on each mesh that is tried, and add sizes of dc without a
    valid mesh to `refused`."""
    for dc in _dc_sizes(cluster):
        try:
            proposals = propose_meshes(cfg, cluster.num_devices, dc)
        except ValueError as fault:
            refused[f"dc={dc}"] = str(fault)
            continue
        yield from (proposal.cfg for proposal in proposals[:MAX_MESHES])


def _dc_sizes(cluster: Cluster) -> list[int]:
    """Return the sizes of the axis dc that are tried, 1 first: the number of units that
    the links of each level but the innermost connect, all in all, and of 2, 4 or 8 of
    them together."""
    sizes, units = {1}, 1
    for level in reversed(cluster.levels[1:]):
        units *= level.size
        sizes |= {units // joined for joined in (1, 2, 4, 8) if units % joined == 0}
    return sorted(sizes)


def _opened(cfg: Config) -> Iterator[Config]:
    """Yield the configuration of a mesh with each group, and all else left open."""
    for group, axes in GROUP_AXES.items():
        if any(getattr(cfg.mesh, axis) == 1 for axis in axes[:-1]):
            continue
        fields = {"schedule": "auto", "domain": "auto", "compression": None}
        fields |= dict.fromkeys(("store", "split", "slots_per_device", "gather"))
        dispatch = dataclasses.replace(cfg.dispatch, group=group, **fields)
        balance = dataclasses.replace(cfg.balance, policy="home", calibration=None)
        try:
            yield dataclasses.replace(cfg, dispatch=dispatch, balance=balance)
        except ValueError:  # the group does not divide the experts
            continue


def _run(opened: Config, cluster: Cluster) -> Resolved:
    """Return the run of a mesh and a group, with experts at home. Raises ValueError,
    with the reason, where none can run or fit."""
    usable = SAFE * usable_bytes(int(cluster.device.memory_bytes))
    run = _resolved(opened, cluster)
    if _bytes(run) <= usable:
        return run
    return _resolved(_fitting(opened, usable, cluster), cluster)


def _balanced(run: Resolved, cluster: Cluster) -> Resolved:
    """Return a run with policy 'auto'; as it is where balancing has no meaning."""
    balance = dataclasses.replace(run.cfg.balance, policy=AUTO)
    try:
        return _resolved(dataclasses.replace(run.cfg, balance=balance), cluster)
    except ValueError:
        return run


def _resolved(cfg: Config, cluster: Cluster) -> Resolved:
    usable = usable_bytes(int(cluster.device.memory_bytes))
    return resolve_on(cfg, abstract_gpu(cluster.device.name), usable, cluster)


def _fitting(cfg: Config, usable: float, cluster: Cluster) -> Config:
    """Return the configuration with the first change that makes it fit, of those that
    leave the devices, the batch and the precision alone. Raises ValueError where none
    does."""

    def allowed(changed: Config) -> int:
        kept = ("mesh", "data", "optimizer")
        if any(getattr(changed, name) != getattr(cfg, name) for name in kept):
            raise ValueError("another run")
        return _bytes(_resolved(changed, cluster))

    found = find_changes(cfg, int(usable), allowed, 1)
    if not found:
        gib = allowed(cfg) / 2**30
        raise ValueError(f"needs {gib:.0f} GiB of memory, and no change makes it fit")
    return found[0].cfg


def _bytes(run: Resolved) -> int:
    """Return the predicted bytes of one device."""
    attention = run.kernels["attention"].value
    parts = step_memory(run.cfg, run.layout, state_bytes(run.cfg), attention)
    return sum(parts.values())


def _best_method(run: Resolved, device: Device, load: str) -> Answer:
    """Return the best of a run's methods for a load."""
    layout, num_layers = run.layout, run.cfg.model.num_moe_layers
    usable = SAFE * usable_bytes(int(device.memory_bytes))
    loads = pairs(load, layout.num_devices, layout.num_experts, num_layers)
    rows = rows_per_step(run.cfg, layout) * layout.num_devices
    scenes: dict[Method, list[Scene]] = {}
    for pair in loads:
        for method, (plan, there) in changes(run, pair, rows, usable).items():
            scene = Scene(rows * pair.met_lwe, plan, there)
            scenes.setdefault(method, []).append(scene)
    times = {
        method: mean_time([step_time(run, device, scene) for scene in found])
        for method, found in scenes.items()
        if len(found) == len(loads)  # else a plan does not fit one of the loads
    }
    best = first_of_the_race({method: time.total for method, time in times.items()})
    layouts = [scene.layout for scene in scenes[best]]
    largest = max(layouts, key=lambda x: (x.rows_per_peer, x.rows_per_device))
    there = dataclasses.replace(run, layout=largest)
    time = times[best]
    figures = speed(run.cfg, time.total, run.calibration.device_kind)
    return Answer(
        cfg=_named(there, best, run.layout),
        method=best,
        time=time,
        total_bytes=_bytes(there),
        tok_per_sec=figures["tok_per_sec"],
        mfu=figures["mfu"],
    )


def changes(
    run: Resolved, pair: Pair, rows: float, usable: float = math.inf
) -> dict[Method, tuple[ExpertPlan, Layout]]:
    """Return the plan and the layout of each method of a run for a load of this number
    of rows. At home buffers fit the load that is met, where that is faster and takes no
    more than `usable` bytes of a device."""
    settings, home = run.settings, Method("home", run.layout)
    methods = settings.methods or (home,)
    policies = {method: find_policy(settings, method.policy) for method in methods}
    few = plan_at_layers(run.home_plan(), slice(len(pair.planned_lwe)))
    question = Question(
        load_lwe=rows * pair.planned_lwe,
        peak_l=np.ones(len(pair.planned_lwe)),
        has_pairs=False,
        ratio=1.0,
        plan=few,
        layout=run.layout,
        cost=run.cost,
        policy=policies[methods[0]],
        margin=0.0,
        swap_steps=STEPS,
        relayout_steps=STEPS,
        max_slots_per_device=settings.max_slots_per_device,
        methods=policies,
        policy_name="home",
    )
    found = method_changes(question)
    if home in found:
        met_lwe = rows * pair.met_lwe
        there = dataclasses.replace(with_pairs(question), load_lwe=met_lwe)
        larger = fitted(there, few, run.layout)
        sec = [run.cost.step_sec(met_lwe, few, x) for x in (run.layout, larger)]
        if sec[1] < sec[0] and _bytes(run.relaid(larger)) <= usable:
            found[home] = few, larger
    return found


def step_time(run: Resolved, device: Device, scene: Scene) -> StepTime:
    """Return the predicted time of a step with some layers' loads."""
    return predict(run, device, state_bytes(run.cfg)["params"], scene)


def mean_time(found: list[StepTime]) -> StepTime:
    """Return the mean of times, part by part."""
    parts = np.mean([dataclasses.astuple(time) for time in found], axis=0)
    return StepTime(*map(float, parts))


def _named(run: Resolved, method: Method, first: Layout) -> Config:
    """Return the run's configuration with a method and all choices by name.

    With a policy a run fits its buffers to the rows that it sees. At home they stay as
    configured, so that Dispatch.buffer_factor is to give those of the run's layout,
    where the `first` one has those of the configuration.
    """
    layout, mine, domain = run.layout, method.layout, None
    if layout.domain is not None:
        domain = (*(1,) * (2 - len(layout.domain.shared)), *layout.domain.shared)
    fields = {"domain": domain, "store": mine.store, "gather": None}
    if layout.tensor is not None:
        fields["schedule"] = layout.tensor.schedule
    if mine.makes_replicas:
        fields |= {"split": mine.split}
    if mine.slots_per_device != mine.experts_per_device:
        fields["slots_per_device"] = mine.slots_per_device
    if method.policy == "home" and not mine.makes_replicas:
        fields["store"] = None
    if method.policy == "home" and layout.rows_per_peer != first.rows_per_peer:
        names = ("rows_per_peer", "rows_per_device")
        larger = max(getattr(layout, x) / getattr(first, x) for x in names)
        factor = larger * run.cfg.dispatch.buffer_factor
        fields["buffer_factor"] = math.ceil(100 * factor) / 100
    dispatch = dataclasses.replace(run.cfg.dispatch, **fields)
    balance = dataclasses.replace(run.cfg.balance, policy=method.policy)
    return dataclasses.replace(run.cfg, dispatch=dispatch, balance=balance)
