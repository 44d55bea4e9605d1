"""Proposed meshes: valid, of the right size, best first, and bound by their lines."""

import dataclasses

import pytest

from moejax.config import Balance, Config, Moe, Train
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
@pytest.mark.parametrize("num_devices", [1, 2, 4, 8, 32])
def test_the_lines_of_a_proposal_bind_it(path, num_devices):
    base = load([path])
    proposals = propose_meshes(base, num_devices * base.mesh.dc)
    assert len({proposal.cfg.mesh for proposal in proposals}) == len(proposals)
    for cfg, params in proposals:
        assert load([path], params) == cfg
        assert cfg.mesh.num_devices == num_devices * base.mesh.dc
        assert cfg.mesh.dc == base.mesh.dc


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
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


@pytest.mark.parametrize(
    ("cfg", "num_devices", "match"),
    [
        (Config(), 0, "--num_devices=0 must be at least 1"),
        (
            Config(mesh=Topology(dc=2), train=Train(batch_size=32)),
            3,
            "--num_devices=3 must be a multiple of Mesh.dc=2",
        ),
    ],
)
def test_what_is_refused(cfg, num_devices, match):
    with pytest.raises(ValueError, match=match):
        propose_meshes(cfg, num_devices)


def test_the_table_has_flags_and_bytes(capsys):
    cfg = load([ROOT / "configs" / "tiny_cpu.gin"])
    record = show_meshes(cfg, 4)
    first = record["meshes"][0]
    assert first["mesh"] == dataclasses.asdict(Topology(expert=4))
    assert first["memory"]["masters"] > 0
    out = capsys.readouterr().out
    assert "meshes of 4 devices, best first" in out
    flags = ("Mesh.data = 1", "Train.num_simulated_devices = 4")
    assert "    " + " ".join(f"--gin_param='{flag}'" for flag in flags) + "\n" in out


@pytest.mark.parametrize("name", ["h100", "b200", None])
def test_a_mesh_needs_the_memory_of_its_dry_run(name):
    cfg = load([ROOT / "configs" / "olmoe_1b_7b.gin"])
    target = name and load_target(name)
    first = show_meshes(cfg, 8, target)["meshes"][0]
    assert first["mesh"] == dataclasses.asdict(cfg.mesh)
    assert first["memory"] == dry_run(cfg, target)["memory"]


def test_a_dry_run_refuses_attention_that_simulated_devices_cannot_compute():
    cfg = load([ROOT / "configs" / "tiny_cpu.gin"], ["Model.attention = 'cudnn'"])
    with pytest.raises(NotImplementedError, match="not cpu: use 'auto'"):
        dry_run(cfg)


def test_no_mesh_is_valid_where_parameters_do_not_divide():
    cfg = load([ROOT / "configs" / "tiny_cpu.gin"])
    with pytest.raises(ValueError, match=r"no mesh of 13 devices is valid; .*d_expert"):
        show_meshes(cfg, 13)


def test_no_mesh_can_run_what_a_run_refuses():
    cfg = load([ROOT / "configs" / "tiny_cpu.gin"], ["Router.training = 'dense'"])
    cfg = dataclasses.replace(cfg, balance=Balance(policy="flexmoe"))
    with pytest.raises(ValueError, match="no mesh of 4 devices can run; the first"):
        show_meshes(cfg, 4)
