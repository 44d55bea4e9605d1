"""Proposed meshes: valid, of the right size, best first, and bound by their lines."""

import dataclasses

import pytest

from moejax.config import Balance, Config, Moe, Router, Train
from moejax.perf.target import load as load_target
from moejax.plan.layout import Topology
from moejax.resolve.meshes import NODE_DEVICES, propose_meshes
from tests.support.run_main import ROOT
from train.config.gin_reader import load
from train.dry_run import dry_run, show_meshes

LARGE = [ROOT / "configs" / f"{name}.gin"
         for name in ("olmoe_1b_7b", "qwen3_30b_a3b", "mixtral_8x7b")]  # fmt: skip
ALL = sorted((ROOT / "configs").glob("*.gin"))


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)
@pytest.mark.parametrize("num_devices", [2, 32])
def test_the_lines_of_a_proposal_bind_it(path, num_devices):
    base = load([path])
    proposals = propose_meshes(base, num_devices * base.mesh.dc)
    assert len({proposal.cfg.mesh for proposal in proposals}) == len(proposals)
    for cfg, params in proposals:
        assert load([path], params) == cfg
        assert cfg.mesh.num_devices == num_devices * base.mesh.dc
        assert cfg.mesh.dc == base.mesh.dc


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
@pytest.mark.parametrize("nodes", [1, 4])
def test_whole_nodes_have_an_expert_axis_each(path, nodes):
    base = load([path])
    best = propose_meshes(base, nodes * NODE_DEVICES)[0].cfg
    assert best.mesh == Topology(data=nodes, expert=NODE_DEVICES)
    assert best.train.batch_size == base.train.batch_size


def test_the_order_is_that_of_the_rule():
    """16 experts: an expert axis wider than a node late, and tensor axes last."""
    cfg = Config(moe=Moe(num_experts=16), train=Train(batch_size=16))
    meshes = [proposal.cfg.mesh for proposal in propose_meshes(cfg, 16)]
    assert [mesh.expert for mesh in meshes if mesh.tensor == 1] == [8, 4, 2, 1, 16]
    assert [mesh.tensor for mesh in meshes] == sorted(mesh.tensor for mesh in meshes)


def test_the_batch_grows_where_no_mesh_divides_it():
    cfg = Config(train=Train(batch_size=10, accumulate_steps=5))
    best = propose_meshes(cfg, 8)[0]
    assert best.params == (
        "Mesh.expert = 8",
        "Train.batch_size = 16",
        "Train.accumulate_steps = 1",
    )


def test_a_mesh_needs_the_memory_of_its_dry_run():
    cfg = load([ROOT / "configs" / "olmoe_1b_7b.gin"])
    target = load_target("h100")
    first = show_meshes(cfg, 8, target)["meshes"][0]
    assert first["mesh"] == dataclasses.asdict(cfg.mesh)
    assert first["memory"] == dry_run(cfg, target)["memory"]


TINY = load([ROOT / "configs" / "tiny_cpu.gin"])
DENSE = dataclasses.replace(
    TINY, router=Router(training="dense"), balance=Balance(policy="flexmoe")
)


@pytest.mark.parametrize(
    ("cfg", "num_devices", "match"),
    [
        (TINY, 0, "--num_devices=0 must be at least 1"),
        (Config(mesh=Topology(dc=2), train=Train(batch_size=32)), 3,
         "--num_devices=3 must be a multiple of Mesh.dc=2"),
        # Parameters do not divide, or a run refuses the configuration.
        (TINY, 13, r"no mesh of 13 devices is valid; .*d_expert"),
        (DENSE, 4, "no mesh of 4 devices can run; the first"),
    ],
)  # fmt: skip
def test_what_is_refused(cfg, num_devices, match):
    with pytest.raises(ValueError, match=match):
        show_meshes(cfg, num_devices)
