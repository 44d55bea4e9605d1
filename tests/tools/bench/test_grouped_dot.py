"""Test the benchmark of grouped products: its checks, tiny runs, and bad input."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels import shapes
from moejax.kernels.cases import DEFINITIONS, FP8_TOLERANCE, TOLERANCES
from moejax.kernels.grouped_dot.hopper import kernels
from moejax.kernels.shapes import ProductShape
from tools.bench import grouped_dot, grouped_dot_cases
from tools.bench import grouped_dot_peers as peers

TINY = ProductShape(rows=96, d=64, f=128, groups=4)
ROWS = np.array([40, 0, 25, 31], np.int32)
KERNELS = ("forward", "wgrad", "swiglu_dgrad")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(shapes.CPU_SHAPES, "tiny", TINY)


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


@pytest.mark.parametrize("which", KERNELS)
def test_a_sample_finds_wrong_values_and_values_that_are_not_finite(which):
    operands = grouped_dot_cases.draw(which, TINY, "float32", 6)
    right = jax.jit(DEFINITIONS[which])(*operands, jnp.asarray(ROWS))
    (sample,) = grouped_dot_cases.make_samples(which, operands, ROWS)
    assert sample.error(right) < sample.case.tolerance
    leaves, tree = jax.tree.flatten(right)
    for value, min_error in ((9.0, sample.case.tolerance), (np.nan, 1e9)):
        wrong = [*leaves[:-1], leaves[-1].at[-1, 0].set(value)]
        assert sample.error(jax.tree.unflatten(tree, wrong)) > min_error


@pytest.mark.parametrize("which", KERNELS)
def test_a_large_product_is_sampled_in_every_group(which):
    """Groups have more rows than are compared, and one wrong group is found."""
    operands = grouped_dot_cases.draw(which, TINY, "float32", 7)
    right = jax.jit(DEFINITIONS[which])(*operands, jnp.asarray(ROWS))
    (sample,) = grouped_dot_cases.make_samples(which, operands, ROWS, max_rows=2)
    for group in np.flatnonzero(ROWS):
        first = int(ROWS[:group].sum())
        own = group if which == "wgrad" else slice(first, first + ROWS[group])
        wrong = jax.tree.map(lambda a, own=own: a.at[own].mul(1.01), right)
        assert sample.error(wrong) > sample.case.tolerance


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


@pytest.mark.long
@pytest.mark.slow
def test_all_implementations_run_and_are_reported(capsys, tiny, tmp_path):
    out, skews = tmp_path / "rows.json", ["uniform", "with_empty"]
    code, text, rows = bench(capsys, f"--skews={','.join(skews)}", f"--out={out}")
    assert code == 0
    assert json.loads(out.read_text()) == rows
    order = [(row["pass"], row["skew"], row["impl"]) for row in rows]
    assert order == [
        (which, skew, impl)
        for which in grouped_dot.PASSES
        for skew in skews
        for impl in peers.ON_CPU
    ]
    for row in rows:
        assert row["shape"] == "tiny"
        assert ProductShape(*(row[n] for n in ("rows", "d", "f", "groups"))) == TINY
        num_products = 3 if row["pass"] == "grads" else 1
        flops = num_products * 2 * TINY.rows * TINY.d * TINY.f
        assert row["tflops"] == pytest.approx(flops / row["msec"] / 1e9)
        assert row["error"] < TOLERANCES[np.dtype(np.float32)]
        assert (row["share_of_dense"] == 1) == (row["impl"] == "dense")
    assert text.count("tiny, ") == len(grouped_dot.PASSES)


def planted(monkeypatch, impl, forward):
    """Replace the forward product of an implementation."""
    products = peers.ragged_dot()[""]._replace(forward=forward)
    monkeypatch.setitem(peers.IMPLEMENTATIONS, impl, lambda: {"": products})


def test_a_wrong_implementation_is_left_out(capsys, tiny, monkeypatch):
    right = peers.ragged_dot()[""].forward
    planted(monkeypatch, "ragged_dot", lambda *arrays: 1.001 * right(*arrays))
    code, text, rows = bench(capsys, "--skews=zipf", "--passes=forward")
    assert code == 1
    found = {row["impl"]: row for row in rows}
    assert found["ragged_dot"]["msec"] is None
    assert "computes something else: error" in found["ragged_dot"]["failed"]
    assert found["blocked"]["msec"] > 0
    assert "| zipf | ragged_dot | failed: forward of" in text


@pytest.mark.parametrize(
    ("impl", "error", "outcome"),
    [
        ("ragged_dot", NotImplementedError, "declined"),
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
@pytest.mark.parametrize("which", ["wgrad", "forward"])
def test_ours_get_aligned_groups_and_fp8_has_its_own_bound(which, monkeypatch):
    """The portable products stand for the kernels; 'hopper_fp8' emulates 8 bits."""
    for impl, fp8 in (("hopper", "none"), ("hopper_fp8", "e4m3")):
        ours = functools.partial(peers.ours, "blocked", fp8)
        monkeypatch.setitem(peers.IMPLEMENTATIONS, impl, ours)
    assert f"{which} default (" in measure("hopper", which)["tiles"]
    row = measure("hopper_fp8", which)
    if which == "wgrad":
        assert "wgrad has no 8-bit values" in row["declined"]
    else:
        assert TOLERANCES[jnp.dtype("bfloat16")] < row["error"] < FP8_TOLERANCE


@pytest.mark.long
@pytest.mark.slow
def test_the_kernels_are_right_in_the_interpreter(monkeypatch):
    """Groups are aligned, and rows behind them hold NaN."""

    def hopper(align_rows):
        run = kernels.KernelRun(2, kernels.INTERPRET)
        return {"": kernels.products(run, align_rows=align_rows)}

    monkeypatch.setitem(peers.IMPLEMENTATIONS, "hopper", hopper)
    monkeypatch.setattr(grouped_dot, "SMALL_ROWS", np.array([64, 0, 3], np.int32))
    monkeypatch.setattr(grouped_dot, "SMALL_WIDTH", 128)
    assert measure("hopper", "grads")["error"] < TOLERANCES[jnp.dtype("bfloat16")]


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
