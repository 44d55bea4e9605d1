"""Test the changes that are proposed for a run that does not fit."""

import dataclasses

import pytest

from moejax.config import Config
from moejax.plan.layout import Topology
from moejax.resolve.fitting import find_changes


def changed(cfg: Config, part: str, **fields) -> Config:
    return dataclasses.replace(
        cfg, **{part: dataclasses.replace(getattr(cfg, part), **fields)}
    )


CFG = dataclasses.replace(Config(), mesh=Topology(expert=2))
CFG = changed(CFG, "model", remat="none")
CFG = changed(CFG, "train", batch_size=32, accumulate_steps=2)
FULL = changed(CFG, "model", remat="full")


def total(cfg: Config) -> int:
    """Imagined bytes: 100 of parameters, 10 a sequence, twice where all is kept."""
    rows = cfg.train.batch_size // cfg.train.accumulate_steps // cfg.mesh.expert
    moments = 50 if cfg.optimizer.mu_dtype == "bfloat16" else 100
    kept = 20 if cfg.model.remat == "none" else 10
    return (100 + moments) // cfg.mesh.num_devices * 2 + rows * kept // cfg.mesh.data


def test_single_changes_come_first_and_pairs_never_hold_what_helps_alone():
    changes = find_changes(CFG, 300, total, 50)
    assert [(change.params, change.total_bytes) for change in changes[:3]] == [
        (('Model.remat = "full"',), 280),
        (("Train.accumulate_steps = 4",), 280),
        (("Mesh.data = 2",), 180),
    ]
    assert all(change.why for change in changes)
    alone = {c.params[0].split(" ")[0] for c in changes if len(c.params) == 1}
    pairs = [c for c in changes if "; " in c.why]
    assert not any(p.split(" ")[0] in alone for pair in pairs for p in pair.params)


def test_pairs_follow_where_no_single_one_helps():
    """On the same devices only smaller moments and smaller micro-batches are enough."""

    def stiff(cfg: Config) -> int:
        if cfg.mesh != CFG.mesh or cfg.data != CFG.data:
            raise ValueError("not valid")
        return total(cfg)

    (change,) = find_changes(CFG, 175, stiff, 3)
    smaller = 'Optimizer.mu_dtype = "bfloat16"', "Train.accumulate_steps = 16"
    assert (change.params, change.total_bytes) == (smaller, 170)
    assert "; " in change.why


@pytest.mark.parametrize(
    ("cfg", "limit", "field", "expected"),
    [
        # The smallest size of a remedy.
        (CFG, 279, "Train.acc", [["Train.accumulate_steps = 8"]]),
        # Micro-batches stay divisors of the batch.
        (changed(CFG, "train", batch_size=12, accumulate_steps=3), 10**9, "Train.acc",
         [["Train.accumulate_steps = 6"]]),
        # More devices lessen the micro-batches where sequences run out.
        (changed(CFG, "train", batch_size=4), 10**9, "Mesh.data",
         [["Mesh.data = 2", "Train.accumulate_steps = 1"]]),
        # Simulated devices follow the mesh, and have no host to send inputs to.
        (changed(FULL, "train", num_simulated_devices=2), 10**9, "Mesh.data",
         [["Mesh.data = 2", "Train.num_simulated_devices = 4"]]),
        (changed(FULL, "train", num_simulated_devices=2), 10**9, "Model.remat", []),
        # Where routes alone are kept, inputs may go to the host.
        (FULL, 10**9, "Model.remat", [['Model.remat = "offload"']]),
    ],
)  # fmt: skip
def test_what_is_proposed_for_a_field(cfg, limit, field, expected):
    alone = [c for c in find_changes(cfg, limit, total, 50) if "; " not in c.why]
    params = [list(c.params) for c in alone if c.params[0].startswith(field)]
    assert params == expected
