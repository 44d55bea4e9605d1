"""Loading a checkpoint on another mesh: same numbers, unchanged files, damage."""

import json
import pathlib
import shutil

import pytest

from moejax.plan.layout import Topology
from tests.support.run_main import checkpoint_record, listing
from tests.support.saved_run import STEPS, saved_run
from train.checkpoint.checksum import checksums
from train.checkpoint.load import find_checkpoints, load_model
from train.checkpoint.record import record_sha256

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved() -> pathlib.Path:
    return saved_run()


@pytest.fixture
def copied(saved, tmp_path) -> pathlib.Path:
    """Return a copy of the run that a test may damage."""
    return shutil.copytree(saved, tmp_path / "run")


def flip_bits(run_dir: pathlib.Path, step: int) -> None:
    """Flip bits in every file of the arrays."""
    for path in (run_dir / "checkpoints" / str(step) / "state").rglob("d/*"):
        content = bytearray(path.read_bytes())
        for at in range(0, len(content), 97):
            content[at] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("params", "mesh", "attention"),
    [
        (
            ("Mesh.expert=8", "Mesh.data=1", "Model.attention = 'cudnn'"),
            Topology(expert=8),
            "auto",
        ),
        (
            ("Train.num_simulated_devices = 3", "Model.attention = 'reference'"),
            Topology(expert=2),
            "reference",
        ),
    ],
)
def test_every_mesh_has_the_numbers_that_were_saved(saved, params, mesh, attention):
    """Parameters and router bias agree bit for bit, and the directory is unchanged.
    Attention for GPUs becomes 'auto' on a machine without one."""
    before = listing(saved)
    loaded = load_model(find_checkpoints(saved, params=params))
    assert (loaded.cfg.mesh, loaded.cfg.model.attention) == (mesh, attention)
    assert dict(loaded.mesh.shape) == dict(zip(loaded.mesh.axis_names, mesh.sizes))
    source = checksums({"params": loaded.params, "router_bias": loaded.router_bias})
    record = checkpoint_record(saved, max(STEPS))
    arrays = record["arrays"]
    names = [name for name in arrays if name.startswith(("params", "router_bias"))]
    assert source == {name: arrays[name]["checksum"] for name in names}
    assert loaded.step == max(STEPS)
    assert loaded.meta == record["meta"]
    assert listing(saved) == before


def test_a_damaged_checkpoint_is_told_of_and_the_one_before_it_used(copied):
    flip_bits(copied, 7)
    before, messages = listing(copied), []
    assert load_model(find_checkpoints(copied), messages.append).step == 3
    (line,) = messages
    assert line.startswith(f"checkpoint 7 in {copied}/checkpoints is damaged: ")
    with pytest.raises(ValueError, match=r"^checkpoint 7 in .* damaged: .*use another"):
        load_model(find_checkpoints(copied, step=7), messages.append)
    assert listing(copied) == before
    (copied / "checkpoints" / "7" / "record" / "metadata").write_text("{")
    assert load_model(find_checkpoints(copied), [].append).step == 3
    with pytest.raises(ValueError, match=r"checkpoint 7 in .* is damaged: its record"):
        find_checkpoints(copied, step=7)


@pytest.mark.parametrize(
    ("step", "params", "message"),
    [
        (5, (), "no checkpoint of step 5: it has 3, 7"),
        (None, ("Mesh.expet = 2",), "Mesh has no field expet; nearest is Mesh.expert"),
        (None, ("Mesh.expert",), "write Class.field = value"),
        (None, ("expert = 2",), "there is no class expert"),
        (None, ("Mesh.expert = 'two'",), "must be an int, and is of type str"),
        (None, ("Mesh.expert = 3",), "Moe.num_experts=8 must be divisible"),
        (None, ("Mesh.data = 4",), "needs 16 devices, but this machine has 8"),
        (None, ("Model.d_model = 64",), "parameters of the checkpoint depend on this"),
    ],
)
def test_what_cannot_be_is_one_line(saved, step, params, message):
    with pytest.raises(ValueError) as error:
        load_model(find_checkpoints(saved, step, params))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_router_that_follows_a_record_is_refused(copied):
    path = copied / "checkpoints" / "7" / "record" / "metadata"
    text = path.read_text().replace('"kind": "sigmoid"', '"kind": "recorded"')
    record = json.loads(text.replace('"bias_rate": 0.01', '"bias_rate": 0.0'))
    path.write_text(json.dumps(record | {"sha256": record_sha256(record)}))
    with pytest.raises(ValueError, match="nothing to evaluate or to generate"):
        find_checkpoints(copied)


def test_a_folder_without_a_run_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match="has no checkpoints: name the run"):
            find_checkpoints(folder)
