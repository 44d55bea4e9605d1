"""Test the changes that are proposed for a run that does not fit."""

import dataclasses

from moejax.config import Config
from moejax.plan.layout import Topology
from moejax.resolve.fitting import find_changes

CFG = Config()
CFG = dataclasses.replace(
    CFG,
    mesh=Topology(expert=2),
    model=dataclasses.replace(CFG.model, remat="none"),
    train=dataclasses.replace(CFG.train, batch_size=32, accumulate_steps=2),
)


def total(cfg: Config) -> int:
    """Imagined bytes: 100 of parameters, 10 a sequence, twice where all is kept."""
    rows = cfg.train.batch_size // cfg.train.accumulate_steps // cfg.mesh.expert
    moments = 50 if cfg.optimizer.mu_dtype == "bfloat16" else 100
    kept = 20 if cfg.model.remat == "none" else 10
    return (100 + moments) // cfg.mesh.num_devices * 2 + rows * kept // cfg.mesh.data


def test_single_changes_come_first_and_help():
    changes = find_changes(CFG, 300, total, 3)
    assert [change.params for change in changes] == [
        ('Model.remat = "full"',),
        ("Train.accumulate_steps = 4",),
        ("Mesh.data = 2",),
    ]
    assert [change.total_bytes for change in changes] == [280, 280, 180]
    assert all(change.why for change in changes)


def test_smallest_size_of_a_remedy_is_taken():
    changes = find_changes(CFG, 279, total, 9)
    steps = [c.params for c in changes if "accumulate_steps" in c.params[0]]
    assert steps == [("Train.accumulate_steps = 8",)]


def test_pairs_follow_where_no_single_one_helps():
    """On the same devices only smaller moments and smaller micro-batches are enough."""

    def stiff(cfg: Config) -> int:
        if cfg.mesh != CFG.mesh or cfg.data != CFG.data:
            raise ValueError("not valid")
        return total(cfg)

    (change,) = find_changes(CFG, 175, stiff, 3)
    assert change.params == (
        'Optimizer.mu_dtype = "bfloat16"',
        "Train.accumulate_steps = 16",
    )
    assert change.total_bytes == 170
    assert "; " in change.why


def test_a_pair_never_holds_what_helps_alone():
    changes = find_changes(CFG, 300, total, 50)
    alone = {c.params[0].split(" ")[0] for c in changes if len(c.params) == 1}
    pairs = [c for c in changes if "; " in c.why]
    assert not any(p.split(" ")[0] in alone for pair in pairs for p in pair.params)


def test_micro_batches_stay_divisors_of_the_batch():
    cfg = dataclasses.replace(
        CFG, train=dataclasses.replace(CFG.train, batch_size=12, accumulate_steps=3)
    )
    changes = find_changes(cfg, 10**9, total, 50)
    values = [p for c in changes for p in c.params if "accumulate" in p]
    assert values
    assert set(values) <= {"Train.accumulate_steps = 6"}


def test_more_devices_lessen_the_micro_batches_where_sequences_run_out():
    cfg = dataclasses.replace(
        CFG, train=dataclasses.replace(CFG.train, batch_size=4, accumulate_steps=2)
    )
    changes = find_changes(cfg, 10**9, total, 50)
    along_data = [c.params for c in changes if c.params[0].startswith("Mesh.data")]
    assert along_data == [("Mesh.data = 2", "Train.accumulate_steps = 1")]


def test_simulated_devices_follow_the_mesh():
    simulated = dataclasses.replace(CFG.train, num_simulated_devices=2)
    changes = find_changes(dataclasses.replace(CFG, train=simulated), 10**9, total, 50)
    meshes = [c.params for c in changes if c.params[0].startswith("Mesh.")]
    assert meshes
    assert all("Train.num_simulated_devices = 4" in params for params in meshes)


def test_a_run_that_keeps_its_routes_alone_may_send_inputs_to_the_host():
    full = dataclasses.replace(CFG, model=dataclasses.replace(CFG.model, remat="full"))
    changes = find_changes(full, 10**9, total, 50)
    remat = [p for c in changes for p in c.params if p.startswith("Model.remat")]
    assert set(remat) == {'Model.remat = "offload"'}
    simulated = dataclasses.replace(full.train, num_simulated_devices=2)
    on_cpu = dataclasses.replace(full, train=simulated)
    changes = find_changes(on_cpu, 10**9, total, 50)
    assert not [p for c in changes for p in c.params if p.startswith("Model.remat")]
