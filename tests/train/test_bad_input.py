"""Bad input gives one clear line and an exit code, and changes no file.

Most tests call train/main.py in this process, where jax has started already.
tests/train/config/test_gin_errors.py has files that cannot be read as a configuration.
"""

import os
import re
import subprocess
from unittest import mock

import pytest

from tests.support.run_main import (
    TOY,
    Ended,
    command,
    environment,
    listing,
)
from tests.support.watched_run import BALANCED, MESH, speeds
from train.main import main

BAD_INPUT = 2
MICROMOE = "Balance.policy = 'micromoe'"
WATER = "Dispatch.split = 'water_filling'"
DYNAMIC = "Dispatch.split = 'dynamic'"
RECORDED = ("Router.kind = 'recorded'", "Router.bias_rate = 0.0")
TWO_NODES = (
    "Mesh.data = 4", "Train.batch_size = 32", "Train.num_simulated_devices = None",
)  # fmt: skip
NO_TRAINING = ("--check compares kernels and collectives, and trains nothing: give it "
               "without --dry_run, --fresh and --from_step")  # fmt: skip
TOYS = [
    # The data.
    (("Data.corpus = 'no/such.txt'",), r"Data.corpus='no/such.txt' is not a file"),
    (("Data.corpus = '{empty}'",), r"Data.corpus='.*empty.txt': .* hold no text"),
    (
        ("Data.seq_len = 8192",),
        r"held out, but a window of Data.seq_len=8192 needs 8193 of each: give",
    ),
    (
        ("Train.eval_batches = 64",),
        r"need 1024 held-out windows, .* lower Train.eval_batches",
    ),
    ((*RECORDED, "Recorded.source = 'no/such.npz'"), "Recorded.source='no/such.npz'"),
    # The devices.
    (("Model.remat = 'offload'",), r"this is a CPU: use Model.remat = 'full'"),
    (
        ("Model.attention = 'cudnn'",),
        r"attention='cudnn' cannot compute this run: .* not cpu: use 'auto'",
    ),
    (
        ("Dispatch.transport = 'ragged'",),
        r"XLA:CPU has no ragged_all_to_all .*: use Dispatch.transport = 'padded'",
    ),
    (
        TWO_NODES,
        r"needs 16 devices, and 8 are here: change Mesh.*--num_devices=8 proposes",
    ),
    # The directory.
    (("--run_dir=/proc/moejax/run",), r"/proc/moejax/run cannot be made"),
    (("--run_dir=/dev/null",), r"/dev/null is a file: name another"),
    # Flags.
    (("--check", "--dry_run"), NO_TRAINING),
    (("--check", "--fresh"), NO_TRAINING),
    (("--check", "--from_step=3"), NO_TRAINING),
    (("--fresh", "--from_step=3"), "--from_step from a checkpoint: give one"),
    (("--target=h100",), "--target=h100 is for --dry_run"),
    (("--num_devices=8",), "--num_devices=8 is for --dry_run"),
]
BALANCERS = [
    (("Balance.act_above = 1.0",), "act_above=1.0 must be above 1"),
    (("Balance.calibration = '{other}'",), "was measured on mesh {'dc': 1, 'data'"),
    (("Balance.calibration = '{none}'",), "as a calibration: there is no such file"),
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
    (("Balance.policy = 'home'", WATER), "makes none: use 'micromoe'"),
    ((MICROMOE, DYNAMIC), "use Balance.policy='home' with it"),
    ((MICROMOE, "Dispatch.slots_per_device = 9"), "more replicas than there are dev"),
]
CASES = [
    *((TOY, *case) for case in TOYS),
    *((BALANCED, params, re.escape(words)) for params, words in BALANCERS),
]
"""A gin file, bindings and flags, and what the line says. `{..}` are files."""


def assert_refused(ended: Ended, match: str) -> None:
    """Assert that a run ended with one line of error that matches, and with its
    record."""
    assert ended.code == BAD_INPUT, (ended.out, ended.err)
    assert re.search(match, ended.err), ended.err
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    text = ended.err.removeprefix("error: ").rstrip("\n")
    assert ended.record == {"error": text, "exit_code": BAD_INPUT}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return the names of files that bindings may have."""
    folder = tmp_path_factory.mktemp("files")
    empty, none = folder / "empty.txt", folder / "none.json"
    empty.touch()
    other = speeds(folder / "other.json", MESH | {"data": 1, "expert": 8})
    return {"empty": empty, "none": none, "other": other}


@pytest.mark.slow
@pytest.mark.parametrize(("gin_file", "words", "match"), CASES)
def test_a_run_that_cannot_start_leaves_no_directory(
    tmp_path, capfd, files, gin_file, words, match
):
    flags = [word for word in words if word.startswith("--")]
    params = [word.format(**files) for word in words if word not in flags]
    args = command(tmp_path / "runs" / "run", *params, gin_file=gin_file)[2:]
    with mock.patch.dict(os.environ):
        code = main([*args, *flags])
    assert_refused(Ended(code, *capfd.readouterr()), match)
    assert listing(tmp_path) == {}


@pytest.mark.parametrize(
    ("param", "match"),
    [
        ("Train.num_stps = 3", r"no field num_stps; nearest is Train.num_steps"),
        ("Mesh.data = 1", r"has 4 devices, and Train.num_simulated_devices=8"),
    ],
)
def test_configuration_errors_need_no_device(tmp_path, param, match):
    """Errors of the configuration are found before jax is imported; a module that fails
    stands in for jax here."""
    (tmp_path / "jax.py").write_text("raise SystemExit('jax was imported')\n")
    before = listing(tmp_path)
    process = subprocess.run(
        command(tmp_path / "run", param),
        env=environment() | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert_refused(Ended(process.returncode, process.stdout, process.stderr), match)
    assert listing(tmp_path) == before
