"""Test tools/calibrate.py: fitted lines, measured collectives, and predictions."""

import dataclasses
import json
import os

import jax
import numpy as np
import pytest

from moejax import axes
from moejax.perf.calibration import (
    RANGES,
    Calibration,
    find_line,
    read_calibration,
)
from moejax.perf.terms import Term, collective_term, make_prediction
from moejax.plan.layout import Topology
from tests.support.close import assert_close
from tools import calibrate
from tools.bench import collective_times
from tools.bench.collective_times import fit

OPS = {
    "all_to_all": "all-to-all", "all_gather": "all-gather", "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter", "ppermute": "collective-permute",
}  # fmt: skip


def test_points_on_a_line_give_the_line():
    amount_n = np.array([1e3, 1e4, 1e5, 1e6])
    line = fit(amount_n, 2e-5 + amount_n / 3e9)
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
    line = fit(amount_n, sec_n)
    assert 0.8 < line.r2 < 1

    def error(latency_sec, rate):
        return np.sum((1 - (latency_sec + amount_n / rate) / sec_n) ** 2)

    min_error = error(line.latency_sec, line.amount_per_sec)
    for a, b in ((0.99, 1), (1.01, 1), (1, 0.99), (1, 1.01)):
        assert error(a * line.latency_sec, b * line.amount_per_sec) > min_error


def test_latency_is_not_negative_and_rates_and_r2_are_in_range():
    amount_n = np.array([1e3, 1e4, 1e5])
    bent = fit(amount_n, np.array([1e-6, 2e-5, 4e-4]))
    assert bent.latency_sec == 0
    assert 1e8 < bent.amount_per_sec < 1e9
    falling = fit(amount_n, np.array([3e-5, 2e-5, 1e-5]))
    assert falling.latency_sec == 0
    assert 0 < falling.amount_per_sec < np.inf
    assert falling.r2 <= 0
    equal = fit(np.array([1e3, 1.6e4]), np.array([2e-5 * (1 + 1e-6), 2e-5]))
    assert equal.r2 == RANGES["r2"][0]  # that which a calibration takes


def test_a_program_runs_its_collective():
    """The collective is in the compiled loop, so XLA has not removed it."""
    mesh = axes.make_mesh(Topology(expert=4), jax.devices()[:4])
    sweep = collective_times.Sweep(tuple(OPS), (64,))
    programs = collective_times.collective_programs(mesh, "float32", sweep)
    assert [program.line for program in programs] == [(x, "expert") for x in OPS]
    for program in programs:
        name, _ = program.line
        sent = {"all_reduce": 2 * 3 / 4, "ppermute": 1}.get(name, 3 / 4)
        assert program.amount == sent * 64 * 4
        text = program.run.as_text()
        assert "while" in text
        assert OPS[name] in text
    (sec,) = collective_times.measure_sec(programs[-1:], turns=1)
    assert sec > 0


def test_products_of_axes_of_several_devices_are_measured(monkeypatch):
    monkeypatch.setattr(
        collective_times, "make_collective", lambda m, name, axes, *_: axes
    )
    mesh = axes.make_mesh(Topology(dc=2, expert=2, tensor=2))
    sweep = collective_times.SWEEP
    groups = collective_times.collective_programs(mesh, "float32", sweep)
    pairs = {("dc", "expert"), ("expert", "tensor")}
    assert set(groups) == {("dc",), ("expert",), ("tensor",)} | pairs


@pytest.mark.slow
def test_calibration_of_the_live_mesh(tmp_path, capfd, monkeypatch):
    """The cost model reads the file that the tool writes."""
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])  # start() adds to them
    sweep = dataclasses.replace(collective_times.SWEEP, elements=(2**8, 2**12))
    monkeypatch.setattr(collective_times, "SWEEP", sweep)
    monkeypatch.setattr(collective_times, "SHARES_OF_ROWS", (1, 4))
    path = tmp_path / "calibration.json"
    words = ["--mesh=expert=8", "--turns=2", f"--out={path}", "--json"]
    small = {"Data.seq_len": 16, "Model.d_model": 32, "Moe.d_expert": 32}
    words += [f"--gin_param={name} = {size}" for name, size in small.items()]
    assert calibrate.main(words) == 0
    out = capfd.readouterr().out
    calibration = read_calibration(path)
    assert calibration.mesh == {"dc": 1, "data": 1, "expert": 8, "tensor": 1}
    assert set(calibration.collectives) == set(OPS)
    for lines in calibration.collectives.values():
        assert set(lines) == {"expert"}
    assert calibration.flops_per_sec > 0
    assert json.loads(out.splitlines()[-1])["flops_per_sec"] == (
        calibration.flops_per_sec
    )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "give --gin_file"),
        (["--mesh=data=2,experts=4"], "'experts=4' is not an axis"),
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


def test_a_product_has_its_own_line_or_the_slowest_of_its_axes():
    rates = {"expert": 1e8, "tensor": 1e9, "expert_tensor": 3e7}
    lines = {a: {"latency_sec": 0.0, "bytes_per_sec": r} for a, r in rates.items()}
    kinds = {"all_to_all": lines, "all_gather": lines, "all_reduce": dict(lines)}
    del kinds["all_reduce"]["expert_tensor"]
    both = Calibration("cpu", {}, "float32", kinds, 1.0, 1.0, 0.0, "never")
    product = ("expert", "tensor")
    assert find_line(both, "all_to_all", product) == lines["expert_tensor"]
    assert find_line(both, "all_reduce", product) == lines["expert"]
    assert find_line(both, "all_to_all", ("tensor",)) == lines["tensor"]
    with pytest.raises(ValueError, match="no all_gather over the 'data' axis"):
        find_line(both, "all_gather", ("data", "expert"))
    part = collective_term(both, "all_gather", {"tensor_inner": 2}, 1e9, 3, "rows")
    assert part == Term("all_gather tensor_inner rows", 3, 3e9, 3.0)
    alone = collective_term(both, "all_gather", {"tensor": 1}, 0.0, 3)
    assert make_prediction(alone).terms == ()
