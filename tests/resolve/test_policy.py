"""Which policy and store a run has where Balance.policy is 'auto', and why."""

import dataclasses

import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from moejax.axes import AUTO, AXES
from moejax.balance.policies import POLICIES
from moejax.config import Balance, Config, Dispatch, Model, Moe, Recorded, Router
from moejax.perf.calibration import Calibration
from moejax.perf.target import load
from moejax.plan.layout import Layout, Topology
from moejax.plan.parallel import Tensor
from moejax.resolve import policy
from moejax.resolve.resolved import Resolved, resolve
from tests.support.calibrations import KINDS, line
from tests.support.resolved import make_run

MESH = Topology(expert=8)
CFG = Config(
    mesh=MESH,
    moe=Moe(num_experts=32),
    router=Router(kind="recorded", balance_loss=0.0),
    recorded=Recorded(source="zipf", zipf=1.2),
    balance=Balance(policy="auto"),
)


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


HOME = policy.Candidate("home", "owned")


def modelled(run: Resolved) -> dict[policy.Candidate, float]:
    """Return the modelled seconds of the candidates that can run."""
    found = run.chosen["policy"].alternatives.items()
    return {name: x.sec for name, x in found if isinstance(x, policy.Modelled)}


def refused(run: Resolved) -> set[policy.Candidate]:
    """Return the candidates that cannot run."""
    return run.chosen["policy"].alternatives.keys() - modelled(run).keys()


def test_of_equal_times_the_race_decides_and_shadows_need_room():
    home = policy.Candidate("home", "owned")
    names = ("prophet", "fastermoe", "smartmoe")
    sec = {policy.Candidate(name, "transient"): 1.0 for name in names} | {home: 2.0}
    for tensor, expected in ((None, "fastermoe"), (Tensor("s1h", 2, 2), "smartmoe")):
        layouts = dict.fromkeys(
            sec, Layout(8, 4, 2, 8, split="local_first", tensor=tensor)
        )
        assert policy._best(sec, home, layouts).policy == expected
    assert policy._best(sec | {home: 1.04}, home, layouts) == home


def test_fast_links_pay_for_replicas(run_at):
    """The run is that of the same policy and store by name."""
    run = run_at(1e12)
    chosen, sec = run.chosen["policy"].value, modelled(run)
    assert sec[chosen] < 0.5 * sec[HOME]
    assert sec[chosen] <= 1.05 * min(sec.values())
    assert POLICIES[chosen.policy].has_replicas
    assert len(sec) == sum(len(p.stores) for p in POLICIES.values())
    assert sorted(policy.RACE) == sorted(POLICIES)
    dispatch = dataclasses.replace(CFG.dispatch, store=chosen.store)
    named = dataclasses.replace(
        CFG, balance=Balance(policy=chosen.policy), dispatch=dispatch
    )
    same = run_at(1e12, named)
    assert (same.layout, same.settings) == (run.layout, run.settings)
    assert "policy" not in same.chosen


def test_copies_that_do_not_pay_are_not_made(run_at):
    """Experts so wide that their copies take longer than all rows stay single, and an
    even load needs no other plan than home."""
    choice = run_at(1e8, changed("moe", d_expert=2**14)).chosen["policy"]
    assert not POLICIES[choice.value.policy].has_replicas
    even = run_at(1e12, changed("recorded", source="uniform"))
    assert even.chosen["policy"].value == HOME


def test_loads_are_presumed_where_a_router_chooses(run_at):
    skewed = run_at(1e12, changed("router", kind="softmax"))
    evened = run_at(1e12, changed("router", kind="softmax", bias_rate=0.01))
    assert modelled(evened)[HOME] < modelled(skewed)[HOME]


def test_stores_are_those_that_are_named_or_that_the_width_admits(run_at):
    run = run_at(1e12, changed("dispatch", store="sharded"))
    assert {name.store for name in modelled(run)} == {"sharded"}
    run = run_at(1e12, changed("moe", d_expert=CFG.moe.d_expert + 4))
    assert {name.store for name in refused(run)} == {"sharded"}


@pytest.mark.parametrize(
    ("part", "fields", "reason"),
    [
        ("dispatch", {"exchange": "capacity"}, "drops rows by slot"),
        ("dispatch", {"split": "shadow"}, "makes the replicas that each micro-batch"),
    ],
)
def test_home_where_no_other_policy_can_run(part, fields, reason):
    choice = make_run(changed(part, **fields)).chosen["policy"]
    assert choice.value.policy == "home"
    reasons = [str(x) for x in choice.alternatives.values()]
    assert len(reasons) == sum(len(p.stores) for p in POLICIES.values()) - 1
    assert all(reason in text for text in reasons)


@pytest.mark.parametrize("mesh", [Topology(expert=4, tensor=2), Topology(tensor=2)])
def test_home_may_have_other_owners_than_the_policies(mesh):
    """With schedule 'local', which only home can have, owners lie along the tensor
    axis. A load has the owners of the layout that is priced."""
    cfg = dataclasses.replace(CFG, mesh=mesh, moe=Moe(num_experts=32, top_k=8))
    run = make_run(cfg)
    named = dataclasses.replace(cfg.dispatch, schedule="local")
    alone = dataclasses.replace(
        cfg, dispatch=named, balance=dataclasses.replace(cfg.balance, policy="home")
    )
    assert make_run(alone).layout.is_local
    assert modelled(run)


def test_budgets_for_copies_are_for_policies_that_make_them(run_at):
    cfg = changed("dispatch", slots_per_device=6)
    fast = run_at(1e12, cfg)
    assert fast.layout.slots_per_device == 6
    assert not refused(fast)
    even = run_at(1e12, dataclasses.replace(cfg, recorded=Recorded(source="uniform")))
    assert even.cfg.balance.policy == "home"
    assert even.layout.slots_per_device == 4


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
    assert not refused(resolve(cfg, mesh, 2**40))
    run = resolve(cfg, mesh, 12 * 2**30)
    choice, flexmoe = run.chosen["policy"], policy.Candidate("flexmoe", "resident")
    assert flexmoe in refused(run)
    assert "is predicted to need " in choice.alternatives[flexmoe]
    assert choice.value not in refused(run)


def test_dense_training_is_refused():
    cfg = changed("router", kind="softmax", training="dense")
    with pytest.raises(
        ValueError, match=r"nothing to balance, and Balance.policy='auto'"
    ):
        make_run(dataclasses.replace(cfg, dispatch=Dispatch()))
