"""Test the search for tiles: its checks and the file it writes. It runs here with the
reference in place of the kernels, and with made times."""

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from moejax.kernels import device_file, tuning
from moejax.kernels.grouped_dot import reference
from moejax.kernels.grouped_dot.hopper import kernels
from moejax.kernels.grouped_dot.hopper.ring import KernelRun
from moejax.kernels.shapes import MODEL_SHAPES, SKEWS, ProductShape, make_rows
from moejax.kernels.tuning import PASSES, Tiles, default_tiles
from tests.support.close import assert_close
from tests.support.hopper_cases import operand_dims
from tools import tune_kernels
from tools.bench import grouped_dot_cases as cases
from tools.bench import grouped_dot_jobs as jobs
from tools.bench import tune_cases, tune_search

TINY = ProductShape(rows=192, d=64, f=128, groups=3)
WIDE = ProductShape(rows=96, d=640, f=544, groups=2)
"""A shape that is wider than a sample."""
KIND = "NVIDIA H200"


def compute_pass(which, *arrays):
    """Compute a pass by moejax's reference and its gradients."""
    *floats, rows_g = arrays
    which = which.removeprefix("fp8_")

    def dot(x, w):
        return reference.grouped_dot(x, w, rows_g)

    def swiglu(into):
        gate, up = jnp.split(into.astype(jnp.float32), 2, axis=1)
        return (jax.nn.silu(gate) * up).astype(into.dtype)

    if which == "forward":
        return dot(*floats)
    if which == "dgrad":
        return dot(floats[0], jnp.swapaxes(floats[1], 1, 2))
    if which == "wgrad":
        x, dy = floats
        zeros = jnp.zeros((len(rows_g), x.shape[1], dy.shape[1]), x.dtype)
        return jax.vjp(lambda w: dot(x, w), zeros)[1](dy)[0]
    if which == "swiglu":
        into = dot(*floats)
        return swiglu(into), into
    dy, down, into = floats
    h, back = jax.vjp(swiglu, into)
    return back(dot(dy, jnp.swapaxes(down, 1, 2)))[0], h


compute_pass_jit = jax.jit(compute_pass, static_argnums=0)


def plain(which, tiles):
    return functools.partial(compute_pass, which)


def prepare(which, product=plain, skews=("zipf", "with_empty"), shape=TINY):
    return tune_cases.prepare(which, shape, "bfloat16", skews, 7, product)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(TINY, id="tiny"),
        pytest.param(WIDE, id="wide", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("which", PASSES)
def test_the_sample_is_the_definition(which, shape):
    """The definition in float64 on the host equals the reference on the device, and the
    check notices one wrong row, or one wrong entry of a matrix."""
    arrays = cases.operands(which, shape, "float32", 1)
    assert [a.shape for a in arrays] == operand_dims(which, shape)
    for skew in SKEWS:
        case = cases.ProductCase(arrays, make_rows(skew, shape.rows, shape.groups, 3))
        out = compute_pass_jit(which, *arrays, jnp.asarray(case.rows_g))
        for part, inputs, whole in cases.pass_parts(which, case, out):
            sampled, results, rows_g = cases.sample(part, inputs, whole, case.rows_g)
            expected = cases.compute_reference(part, sampled, rows_g)
            assert_close(results, expected, dtype=np.float32)
        leaves, tree = jax.tree.flatten(out)
        index = (case.rows_g.argmax(), 0, 0) if which == "wgrad" else (-1, 0)
        for value in (1000, jnp.nan):
            leaves[-1] = leaves[-1].at[index].set(value)
            wrong = jax.tree.unflatten(tree, leaves)
            error = cases.sampled_error(which, wrong, case)
            assert error > max(cases.MAX_ERROR.values())


def spoiled(which, tiles):
    """Return a product that is right for the rule's tiles. For tiles of another span it
    is wrong, raises, or returns NaN."""

    def product(*arrays):
        out = compute_pass(which, *arrays)
        if tiles.span == 4:
            return jax.tree.map(lambda a: a.at[-1].add(5), out)
        if tiles.span == 16:
            raise NotImplementedError("no span of 16:\nuse another")
        if tiles.span == 1:
            return jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), out)
        return out

    return product


@pytest.mark.slow
def test_a_wrong_candidate_has_no_time():
    case = prepare("swiglu", spoiled)
    rule = default_tiles("swiglu", TINY)
    batch = [dataclasses.replace(rule, span=span) for span in (rule.span, 4, 16, 1, 32)]
    timed = []

    def timer(tiles, call):
        timed.append(tiles.span)
        return float(len(timed))

    msec = tune_cases.make_measure(case, spoiled, timer)(batch)
    assert timed == [rule.span, rule.span, 32, 32]
    assert (msec[0], msec[4]) == (1.5, 3.5), "the mean over skews"
    assert "computes something else: error" in msec[1]
    assert msec[2] == "no span of 16: use another"
    assert msec[3] == "computes something else: error nan"


def test_wrong_results_of_the_rules_tiles_end_the_search():
    def product(which, tiles):
        return lambda *arrays: 1.1 * compute_pass(which, *arrays)

    with pytest.raises(
        tune_cases.WrongKernel, match=r"forward of ProductShape.*at most 0\.01"
    ):
        prepare("forward", product)


def test_time_is_the_median_of_calls():
    calls = []
    msec = tune_cases.time_msec(Tiles(128, 128), lambda: calls.append(None))
    min_calls = 1 + jobs.MIN_CALLS * (1 + tune_cases.REPEATS)
    assert min_calls <= len(calls) <= min_calls + tune_cases.REPEATS * jobs.MAX_CALLS
    assert 0 < msec < jobs.SAMPLE_MSEC


def test_calls_between_two_waits():
    """There are as many calls as last 20 ms together, but at least 3 and at most 50."""
    assert [jobs.num_calls(msec) for msec in (0.1, 1, 5, 100)] == [50, 20, 4, 3]


@pytest.mark.slow
def test_the_kernel_itself_is_measured():
    """The kernel runs in the interpreter, and is measured as the tool measures it on a
    GPU."""
    run = KernelRun(2, plgpu.InterpretGPUParams())

    def product(which, tiles):
        return functools.partial(getattr(kernels, which), tiles=tiles, run=run)

    case = prepare("forward", product, skews=("zipf",))
    rule = default_tiles("forward", TINY)
    other = dataclasses.replace(rule, stages=2)
    msec = tune_cases.make_measure(case, product, lambda *_: 1.0)([rule, other])
    assert msec == [1.0, 1.0]


def make_settings(path, **changes):
    buckets = list(tune_search.tuning_buckets({"tiny": TINY}, is_layer=False))
    settings = tune_search.Settings(
        buckets[:2], ["zipf"], "bfloat16", 60, 1, False, path
    )
    return dataclasses.replace(settings, **changes)


def fake_msec(tiles, call):
    """Return a made time, by which small spans and few stages are fast."""
    return float(tiles.span + tiles.stages)


@pytest.mark.long
def test_second_forms_and_spared_multiprocessors_are_asked_for(tmp_path):
    """With made times by which clusters are the fastest."""

    def msec(tiles, call):
        return fake_msec(tiles, call) - 20 * (tiles.cluster - 1)

    path = tmp_path / "some.json"
    settings = make_settings(path, forms="all", spared=4)
    settings = dataclasses.replace(settings, buckets=settings.buckets[:1])
    tune_kernels.tune(settings, KIND, plain, msec)
    for tiles in json.loads(path.read_text())["tiles"].values():
        assert (tiles["cluster"], tiles["spared"]) == (2, 4)
    first = dataclasses.replace(settings, forms="first", is_again=True)
    tune_kernels.tune(first, KIND, plain, msec)
    for tiles in json.loads(path.read_text())["tiles"].values():
        assert not Tiles(**tiles).is_second_form


@pytest.mark.slow
def test_a_run_goes_on_where_the_file_ends(tmp_path, capsys):
    path = tmp_path / "some.json"
    first = make_settings(path)
    summary = tune_kernels.tune(first, KIND, plain, fake_msec)
    assert (summary["num_left"], len(summary["measured"])) == (0, 2)
    record = json.loads(path.read_text())
    about = {"when", "jax", "commit"}
    assert {"device", "tiles", "measured", "quarantined"} | about == set(record)
    assert record["device"] == KIND
    keys = [tuning.bucket(b.which, TINY, "bfloat16") for b in first.buckets]
    assert list(record["tiles"]) == list(record["measured"]) == keys
    for row in record["measured"].values():
        assert row["msec"] < row["rule_msec"]
        assert row["is_whole"]
        assert row["shape"] == "tiny"
    assert all(Tiles(**tiles).span == 1 for tiles in record["tiles"].values())
    again = tune_kernels.tune(first, KIND, plain, fake_msec)
    assert (again["measured"], json.loads(path.read_text())) == ([], record)
    anew = tune_kernels.tune(make_settings(path, is_again=True), KIND, plain, fake_msec)
    assert len(anew["measured"]) == 2
    assert "forward of tiny, 64 -> 128: 3.000 ms by Tiles(" in capsys.readouterr().out


def test_buckets_share_the_time(tmp_path, capsys):
    """The clock advances by a second at each reading. The first bucket gets half of the
    time and is cut off; no time is left for the second."""
    path = tmp_path / "some.json"
    seconds = itertools.count()
    settings = make_settings(path, limit_sec=4)
    summary = tune_kernels.tune(
        settings, KIND, plain, fake_msec, clock=lambda: float(next(seconds))
    )
    assert [row["is_whole"] for row in summary["measured"]] == [False]
    assert summary["num_left"] == 1
    assert "the time is up: 1 buckets are left" in capsys.readouterr().out
    assert len(device_file.load(path, KIND)["tiles"]) == 1


def test_a_layer_has_its_own_products():
    pairs = [b[1:] for b in tune_search.tuning_buckets({"tiny": TINY}, is_layer=True)]
    into, down = ProductShape(192, 64, 256, 3), ProductShape(192, 128, 64, 3)
    assert pairs == [
        *(("swiglu", TINY), ("forward", down), ("swiglu_dgrad", TINY)),
        *(("dgrad", into), ("wgrad", into), ("wgrad", down)),
        *(("fp8_forward", into), ("fp8_forward", down)),
        *(("fp8_dgrad", into), ("fp8_dgrad", down)),
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "rule"),
    [
        ("", 3, "there is no GPU here, but tiles are measured on one"),
        ("--shapes mixtral", 2, "did you mean 'mixtral_8x7b'?"),
        ("--passes backward", 2, "none of forward, dgrad, wgrad, swiglu, swiglu_dgrad"),
        ("--skews unifrom", 2, "did you mean 'uniform'?"),
        ("--limit_sec 0", 2, "--limit_sec 0.0 must be above 0"),
    ],
)
def test_errors_are_one_line(capsys, arguments, code, rule):
    assert tune_kernels.main([*arguments.split(), "--json"]) == code
    out, err = capsys.readouterr()
    assert rule in err
    assert err.count("\n") == 1
    assert json.loads(out)["exit_code"] == code


def test_a_wrong_kernel_is_exit_1(capsys, monkeypatch, tmp_path):
    def wrong(*arrays, tiles):
        return 2 * compute_pass("forward", *arrays)

    monkeypatch.setattr(kernels, "forward", wrong)
    monkeypatch.setattr(tune_kernels, "hopper_here", lambda: KIND)
    monkeypatch.setitem(MODEL_SHAPES, "tiny", TINY)
    out = tmp_path / "some.json"
    argv = f"--shapes tiny --passes forward --out {out} --json".split()
    assert tune_kernels.main(argv) == 1
    assert (
        "computes something else"
        in json.loads(capsys.readouterr().out.splitlines()[-1])["error"]
    )
    assert not out.exists()


def test_compiled_programs_go_to_the_cache_of_the_repository(repo):
    """JAX reads the folder of its cache once, when it is imported."""
    code = (
        "from tools import tune_kernels; code = tune_kernels.main(['--limit_sec', '0'])"
        "; import jax; print(code, jax.config.jax_compilation_cache_dir)"
    )
    env = os.environ.copy()
    env.pop("JAX_COMPILATION_CACHE_DIR", None)
    words = [sys.executable, "-c", code]
    text = subprocess.check_output(words, cwd=repo, env=env, text=True)
    assert text == f"2 {repo / '.cache' / 'jax'}\n"


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "some.json"
    device_file.save(path, {"device": KIND, "tiles": {"a": 1}})

    def cut_off(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", cut_off)
    with pytest.raises(KeyboardInterrupt):
        device_file.save(path, {"device": KIND, "tiles": {"a": 2}})
    assert device_file.load(path, KIND)["tiles"] == {"a": 1}
    assert [name.name for name in path.parent.iterdir()] == ["some.json"]
    with pytest.raises(ValueError, match="is for NVIDIA H200, but this is other"):
        device_file.load(path, "other")
