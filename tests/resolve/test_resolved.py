"""Test that a resolved run has no open question, and that a relayout is checked."""

import dataclasses
import math

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from moejax.axes import AUTO, AXES, make_mesh
from moejax.choice import Choice
from moejax.config import Balance, Config, Data, Dispatch, Model, Moe, Train
from moejax.perf import target
from moejax.perf.cluster import nodes_of
from moejax.perf.cost_model import NOTES
from moejax.plan.layout import Layout, Topology
from moejax.plan.parallel import Tensor
from moejax.resolve.resolved import Resolved, resolve
from tests.support.resolved import make_run

MESH = Topology(data=2, expert=4)
CFG = Config(mesh=MESH, moe=Moe(num_experts=8))
TENSOR = dataclasses.replace(CFG, mesh=Topology(expert=4, tensor=2))
FLEXMOE = dataclasses.replace(CFG, balance=Balance(policy="flexmoe"))


def changed(cfg: Config = CFG, **parts) -> Config:
    return dataclasses.replace(cfg, **parts)


def resolve_on(kind: str, cfg: Config, platform: str = "gpu", **kwargs) -> Resolved:
    """Return the resolved run on abstract devices of a kind."""
    device = AbstractDevice(kind, num_cores=132, platform=platform)
    mesh = AbstractMesh(
        cfg.mesh.sizes, AXES, axis_types=AUTO * len(AXES), abstract_device=device
    )
    return resolve(cfg, mesh, **kwargs)


@pytest.mark.parametrize(
    ("policy", "store", "is_prefetched"),
    [
        ("home", "owned", False),
        ("smartmoe", "owned", False),
        ("flexmoe", "resident", False),
        ("micromoe", "resident", False),
        ("prophet", "transient", True),
        ("eplb", "sharded", False),
        ("laer", "sharded", True),
    ],
)
def test_no_question_is_open_below(policy, store, is_prefetched):
    """A layout has None only for parts that it does not have (tensor axis, domain), and
    no 'auto' but that of the kernels. Its store and prefetch are the policy's."""
    run = make_run(changed(balance=Balance(policy=policy)))
    values = dataclasses.asdict(run.layout)
    assert {n for n, value in values.items() if value is None} == {"tensor", "domain"}
    assert "auto" not in [v for name, v in values.items() if name != "kernels"]
    assert (run.layout.store, run.layout.prefetch) == (store, is_prefetched)
    assert run.settings.max_slots_per_device >= run.layout.slots_per_device
    assert run.num_owners == run.layout.num_devices == run.owning.num_devices == 4
    assert run.owning.store == "owned"
    assert run.home_plan().validate(run.layout).is_logical


def test_named_attention_that_cannot_run_is_refused_with_its_reason():
    cfg = Config(model=Model(attention="cudnn"))
    with pytest.raises(NotImplementedError, match=r"Model.attention='cudnn' .*not cpu"):
        resolve(cfg, make_mesh(Topology(), jax.devices()[:1]))
    elsewhere = AbstractMesh((1,) * len(AXES), AXES, axis_types=AUTO * len(AXES))
    choice = resolve(cfg, elsewhere).kernels["attention"]
    assert choice == Choice("cudnn", "Model.attention='cudnn'")


@pytest.mark.parametrize(("seq_len", "expected"), [(256, "blocked"), (16, "reference")])
def test_attention_of_this_machine(seq_len, expected):
    cfg = changed(data=Data(seq_len=seq_len), train=Train(loss_chunk=16))
    assert make_run(cfg).kernels["attention"].value == expected


@pytest.mark.parametrize(
    ("dispatch", "overflow"),
    [
        ({}, "redo"),
        ({"overflow": "rounds"}, "rounds"),
        ({"exchange": "capacity"}, "rounds"),
        ({"buffer_factor": 1e6}, "rounds"),  # round 0 carries every row
    ],
)
def test_steps_have_no_loops_on_gpus(dispatch, overflow):
    run = resolve_on("NVIDIA B200", changed(dispatch=Dispatch(**dispatch)))
    assert run.layout.overflow == overflow


@pytest.mark.parametrize(
    ("kind", "grouped"),
    [("NVIDIA H100 80GB HBM3", "hopper"), ("NVIDIA B200", "blocked")],
)
def test_kernels_are_those_of_the_meshs_devices(kind, grouped):
    """The device of this machine is a CPU."""
    model = Model(d_model=256, compute_dtype="bfloat16")
    cfg = changed(model=model, moe=Moe(num_experts=8, d_expert=256))
    assert resolve_on(kind, cfg).kernels["grouped_dot"].value == grouped


@pytest.mark.parametrize(
    ("platform", "mesh", "dispatch", "expected"),
    [
        ("gpu", MESH, Dispatch(), True),
        ("cpu", MESH, Dispatch(), False),
        ("gpu", MESH, Dispatch(prefetch=False), False),
        ("gpu", MESH, Dispatch(split="dynamic"), True),
        ("gpu", MESH, Dispatch(group="data_expert"), False),
        ("gpu", Topology(expert=8), Dispatch(), False),
    ],
)
def test_gpus_fetch_weights_ahead_that_are_split_over_data(
    platform, mesh, dispatch, expected
):
    cfg = changed(mesh=mesh, dispatch=dispatch)
    run = resolve_on("NVIDIA H100 80GB HBM3", cfg, platform)
    assert run.layout.prefetch == expected


def test_top_up_is_refused_on_gpus():
    """The search of top-up has loops whose length the devices alone know."""
    cfg = changed(mesh=MESH, dispatch=Dispatch(split="top_up"))
    with pytest.raises(NotImplementedError, match="the host of a GPU waits") as error:
        resolve_on("NVIDIA H100 80GB HBM3", cfg)
    assert "\n" not in str(error.value)


def test_a_relayout_is_the_next_value():
    run = make_run(FLEXMOE)
    wider = dataclasses.replace(run.layout, slots_per_device=4, copies_per_device=2)
    after = run.relaid(wider)
    assert after.layout == after.mesh_layout.layout == wider
    assert run.layout.slots_per_device != 4, "the value before stays as it was"
    same = ("cfg", "partition", "chosen", "owning", "calibration", "cost", "settings")
    assert all(getattr(after, name) is getattr(run, name) for name in same)


RUN = make_run(CFG)


@pytest.mark.parametrize(
    ("other", "kept"),
    [
        (Layout.home(8, 2, 64), "num_devices=4"),
        (Layout.home(16, 4, 64), "num_experts=8"),
        (Layout.home(8, 4, 64, tensor=Tensor("s1h", 2, 2)), r"shards=\(1, 1\)"),
        (dataclasses.replace(RUN.layout, overflow="redo"), "overflow=rounds"),
        (dataclasses.replace(RUN.layout, align_rows=64), "align_rows=1"),
    ],
)
def test_a_relayout_cuts_nothing_otherwise(other, kept):
    with pytest.raises(ValueError, match=f"a relayout keeps .*{kept}") as error:
        RUN.relaid(other)
    assert "\n" not in str(error.value)


def test_presumed_speeds_make_the_cost_model():
    run = make_run(FLEXMOE)
    assert run.calibration.when == "presumed"
    assert run.cost.flops_per_sec == NOTES.flops_per_sec
    assert run.cost.bytes_per_sec == NOTES.bytes_per_sec


@pytest.mark.parametrize("is_named", [True, False])
def test_a_gpu_has_the_rates_that_are_stated_for_it(is_named):
    """The rates are those of a cluster that the user gives, or of the kind of the
    devices: 400 TFLOP/s of experts, and of 4 devices of one node 3/4 of an array over
    NVLink."""
    gpu = target.load("h100")
    kind = "cpu" if is_named else gpu.name
    nodes = nodes_of(gpu, FLEXMOE.mesh.num_devices)
    run = resolve_on(kind, FLEXMOE, cluster=nodes if is_named else None)
    assert not run.calibration.is_measured
    assert run.cost.flops_per_sec == 4e14
    assert run.cost.bytes_per_sec == pytest.approx(3.5e11)
    assert run.cost.compile_sec == 30


def test_settings_are_the_balance_of_the_run():
    balance = Balance(policy="flexmoe", every_steps=7, margin=0.5, horizon_steps=33)
    settings = make_run(changed(balance=balance)).settings
    for field in dataclasses.fields(Balance):
        if getattr(balance, field.name) is not None:
            assert getattr(settings, field.name) == getattr(balance, field.name)
    assert settings.relayout_lag_steps == 50
    assert settings.max_slots_per_device == 6  # two own experts: twice, and two more


def test_a_batch_of_another_size_drops_nothing():
    """Evaluation uses the exact mode also in a run with small buffers that drops
    rows."""
    dispatch = Dispatch(exchange="capacity", buffer_factor=1.0)
    run = make_run(changed(dispatch=dispatch))
    layout = run.exact_layout(batch_size=24, width=5)
    assert (run.layout.exchange, layout.exchange) == ("capacity", "exact")


@pytest.mark.parametrize(("cfg", "schedule"), [(CFG, "auto"), (TENSOR, "s1")])
def test_an_odd_number_of_tokens_cannot_be_halved(cfg, schedule):
    """Each device routes 127 tokens: one sequence, or with a tensor axis half of
    two."""
    cfg = changed(
        cfg, dispatch=Dispatch(schedule=schedule), moe=Moe(num_experts=8, halves=True),
        data=Data(seq_len=127), train=Train(batch_size=8),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"cuts the 127 tokens .* Moe\.halves = False"):
        make_run(cfg)
    make_run(changed(cfg, data=Data(seq_len=128)))


def test_a_policy_that_plans_does_not_go_with_a_split_that_does():
    cfg = changed(FLEXMOE, dispatch=Dispatch(split="shadow"))
    with pytest.raises(ValueError, match="split='shadow' makes the repl") as error:
        make_run(cfg)
    assert "\n" not in str(error.value)


def test_shadows_are_priced_by_the_equations_of_fastermoe():
    """A shadow costs 2 |expert| / W and a row 4 H / W, in units of 3 F / P of a row;
    by the presumed speeds. Other splits have no prices."""
    run = make_run(changed(dispatch=Dispatch(split="shadow")))
    cost, layout = run.cost, run.layout
    row_sec = 3 * cost.flops_per_row / cost.flops_per_sec
    copy_sec = 2 * cost.bytes_per_expert / cost.bytes_per_sec
    exchange_sec = 4 * cost.bytes_per_row / cost.bytes_per_sec
    assert layout.shadow_price == math.ceil(copy_sec / row_sec) > 0
    assert layout.exchange_toll / 256 == pytest.approx(exchange_sec / row_sec, rel=0.01)
    assert (layout.store, layout.prefetch) == ("transient", False)
    assert layout.slots_per_device == 2 * layout.experts_per_device
    assert (RUN.layout.shadow_price, RUN.layout.exchange_toll) == (0, 0)
