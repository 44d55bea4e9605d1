"""Bad input of the programs gives one clear line and exit code 2, and changes no file.

Most rows call the programs in this process, where jax has started already.
tests/train/config/test_gin_errors.py has files that cannot be read as a configuration,
and test_load.py what cannot be read from a checkpoint.
"""

import json
import os
import re
import shutil
import subprocess
from unittest import mock

import pytest

from tests.support.data_files import write_bpe
from tests.support.published_model import write_published
from tests.support.run_main import (
    ROOT,
    TOY,
    Ended,
    command,
    environment,
    listing,
)
from tests.support.saved_run import saved_run
from tests.support.watched_run import BALANCED, MESH, speeds
from train import evaluate, generate
from train.main import main

BAD_INPUT = 2
FROM_HF = ROOT / "tests" / "support" / "from_hf.gin"
MICROMOE = "Balance.policy = 'micromoe'"
RECORDED = ("Router.kind = 'recorded'", "Router.bias_rate = 0.0")
TWO_NODES = (
    "Mesh.data = 4", "Train.batch_size = 32", "Train.num_simulated_devices = None",
)  # fmt: skip
NO_TRAINING = "--check compares kernels and collectives, and trains nothing: give it"
SOURCE = "Model.from_hf = '{hf}'"
TOYS = [
    # The data.
    (("Data.corpus = 'no/such.txt'",), "Data.corpus='no/such.txt' is not a file"),
    (("Data.corpus = '{empty}'",), "empty.txt': "),
    (("Data.seq_len = 8192",), "a window of Data.seq_len=8192 needs 8193 of each"),
    (("Train.eval_batches = 64",), "need 1024 held-out windows, "),
    ((*RECORDED, "Recorded.source = 'no/such.npz'"), "Recorded.source='no/such.npz'"),
    (
        (*RECORDED, "Recorded.source = '{damaged}'", "--dry_run"),
        "damaged.npz is damaged",
    ),
    # The devices.
    (("Model.remat = 'offload'",), "this is a CPU: use Model.remat = 'full'"),
    (
        ("Model.attention = 'cudnn'",),
        "attention='cudnn' cannot compute this run: ",
    ),
    (("Dispatch.transport = 'ragged'",), "use Dispatch.transport = 'padded'"),
    (TWO_NODES, "needs 16 devices, and 8 are here: change Mesh"),
    # The directory.
    (("--run_dir=/proc/moejax/run",), "/proc/moejax/run cannot be made"),
    (("--run_dir=/dev/null",), "/dev/null is a file: name another"),
    # Flags.
    (("--check", "--dry_run"), NO_TRAINING),
    (("--check", "--fresh"), NO_TRAINING),
    (("--check", "--from_step=3"), NO_TRAINING),
    (("--fresh", "--from_step=3"), "--from_step from a checkpoint: give one"),
    (("--target=h100",), "--target=h100 is for --dry_run"),
    (("--num_devices=8",), "--num_devices=8 is for --dry_run"),
    (("--dry_run", "--target=h100", "--num_devices=8"), "give one after the other"),
]
BALANCERS = [
    (("Balance.act_above = 1.0",), "act_above=1.0 must be above 1"),
    (("Balance.calibration = '{speeds}'",), "was measured on mesh {'dc': 1, 'data'"),
    (("Balance.calibration = '{no}'",), "as a calibration: there is no such file"),
    (("Balance.policy = 'flexmo'",), "did you mean 'flexmoe'?"),
    (("Balance.lag_steps = 0",), "Balance.lag_steps=0 must be at least 1"),
    (("Dispatch.slots_per_device = 1",), "4 x 1 slots hold fewer than num_experts=8"),
    (
        ("Dispatch.slots_per_device = 3", "Dispatch.store = 'owned'"),
        "store='owned' has exactly one slot for each of 8 experts",
    ),
    (
        ("Dispatch.store = 'sharded'", "Moe.d_expert = 12"),
        "over data x expert x tensor = 8 devices: use a multiple of 8",
    ),
    (
        ("Balance.policy = 'home'", "Dispatch.split = 'water_filling'"),
        "makes none: use 'micromoe'",
    ),
    ((MICROMOE, "Dispatch.split = 'dynamic'"), "use Balance.policy='home' with it"),
    (
        (MICROMOE, "Dispatch.slots_per_device = 9"),
        "more slots (9) than there are experts",
    ),
]
FOLDERS = [
    (("Model.from_hf = '{no}'",), "there is no folder"),
    (("Model.from_hf = '{bare}'",), "has neither model.safetensors"),
    (("Model.from_hf = '{cut}'",), "files are missing"),
    (("Model.from_hf = '{other}'",), "they belong to different models"),
    (("Model.from_hf = '{mute}'",), "has no tokenizer.json: copy it there"),
    ((SOURCE, "Moe.top_k = 1"), "says 2: remove the"),
    ((SOURCE, "Mesh.expert = 3"), "num_experts=8 must be divisible"),
    ((SOURCE, "Data.tokenizer = '{bpe}'"), "ids, but Model.vocab_size=256"),
]
RUNS = [
    *((TOY, *case) for case in TOYS),
    *((BALANCED, *case) for case in BALANCERS),
    *((FROM_HF, *case) for case in FOLDERS),
]
"""A gin file, bindings and flags, and a part of the line. `{..}` are files."""
TEXT = ("--files", str(TOY))
READERS = [
    (evaluate, "run", ("--batches=0",), "--batches=0 must be at least 1"),
    (evaluate, "run", ("--batches=1", *TEXT), "--batches counts batches of held-out"),
    (evaluate, "hf", (), "name a text with --files"),
    (evaluate, "hf", (*TEXT, "--step=1"), "leave --step out"),
    (evaluate, "mute", TEXT, "has no tokenizer.json: copy it there"),
    (generate, "run", ("--max_tokens=0",), "--max_tokens=0 must be at least 1"),
    (generate, "run", ("--temperature=-1",), "--temperature=-1.0 must be 0 or more"),
    (generate, "run", ("--top_p=0",), "--top_p=0.0 must be above 0, and at most 1"),
    (generate, "run", ("--seed=-1",), "--seed=-1 must be 0 .. 2**32 - 1"),
    (generate, "run", ("--step=4",), "has no checkpoint of step 4: it has 3, 7"),
    (generate, "hf", ("--gin_param=Moe.top_k = 1",), "depend on this field"),
    (generate, "mute", (), "has no tokenizer.json: copy it there"),
    (generate, "no", (), "no checkpoints, and no config.json"),
]
"""A program, what it reads, its flags, and a part of the line."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the paths of files and folders by name: some have a fault each, and 'no'
    does not exist."""
    folder = tmp_path_factory.mktemp("files")
    paths = {"no": folder / "no.txt", "run": saved_run()}
    paths |= {"empty": folder / "empty.txt", "damaged": folder / "damaged.npz"}
    paths["empty"].touch()
    paths["damaged"].write_bytes(b"PK\x03\x04 damaged")
    mesh = MESH | {"data": 1, "expert": 8}
    paths["speeds"] = speeds(folder / "speeds.json", mesh)
    paths["bpe"] = write_bpe(folder / "bpe.json")
    paths["hf"] = write_published(folder / "hf")
    paths["cut"] = write_published(folder / "cut", max_shard_bytes=100_000)
    next(paths["cut"].glob("model-00002*")).unlink()
    paths |= {name: folder / name for name in ("other", "mute", "bare")}
    for name in ("other", "mute"):
        shutil.copytree(paths["hf"], paths[name])
    config = paths["other"] / "config.json"
    record = json.loads(config.read_text())
    config.write_text(json.dumps(record | {"moe_intermediate_size": 64}))
    (paths["mute"] / "tokenizer.json").unlink()
    paths["bare"].mkdir()
    shutil.copy(paths["hf"] / "config.json", paths["bare"])
    return paths


def assert_refused(ended: Ended, words: str) -> None:
    """Assert that a program ended with one line of error that has these words, and with
    its record."""
    assert ended.code == BAD_INPUT, (ended.out, ended.err)
    found = re.fullmatch(r"error: (.*)\n", ended.err)
    assert found, ended.err
    assert words in found[1]
    assert ended.record == {"error": found[1], "exit_code": BAD_INPUT}


@pytest.mark.slow
@pytest.mark.parametrize(("gin_file", "words", "line"), RUNS)
def test_a_run_that_cannot_start_leaves_no_directory(
    tmp_path, capfd, files, gin_file, words, line
):
    flags = [word for word in words if word.startswith("--")]
    params = [word.format(**files) for word in words if word not in flags]
    args = command(tmp_path / "runs" / "run", *params, gin_file=gin_file)[2:]
    with mock.patch.dict(os.environ):
        code = main([*args, *flags])
    assert_refused(Ended(code, *capfd.readouterr()), line)
    assert listing(tmp_path) == {}


@pytest.mark.slow
@pytest.mark.parametrize(("program", "folder", "words", "line"), READERS)
def test_what_cannot_be_read_is_left_as_it_is(
    capfd, files, program, folder, words, line
):
    before = listing(files[folder])
    with mock.patch.dict(os.environ):
        code = program.main([str(files[folder]), "--json", *words])
    assert_refused(Ended(code, *capfd.readouterr()), line)
    assert listing(files[folder]) == before


def test_configuration_errors_need_no_device(tmp_path):
    """Errors of the configuration are found before jax is imported; a module that fails
    stands in for jax here."""
    (tmp_path / "jax.py").write_text("raise SystemExit('jax was imported')\n")
    before = listing(tmp_path)
    process = subprocess.run(
        command(tmp_path / "run", "Mesh.data = 1"),
        env=environment() | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    ended = Ended(process.returncode, process.stdout, process.stderr)
    assert_refused(ended, "has 4 devices, and Train.num_simulated_devices=8")
    assert listing(tmp_path) == before
