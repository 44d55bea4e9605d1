"""The methods of balancing that a run with Balance.policy = 'auto' can have.

The run starts at home. Once it has seen its loads, the balancer prices each method for
them, and changes to the best one (`moejax.balance.methods`).
"""

from collections.abc import Iterator
from dataclasses import replace

from jax.sharding import AbstractMesh, Mesh

from moejax.axes import devices_of
from moejax.balance.methods import Method
from moejax.balance.policies import POLICIES
from moejax.choice import Choice
from moejax.config import Config
from moejax.perf.calibration import Calibration
from moejax.plan.layout import REPLICATING_SPLITS, Layout
from moejax.resolve import layouts
from moejax.resolve.communication import choose_communication
from moejax.resolve.gather import GIB, SAFE
from moejax.resolve.kernels import choose_kernels
from moejax.resolve.memory import state_bytes, step_memory
from moejax.resolve.speeds import make_cost_model


def find_methods(
    cfg: Config,
    home: Layout,
    mesh: Mesh | AbstractMesh,
    calibration: Calibration,
    usable_bytes: int | None,
) -> tuple[tuple[Method, ...], Choice[str]]:
    """Return the methods that a run which starts in the layout `home` can have, home
    first, and what the run prints of them, with the reason against each of the others.

    `cfg` names the run's schedule and domain, which methods share. `usable_bytes` are
    those of a device that a run may use; None: they are not known, and nothing is
    refused for its memory.
    """
    methods, refused = [Method("home", home)], {}
    for named in _candidates(cfg):
        policy, dispatch = named.balance.policy, named.dispatch
        name = f"{policy} in store {dispatch.store}"
        if policy == "home":
            name += f" with split {dispatch.split}"
        try:
            layout = _first_layout(named, mesh, calibration)
            method = Method(policy, Method(policy, layout).applied(home))
            _require_room(named, method.layout, mesh, usable_bytes)
        except ValueError as fault:
            refused[name] = f"cannot run: {fault}"
        else:
            methods.append(method)
    names = ", ".join(map(str, methods[1:])) or "no other"
    why = f"until loads were observed, then the best of it and {names}"
    return tuple(methods), Choice(str(methods[0]), why, refused)


def _candidates(cfg: Config) -> Iterator[Config]:
    """Yield the configuration with each policy but home, in each of the stores that the
    run can have, and with home and the splits that make the replicas: 'dynamic' with
    room for one copy a device too, whose travels cost least."""
    dispatch, balance = cfg.dispatch, cfg.balance
    pairs = [
        (name, {"store": store})
        for name, policy in POLICIES.items()
        for store in policy.stores
        if name != "home"
    ]
    if dispatch.split is None:
        makers = [{"store": "transient", "split": x} for x in REPLICATING_SPLITS]
        if dispatch.slots_per_device is None:
            own = cfg.moe.num_experts // cfg.group_size
            one_copy = {"split": "dynamic", "slots_per_device": own + 1}
            makers.append(makers[0] | one_copy)
        pairs += [("home", fields) for fields in makers]
    for name, fields in pairs:
        if dispatch.store not in (None, fields["store"]):
            continue
        if fields["store"] == "owned":
            fields["slots_per_device"] = None
        yield replace(
            cfg,
            balance=replace(balance, policy=name),
            dispatch=replace(dispatch, **fields),
        )


def _first_layout(
    named: Config, mesh: Mesh | AbstractMesh, calibration: Calibration
) -> Layout:
    """Return the layout of the first step of a configuration. Raises ValueError, with
    the reason, for one that cannot run."""
    policy = POLICIES[named.balance.policy]
    if policy.needs_together:
        raise ValueError(
            "it plans by the experts that tokens choose together, which a run at home "
            "does not count: name the policy"
        )
    partition = choose_communication(named, calibration, mesh).partition
    layout = layouts.step_layout(named, partition, mesh)
    layouts.balancer_settings(named, layout)
    return layouts.with_shadow_prices(layout, make_cost_model(named, calibration))


def _require_room(
    named: Config, layout: Layout, mesh: Mesh | AbstractMesh, usable_bytes: int | None
) -> None:
    """Raise ValueError where a step is predicted to need too much of the memory."""
    if usable_bytes is None:
        return
    with devices_of(mesh):
        attention = choose_kernels(named, layout)["attention"].value
    needed = sum(step_memory(named, layout, state_bytes(named), attention).values())
    if needed > SAFE * usable_bytes:
        raise ValueError(
            f"a step is predicted to need {needed / GIB:.1f} GiB; at most {SAFE:.0%} "
            f"of the {usable_bytes / GIB:.1f} GiB that a run may use are taken"
        )
