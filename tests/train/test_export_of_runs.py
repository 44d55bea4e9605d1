"""Runs that move experts while they train are published with experts in their logical
order: the exported folder has the checkpoint's parameters, and computes what it does.

The checkpoint computes what the run did: train/evaluate.py gives the run's own last
loss of held-out text, which was computed under its plan.
"""

import json
import pathlib

import jax
import numpy as np
import pytest

from moejax.interop.published import open_model
from moejax.plan.expert_plan import ExpertPlan
from tests.support.close import assert_close
from tests.support.published_model import write_published
from tests.support.run_main import ROOT, checkpoint_record, metric_lines, run
from tools import hf
from tools.faults.reference import imaginary_speeds
from train import evaluate
from train.checkpoint.load import find_checkpoints, load_model

GIN = ROOT / "tests" / "support" / "from_hf.gin"
STEPS = 16
EAGER = (
    f"Train.num_steps = {STEPS}", f"Train.eval_every_steps = {STEPS}",
    f"Checkpoint.every_steps = {STEPS}", "Balance.every_steps = 2",
    "Balance.lag_steps = 2", "Balance.relayout_lag_steps = 8",
    "Balance.cooldown_steps = 2", "Balance.half_life_steps = 2.0",
    "Balance.act_above = 1.05", "Balance.margin = 0.0",
    "Balance.horizon_steps = 100000000",
)  # fmt: skip
"""A short run whose balancer acts on any imbalance and takes any gain."""
SMARTMOE = ("Balance.policy = 'smartmoe'",)
FLEXMOE = ("Balance.policy = 'flexmoe'",)
LAYOUTS = {
    "owners": SMARTMOE,
    "owners, tensor": (*SMARTMOE, "Mesh.data = 1", "Mesh.tensor = 2"),
    "sharded": (*FLEXMOE, "Dispatch.store = 'sharded'"),
    "relayout": (
        *FLEXMOE, "Balance.calibration = '{cheap}'", "Balance.max_slots_per_device = 3",
    ),
}  # fmt: skip
"""Bindings of runs by what they move; {cheap} is a calibration of slow devices, for
which relayouts pay."""
pytestmark = pytest.mark.slow


def call(capfd, program, *words) -> dict:
    """Run a program of tools/ or train/ in this process; return its record."""
    code = program.main([*map(str, words), "--json"])
    text = capfd.readouterr()
    assert code == 0, text.err
    return json.loads(text.out.splitlines()[-1])


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_exported_model_is_that_of_the_checkpoint(layout, tmp_path, capfd):
    run_dir, out = tmp_path / "run", tmp_path / "out"
    train(run_dir, layout, tmp_path)
    record = call(capfd, hf, "export", run_dir, "--out", out, "--dtype=float32")
    assert record["step"] == STEPS
    loaded = load_model(find_checkpoints(run_dir))
    model = open_model(out)
    assert_same(model.params, loaded.params)
    assert_same(model.router_bias, loaded.router_bias)
    own_loss = metric_lines(run_dir)[-1]["eval_loss"]
    loss = call(capfd, evaluate, run_dir)["loss"]
    assert_close(np.float32(loss), np.float32(own_loss))
    assert np.abs(logits(capfd, run_dir) - logits(capfd, out)).max() < 1e-5


def train(run_dir: pathlib.Path, layout: str, folder: pathlib.Path) -> None:
    """Train a published model, and check that the run moved what its name says."""
    published, cheap = write_published(folder / "published"), folder / "cheap.json"
    mesh = {"dc": 1, "data": 2, "expert": 4, "tensor": 1}
    cheap.write_text(imaginary_speeds(mesh).to_json())
    params = (param.format(cheap=cheap) for param in LAYOUTS[layout])
    source = f"Model.from_hf = '{published}'"
    ended = run(run_dir, source, *EAGER, *params, gin_file=GIN)
    assert ended.code == 0, ended.err
    lines = metric_lines(run_dir)
    kinds = {line["decision"]["kind"] for line in lines if "decision" in line}
    assert ("relayout" if layout == "relayout" else "swap") in kinds, kinds
    plan = ExpertPlan.from_json(checkpoint_record(run_dir, STEPS)["meta"]["plan"])
    assert plan.is_logical == ("owners" not in layout)


def assert_same(views, arrays) -> None:
    """Check a tree of views against one of arrays, bit for bit."""
    leaves, structure = jax.tree.flatten(views)
    others, other = jax.tree.flatten(arrays)
    assert structure == other
    for ours, theirs in zip(leaves, others, strict=True):
        np.testing.assert_array_equal(ours.read(), theirs)


def logits(capfd, source: pathlib.Path) -> np.ndarray:
    """Return what tools/hf.py computes for a run or a folder."""
    ids, path = (source.with_suffix(f".{name}.npy") for name in ("ids", "logits"))
    np.save(ids, np.arange(64).reshape(2, 32))
    mesh = {"data": 1, "expert": 8, "tensor": 1}
    flags = [f"--gin_param=Mesh.{axis} = {size}" for axis, size in mesh.items()]
    call(capfd, hf, "logits", source, "--ids", ids, "--out", path, *flags)
    return np.load(path)
