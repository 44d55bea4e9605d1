"""Choice of the balancing policy and its store where Balance.policy is 'auto'.

    for each policy, in each store that the run can have:
        plan for a load, and price the plan on the load of a later step
    the cheapest one by the cost model, and of those near it the first of the race

The loads of a run are not known when it starts. So they are presumed, unless the router
follows recorded ones.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from moejax.axes import devices_of
from moejax.balance.decision import duration
from moejax.balance.policies import POLICIES, make_valid_plan
from moejax.balance.settings import find_policy
from moejax.choice import Choice
from moejax.config import Config
from moejax.moe import recorded
from moejax.perf.calibration import Calibration
from moejax.perf.cost_model import CostModel
from moejax.perf.traffic import max_over_mean
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout, Store
from moejax.plan.units import unit_order
from moejax.resolve import layouts
from moejax.resolve.communication import choose_communication
from moejax.resolve.gather import GIB, SAFE
from moejax.resolve.kernels import choose_kernels
from moejax.resolve.memory import state_bytes, step_memory
from moejax.resolve.partition import rows_per_step
from moejax.resolve.speeds import make_cost_model

AUTO = "auto"
"""Value of Balance.policy that asks for this choice."""
RACE = (
    "micromoe", "flexmoe", "eplb", "laer", "fastermoe", "prophet", "smartmoe",
    "hiermoe", "home",
)  # fmt: skip
"""Policies from the fastest to the slowest of the race (docs/race.md), in which
'hiermoe' does not run: a trace of loads does not say what tokens choose together."""
NEAR = 0.05
"""Share of the cheapest time by which a policy may be slower and still count as near
it."""
MIN_GAIN = 0.05
"""Smallest share of the time of MoE layers at home that a policy must save."""
NUM_LOADS, MAX_LAYERS = 3, 2
"""Numbers of the loads, each of which is planned from the one before, and of the layers
that are priced."""
ZIPF, ZIPF_EVENED = 1.2, 0.3
"""Exponents of the presumed loads of a router that nothing evens out, about as in
SmartMoE's recording, where the three hottest of 32 experts have two thirds of the
choices, and of one with a balancing loss or a correction bias."""
NOISE = 0.1
"""Standard deviation of the logarithm of a presumed load, from one load to the next."""


class Candidate(NamedTuple):
    """A policy in one of its stores."""

    policy: str
    store: Store

    def __str__(self) -> str:
        return f"{self.policy} in store {self.store}"

    def applied(self, cfg: Config) -> Config:
        """Return a configuration with this policy and store. Dispatch.slots_per_device
        is that of policies that make copies."""
        fields = {"store": self.store}
        if self.store == "owned":
            fields["slots_per_device"] = None
        return replace(
            cfg,
            balance=replace(cfg.balance, policy=self.policy),
            dispatch=replace(cfg.dispatch, **fields),
        )


class Modelled(NamedTuple):
    """Modelled time of a candidate."""

    sec: float
    """Seconds of all MoE layers in a step."""

    def __str__(self) -> str:
        return f"modelled {duration(self.sec)}"


def choose_policy(
    cfg: Config,
    mesh: Mesh | AbstractMesh,
    calibration: Calibration,
    usable_bytes: int | None,
) -> Choice[Candidate]:
    """Return the policy and the store for a configuration whose policy is 'auto'.

    `usable_bytes` are those of a device that a run may use; None: they are not known,
    and nothing is refused for its memory. Raises ValueError where home cannot run.
    """
    at_home = "transient" if cfg.dispatch.makes_replicas else "owned"
    home = Candidate("home", cfg.dispatch.store or at_home)
    found, refused = {home: _first_layout(home.applied(cfg), mesh, calibration)}, {}
    for candidate in _others(cfg):
        applied = candidate.applied(cfg)
        try:
            layout = _first_layout(applied, mesh, calibration)
            _require_room(applied, layout, mesh, usable_bytes)
            found[candidate] = layout
        except ValueError as fault:
            refused[candidate] = f"cannot run: {fault}"
    if len(found) == 1:
        return Choice(home, "no other can run", refused)
    share_tle, what = _shares(cfg)
    load = f"{what} (device max/mean {_ratio(share_tle, found[home]):.2f} at home)"
    cost = make_cost_model(cfg, calibration)
    sec = {
        candidate: _layers_sec(candidate.applied(cfg), layout, cost, share_tle)
        for candidate, layout in found.items()
    }
    best = _best(sec, home, found)
    why = f"{duration(sec[best])} a step in MoE layers, home "
    if best == home:
        why = f"nothing saves {MIN_GAIN:.0%} of a step's MoE layers, "
    why += f"{duration(sec[home])}, modelled for {load}"
    in_order = sorted(sec, key=sec.__getitem__)
    modelled = {candidate: Modelled(sec[candidate]) for candidate in in_order}
    return Choice(best, why, modelled | refused)


def _others(cfg: Config) -> Iterator[Candidate]:
    """Yield the policies but home, in each of the stores that the run can have."""
    for name, policy in POLICIES.items():
        for store in policy.stores:
            if name != "home" and cfg.dispatch.store in (None, store):
                yield Candidate(name, store)


def _first_layout(
    cfg: Config, mesh: Mesh | AbstractMesh, calibration: Calibration
) -> Layout:
    """Return the layout of the first step of a configuration. Raises ValueError, with
    the reason, for one that cannot run."""
    partition = choose_communication(cfg, calibration, mesh).partition
    layout = layouts.step_layout(cfg, partition, mesh)
    layouts.balancer_settings(cfg, layout)
    return layout


def _require_room(
    cfg: Config, layout: Layout, mesh: Mesh | AbstractMesh, usable_bytes: int | None
) -> None:
    """Raise ValueError where a step is predicted to need too much of the memory."""
    if usable_bytes is None:
        return
    with devices_of(mesh):
        attention = choose_kernels(cfg, layout)["attention"].value
    needed = sum(step_memory(cfg, layout, state_bytes(cfg), attention).values())
    if needed > SAFE * usable_bytes:
        raise ValueError(
            f"a step is predicted to need {needed / GIB:.1f} GiB; at most {SAFE:.0%} "
            f"of the {usable_bytes / GIB:.1f} GiB that a run may use are taken"
        )


def _layers_sec(
    cfg: Config, layout: Layout, cost: CostModel, share_tle: np.ndarray
) -> float:
    """Return the modelled time of all MoE layers in a step: the mean over the loads
    after the first, each under the plan that the policy makes of the one before."""
    policy, w = find_policy(layouts.balancer_settings(cfg, layout)), layout.num_devices
    load_tle = rows_per_step(cfg, layout) * share_tle
    load_tlwe = np.repeat(load_tle[:, :, None], w, axis=2)
    num_loads, num_layers = load_tlwe.shape[:2]
    plan, sec = ExpertPlan.home_in(layout, num_layers), 0.0
    for before_lwe, load_lwe in itertools.pairwise(load_tlwe):
        name, args = cfg.balance.policy, (before_lwe, layout, cost, plan)
        plan = make_valid_plan(name, policy, *args)
        sec += cost.step_sec(load_lwe, plan, layout)
    return cfg.model.num_moe_layers / num_layers * sec / (num_loads - 1)


def _shares(cfg: Config) -> tuple[np.ndarray, str]:
    """Return the shares of a layer's rows by time, layer and expert, and what they are:
    samples of those that the router follows, or presumed ones."""
    num_layers = min(MAX_LAYERS, cfg.model.num_moe_layers)
    if cfg.router.kind == "recorded":
        sizes = cfg.model.num_moe_layers, cfg.moe.num_experts, cfg.moe.top_k
        table_tle = recorded.loads(cfg.recorded, *sizes)
        index_t = np.linspace(0, len(table_tle) - 1, NUM_LOADS).astype(int)
        share_tle, what = table_tle[index_t, :num_layers], "the recorded load"
    else:
        share_tle, what = _presumed_shares(cfg, num_layers)
    return share_tle / share_tle.sum(axis=-1, keepdims=True), what


def _ratio(share_tle: np.ndarray, layout: Layout) -> float:
    """Return the device max/mean of loads under the home plan of a layout, the mean
    over layers and times."""
    u = layout.exchanged.num_devices
    share_tle = share_tle[..., unit_order(layout)]
    device_xu = share_tle.reshape(-1, u, layout.num_experts // u).sum(axis=-1)
    return float(np.mean([max_over_mean(share_u) for share_u in device_xu]))


def _presumed_shares(cfg: Config, num_layers: int) -> tuple[np.ndarray, str]:
    """Return shares of experts by time and layer, and what they are. Experts are in a
    random order, and each share changes a little from one time to the next."""
    router, rng = cfg.router, np.random.default_rng(0)
    is_evened = router.bias_rate or router.balance_loss or router.sequence_balance_loss
    zipf = ZIPF_EVENED if is_evened else ZIPF
    why = "whose load training evens out" if is_evened else "that nothing evens out"
    share_e = np.arange(1.0, cfg.moe.num_experts + 1) ** -zipf
    share_le = np.stack([rng.permutation(share_e) for _ in range(num_layers)])
    noise_tle = rng.standard_normal((NUM_LOADS, *share_le.shape))
    what = f"a Zipf load of {zipf:g}, presumed for a router {why}"
    return share_le * np.exp(NOISE * noise_tle), what


def _best(
    sec: dict[Candidate, float], home: Candidate, layouts: Mapping[Candidate, Layout]
) -> Candidate:
    """Return the candidate to take, of those with modelled times."""

    def place(name: Candidate) -> tuple[bool, int, float]:
        # Rows that stay at copies take later rounds where a buffer holds them.
        stays = POLICIES[name.policy].split == "local_first"
        has_room = layouts[name].keeps_home_rows
        return stays and not has_room, RACE.index(name.policy), sec[name]

    least_sec = min(sec.values())
    if least_sec > (1 - MIN_GAIN) * sec[home]:
        return home
    near = [name for name in sec if sec[name] <= (1 + NEAR) * least_sec]
    return min(near, key=place)
