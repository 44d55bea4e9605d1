"""Tiles of kernels: limits of shared memory, measured tiles, the rule."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import use_abstract_mesh

from moejax.kernels import device_file, tuning
from moejax.kernels.cases import operand_dims
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
from tests.support.hopper_traces import H200

TINY = ProductShape(rows=192, d=64, f=128, groups=3)
MIXTRAL = MODEL_SHAPES["mixtral_8x7b"]
KIND = "NVIDIA H200"


def lower(which, shape, tiles):
    dims = operand_dims(which, shape.rows, shape.d, shape.f, shape.groups)
    floats = [jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in dims]
    rows_g = jax.ShapeDtypeStruct((shape.groups,), jnp.int32)
    call = jax.jit(functools.partial(getattr(kernels, which), tiles=tiles))
    with use_abstract_mesh(H200):
        call.trace(*floats, rows_g).lower(lowering_platforms=("cuda",))


TOO_LARGE = [
    Tiles(128, 256, stages=9),
    Tiles(256, 128, depth=128, stages=4, chunk=64),
    Tiles(64, 128, stages=20, halves="columns", chunk=64),
]


@pytest.mark.parametrize(
    ("which", "tiles"),
    [
        pytest.param(which, TOO_LARGE[(number + i) % 3], id=f"{which} {i}")
        for number, which in enumerate(PASSES)
        for i in range(2)
    ],
)
def test_shared_bytes_are_those_of_the_lowering(which, tiles):
    if which == "wgrad":  # a warpgroup's part of x cuts no swizzle
        tiles = dataclasses.replace(tiles, rows=max(128, tiles.rows))
    if which in FP8:
        sizes = {"rows": min(128, tiles.rows), "columns": 128, "depth": 128}
        tiles = dataclasses.replace(tiles, **sizes, stages=tiles.stages + 4)
    with pytest.raises(ValueError, match="exceeds available shared memory") as error:
        lower(which, MIXTRAL, tiles)
    needed, limit = map(int, re.findall(r"smem_bytes=(\d+)", str(error.value)))
    assert (needed, limit) == (shared_bytes(which, tiles, 2), SHARED_BYTES)


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
    assert tuning.tiles_for(*known, 256) == tuning.measured_tiles(*known) == measured
    # Groups of 128 rows are no whole tiles of 256.
    rule = default_tiles("forward", MIXTRAL, 128)
    assert tuning.tiles_for(*known, 128) == rule
    assert tuning.measured_tiles(*other) is None
    assert tuning.tiles_for(*other, 128) == default_tiles("dgrad", MIXTRAL, 128)


@pytest.mark.parametrize("which", PASSES)
def test_default_tiles_fit_and_divide_their_groups(which):
    for shape in MODEL_SHAPES.values():
        align_rows = tuning.align_rows_for(shape.rows, shape.groups)
        tiles = default_tiles(which, shape, align_rows)
        assert tuning.divides(which, tiles, align_rows)
        assert shared_bytes(which, tiles, 2) <= SHARED_BYTES


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
        tuning.tiles_for("forward", TINY, "bfloat16", KIND, 64)
