"""Test that the answers about a described cluster are those of a run that is
configured so, and that laws of prices hold."""

import dataclasses

import numpy as np
import pytest

from moejax.config import Balance, Config, Data, Dispatch, Model, Moe, Train
from moejax.perf import cluster as clusters
from moejax.perf.cluster import Cluster
from moejax.plan.layout import Topology
from moejax.resolve.memory import state_bytes
from moejax.resolve.step_time import predict
from tests.support.run_main import ROOT
from tools.simulated import report, scale
from tools.simulated.loads import pairs
from tools.simulated.what_if import plain, what_if
from train.config import gin_reader
from train.dry_run import abstract_gpu, resolve_on
from train.launch.program import usable_bytes

NODE, TWO = clusters.load("h100_1x8"), clusters.load("h100_2x8")
CFG = Config(
    mesh=Topology(expert=8),
    model=Model(d_model=1024, num_layers=4, num_heads=8, num_kv_heads=8),
    moe=Moe(num_experts=16, top_k=2, d_expert=1024),
    data=Data(seq_len=1024),
    train=Train(batch_size=64, accumulate_steps=2, loss_chunk=1024),
)


def with_rates(cluster: Cluster, factor: float, devices: float = 1.0) -> Cluster:
    """Return the cluster with all links, and its devices, faster by factors."""
    levels = tuple(
        dataclasses.replace(
            level,
            bytes_per_sec=level.bytes_per_sec * factor,
            latency_sec=level.latency_sec / factor,
        )
        for level in cluster.levels
    )
    rates = {
        name: getattr(cluster.device, name) * devices
        for name in (
            "dense_flops_per_sec",
            "grouped_flops_per_sec",
            "hbm_bytes_per_sec",
        )
    }
    device = dataclasses.replace(cluster.device, **rates)
    return dataclasses.replace(cluster, levels=levels, device=device)


@pytest.fixture(scope="module")
def answers():
    return what_if(CFG, TWO, "zipf:1.0", count=4)


def test_the_answers_are_sorted_and_use_all_devices(answers):
    rates = [answer.tok_per_sec for answer in answers.found]
    assert rates == sorted(rates, reverse=True)
    assert len(rates) > 20
    for answer in answers.found:
        assert answer.cfg.mesh.num_devices == 16
        assert answer.total_bytes < usable_bytes(TWO.device.memory_bytes)


def test_the_gin_lines_lead_to_the_answer(answers, tmp_path):
    """A run that is configured by the lines resolves to the answer's layout; at home,
    its price for an even load is that of the answer."""
    path = tmp_path / "mine.gin"
    path.write_text(gin_reader.render(CFG))
    for answer in answers.found[:4]:
        lines = report.gin_lines(CFG, answer.cfg)
        cfg = gin_reader.load([str(path)], lines)
        assert cfg == answer.cfg
        usable = usable_bytes(TWO.device.memory_bytes)
        run = resolve_on(cfg, abstract_gpu(TWO.device.name), usable, TWO)
        assert run.layout.store == answer.method.layout.store
        assert run.layout.split == answer.method.layout.split
        domain = run.layout.domain
        shared = None if domain is None else (1, *domain.shared)[-2:]
        assert answer.cfg.dispatch.domain == shared


def test_no_device_waits_for_an_even_load():
    """Replicas may still be taken, for rows that then stay."""
    for answer in what_if(CFG, NODE, "even").found:
        assert answer.time.wait == pytest.approx(0, abs=1e-12)


def test_an_even_answer_is_the_dry_run_of_its_configuration():
    answer = what_if(CFG, NODE, "even", count=1).found[0]
    usable = usable_bytes(NODE.device.memory_bytes)
    run = resolve_on(answer.cfg, abstract_gpu(NODE.device.name), usable, NODE)
    there = predict(run, NODE.device, state_bytes(run.cfg)["params"])
    assert there.total == pytest.approx(answer.time.total)


def test_infinite_bandwidth_leaves_work():
    best = what_if(CFG, with_rates(TWO, 1e12), "even", count=1).found[0]
    time = best.time
    work = time.experts + time.blocks + time.head + time.weights
    assert time.total == pytest.approx(work, rel=1e-4)


def test_doubling_everything_halves_every_time():
    """Loads are even: prices of shadows are whole numbers."""
    slow, fast = (what_if(CFG, with_rates(TWO, x, x), "even") for x in (1.0, 2.0))
    for one, two in zip(slow.found, fast.found, strict=True):
        assert one.cfg == two.cfg
        for part, sec in dataclasses.asdict(one.time).items():
            assert sec == pytest.approx(2 * getattr(two.time, part), abs=1e-12)


def test_methods_save_what_home_waits_for(answers):
    """With a hot expert some way balances, and waits less than plain expert
    parallelism."""
    home = plain(CFG, TWO, "zipf:1.0")
    balanced = [x for x in answers.found if str(x.method) != "home in store owned"]
    assert home.time.wait > 0.1 * home.time.experts
    assert balanced
    assert min(x.time.wait for x in balanced) < 0.05 * home.time.wait
    assert answers.found[0].tok_per_sec >= home.tok_per_sec


def test_what_does_not_fit_repeats_more_or_has_smaller_micro_batches():
    least = min(x.total_bytes for x in what_if(CFG, NODE, "even").found)

    def with_memory(memory_bytes: float) -> Cluster:
        device = dataclasses.replace(NODE.device, memory_bytes=memory_bytes)
        return dataclasses.replace(NODE, device=device)

    found = what_if(
        CFG, with_memory(least), "even"
    ).found  # a run may use a share of it
    changed = {(x.cfg.train.accumulate_steps, x.cfg.model.remat) for x in found}
    assert (2, CFG.model.remat) not in changed
    assert all(x.cfg.train.batch_size == 64 for x in found)
    assert all(x.total_bytes <= usable_bytes(least) for x in found)
    with pytest.raises(ValueError, match="nothing can run on h100_1x8") as error:
        what_if(CFG, with_memory(1e8), "even")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "kind",
    ["even", "zipf:1.0", "rotating:0.5", str(ROOT / "tests/golden/routing.npz")],
)
def test_loads_are_shares(kind):
    for pair in pairs(kind, 4, 64, num_layers=2):
        for share_lwe in pair:
            assert len(share_lwe) <= 2
            assert share_lwe.shape[1:] == (4, 64)
            assert (share_lwe >= 0).all()
            np.testing.assert_allclose(share_lwe.sum(axis=(1, 2)), 1.0)


def test_recorded_loads_of_their_own_size_are_as_recorded():
    path = ROOT / "tests/golden/routing.npz"
    recorded = np.load(path)["tokens"].astype(float)
    first = pairs(str(path), 16, 32, 6)[0].planned_lwe
    assert any(
        np.allclose(first, x / x.sum(axis=(1, 2), keepdims=True)) for x in recorded
    )


def test_a_cluster_grows_in_its_outermost_level():
    assert scale.sized(TWO, 8).num_devices == 8
    assert [x.size for x in scale.sized(TWO, 64).levels] == [8, 8]
    with pytest.raises(ValueError, match="do not fill units of 8"):
        scale.sized(TWO, 20)


def test_the_best_way_is_no_slower_than_plain_expert_parallelism():
    cfg = dataclasses.replace(
        CFG, dispatch=Dispatch(), balance=Balance(), train=Train(64, loss_chunk=1024)
    )
    found = scale.scale(cfg, NODE.with_outer(8), "zipf:0.5", 8)
    assert [size.cluster.num_devices for size in found] == [8]
    assert all(size.gain >= 1 for size in found)
