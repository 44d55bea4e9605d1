"""Tiles of kernels: limits of shared memory, candidates, measured tiles, the rule."""

import dataclasses
import functools
import itertools
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from moejax.kernels import device as device_module
from moejax.kernels import device_file, tuning
from moejax.kernels.grouped_dot.hopper import kernels
from moejax.kernels.shapes import MODEL_SHAPES, ProductShape
from moejax.kernels.tuning import (
    FP8,
    PASSES,
    SHARED_BYTES,
    Tiles,
    default_tiles,
    shared_bytes,
)
from tests.support.hopper_cases import operand_dims
from tools.bench import grouped_dot, tune_search
from tools.bench import grouped_dot_cases as cases

H200 = AbstractMesh(
    (), (), abstract_device=AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
)
TINY = ProductShape(rows=192, d=64, f=128, groups=3)
MIXTRAL = MODEL_SHAPES["mixtral_8x7b"]
KIND = "NVIDIA H200"


def lower(which, shape, tiles):
    floats = [jax.ShapeDtypeStruct(d, jnp.bfloat16) for d in operand_dims(which, shape)]
    rows_g = jax.ShapeDtypeStruct((shape.groups,), jnp.int32)
    call = jax.jit(functools.partial(getattr(kernels, which), tiles=tiles))
    with use_abstract_mesh(H200):
        call.trace(*floats, rows_g).lower(lowering_platforms=("cuda",))


TOO_LARGE = [
    Tiles(128, 256, stages=9),
    Tiles(256, 128, depth=128, stages=4, chunk=64),
    Tiles(64, 128, stages=20, halves="columns", chunk=64),
]


@pytest.mark.parametrize("tiles", TOO_LARGE, ids=str)
@pytest.mark.parametrize("which", PASSES)
def test_shared_bytes_are_those_of_the_lowering(which, tiles):
    if which == "wgrad":  # each warpgroup zeroes half of the columns, of 128
        tiles = dataclasses.replace(tiles, rows=max(128, tiles.rows))
    if which in FP8:
        sizes = {"rows": min(128, tiles.rows), "columns": 128, "depth": 128}
        tiles = dataclasses.replace(tiles, **sizes, stages=tiles.stages + 4)
    with pytest.raises(ValueError, match="exceeds available shared memory") as error:
        lower(which, MIXTRAL, tiles)
    needed, limit = map(int, re.findall(r"smem_bytes=(\d+)", str(error.value)))
    assert (needed, limit) == (shared_bytes(which, tiles, 2), SHARED_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["forward", "wgrad", "swiglu"])
def test_just_below_the_limit_lowers(which):
    tiles = default_tiles(which, MIXTRAL)
    more = dataclasses.replace(tiles, stages=tiles.stages + 1)
    assert shared_bytes(which, tiles, 2) <= SHARED_BYTES < shared_bytes(which, more, 2)
    lower(which, MIXTRAL, tiles)


@pytest.mark.long
@pytest.mark.parametrize("which", PASSES)
def test_all_that_is_tried_lowers(which):
    rule = default_tiles(which, MIXTRAL)
    tried = tune_search.candidates(which, MIXTRAL, 2, "all")
    near = [
        tiles
        for centre in (rule, *tried[:3])
        for tiles in tune_search.neighbours(which, centre, 2, "all")
    ]
    for tiles in dict.fromkeys([*tried, *near]):
        lower(which, MIXTRAL, tiles)


def some_shapes():
    random = np.random.default_rng(0)
    drawn = 2 ** random.uniform([6, 6, 6, 0], [18, 14, 14, 10], (40, 4))
    return [
        *MODEL_SHAPES.values(),
        *(ProductShape(*map(int, sizes)) for sizes in drawn),
    ]


@pytest.mark.parametrize("forms", tune_search.FORMS)
@pytest.mark.parametrize("which", PASSES)
def test_all_that_is_tried_fits(which, forms):
    for shape in some_shapes():
        rule = default_tiles(which, shape)
        tried = tune_search.candidates(which, shape, 2, forms)
        assert tried[0] == rule
        assert len(set(tried)) == len(tried) > 1
        near = tune_search.neighbours(which, rule, 2, forms)
        assert rule not in near
        for tiles in [*tried, *near]:
            assert shared_bytes(which, tiles, 2) <= SHARED_BYTES
            assert tune_search.is_possible(which, tiles)
            assert forms == "all" or not tiles.is_second_form


def test_second_forms_are_tried_where_they_are_asked_for():
    """Each pass has turns; blanking needs the compiler's barriers, and only SwiGLU has
    an exp."""
    for which in (which for which in PASSES if which not in FP8):
        tried = tune_search.candidates(which, MIXTRAL, 2, "all")
        assert any(tiles.takes_turns for tiles in tried)
        near = tune_search.neighbours(which, default_tiles(which, MIXTRAL), 2, "all")
        second = [tiles for tiles in near if tiles.is_second_form]
        assert sum(tiles.cluster == 2 for tiles in second) == 1
        assert any(tiles.barriers == "own" for tiles in second) == (which != "wgrad")
        assert any(tiles.math == "approx" for tiles in second) == ("swiglu" in which)
    assert not any(
        tiles.is_second_form
        for which in FP8
        for tiles in tune_search.candidates(which, MIXTRAL, 2, "all")
    )


def test_likely_tiles_come_first():
    """Groups of few rows need low tiles; large groups need tiles that read least."""
    few = tune_search.candidates("forward", MODEL_SHAPES["fine_grained"], 2)
    many = tune_search.candidates("forward", MIXTRAL, 2)
    assert few[1].rows == 64
    assert min(tiles.rows * tiles.columns for tiles in many[:3]) >= 128 * 256
    cost = [tune_search.guessed_cost("forward", MIXTRAL, tiles) for tiles in many[1:]]
    assert cost == sorted(cost)
    # Groups of 2048 rows fill tiles of 128 x 256; the cost is 1 + 32 (1/128 + 1/256).
    assert tune_search.guessed_cost("forward", MIXTRAL, many[0]) == 1.375


def run_search(msec_of, first, around=lambda tiles: [], is_over=lambda: False):
    batches = []

    def measure(batch):
        batches.append(list(batch))
        return [msec_of(tiles) for tiles in batch]

    return tune_search.search(first, around, measure, is_over), batches


def test_search_goes_downhill_from_the_fastest():
    """The time grows with the distance to span 32 and chunk 64, each two steps away."""
    first = tune_search.candidates("wgrad", MIXTRAL, 2)
    around = functools.partial(tune_search.neighbours, "wgrad", itemsize=2)

    def msec_of(tiles):
        if tiles.halves == "columns":
            return "does not lower"
        return 10 - tiles.span / 32 - tiles.chunk / 64 + (tiles.rows != 128)

    result, batches = run_search(msec_of, first, around)
    tried = list(itertools.chain(*batches))
    assert (result.best.rows, result.best.span, result.best.chunk) == (128, 32, 64)
    assert result.is_whole
    assert len(tried) == len(set(tried)) == len(result.msec) + len(result.skipped)
    assert set(result.skipped.values()) == {"does not lower"}
    assert max(map(len, batches)) == tune_search.BATCH


def test_search_ends_when_the_time_is_up():
    first = tune_search.candidates("forward", MIXTRAL, 2)
    result, batches = run_search(lambda tiles: 1.0, first, is_over=lambda: True)
    assert batches == [first[: tune_search.BATCH]]
    assert not result.is_whole
    result, _ = run_search(lambda tiles: 1.0, first[:1], is_over=lambda: True)
    assert result.is_whole


def test_search_where_nothing_runs():
    result, _ = run_search(lambda tiles: "no", tune_search.candidates("dgrad", TINY, 2))
    assert result.best is None


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"rows": 64, "columns": 128}, "32 x 128 of .* 64 or 128 rows"),
        ({"rows": 128, "columns": 96}, "64 x 96 of .* a multiple of 64"),
        ({"rows": 512, "columns": 128}, "256 x 128 of .* 64 or 128 rows"),
        ({"rows": 128, "columns": 512}, "at most 256 columns"),
        ({"rows": 128, "columns": 128, "chunk": 96}, "chunk=96 must divide 128"),
        ({"rows": 128, "columns": 128, "chunk": 16}, "be a multiple of 32"),
        ({"rows": 128, "columns": 128, "depth": 32}, "depth=32 must be a multiple of"),
        ({"rows": 128, "columns": 128, "stages": 1}, "stages=1 must be at least 2"),
    ],
)
def test_tiles_that_cannot_be(settings, rule):
    with pytest.raises(ValueError, match=rule):
        Tiles(**settings)


def test_a_bucket_rounds_sizes_up():
    assert tuning.bucket("forward", MIXTRAL, "bfloat16") == (
        "forward bfloat16 r16384 d4096 f16384 g8"
    )
    near = dataclasses.replace(MIXTRAL, rows=8193, f=8200)
    assert tuning.bucket("dgrad", near, "x") == tuning.bucket("dgrad", MIXTRAL, "x")
    assert (
        tuning.bucket("wgrad", ProductShape(0, 1, 2, 3), "x") == "wgrad x r1 d1 f2 g4"
    )


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv(device_file.FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def test_measured_tiles_or_the_rule(folder):
    measured = Tiles(256, 64, stages=3, span=2)
    key = tuning.bucket("forward", MIXTRAL, "bfloat16")
    record = {"device": KIND, "tiles": {key: dataclasses.asdict(measured)}}
    device_file.save(folder / "nvidia_h200.json", record)
    known = ("forward", MIXTRAL, "bfloat16", KIND)
    other = ("dgrad", MIXTRAL, "bfloat16", KIND)
    assert tuning.tiles_for(*known) == tuning.require_measured_tiles(*known) == measured
    assert tuning.measured_tiles(*other) is None
    assert tuning.tiles_for(*other) == default_tiles("dgrad", MIXTRAL)


def test_a_benchmark_is_told_how_to_measure(folder):
    with pytest.raises(ValueError, match=r"nvidia_h200\.json has no") as error:
        tuning.require_measured_tiles("wgrad", MIXTRAL, "float16", KIND)
    text = str(error.value)
    assert "'wgrad float16 r16384 d4096 f16384 g8'" in text
    assert "--shapes mixtral_8x7b --passes wgrad --dtype float16" in text
    assert "\n" not in text
    with pytest.raises(
        ValueError, match=r"name ProductShape\(rows=192, .* in moejax/kernels"
    ):
        tuning.require_measured_tiles("wgrad", TINY, "float16", KIND)


def test_hopper_needs_measured_tiles():
    some = {"tiny": TINY}
    kind = "no such device"
    for which, kernel in {"fused": "swiglu", "grads": "forward"}.items():
        with pytest.raises(ValueError, match=f"no measured tiles for '{kernel} "):
            grouped_dot.require_tuned(some, [which], "bfloat16", kind)


def test_measured_tiles_are_enough(monkeypatch):
    monkeypatch.setattr(
        tuning, "measured_tiles", lambda *bucket: tuning.Tiles(128, 128)
    )
    grouped_dot.require_tuned({"tiny": TINY}, cases.PASSES, "bfloat16", "any")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        (TINY, "float32", "dtype float32 is not one of bfloat16, float16"),
        (
            ProductShape(96, 16, 24, 4),
            "bfloat16",
            "is not a multiple of 64 in bfloat16",
        ),
    ],
)
def test_what_hopper_declines_needs_no_measured_tiles(
    capsys, monkeypatch, shape, dtype, why
):
    monkeypatch.setitem(MODEL_SHAPES, "tiny", shape)
    kind = "no such device"
    device = types.SimpleNamespace(device_kind=kind, compute_capability="9.0")
    monkeypatch.setattr(device_module, "device_here", lambda: device)
    monkeypatch.setattr(grouped_dot, "describe_run", lambda settings: {"device": kind})
    options = f"--device gpu --shapes tiny --skews zipf --impls hopper --dtype {dtype}"
    assert grouped_dot.main([*options.split(), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["pass"] for row in rows] == list(cases.PASSES)
    assert all(why in row["declined"] for row in rows)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{", "must hold tiles by bucket"),
        ('{"device": "x"}', r"KeyError\('tiles'\)"),
        ('{"tiles": [1]}', "must hold tiles by bucket"),
        ('{"tiles": {"KEY": {"rows": 100, "columns": 8}}}', "a warpgroup has 50 x 8"),
        ('{"tiles": {"KEY": {"height": 100}}}', "unexpected keyword .*height"),
    ],
)
def test_a_file_that_is_none(folder, text, rule):
    key = tuning.bucket("forward", TINY, "bfloat16")
    (folder / "nvidia_h200.json").write_text(text.replace("KEY", key))
    with pytest.raises(ValueError, match=rf"nvidia_h200\.json .*{rule}"):
        tuning.tiles_for("forward", TINY, "bfloat16", KIND)
