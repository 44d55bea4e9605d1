"""Loading a checkpoint on another mesh: same numbers, unchanged files, damage."""

import json
import pathlib
import shutil

import pytest

from moejax.plan.layout import Topology
from tests.support.run_main import listing
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


def read_record(run_dir: pathlib.Path, step: int) -> dict:
    path = run_dir / "checkpoints" / str(step) / "record" / "metadata"
    return json.loads(path.read_text())


def flip_bits(run_dir: pathlib.Path, step: int) -> None:
    """Flip bits in every file of the arrays."""
    for path in (run_dir / "checkpoints" / str(step) / "state").rglob("d/*"):
        content = bytearray(path.read_bytes())
        for at in range(0, len(content), 97):
            content[at] ^= 1
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("params", "mesh"),
    [
        (("Mesh.expert=8", "Mesh.data=1"), Topology(expert=8)),
        (("Train.num_simulated_devices = 3",), Topology(expert=2)),
    ],
)
def test_every_mesh_has_the_numbers_that_were_saved(saved, params, mesh):
    """Parameters and router bias agree bit for bit; the directory is unchanged."""
    before = listing(saved)
    loaded = load_model(find_checkpoints(saved, params=params))
    assert loaded.cfg.mesh == mesh
    assert dict(loaded.mesh.shape) == dict(zip(loaded.mesh.axis_names, mesh.sizes))
    source = checksums({"params": loaded.params, "router_bias": loaded.router_bias})
    arrays = read_record(saved, max(STEPS))["arrays"]
    names = [name for name in arrays if name.startswith(("params", "router_bias"))]
    assert source == {name: arrays[name]["checksum"] for name in names}
    assert loaded.step == max(STEPS)
    assert loaded.meta == read_record(saved, max(STEPS))["meta"]
    assert listing(saved) == before


@pytest.mark.parametrize(
    ("named", "becomes"),
    [("cudnn", "auto"), ("reference", "reference")],
)
def test_attention_for_gpus_becomes_auto_without_one(saved, named, becomes):
    source = find_checkpoints(saved, params=(f"Model.attention = '{named}'",))
    assert load_model(source).cfg.model.attention == becomes


def test_a_damaged_checkpoint_is_told_of_and_the_one_before_it_used(copied):
    flip_bits(copied, 7)
    before, messages = listing(copied), []
    assert load_model(find_checkpoints(copied), messages.append).step == 3
    (line,) = messages
    assert line.startswith(f"checkpoint 7 in {copied}/checkpoints is damaged: ")
    with pytest.raises(ValueError, match=r"^checkpoint 7 in .* damaged: .*use another"):
        load_model(find_checkpoints(copied, step=7), messages.append)
    assert listing(copied) == before


def test_a_record_that_is_no_record_is_told_of(copied):
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
        (None, ("Model.d_model = 64",), "parameters of the checkpoint depend on this"),
    ],
)
def test_what_cannot_be_is_one_line(saved, step, params, message):
    with pytest.raises(ValueError) as error:
        find_checkpoints(saved, step, params)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_router_that_follows_a_record_is_refused(copied):
    path = copied / "checkpoints" / "7" / "record" / "metadata"
    text = path.read_text().replace('"kind": "sigmoid"', '"kind": "recorded"')
    record = json.loads(text.replace('"bias_rate": 0.01', '"bias_rate": 0.0'))
    path.write_text(json.dumps(record | {"sha256": record_sha256(record)}))
    with pytest.raises(ValueError, match="nothing to evaluate or to generate"):
        find_checkpoints(copied)


def test_too_few_devices_and_no_run_are_one_line(saved, tmp_path):
    with pytest.raises(ValueError, match="needs 16 devices, but this machine has 8"):
        load_model(find_checkpoints(saved, params=("Mesh.data = 4",)))
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ValueError, match="has no checkpoints: name the run"):
            find_checkpoints(folder)
