"""Which methods a run with Balance.policy = 'auto' can have, and which one it takes for
the loads that it sees."""

import dataclasses

import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from moejax.axes import AUTO, AXES
from moejax.balance import candidates, codec, controller
from moejax.balance.methods import RACE, Method, first_of_the_race
from moejax.balance.policies import POLICIES
from moejax.config import (
    Balance,
    Config,
    Dispatch,
    Model,
    Moe,
    Recorded,
    Router,
    Train,
)
from moejax.perf.calibration import Calibration
from moejax.perf.target import load
from moejax.plan.layout import Layout, Topology
from moejax.plan.parallel import Tensor
from moejax.resolve.partition import rows_per_step
from moejax.resolve.resolved import Resolved, resolve
from tests.support.balanced_run import BalancedRun, L, worst
from tests.support.calibrations import KINDS, line
from tests.support.resolved import make_run

MESH = Topology(expert=8)
CFG = Config(
    mesh=MESH,
    model=Model(num_layers=L),
    moe=Moe(num_experts=32),
    router=Router(kind="recorded", balance_loss=0.0),
    recorded=Recorded(source="zipf", zipf=1.2),
    train=Train(num_steps=1000),
    balance=Balance(policy="auto"),
)
NUM_METHODS = sum(len(p.stores) for p in POLICIES.values() if not p.needs_together) + 3
"""Each policy in each of its stores, and home with the splits 'dynamic', with one copy
and with several, and 'shadow'."""


def changed(part: str, **fields) -> Config:
    return dataclasses.replace(
        CFG, **{part: dataclasses.replace(getattr(CFG, part), **fields)}
    )


@pytest.fixture
def run_at(tmp_path):
    """Return a function that resolves a run at a speed of links, in bytes per second,
    on devices of 1e12 FLOP/s."""

    def resolved(bytes_per_sec: float, cfg: Config = CFG) -> Resolved:
        lines = {"expert": line(bytes_per_sec)}
        sizes, collectives = dataclasses.asdict(MESH), dict.fromkeys(KINDS, lines)
        dtype = cfg.model.compute_dtype
        speeds = Calibration("cpu", sizes, dtype, collectives, 1e12, 1.0, 0.0, "never")
        path = tmp_path / "calibration.json"
        path.write_text(speeds.to_json())
        balance = dataclasses.replace(cfg.balance, calibration=str(path))
        return make_run(dataclasses.replace(cfg, balance=balance))

    return resolved


def names(run: Resolved) -> set[str]:
    return set(map(str, run.settings.methods))


def refused(run: Resolved) -> dict[str, str]:
    """Return the reasons against the methods that cannot run."""
    return dict(run.chosen["policy"].alternatives)


def zipf(run: Resolved, exponent: float):
    """Return loads by step with Zipf shares, in another random order in each layer; 0
    makes them even."""
    rng = np.random.default_rng(0)
    share_e = np.arange(1.0, 33.0) ** -exponent
    share_le = np.stack([rng.permutation(share_e) for _ in range(L)]) / share_e.sum()
    rows = int(rows_per_step(run.cfg, run.layout))

    def load_of_step(step: int) -> np.ndarray:
        drawn = np.random.default_rng(step).multinomial(rows, share_le, (8, L))
        return drawn.transpose(1, 0, 2)

    return load_of_step


def watched(run: Resolved, compile_sec: float = 0.05) -> BalancedRun:
    """Return the balancer of a run, whose first compilation took `compile_sec` and each
    of whose steps takes 10 ms."""
    watched = BalancedRun.start(run.settings, run.cost, run.layout)
    watched.step_sec = 0.01
    watched.state = controller.compiled(watched.state, compile_sec)
    return watched


def test_of_equal_times_the_race_decides_and_shadows_need_room():
    stores = {"prophet": "transient", "fastermoe": "transient", "smartmoe": "owned"}
    for tensor, expected in ((None, "fastermoe"), (Tensor("s1h", 2, 2), "smartmoe")):
        methods = [
            Method(name, Layout(8, 4, 2, 8, tensor=tensor, split=POLICIES[name].split))
            for name in stores
        ]
        home = Method("home", Layout(8, 4, 2, 8))
        sec = dict.fromkeys(methods, 1.0) | {home: 1.1}
        assert first_of_the_race(sec).policy == expected
        assert first_of_the_race(sec | {home: 1.04}) == home
    assert {*POLICIES, "dynamic", "shadow"} == {*RACE, "hiermoe", "home"}


def test_it_starts_at_home_and_takes_the_best_method_for_the_loads(run_at):
    """A compilation takes 0.05 s before the first step and 1.5 times that beside steps
    of 10 ms: it is adopted 4 + 8 steps after the decision, which is the first that
    knows loads of a half life."""
    run = run_at(1e12)
    assert (len(run.settings.methods), len(refused(run))) == (NUM_METHODS, 1)
    home = dataclasses.replace(CFG, balance=Balance())
    assert run.layout == make_run(home).layout
    loads = zipf(run, 1.2)
    auto = watched(run).go(range(1, 100), loads)
    (relayout,) = auto.changes()
    assert (relayout.step, relayout.adopt_step) == (10, 22)
    chosen = Method(relayout.policy, relayout.layout)
    assert any(m.is_in_use(chosen.policy, chosen.layout) for m in run.settings.methods)
    assert (auto.state.policy, auto.state.layout) == (chosen.policy, chosen.layout)
    assert worst(auto.state, loads(99)) < 1.05


def test_where_loads_jump_the_step_makes_the_replicas(run_at):
    """Copies in each micro-batch cost more than those of a plan, which is right until
    the hot experts are other ones."""
    cfg = dataclasses.replace(
        CFG, balance=dataclasses.replace(CFG.balance, lag_steps=1)
    )
    run = run_at(5e9, cfg)
    steady = zipf(run, 1.2)

    def jumping(step: int) -> np.ndarray:
        return np.roll(steady(step), 5 * (step // 50), axis=2)

    taken = {}
    for name, load_of_step in (("steady", steady), ("jumping", jumping)):
        auto = watched(run, 0.01).go(range(1, 400), load_of_step)
        taken[name] = auto.state.layout.split
    assert taken == {"steady": "water_filling", "jumping": "dynamic"}


def test_methods_that_do_not_change_are_priced_ever_less_often(run_at, monkeypatch):
    """After one cool-down, two, four, and then every eight, in each layout anew."""
    run = run_at(1e12)
    auto, steps = watched(run), []
    priced = candidates.other_methods

    def other_methods(question):
        steps.append(auto.state.tracker.step)
        return priced(question)

    monkeypatch.setattr(candidates, "other_methods", other_methods)
    auto.go(range(1, 1000), zipf(run, 1.2))
    (relayout,) = auto.changes()
    since = [step for step in steps if step > relayout.adopt_step]
    waits = np.diff(since) / run.settings.cooldown_steps
    assert waits[:3].tolist() == [1, 2, 4]
    assert len(waits) > 3
    assert (waits[3:] == 8).all()


def test_copies_that_do_not_pay_are_not_made(run_at):
    """Experts so wide that their copies take longer than all rows stay single, an even
    load needs no other plan than home, and a compilation must be earned."""
    wide = run_at(1e8, changed("moe", d_expert=2**14))
    auto = watched(wide).go(range(1, 60), zipf(wide, 1.2))
    assert not any(POLICIES[d.policy].has_replicas for d in auto.changes())
    fast = run_at(1e12)
    assert not watched(fast).go(range(1, 60), zipf(fast, 0.0)).changes()
    assert not watched(fast, 100.0).go(range(1, 60), zipf(fast, 1.2)).changes()


def test_it_goes_home_when_the_load_becomes_even(run_at):
    """Copies of these wide experts take half of a step."""
    run = run_at(3e8, changed("moe", d_expert=4096))
    auto = watched(run).go(range(1, 60), zipf(run, 1.2))
    assert auto.state.layout.store != "owned"
    auto.go(range(60, 200), zipf(run, 0.0))
    assert auto.changes()[-1].policy == "home"
    assert (auto.state.policy, auto.state.layout.store) == ("home", "owned")


def test_its_state_comes_back_from_json_bit_for_bit(run_at):
    run = run_at(1e12)
    loads = zipf(run, 1.2)
    whole = watched(run).go(range(1, 50), loads)
    first = watched(run).go(range(1, 15), loads)  # a relayout is pending
    state, settings = codec.loads(codec.dumps((first.state, first.settings)))
    assert settings == run.settings
    resumed = BalancedRun(settings, run.cost, state, first.decisions, first.step_sec)
    resumed.state = controller.compiled(resumed.state, 7.0)  # its own, which is ignored
    resumed.go(range(15, 50), loads)
    assert [d.line() for d in resumed.decisions] == [d.line() for d in whole.decisions]
    assert codec.dumps(resumed.state) == codec.dumps(whole.state)


@pytest.mark.parametrize("policy", ["micromoe", "flexmoe", "eplb", "laer"])
def test_a_run_that_is_skewed_from_its_first_step_is_balanced_at_step_14(
    run_at, policy
):
    """A policy that is named has room for copies from the start, so that a swap is
    enough. The settings are those by default."""
    run = run_at(1e12, dataclasses.replace(CFG, balance=Balance(policy=policy)))
    loads = zipf(run, 1.2)
    balanced = watched(run).go(range(1, 15), loads)
    assert [d.adopt_step for d in balanced.changes()] == [14]
    home = BalancedRun.start(run.settings, run.cost, run.layout)
    assert worst(home.state, loads(14)) > 3.0
    assert worst(balanced.state, loads(14)) < 1.15


def test_stores_are_those_that_are_named_or_that_the_width_admits(run_at):
    run = run_at(1e12, changed("dispatch", store="sharded"))
    assert {m.layout.store for m in run.settings.methods} == {"sharded"}
    run = run_at(1e12, changed("moe", d_expert=CFG.moe.d_expert + 4))
    assert "sharded" not in {m.layout.store for m in run.settings.methods}
    reasons = [why for name, why in refused(run).items() if "sharded" in name]
    assert reasons
    assert all("can have owned, " in why or "splits" in why for why in reasons)


@pytest.mark.parametrize(
    ("part", "fields", "reason"),
    [
        ("dispatch", {"exchange": "capacity"}, "drops rows by slot"),
        ("dispatch", {"split": "shadow"}, "makes the replicas that each micro-batch"),
        ("dispatch", {"schedule": "local"}, "with schedule='local' some rows do not"),
    ],
)
def test_what_no_policy_can_change_is_refused(part, fields, reason):
    mesh = Topology(expert=4, tensor=2) if "schedule" in fields else MESH
    options = dataclasses.replace(getattr(CFG, part), **fields)
    cfg = dataclasses.replace(CFG, mesh=mesh, **{part: options})
    with pytest.raises(ValueError, match=f"(?s){reason}.*'auto'|'auto'.*{reason}"):
        make_run(cfg)


def test_budgets_for_copies_are_for_methods_that_make_them(run_at):
    run = run_at(1e12, changed("dispatch", slots_per_device=6))
    assert run.layout.slots_per_device == 4
    assert len(run.settings.methods) == NUM_METHODS - 1  # dynamic with two copies
    for method in run.settings.methods:
        own_alone = method.layout.store == "owned"
        assert method.layout.slots_per_device == (4 if own_alone else 6)


@pytest.mark.parametrize("gather", ["layer", "step"])
def test_methods_keep_the_domain_and_what_is_gathered_once(gather):
    dispatch = Dispatch(group="dc_expert", domain=(2, 1), gather=gather)
    mesh = Topology(dc=2, expert=4)
    run = make_run(dataclasses.replace(CFG, mesh=mesh, dispatch=dispatch))
    assert len(run.settings.methods) == (NUM_METHODS if gather == "layer" else 7)
    for method in run.settings.methods:
        layout = method.applied(run.layout)
        assert (layout.domain, layout.gather) == (run.layout.domain, gather)
        assert layout.prefetch == (gather == "layer")


def test_slots_that_do_not_fit_are_refused():
    cfg = dataclasses.replace(
        CFG,
        model=Model(d_model=2048, num_layers=16, remat="full"),
        moe=Moe(num_experts=64, d_expert=1024, top_k=8),
    )
    gpu = load("h100")
    device = AbstractDevice(gpu.name, num_cores=132, platform="gpu")
    mesh = AbstractMesh(
        MESH.sizes, AXES, axis_types=AUTO * len(AXES), abstract_device=device
    )
    assert len(refused(resolve(cfg, mesh, 2**40))) == 1
    run, flexmoe = resolve(cfg, mesh, 12 * 2**30), "flexmoe in store resident"
    assert "is predicted to need " in refused(run)[flexmoe]
    assert flexmoe not in names(run)


def test_dense_training_is_refused():
    cfg = changed("router", kind="softmax", training="dense")
    with pytest.raises(
        ValueError, match=r"nothing to balance, and Balance.policy='auto'"
    ):
        make_run(dataclasses.replace(cfg, dispatch=Dispatch()))


@pytest.mark.parametrize("exponent", [0.0, 1.2])
def test_domains_are_open_unless_they_are_named(run_at, exponent):
    """Over slow links it takes a domain of narrow experts, which have fewer bytes than
    rows, also for an even load; a run begins without, and a named (1, 1) stays."""
    narrow = changed("moe", d_expert=64)
    run = run_at(1e6, narrow)
    assert run.layout.domain is None
    assert len(run.settings.ways) == 4  # domains of 1, 2, 4 and 8 devices
    loads = zipf(run, exponent)
    auto = watched(run).go(range(1, 100), loads)
    assert auto.state.layout.domain is not None
    alone = dataclasses.replace(narrow, dispatch=Dispatch(domain=(1, 1)))
    named = run_at(1e6, alone)
    assert not named.settings.ways
    assert watched(named).go(range(1, 100), loads).state.layout.domain is None
    policy = dataclasses.replace(narrow, balance=Balance(policy="micromoe"))
    assert not run_at(1e6, policy).settings.ways
