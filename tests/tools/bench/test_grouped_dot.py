"""Test the benchmark of grouped products: its checks, tiny runs, and bad input."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels import shapes
from moejax.kernels.cases import DEFINITIONS, FP8_TOLERANCE, TOLERANCES
from moejax.kernels.shapes import ProductShape
from tools.bench import grouped_dot, grouped_dot_cases
from tools.bench import grouped_dot_peers as peers

TINY = ProductShape(rows=96, d=64, f=128, groups=4)
ROWS = np.array([40, 0, 25, 31], np.int32)
KERNELS = ("wgrad", "swiglu_dgrad")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """Make the case that is checked first small, and add a small shape."""
    monkeypatch.setitem(shapes.CPU_SHAPES, "tiny", TINY)
    monkeypatch.setattr(grouped_dot, "SMALL_ROWS", ROWS)
    monkeypatch.setattr(grouped_dot, "SMALL_WIDTH", 64)


@pytest.fixture(autouse=True)
def fresh_variants():
    yield
    peers.variants.cache_clear()


def bench(capsys, *arguments):
    """Run the benchmark with --json, and return its exit code, text and rows."""
    code = grouped_dot.main(["--shapes=tiny", "--repeats=1", "--json", *arguments])
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    return code, text, json.loads(last)


def measure(impl, which, dtype="bfloat16"):
    args = grouped_dot.parse([f"--dtype={dtype}", "--repeats=1", "--seed=0"])
    args.skews, args.impls = ["with_empty"], [impl]
    (row,) = grouped_dot.measure(args, TINY, which)
    return row


def changed(results, index, factor: float):
    """Return results, with a part of each array times a factor."""

    def change(array):
        copy = np.array(array)
        copy[index] *= factor
        return copy

    return jax.tree.map(change, results)


@pytest.mark.parametrize("which", KERNELS)
def test_a_sample_finds_what_is_wrong(which):
    """Values that are not finite are found, and one wrong group, also of groups that
    have more rows than are compared."""
    operands = grouped_dot_cases.draw(which, TINY, "float32", 6)
    right = jax.jit(DEFINITIONS[which])(*operands, jnp.asarray(ROWS))
    for max_rows in (32, 2):
        (sample,) = grouped_dot_cases.make_samples(which, operands, ROWS, max_rows)
        assert sample.error(right) < sample.case.tolerance
        assert sample.error(changed(right, (-1, 0), np.nan)) == np.inf
        for group in np.flatnonzero(ROWS):
            first = int(ROWS[:group].sum())
            own = group if which == "wgrad" else slice(first, first + ROWS[group])
            assert sample.error(changed(right, own, 1.01)) > sample.case.tolerance


@pytest.mark.parametrize("which", KERNELS)
def test_aligned_groups_have_the_same_results(which):
    operands = grouped_dot_cases.draw(which, TINY, "float32", 8)
    *arrays, rows_g = grouped_dot_cases.aligned_arguments(operands, ROWS, 64)
    assert (rows_g % 64 == 0).all()
    assert ((rows_g >= ROWS) & (rows_g - ROWS < 64)).all()
    results = jax.jit(DEFINITIONS[which])(*arrays, rows_g)
    (sample,) = grouped_dot_cases.make_samples(which, operands, ROWS)
    without = grouped_dot_cases.without_gaps(results, ROWS, 64)
    assert sample.error(without) < sample.case.tolerance
    for own, array in zip(operands, arrays):
        if own.ndim == 2:
            gaps = array[: rows_g.sum()]
            assert jnp.isnan(array[rows_g.sum() :]).all()
            assert jnp.sum(jnp.abs(gaps)) == pytest.approx(jnp.sum(jnp.abs(own)))


def planted(monkeypatch, impl, forward):
    """Replace the forward product of an implementation."""
    products = peers.ragged_dot()[""]._replace(forward=forward)
    monkeypatch.setitem(peers.IMPLEMENTATIONS, impl, lambda: {"": products})


def test_a_wrong_implementation_is_left_out(capsys, monkeypatch, tmp_path):
    right, out = peers.ragged_dot()[""].forward, tmp_path / "rows.json"
    planted(monkeypatch, "ragged_dot", lambda *arrays: 1.001 * right(*arrays))
    code, text, rows = bench(
        capsys, "--skews=zipf,uniform", "--passes=forward", f"--out={out}"
    )
    assert code == 1
    assert json.loads(out.read_text()) == rows
    order = [(row["skew"], row["impl"]) for row in rows]
    assert order == [(x, impl) for x in ("zipf", "uniform") for impl in peers.ON_CPU]
    assert "| zipf | ragged_dot | failed: forward of" in text
    for row in rows:
        if row["impl"] == "ragged_dot":
            assert row["msec"] is None
            assert "computes something else: error" in row["failed"]
            continue
        flops = 2 * TINY.rows * TINY.d * TINY.f
        assert row["tflops"] == pytest.approx(flops / row["msec"] / 1e9)
        assert (row["share_of_dense"] == 1) == (row["impl"] == "dense")


@pytest.mark.parametrize(
    ("impl", "error", "outcome"),
    [
        ("ragged_dot", RuntimeError, "declined"),
        ("blocked", NotImplementedError, "declined"),
        ("blocked", RuntimeError, "failed"),
    ],
)
def test_an_implementation_that_raises_gives_a_reason(
    impl, error, outcome, monkeypatch
):
    def forward(*arrays):
        raise error("not\nthis one")

    planted(monkeypatch, impl, forward)
    assert measure(impl, "forward")[outcome] == "not this one"


def test_the_fastest_variant_that_can_run_is_kept(monkeypatch):
    def run(tiles):
        if tiles == "none":
            raise KeyError(tiles)

    def median_sec(calls, *_):
        return {tiles: (call(), len(tiles))[1] for tiles, call in calls.items()}

    monkeypatch.setattr(grouped_dot, "median_sec", median_sec)
    variants = {name: functools.partial(run, name) for name in ("slow", "ok", "none")}
    assert grouped_dot.fastest(variants, ()) == "ok"
    del variants["slow"], variants["ok"]
    with pytest.raises(KeyError):
        grouped_dot.fastest(variants | {"too": variants["none"]}, ())


@pytest.mark.slow
def test_ours_get_aligned_groups_and_fp8_has_its_own_bound(monkeypatch):
    """The portable products stand for the kernels; 'hopper_fp8' emulates 8 bits."""
    for impl, fp8 in (("hopper", "none"), ("hopper_fp8", "e4m3")):
        ours = functools.partial(peers.ours, "blocked", fp8)
        monkeypatch.setitem(peers.IMPLEMENTATIONS, impl, ours)
    assert "forward default (" in measure("hopper", "forward")["tiles"]
    error = measure("hopper_fp8", "forward")["error"]
    assert TOLERANCES[jnp.dtype("bfloat16")] < error < FP8_TOLERANCE
    with pytest.raises(NotImplementedError, match="no 8-bit values"):
        peers.variants("hopper_fp8", "wgrad")


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ("--shapes mixtral", "did you mean 'mixtral_8x7b'?"),
        ("--skews unifrom", "did you mean 'uniform'?"),
        ("--passes backward", "none of forward, dgrad, wgrad, grads"),
        ("--impls hopper", "none of blocked, ragged_dot, dense here"),
        ("--repeats 0", "--repeats 0 must be at least 1"),
        ("--device gpu --shapes olmoe_1b_7b", "there is no GPU here: use cpu"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, arguments, rule):
    assert grouped_dot.main([*arguments.split(), "--json"]) == 2
    out, err = capsys.readouterr()
    assert rule in err
    assert err.count("\n") == 1
    assert json.loads(out)["exit_code"] == 2
