"""Test the benchmark of grouped products: its peers, tiny runs, and bad input."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu

from moejax.kernels import shapes, tuning
from moejax.kernels.grouped_dot import reference
from moejax.kernels.shapes import SKEWS, ProductShape
from tests.support.close import assert_close
from tools.bench import grouped_dot, grouped_dot_jobs, published_rates
from tools.bench import grouped_dot_cases as cases
from tools.bench import grouped_dot_peers as peers

TINY = ProductShape(rows=96, d=16, f=24, groups=4)
PASSES = list(cases.PASSES)
KEYS = {
    "device", "shape", "skew", "pass", "impl", "msec", "tflops", "dtype", "rows", "d",
    "f", "groups", "share_of_dense", "min_bytes", "gb_per_sec", "error", "commit",
    "date", "jax", "repeats", "seed", "msec_min", "msec_max", "num_calls", "tiles",
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(shapes.CPU_SHAPES, "tiny", TINY)


@pytest.fixture
def fresh_variants():
    """Clear the cache of variants before and after a test that replaces an
    implementation."""
    peers.variants.cache_clear()
    yield
    peers.variants.cache_clear()


def bench(capsys, *arguments):
    """Run the benchmark with --json, and return its exit code, text and rows."""
    argv = ["--shapes=tiny", "--repeats=1", "--json", *arguments]
    code = grouped_dot.main(argv)
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    return code, text, json.loads(last)


@functools.partial(jax.jit, static_argnums=0)
def compute_pass(which, operands, rows_g):
    """Compute a pass by moejax's reference and its gradients."""

    def dot(x_md, w_gdf):
        return reference.grouped_dot(x_md, w_gdf, rows_g)

    x, other, *more = operands
    if which == "forward":
        return dot(x, other)
    if which == "fused":
        into_mh = dot(x, other)
        gate_mf, up_mf = jnp.split(into_mh, 2, axis=1)
        return jax.nn.silu(gate_mf) * up_mf, into_mh
    if which == "grads":
        y_mf, vjp = jax.vjp(dot, x, other)
        return y_mf, *vjp(more[0])
    if which == "dgrad":
        dims = x.shape[0], other.shape[1]
        return jax.linear_transpose(lambda a: dot(a, other), jnp.zeros(dims))(x)[0]
    w_gdf = jnp.zeros((len(rows_g), x.shape[1], other.shape[1]))
    return jax.vjp(lambda w: dot(x, w), w_gdf)[1](other)[0]


@pytest.mark.slow
@pytest.mark.parametrize("which", PASSES)
def test_the_definition_in_float64_is_the_reference(which):
    for skew in SKEWS:
        case = cases.small_case(which, TINY, "float32", 3, skew)
        out = compute_pass(which, case.operands, case.rows_g)
        error = cases.largest_error(which, out, case, has_zero_padding=True)
        assert error < cases.max_error("float32", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("impl", peers.ON_CPU)
def test_implementations_equal_the_reference(impl, which):
    case = cases.small_case(which, TINY, "float32", 4, "with_empty")
    fullest = int(case.rows_g.max()) if impl == "batched" else 0
    (variant,) = peers.variants(impl, which, fullest)
    rows_g = jnp.asarray(case.rows_g)
    results = variant.run_results(variant.arguments(case.operands, rows_g))
    if impl == "dense":
        case = case.without_groups()
    expected = compute_pass(which, case.operands, case.rows_g)
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        own = case.num_rows if a.ndim == 2 else None  # peers leave padding undefined
        assert_close(a[:own], b[:own])


@pytest.mark.slow
@pytest.mark.parametrize("which", ["forward", "dgrad", "wgrad"])
def test_kernels_of_pallas_are_called_correctly(which, monkeypatch, fresh_variants):
    """JAX's kernels run in the interpreter."""
    options = {"interpret": plgpu.InterpretGPUParams()}
    monkeypatch.setattr(plgpu, "kernel", functools.partial(plgpu.kernel, **options))
    here = types.SimpleNamespace(**vars(jax))
    here.devices = lambda: [types.SimpleNamespace(core_count=1)]
    monkeypatch.setattr(transposed_ragged_dot_mgpu, "jax", here)
    shape = ProductShape(rows=72, d=128, f=128, groups=3)
    case = cases.small_case(which, shape, "bfloat16", 5, "with_empty")
    variant = peers.variants("mgpu", which, 0)[1]
    out = variant.run_results(
        variant.arguments(case.operands, jnp.asarray(case.rows_g))
    )
    error = cases.largest_error(which, out, case, has_zero_padding=False)
    assert error < cases.max_error("bfloat16", "gpu")


@pytest.mark.slow
def test_a_sample_finds_wrong_values_and_values_that_are_not_finite():
    rows_g = np.array([40, 0, 25, 31], np.int32)
    max_error = cases.max_error("float32", "cpu")
    for which in ("forward", "wgrad"):
        case = cases.ProductCase(cases.operands(which, TINY, "float32", 6), rows_g)
        right = compute_pass(which, case.operands, rows_g)
        assert cases.sampled_error(which, right, case) < max_error
        for value, min_error in ((2, max_error), (np.nan, 1)):
            wrong = np.array(right)
            wrong[-1, 0] = value
            assert cases.sampled_error(which, wrong, case) > min_error


@pytest.mark.slow
def test_all_implementations_run_and_are_reported(capsys, tiny, tmp_path):
    out = tmp_path / "rows.json"
    skews = "uniform,with_empty"
    code, text, rows = bench(capsys, f"--skews={skews}", f"--out={out}")
    assert code == 0
    assert json.loads(out.read_text()) == rows
    order = [(row["pass"], row["skew"], row["impl"]) for row in rows]
    expected = [
        (which, skew, impl)
        for which in PASSES
        for skew in skews.split(",")
        for impl in peers.ON_CPU
    ]
    assert order == expected
    for row in rows:
        assert set(row) == KEYS
        assert row["shape"] == "tiny"
        assert row["dtype"] == "float32"
        assert (
            ProductShape(*(row[name] for name in ("rows", "d", "f", "groups"))) == TINY
        )
        assert 0 < row["msec_min"] <= row["msec"] <= row["msec_max"]
        flops = cases.flops(row["pass"], TINY)
        assert row["tflops"] == pytest.approx(flops / row["msec"] / 1e9)
        assert row["error"] < cases.max_error("float32", "cpu")
        assert (row["share_of_dense"] == 1) == (row["impl"] == "dense")
    summary = text[text.index("blocked: minimum") :]
    lines = summary.splitlines()[1:]
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {n}" for n in PASSES]
    assert {line.count("|") for line in lines} == {6}


def test_the_summary_has_the_minimum_with_its_shape_and_skew(capsys):
    msec = {
        ("even", "uniform"): {"blocked": 4, "ragged_dot": 40, "batched": 8, "dense": 3},
        ("even", "zipf"): {"blocked": 5, "ragged_dot": 30, "batched": 40, "dense": 3},
    }
    rows = [
        {"shape": shape, "skew": skew, "pass": "forward", "impl": impl, "msec": time}
        for (shape, skew), times in msec.items()
        for impl, time in times.items()
    ]
    grouped_dot.show_summary(rows, peers.OURS)
    cells = capsys.readouterr().out.splitlines()[-1].split(" | ")[1:]
    skews = ["uniform", "zipf", "zipf", "zipf"]
    minima = ["2.00", "6.00", "0.60", "0.80"]
    expected = [f"{n} (even, {skew})" for n, skew in zip(minima, skews)]
    assert [cell.strip(" |") for cell in cells] == expected


def test_our_rate_is_shown_beside_published_ones(capsys):
    """DeepSeek-V3's product has 65536 rows in both; qwen's bar has twice as many."""
    sizes = {"deepseek_v3": (65536, 7168, 2048, 256), "toy": (96, 16, 24, 4)}
    sizes["qwen3_30b_a3b"] = (65536, 2048, 768, 128)
    row = {"pass": "forward", "impl": "hopper", "skew": "uniform", "msec": 5.0}
    rows = [
        row
        | {"shape": name, "rows": m, "d": d, "f": f, "groups": g}
        | {"device": "NVIDIA H200", "tflops": 2 * m * d * f / 5 / 1e9}
        for name, (m, d, f, g) in sizes.items()
    ]
    grouped_dot.show_bars(rows, peers.OURS)
    *_, deepseek, qwen = capsys.readouterr().out.splitlines()
    # 2 x 65536 x 7168 x 2048 FLOPs in 5 ms are 385 TFLOP/s; tokamax took 4.949 ms.
    assert deepseek == (
        "| deepseek_v3 | forward | 385 | 389 | 0.99 "
        "| tokamax_triton 0.0.12, H100, 65536 rows |"
    )
    assert qwen.endswith("| tokamax_mosaic 0.0.14, H100, 131072 rows |")
    for row in rows:
        row["device"] = "NVIDIA B200"
    grouped_dot.show_bars(rows, peers.OURS)
    assert not capsys.readouterr().out


def test_every_published_rate_is_below_the_peak():
    assert len(published_rates.bars()) == 141
    assert all(1 < bar.tflops < 989 for bar in published_rates.bars())
    assert {bar.impl for bar in published_rates.bars()} < set(peers.IMPLEMENTATIONS)


def test_bytes_of_empty_groups_are_not_counted():
    rows_g = np.array([96, 0, 0, 0])
    x, dy, matrix = 96 * 16, 96 * 24, 16 * 24
    assert cases.min_bytes("forward", TINY, rows_g, 2) == 2 * (x + dy + matrix)
    assert cases.min_bytes("wgrad", TINY, rows_g, 2) == 2 * (x + dy + 4 * matrix)


def test_a_wrong_result_ends_the_program(capsys, tiny, monkeypatch, fresh_variants):
    right = peers.ragged_dot()[""]

    def wrong(x_md, w_gdf, rows_g):
        return 1.001 * right.forward(x_md, w_gdf, rows_g)

    def variants():
        return {"": right._replace(forward=wrong)}

    monkeypatch.setitem(peers.IMPLEMENTATIONS, "ragged_dot", variants)
    code, _, last = bench(capsys, "--skews=zipf", "--passes=forward")
    assert code == 1
    assert last["exit_code"] == 1
    assert "ragged_dot computes something else: forward, zipf" in last["error"]


def test_padding_that_reaches_a_result_of_ours_is_wrong(
    capsys, tiny, monkeypatch, fresh_variants
):
    """Our implementations get NaN in the padding; peers get numbers."""
    right = peers.ragged_dot()[""]

    def reads_all(x_md, w_gdf, rows_g):
        return right.forward(x_md, w_gdf, rows_g) + 0 * x_md.sum()

    def variants():
        return {"": right._replace(forward=reads_all)}

    for impl, expected in (("ragged_dot", 0), ("blocked", 1)):
        monkeypatch.setitem(peers.IMPLEMENTATIONS, impl, variants)
        options = f"--impls={impl}", "--skews=zipf", "--passes=forward"
        code, _, last = bench(capsys, *options)
        assert code == expected
    assert "blocked computes something else: forward" in last["error"]


def test_an_implementation_that_declines_gives_a_reason(capsys, tiny, monkeypatch):
    monkeypatch.setitem(grouped_dot_jobs.BATCHED_GIB, "cpu", 0)
    code, text, rows = bench(capsys, "--skews=zipf", "--passes=forward")
    assert code == 0
    (declined,) = (row for row in rows if "declined" in row)
    assert declined["impl"] == "batched"
    assert declined["msec"] is None
    assert "padding takes" in declined["declined"]
    assert "| zipf | batched | declined: padding takes" in text


def test_an_implementation_that_is_not_installed_is_reported_once(
    capsys, tiny, monkeypatch, fresh_variants
):
    def missing(capacity):
        raise ImportError("no module of that name")

    monkeypatch.setitem(peers.IMPLEMENTATIONS, "batched", missing)
    code, text, rows = bench(capsys, "--skews=zipf,uniform", "--passes=forward")
    assert code == 0
    assert text.count("batched is not installed: no module of that name") == 1
    assert {row["impl"] for row in rows} == set(peers.ON_CPU) - {"batched"}


def test_the_fastest_variant_that_can_run_is_kept(fresh_variants, monkeypatch):
    @dataclasses.dataclass
    class Timed(grouped_dot_jobs.BenchJob):
        def call_msec(self, num_calls):
            return {"slow": 2, "fast": 1}[self.variant.tiles]

    def job(tiles):
        return Timed(peers.Variant(run=print, tiles=tiles), [])

    jobs = [job("slow"), job("fast"), job("raises KeyError")]
    assert grouped_dot_jobs.fastest(jobs).variant.tiles == "fast"
    with pytest.raises(KeyError):
        grouped_dot_jobs.fastest(jobs[-1:])


@pytest.mark.slow
@pytest.mark.parametrize("which", PASSES)
def test_fp8_is_within_its_own_bound(which, monkeypatch, fresh_variants):
    """The emulation runs on padding that holds NaN. Its error is more than a quarter of
    the bound, and more than twice the bound of bfloat16."""
    ours = functools.partial(peers.ours, "blocked", "e4m3")
    monkeypatch.setitem(peers.IMPLEMENTATIONS, "hopper_fp8", ours)
    if which == "wgrad":
        with pytest.raises(NotImplementedError, match="wgrad has no 8-bit values"):
            peers.variants("hopper_fp8", which, 0)
        return
    shape = ProductShape(rows=600, d=256, f=256, groups=4)
    case = cases.small_case(which, shape, "bfloat16", 4, "with_empty")
    (variant,) = peers.variants("hopper_fp8", which, 0)
    inputs = case.poisoned().operands
    results = variant.run_results(variant.arguments(inputs, jnp.asarray(case.rows_g)))
    error = cases.largest_error(which, results, case, has_zero_padding=True)
    max_error = cases.max_error("bfloat16", "gpu", which, is_fp8=True)
    assert max_error / 4 < error < max_error
    assert error > 2 * cases.max_error("bfloat16", "gpu")


def test_fp8_needs_measured_tiles_of_its_own(monkeypatch):
    """Tiles are required only for shapes that it takes, and for the products that it
    runs there."""
    required = []

    def require(which, shape, *_):
        required.append((which, shape))

    monkeypatch.setattr(tuning, "require_measured_tiles", require)
    shape = ProductShape(192, 128, 256, 3)
    both = {"tiny": shape, "declined": dataclasses.replace(shape, d=64)}
    settings = "bfloat16", "any", "hopper_fp8"
    grouped_dot.require_tuned(both, cases.PASSES, *settings)
    wide = dataclasses.replace(shape, f=512)
    assert required == [
        *(("fp8_forward", shape), ("fp8_dgrad", shape), ("fp8_forward", wide)),
        *(("fp8_forward", shape), ("fp8_dgrad", shape), ("wgrad", shape)),
    ]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ("--shapes mixtral", "did you mean 'mixtral_8x7b'?"),
        ("--skews unifrom", "did you mean 'uniform'?"),
        ("--passes backward", "none of forward, dgrad, wgrad, fused, grads"),
        ("--impls hopper", "none of blocked, ragged_dot, batched, dense here"),
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


def test_shapes_for_a_cpu_are_an_eighth():
    assert set(shapes.CPU_SHAPES) == {*shapes.MODEL_SHAPES, "narrow", "wide"}
    for name, whole in shapes.MODEL_SHAPES.items():
        eighth = shapes.CPU_SHAPES[name]
        sizes = dataclasses.astuple(whole)
        groups = max(64, whole.groups)
        assert [8 * n for n in dataclasses.astuple(eighth)] == [*sizes[:3], groups]
