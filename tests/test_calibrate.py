import json
import os

import jax
import numpy as np
import pytest
from close import assert_close

from moejax import axes
from moejax.balance.calibration import read_calibration
from moejax.layout import Topology
from tools import calibrate, collective_times

OPS = {
    "all_to_all": "all-to-all", "all_gather": "all-gather", "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter", "ppermute": "collective-permute",
}  # fmt: skip


def test_points_on_a_line_give_the_line():
    amount_n = np.array([1e3, 1e4, 1e5, 1e6])
    line = calibrate.fit(amount_n, 2e-5 + amount_n / 3e9)
    assert_close(
        np.array([line.latency_sec, line.amount_per_sec, line.r2]),
        np.array([2e-5, 3e9, 1.0]),
        factor=100,
        reason="the solver divides numbers eight orders apart",
    )


def test_no_line_through_noise_has_less_relative_error():
    rng = np.random.default_rng(0)
    amount_n = np.geomspace(1e3, 1e7, 9)
    sec_n = (5e-5 + amount_n / 1e9) * rng.uniform(0.8, 1.2, 9)
    line = calibrate.fit(amount_n, sec_n)
    assert 0.8 < line.r2 < 1

    def error(latency_sec, rate):
        return np.sum((1 - (latency_sec + amount_n / rate) / sec_n) ** 2)

    least = error(line.latency_sec, line.amount_per_sec)
    for a, b in ((0.99, 1), (1.01, 1), (1, 0.99), (1, 1.01)):
        assert error(a * line.latency_sec, b * line.amount_per_sec) > least


def test_latency_is_not_negative_and_rates_are_finite():
    amount_n = np.array([1e3, 1e4, 1e5])
    bent = calibrate.fit(amount_n, np.array([1e-6, 2e-5, 4e-4]))
    assert bent.latency_sec == 0
    assert 1e8 < bent.amount_per_sec < 1e9
    falling = calibrate.fit(amount_n, np.array([3e-5, 2e-5, 1e-5]))
    assert falling.latency_sec == 0
    assert 0 < falling.amount_per_sec < np.inf
    assert falling.r2 <= 0


@pytest.fixture(scope="module")
def mesh():
    return axes.make_mesh(Topology(data=2, expert=4))


@pytest.mark.parametrize("name", OPS)
def test_a_program_runs_its_collective(mesh, name, monkeypatch):
    """It stands in the compiled loop, and keeps what it must: what every device sends
    arrives, so no result is a constant."""
    monkeypatch.setattr(collective_times, "COLLECTIVES", {
        name: collective_times.COLLECTIVES[name]
    })  # fmt: skip
    monkeypatch.setattr(collective_times, "ELEMENTS", (64,))
    programs = collective_times.collective_programs(mesh, "float32")
    assert [program.line for program in programs] == [(name, "data"), (name, "expert")]
    sent = {
        "all_to_all": 3 / 4, "all_gather": 3 / 4, "reduce_scatter": 3 / 4,
        "all_reduce": 6 / 4, "ppermute": 1,
    }[name]  # fmt: skip
    assert programs[1].amount == sent * 64 * 4
    for program in programs:
        text = program.run.as_text()
        assert "while" in text
        assert OPS[name] in text
    (sec,) = collective_times.seconds(programs[1:], turns=1)
    assert sec > 0


def test_calibration_of_the_live_mesh(tmp_path, capfd, monkeypatch):
    """What it writes is what the cost model reads."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # start() adds to them
    monkeypatch.setattr(collective_times, "ELEMENTS", (2**8, 2**12))
    path = tmp_path / "calibration.json"
    words = ["--mesh=data=2,expert=4", "--turns=2", f"--out={path}", "--json"]
    small = "--gin_param=Data.seq_len = 16"
    assert calibrate.main([*words, small]) == 0
    out = capfd.readouterr().out
    calibration = read_calibration(path)
    assert calibration.mesh == {"dc": 1, "data": 2, "expert": 4, "tensor": 1}
    assert calibration.device_kind == jax.devices()[0].device_kind
    assert set(calibration.collectives) == set(OPS)
    for line_of in calibration.collectives.values():
        assert set(line_of) == {"data", "expert"}
    assert calibration.flops_per_sec > 0
    assert "all_to_all      expert" in out
    assert json.loads(out.splitlines()[-1])["flops_per_sec"] == (
        calibration.flops_per_sec
    )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "give --gin_file"),
        (["--mesh=data=2,experts=4"], "'experts=4' is no axis"),
        (["--mesh=data=0"], "'data=0'"),
        (["--mesh=data=2", "--compile"], "--gin_file"),
        (["--mesh=expert=4", "--turns=0"], "--turns 0"),
        (["--gin_file=none.gin"], "none.gin"),
    ],
)
def test_bad_options_are_one_line(capsys, words, what):
    assert calibrate.main([*words, "--json"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert what in err
    assert json.loads(out)["exit_code"] == 2
