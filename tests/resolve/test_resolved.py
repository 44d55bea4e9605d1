"""Test that a resolved run has no open question, and that a relayout is checked."""

import dataclasses
import math

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from moejax.axes import AUTO, AXES, make_mesh
from moejax.balance.settings import Settings
from moejax.choice import Choice
from moejax.config import Balance, Config, Data, Dispatch, Model, Moe, Train
from moejax.perf import target
from moejax.perf.cost_model import NOTES
from moejax.plan.layout import Layout, Topology
from moejax.plan.parallel import Tensor
from moejax.resolve.resolved import resolve
from tests.support.resolved import make_run

MESH = Topology(data=2, expert=4)
CFG = Config(mesh=MESH, moe=Moe(num_experts=8))
TENSOR = dataclasses.replace(CFG, mesh=Topology(expert=4, tensor=2))


@pytest.mark.parametrize("policy", ["home", "flexmoe", "micromoe", "eplb", "smartmoe"])
def test_no_question_is_open_below(policy):
    """A layout has None only for parts that it does not have (tensor axis, domain), and
    no 'auto' but that of the kernels."""
    run = make_run(dataclasses.replace(CFG, balance=Balance(policy=policy)))
    values = dataclasses.asdict(run.layout)
    assert {name for name, value in values.items() if value is None} == {
        "tensor",
        "domain",
    }
    assert "auto" not in [v for name, v in values.items() if name != "kernels"]
    assert run.settings.max_slots_per_device >= run.layout.slots_per_device
    assert run.num_owners == run.layout.num_devices == run.owning.num_devices == 4
    assert run.owning.store == "owned"
    assert run.home_plan().validate(run.layout).is_logical


def test_named_attention_that_cannot_run_is_refused_with_its_reason():
    cfg = Config(model=Model(attention="cudnn"))
    with pytest.raises(NotImplementedError) as error:
        resolve(cfg, make_mesh(Topology(), jax.devices()[:1]))
    message = str(error.value)
    assert message.startswith("Model.attention='cudnn' cannot compute this run: ")
    assert message.endswith(" not cpu: use 'auto'")
    assert "\n" not in message
    elsewhere = AbstractMesh((1,) * len(AXES), AXES, axis_types=AUTO * len(AXES))
    choice = resolve(cfg, elsewhere).kernels["attention"]
    assert choice == Choice("cudnn", "Model.attention='cudnn'")


def test_attention_of_this_machine():
    choice = make_run(CFG).kernels["attention"]
    assert choice.value == "blocked"
    assert "for NVIDIA GPUs, not cpu" in choice.why
    short = dataclasses.replace(CFG, data=Data(seq_len=16), train=Train(loss_chunk=16))
    expected = Choice("reference", "few queries: 16")
    assert make_run(short).kernels["attention"] == expected


@pytest.mark.parametrize(
    ("dispatch", "overflow", "why"),
    [
        ({}, "redo", "on GPUs the host waits at each loop"),
        ({"overflow": "rounds"}, "rounds", "Dispatch.overflow='rounds'"),
        ({"exchange": "capacity"}, "rounds", "exchange='capacity' drops the rest"),
        ({"rows_per_peer": 10**6}, "rounds", "round 0 carries every row"),
    ],
)
def test_steps_have_no_loops_on_gpus(dispatch, overflow, why):
    device = AbstractDevice("NVIDIA B200", num_cores=148, platform="gpu")
    types = (AxisType.Auto,) * len(AXES)
    mesh = AbstractMesh(MESH.sizes, AXES, axis_types=types, abstract_device=device)
    cfg = dataclasses.replace(CFG, dispatch=Dispatch(**dispatch))
    run = resolve(cfg, mesh)
    assert run.layout.overflow == overflow
    (line,) = [x for x in run.lines() if x.startswith("overflow ")]
    assert why in line


@pytest.mark.parametrize(
    ("field", "match"),
    [({"overflow": "redo"}, "overflow=rounds"), ({"align_rows": 64}, "align_rows=1")],
)
def test_a_relayout_keeps_how_overflows_and_rows_of_slots_are_treated(field, match):
    run = make_run(CFG)
    with pytest.raises(ValueError, match=f"a relayout keeps {match}, and the new"):
        run.relaid(dataclasses.replace(run.layout, **field))


@pytest.mark.parametrize(
    ("kind", "grouped"),
    [("NVIDIA H100 80GB HBM3", "hopper"), ("NVIDIA B200", "blocked")],
)
def test_kernels_are_those_of_the_meshs_devices(kind, grouped):
    """The device of this machine is a CPU."""
    device = AbstractDevice(kind, num_cores=132, platform="gpu")
    types = (AxisType.Auto,) * len(AXES)
    mesh = AbstractMesh(MESH.sizes, AXES, axis_types=types, abstract_device=device)
    model = Model(d_model=256, compute_dtype="bfloat16")
    moe = Moe(num_experts=8, d_expert=256)
    run = resolve(dataclasses.replace(CFG, model=model, moe=moe), mesh)
    assert run.kernels["grouped_dot"].value == grouped
    assert kind in run.kernels["grouped_dot"].why


@pytest.mark.parametrize(
    ("platform", "mesh_sizes", "dispatch", "expected"),
    [
        ("gpu", MESH, Dispatch(), True),
        ("cpu", MESH, Dispatch(), False),
        ("gpu", MESH, Dispatch(prefetch=False), False),
        ("gpu", MESH, Dispatch(split="dynamic"), False),
        ("gpu", MESH, Dispatch(group="data_expert"), False),
        ("gpu", Topology(expert=8), Dispatch(), False),
    ],
)
def test_gpus_fetch_weights_ahead_that_are_split_over_data(
    platform, mesh_sizes, dispatch, expected
):
    device = AbstractDevice("NVIDIA H100 80GB HBM3", None, platform)
    types = (AxisType.Auto,) * len(AXES)
    mesh = AbstractMesh(
        mesh_sizes.sizes, AXES, axis_types=types, abstract_device=device
    )
    cfg = dataclasses.replace(CFG, mesh=mesh_sizes, dispatch=dispatch)
    assert resolve(cfg, mesh).layout.prefetch == expected


def test_a_relayout_is_the_next_value():
    run = make_run(dataclasses.replace(CFG, balance=Balance(policy="flexmoe")))
    wider = dataclasses.replace(run.layout, slots_per_device=4, copies_per_device=2)
    after = run.relaid(wider)
    assert after.layout == after.mesh_layout.layout == wider
    assert run.layout.slots_per_device != 4, "the value before stays as it was"
    same = ("cfg", "partition", "chosen", "owning", "calibration", "cost", "settings")
    assert all(getattr(after, name) is getattr(run, name) for name in same)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Layout.home(8, 2, 64), "num_devices=4"),
        (Layout.home(16, 4, 64), "num_experts=8"),
        (Layout.home(8, 4, 64, tensor=Tensor("s1h", 2, 2)), "tensor=None"),
    ],
)
def test_a_relayout_cuts_nothing_otherwise(other, words):
    with pytest.raises(ValueError, match="a relayout keeps") as error:
        make_run(CFG).relaid(other)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_presumed_speeds_make_the_cost_model():
    run = make_run(dataclasses.replace(CFG, balance=Balance(policy="flexmoe")))
    assert run.calibration.when == "presumed"
    assert run.cost.flops_per_sec == NOTES.flops_per_sec
    line = "presumed, 50 TFLOP/s of experts and 12.5 GB/s of exchange per device"
    assert line in run.lines()[-1]


@pytest.mark.parametrize("is_named", [True, False])
def test_a_gpu_has_the_rates_that_are_stated_for_it(is_named):
    """The rates are those of a target that the user gives, or of the kind of the
    devices: 400 TFLOP/s of experts, and of 4 devices of one node 3/4 of an array over
    NVLink."""
    gpu = target.load("h100")
    device = AbstractDevice("cpu" if is_named else gpu.name, None, "gpu")
    types = (AxisType.Auto,) * len(AXES)
    mesh = AbstractMesh(MESH.sizes, AXES, axis_types=types, abstract_device=device)
    cfg = dataclasses.replace(CFG, balance=Balance(policy="flexmoe"))
    run = resolve(cfg, mesh, target=gpu if is_named else None)
    assert not run.calibration.is_measured
    assert run.cost.flops_per_sec == 4e14
    assert run.cost.bytes_per_sec == pytest.approx(3.5e11)
    (line,) = (line for line in run.lines() if line.startswith("speeds"))
    assert f"those stated for {gpu.name}, 400 TFLOP/s of experts and 350 GB/s" in line
    assert run.cost.compile_sec == 30


def test_settings_are_the_balance_of_the_run():
    balance = Balance(policy="flexmoe", every_steps=7, margin=0.5, horizon_steps=33)
    settings = make_run(dataclasses.replace(CFG, balance=balance)).settings
    assert isinstance(settings, Settings)
    for field in dataclasses.fields(Balance):
        if field.name != "max_slots_per_device":
            assert getattr(settings, field.name) == getattr(balance, field.name)
    assert settings.max_slots_per_device == 6  # two own experts: twice, and two more


def test_a_batch_of_another_size_drops_nothing():
    """Evaluation uses the exact mode also in a run with small buffers that drops
    rows."""
    dispatch = Dispatch(exchange="capacity", buffer_factor=1.0)
    run = make_run(dataclasses.replace(CFG, dispatch=dispatch))
    layout = run.exact_layout(batch_size=24, width=5)
    assert (run.layout.exchange, layout.exchange) == ("capacity", "exact")


@pytest.mark.parametrize("has_tensor_axis", [False, True])
def test_an_odd_number_of_tokens_cannot_be_halved(has_tensor_axis):
    """Each device routes 127 tokens: one sequence, or with a tensor axis half of
    two."""
    cfg = dataclasses.replace(
        TENSOR if has_tensor_axis else CFG,
        dispatch=Dispatch(schedule="s1" if has_tensor_axis else "auto"),
        moe=Moe(num_experts=8, halves=True),
        data=Data(seq_len=127),
        train=Train(batch_size=8),
    )
    with pytest.raises(ValueError, match=r"cuts the 127 tokens .* Moe\.halves = False"):
        make_run(cfg)
    make_run(dataclasses.replace(cfg, data=Data(seq_len=128)))


def test_a_domain_and_a_policy_that_plans_do_not_go_together():
    cfg = dataclasses.replace(
        CFG,
        mesh=Topology(dc=2, expert=4),
        dispatch=Dispatch(group="dc_expert", domain=(2, 1)),
        balance=Balance(policy="flexmoe"),
        train=Train(batch_size=32),
    )
    with pytest.raises(ValueError, match=r"Dispatch\.domain") as error:
        make_run(cfg)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("laer", ("sharded", True)),
        ("eplb", ("sharded", False)),
        ("prophet", ("transient", True)),
        ("flexmoe", ("resident", False)),
    ],
)
def test_policies_that_fetch_a_layer_ahead(policy, expected):
    cfg = dataclasses.replace(CFG, balance=Balance(policy=policy))
    layout = make_run(cfg).layout
    assert (layout.store, layout.prefetch) == expected


def test_shadows_are_priced_by_the_equations_of_fastermoe():
    """A shadow costs 2 |expert| / W and a row 4 H / W, in units of 3 F / P of a row;
    by the presumed speeds. Other splits have no prices."""
    run = make_run(dataclasses.replace(CFG, dispatch=Dispatch(split="shadow")))
    cost, layout = run.cost, run.layout
    row_sec = 3 * cost.flops_per_row / cost.flops_per_sec
    copy_sec = 2 * cost.bytes_per_expert / cost.bytes_per_sec
    exchange_sec = 4 * cost.bytes_per_row / cost.bytes_per_sec
    assert layout.shadow_price == math.ceil(copy_sec / row_sec) > 0
    assert layout.exchange_toll / 256 == pytest.approx(exchange_sec / row_sec, rel=0.01)
    assert (layout.store, layout.prefetch) == ("transient", False)
    assert layout.slots_per_device == 2 * layout.experts_per_device
    others = make_run(CFG).layout
    assert (others.shadow_price, others.exchange_toll) == (0, 0)
    shadowed = Dispatch(split="shadow")
    with pytest.raises(ValueError, match=r"split='shadow' makes the replicas"):
        make_run(
            dataclasses.replace(
                CFG, dispatch=shadowed, balance=Balance(policy="flexmoe")
            )
        )
