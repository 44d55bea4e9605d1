"""When slots are gathered over data, and which ways to compute experts there are."""

import dataclasses

import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from moejax.axes import AUTO, AXES
from moejax.config import Balance, Config, Router
from moejax.perf.stated import stated_calibration
from moejax.perf.target import load
from moejax.plan.layout import Topology
from moejax.resolve.resolved import Resolved, resolve
from moejax.resolve.sent_bytes import sent_bytes
from moejax.resolve.strategies import find_strategies, link_time
from train.config import gin_reader

GIB = 2**30
H100 = load("h100")
USABLE = 72 * GIB


@pytest.fixture
def qwen(repo) -> Config:
    """Qwen3-30B on two nodes, in 8 micro-batches of one whole sequence each."""
    params = ["Train.accumulate_steps = 8", "Moe.halves = False"]
    return gin_reader.load([repo / "configs" / "qwen3_30b_a3b.gin"], params)


def on_h100(cfg: Config, usable_bytes: int | None = USABLE) -> Resolved:
    device = AbstractDevice(H100.name, num_cores=132, platform="gpu")
    mesh = AbstractMesh(
        cfg.mesh.sizes, AXES, axis_types=AUTO * len(AXES), abstract_device=device
    )
    return resolve(cfg, mesh, usable_bytes)


def with_fields(cfg: Config, **fields) -> Config:
    return dataclasses.replace(
        cfg, dispatch=dataclasses.replace(cfg.dispatch, **fields)
    )


def test_once_a_step_where_it_is_known_to_fit(qwen):
    """Two gathers and scatters a step, in place of three in each of 8 micro-batches."""
    run = on_h100(qwen)
    assert run.layout.gather == "step"
    layer, once = (run.chosen["gather"].alternatives[x] for x in ("layer", "step"))
    assert layer.sec == pytest.approx(12 * once.sec)
    for usable_bytes in (40 * GIB, None):
        assert on_h100(qwen, usable_bytes).layout.gather == "layer"


@pytest.mark.parametrize(("steps", "gather"), [(1, "layer"), (8, "step")])
def test_data_centres_sum_gradients_once_a_step(qwen, steps, gather):
    """Where each has all experts, and with several micro-batches, each of which would
    sum them: in float32, once for each of 8 devices."""
    train = dataclasses.replace(qwen.train, accumulate_steps=steps)
    cfg = dataclasses.replace(qwen, mesh=Topology(dc=2, expert=8), train=train)
    run = on_h100(cfg, 120 * GIB)
    assert run.layout.gather == gather
    assert ("gather" in run.chosen) == (steps > 1)
    if steps > 1:
        layer, once = (run.chosen["gather"].alternatives[x] for x in ("layer", "step"))
        assert layer.sec == pytest.approx(8 * once.sec)
    sent = sent_bytes(cfg, run.cost, run.layout)
    experts = 48 * 128 * 3 * 2048 * 768
    assert sent["all_reduce dc gradients"] == 4 * experts / 8


@pytest.mark.parametrize(
    ("mesh", "fields", "parts"),
    [
        (Topology(data=1, expert=16), {}, {}),
        (Topology(data=2, expert=8), {"gather": "layer"}, {}),
        (Topology(data=2, expert=8), {"group": "data_expert"}, {}),
        (Topology(data=2, expert=8), {"store": "sharded"}, {}),
        (Topology(data=2, expert=8), {}, {"balance": Balance(policy="prophet")}),
        (Topology(data=2, expert=8), {}, {"router": Router(training="dense")}),
    ],
)
def test_no_choice(qwen, mesh, fields, parts):
    """Nothing to gather over data, a way that the user named, or slots that a layer
    makes."""
    run = on_h100(dataclasses.replace(with_fields(qwen, **fields), mesh=mesh, **parts))
    assert run.layout.gather == "layer"
    assert "gather" not in run.chosen


def test_a_named_way_stays(qwen):
    """Relayouts change to stores that gather once, too."""
    cfg = dataclasses.replace(
        with_fields(qwen, gather="step", store=None), balance=Balance(policy="smartmoe")
    )
    run = on_h100(cfg, None)
    assert run.layout.gather == "step"
    assert run.settings.stores == ("owned", "resident")
    with pytest.raises(ValueError, match=r"gather='step' .* store='transient'"):
        on_h100(with_fields(qwen, gather="step", store="transient"))
    dense = dataclasses.replace(
        with_fields(qwen, gather="step"), router=Router(training="dense")
    )
    with pytest.raises(ValueError, match="no slots to gather once a step"):
        on_h100(dense)


def test_arms_of_two_nodes(qwen):
    """A step of Qwen3 compiled for two nodes has row exchanges of 650 ms, and gathers
    and scatters of experts over data of 1933 ms, or 161 ms once a step."""
    strategies = {each.name: each for each in find_strategies(on_h100(qwen))}
    msec = {}
    for name, strategy in strategies.items():
        calibration = stated_calibration(H100, strategy.cfg.mesh)
        time = link_time(on_h100(strategy.cfg), calibration)
        msec[name] = round(1e3 * time.rows_sec), round(1e3 * time.weights_sec)
    expert, fsdp = "expert parallelism", "no expert parallelism (FSDP)"
    assert msec[f"{expert}, gathered in each layer"] == (650, 1933)
    assert msec[f"{expert}, gathered once a step"] == (650, 161)
    assert msec[f"{fsdp}, gathered once a step"][0] == 0
    assert strategies[f"{fsdp}, gathered once a step"].params == (
        "Mesh.data = 16",
        "Mesh.expert = 1",
        "Dispatch.gather = 'step'",
    )


def test_a_prediction_near_the_limit_is_not_chosen(repo):
    """Mixtral gathers in each layer: XLA recomputes parts of a step that gathers once,
    which takes longer than the gathers (decision 0022)."""
    cfg = gin_reader.load([repo / "configs" / "mixtral_8x7b.gin"], [])
    run = on_h100(cfg, 78 * GIB)
    assert run.layout.gather == "layer"
    once = run.chosen["gather"].alternatives["step"]
    assert 0.9 * 78 * GIB < once.num_bytes < 78 * GIB
