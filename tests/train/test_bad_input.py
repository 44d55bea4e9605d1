"""Test that bad input gives one clear line and an exit code, and changes no file.

Most tests call train/main.py in this process, where jax has started already.
"""

import functools
import os
import re
import resource
import signal
import subprocess
from unittest import mock

import pytest

from tests.support.run_main import (
    Ended,
    Live,
    command,
    corpus,
    environment,
    listing,
    run,
)
from train.main import main

BAD_INPUT = 2
CONFIG = [
    ("Train.num_stps = 3", r"Train has no field num_stps; nearest is Train.num_steps"),
    ("Trian.num_steps = 3", r"no class Trian; nearest is Train"),
    ("Train.num_steps = 'x'", r"Train.num_steps = 'x' must be an int"),
    (
        "Moe.num_experts = 6",
        r"num_experts=6 must be divisible by the expert axis \(4\)",
    ),
    ("Mesh.data = 1", r"Mesh .* has 4 devices, and Train.num_simulated_devices=8"),
    ("Train.batch_size = 20", r"Train.batch_size=20 must be a multiple of 16"),
]
SET_UP = [
    (["Data.corpus = 'no/such.txt'"], r"Data.corpus='no/such.txt' is not a file"),
    (["Data.corpus = '{empty}'"], r"Data.corpus='.*empty.txt' is empty: give a file"),
    (
        ["Data.seq_len = 8192"],
        r"held out, but a window of Data.seq_len=8192 needs 8193 of each: give",
    ),
    (
        ["Train.eval_batches = 64"],
        r"need 1024 held-out windows, .* lower Train.eval_batches",
    ),
    (["Model.remat = 'offload'"], r"this is a CPU: use Model.remat = 'full'"),
    (
        ["Model.attention = 'cudnn'"],
        r"attention='cudnn' cannot compute this run: .* not cpu: use 'auto'",
    ),
    (
        ["Dispatch.transport = 'ragged'"],
        r"XLA:CPU has no ragged_all_to_all .*: use Dispatch.transport = 'padded'",
    ),
    (
        [
            "Router.kind = 'recorded'",
            "Router.bias_rate = 0.0",
            "Recorded.source = 'no/such.npz'",
        ],
        r"Recorded.source='no/such.npz'",
    ),
    (
        [
            "Mesh.data = 4",
            "Train.batch_size = 32",
            "Train.num_simulated_devices = None",
        ],
        r"needs 16 devices, and 8 are here: change Mesh.*--num_devices=8 proposes",
    ),
]
OTHER = [
    ("Model.d_model = 64", r"another model: model.d_model: 32 saved, 64 here"),
    ("Moe.num_experts = 16", r"another model: moe.num_experts: 8 saved, 16 here"),
    ("Data.corpus = '{other}'", r"trained on other data: .*sha256 was"),
    ("Data.seed = 7", r"trained on other data: seed was 0, is 7"),
]


@pytest.fixture
def run_here(capfd):
    """A function that runs train/main.py in this process."""
    return functools.partial(_run_here, capfd)


def _run_here(capfd, run_dir, *params, flags=()) -> Ended:
    with mock.patch.dict(os.environ):
        code = main(command(run_dir, *params, flags=flags)[2:])
    return Ended(code, *capfd.readouterr())


def children_cpu_sec() -> float:
    """Return the CPU time of all ended children of this process."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def assert_refused(ended, match: str) -> None:
    """Assert that a run ended with one line of error that matches, and with its
    record."""
    assert ended.code == BAD_INPUT, (ended.out, ended.err)
    assert re.search(match, ended.err), ended.err
    assert ended.err.startswith("error: ")
    assert ended.err.count("\n") == 1
    text = ended.err.removeprefix("error: ").rstrip("\n")
    assert ended.record == {"error": text, "exit_code": BAD_INPUT}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The directory of a run of two steps."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    ended = run(run_dir, "Train.num_steps = 2")
    assert (ended.code, ended.err) == (0, "")
    return run_dir


@pytest.mark.parametrize(("param", "match"), CONFIG)
def test_configuration_errors_need_no_device(tmp_path, param, match):
    """Errors of the configuration are found before jax is imported; a module that fails
    stands in for jax here."""
    (tmp_path / "jax.py").write_text("raise SystemExit('jax was imported')\n")
    before, start_sec = listing(tmp_path), children_cpu_sec()
    process = subprocess.run(
        command(tmp_path / "run", param),
        env=environment() | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert children_cpu_sec() - start_sec < 2
    ended = Ended(process.returncode, process.stdout, process.stderr)
    assert_refused(ended, match)
    assert listing(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize(("params", "match"), SET_UP)
def test_a_run_that_cannot_start_leaves_no_directory(tmp_path, run_here, params, match):
    empty = tmp_path / "empty.txt"
    empty.touch()
    before = listing(tmp_path)
    params = [param.format(empty=empty) for param in params]
    assert_refused(run_here(tmp_path / "runs" / "run", *params), match)
    assert listing(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [2, 4], ids=["finished", "unfinished"])
@pytest.mark.parametrize(("param", "match"), OTHER)
def test_a_checkpoint_of_another_run_is_left_alone(
    trained, run_here, num_steps, param, match
):
    before = listing(trained)
    param = param.format(other=corpus(seed=1))
    assert_refused(run_here(trained, param, f"Train.num_steps = {num_steps}"), match)
    assert listing(trained) == before


@pytest.mark.long
@pytest.mark.slow
def test_a_directory_in_use_is_left_alone(trained, run_here):
    with Live(trained, "Train.num_steps = 100000") as live:
        live.wait_for_steps(3)
        live.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, live.process.pid, os.WSTOPPED)
        before = listing(trained)
        for flags in ([], ["--fresh"]):
            ended = run_here(trained, flags=flags)
            assert_refused(ended, rf"run is in use by pid {live.process.pid} on .*wait")
        assert listing(trained) == before
        assert not list(trained.parent.glob("run.*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run_dir", "match"),
    [
        ("/proc/moejax/run", r"run directory /proc/moejax/run cannot be made"),
        ("/dev/null", r"run directory /dev/null is a file: name another"),
    ],
)
def test_a_directory_that_cannot_be_made(run_here, run_dir, match):
    assert_refused(run_here(run_dir), match)


@pytest.mark.slow
def test_a_process_ends_like_a_call_of_main(tmp_path):
    params, match = SET_UP[0]
    assert_refused(run(tmp_path / "run", *params), match)
    assert listing(tmp_path) == {}
