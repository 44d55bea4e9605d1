"""Tiles: what fits shared memory, what is tried, what was measured, and the rule."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper_cases import dims_of
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from moejax.kernels import tuning
from moejax.kernels.grouped_dot import hopper
from moejax.kernels.shapes import MODEL_SHAPES, Shape
from moejax.kernels.tuning import PASSES, SHARED_BYTES, Tiles, by_rule, shared_bytes
from tools import tune_search

H200 = AbstractMesh(
    (), (), abstract_device=AbstractDevice("NVIDIA H200", num_cores=132, platform="gpu")
)
TINY = Shape(rows=192, d=64, f=128, groups=3)
MIXTRAL = MODEL_SHAPES["mixtral_8x7b"]
KIND = "NVIDIA H200"


def lower(which, shape, tiles):
    floats = [jax.ShapeDtypeStruct(d, jnp.bfloat16) for d in dims_of(which, shape)]
    rows_g = jax.ShapeDtypeStruct((shape.groups,), jnp.int32)
    call = jax.jit(functools.partial(getattr(hopper, which), tiles=tiles))
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
    if which == "wgrad":  # each warpgroup blanks half of the columns: of 128
        tiles = dataclasses.replace(tiles, rows=max(128, tiles.rows))
    with pytest.raises(ValueError, match="exceeds available shared memory") as error:
        lower(which, MIXTRAL, tiles)
    found, most = map(int, re.findall(r"smem_bytes=(\d+)", str(error.value)))
    assert (found, most) == (shared_bytes(which, tiles, 2), SHARED_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["forward", "wgrad", "swiglu"])
def test_just_below_the_limit_lowers(which):
    tiles = by_rule(which, MIXTRAL)
    more = dataclasses.replace(tiles, stages=tiles.stages + 1)
    assert shared_bytes(which, tiles, 2) <= SHARED_BYTES < shared_bytes(which, more, 2)
    lower(which, MIXTRAL, tiles)


@pytest.mark.long
@pytest.mark.parametrize("which", PASSES)
def test_all_that_is_tried_lowers(which):
    rule = by_rule(which, MIXTRAL)
    tried = tune_search.candidates(which, MIXTRAL, 2)
    for tiles in dict.fromkeys([*tried, *tune_search.neighbours(which, rule, 2)]):
        lower(which, MIXTRAL, tiles)


def some_shapes():
    random = np.random.default_rng(0)
    drawn = 2 ** random.uniform([6, 6, 6, 0], [18, 14, 14, 10], (40, 4))
    return [*MODEL_SHAPES.values(), *(Shape(*map(int, sizes)) for sizes in drawn)]


@pytest.mark.parametrize("which", PASSES)
def test_all_that_is_tried_fits(which):
    for shape in some_shapes():
        rule = by_rule(which, shape)
        tried = tune_search.candidates(which, shape, 2)
        assert tried[0] == rule
        assert len(set(tried)) == len(tried) > 1
        near = tune_search.neighbours(which, rule, 2)
        assert rule not in near
        for tiles in [*tried, *near]:
            assert shared_bytes(which, tiles, 2) <= SHARED_BYTES
            assert tune_search.is_possible(which, tiles)


def test_likely_tiles_come_first():
    """Groups of few rows want low tiles, large ones those that read least."""
    few = tune_search.candidates("forward", MODEL_SHAPES["fine_grained"], 2)
    many = tune_search.candidates("forward", MIXTRAL, 2)
    assert few[1].rows == 64
    assert min(tiles.rows * tiles.columns for tiles in many[:3]) >= 128 * 256
    cost = [tune_search.guessed_cost("forward", MIXTRAL, tiles) for tiles in many[1:]]
    assert cost == sorted(cost)
    # 2048 rows a group fill tiles of 128 x 256, and each FLOP reads 32 (1/128 + 1/256).
    assert tune_search.guessed_cost("forward", MIXTRAL, many[0]) == 1.375


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"rows": 64, "columns": 128}, "32 x 128 of .* multiple of 64 x 64"),
        ({"rows": 128, "columns": 96}, "64 x 96 of .* multiple of 64 x 64"),
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
    assert tuning.bucket("wgrad", Shape(0, 1, 2, 3), "x") == "wgrad x r1 d1 f2 g4"


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    return tmp_path


def test_measured_tiles_or_the_rule(folder):
    measured = Tiles(256, 64, stages=3, span=2)
    key = tuning.bucket("forward", MIXTRAL, "bfloat16")
    record = {"device": KIND, "tiles": {key: dataclasses.asdict(measured)}}
    tune_search.keep(folder / "nvidia_h200.json", record)
    known = ("forward", MIXTRAL, "bfloat16", KIND)
    other = ("dgrad", MIXTRAL, "bfloat16", KIND)
    assert tuning.tiles_for(*known) == tuning.require(*known) == measured
    assert tuning.tuned(*other) is None
    assert tuning.tiles_for(*other) == by_rule("dgrad", MIXTRAL)


def test_a_benchmark_is_told_how_to_measure(folder):
    with pytest.raises(ValueError, match=r"nvidia_h200\.json has no") as error:
        tuning.require("wgrad", MIXTRAL, "float16", KIND)
    text = str(error.value)
    assert "'wgrad float16 r16384 d4096 f16384 g8'" in text
    assert "--shapes mixtral_8x7b --passes wgrad --dtype float16" in text
    assert "\n" not in text
    with pytest.raises(ValueError, match=r"name Shape\(rows=192, .* in moejax/kernels"):
        tuning.require("wgrad", TINY, "float16", KIND)


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
