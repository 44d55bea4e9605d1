"""Test the search for tiles: what it tries, its checks and the file it writes. The
definitions stand for the kernels, with made times."""

import dataclasses
import itertools
import json
import os
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import use_abstract_mesh

from moejax.kernels import cases, device_file, tuning
from moejax.kernels.cases import DEFINITIONS
from moejax.kernels.shapes import MODEL_SHAPES, ProductShape
from moejax.kernels.tuning import FP8, PASSES, Tiles
from tests.support.hopper_traces import H200
from tools import tune_kernels

TINY = ProductShape(rows=192, d=64, f=128, groups=3)
KIND = "NVIDIA H200"
KERNEL = tune_kernels.kernel


@pytest.fixture(autouse=True)
def made(monkeypatch):
    """Replace kernels by definitions, and times by ones in which small spans and few
    stages are fast."""

    def kernel(which, tiles):
        return DEFINITIONS[which.removeprefix("fp8_")]

    def median_sec(calls, *_):
        return {tiles: 1e-3 * (tiles.span + tiles.stages) for tiles in calls}

    monkeypatch.setattr(tune_kernels, "kernel", kernel)
    monkeypatch.setattr(tune_kernels, "median_sec", median_sec)
    monkeypatch.setitem(MODEL_SHAPES, "tiny", TINY)


def buckets(name="tiny", passes=PASSES, is_layer=False):
    found = tune_kernels.shape_buckets(name, is_layer)
    return [bucket for bucket in found if bucket.which in passes]


def tune(path, passes=("forward", "dgrad"), limit_sec=1e9):
    own = buckets(passes=passes)
    return tune_kernels.tune(own, KIND, path, limit_sec)


@pytest.mark.parametrize("name", ["mixtral_8x7b", "fine_grained"])
@pytest.mark.parametrize("which", PASSES)
def test_all_that_is_tried_can_run(which, name):
    (bucket,) = buckets(name, [which])
    rule, *others = tune_kernels.candidates(bucket)
    assert rule == tuning.default_tiles(which, bucket.shape, bucket.align_rows)
    near = tune_kernels.neighbours(bucket, rule)
    tried = [*others, *near]
    assert len(set(others)) == len(others)
    assert rule not in tried
    for tiles in tried:
        assert tuning.shared_bytes(which, tiles, 2) <= tuning.SHARED_BYTES
        assert tuning.divides(which, tiles, bucket.align_rows)
    for tiles in near:
        changed = dataclasses.asdict(tiles).items() - dataclasses.asdict(rule).items()
        assert {name for name, _ in changed} <= {"depth", "stages"} or len(changed) == 1


@pytest.mark.slow
def test_a_wrong_candidate_has_no_time(monkeypatch):
    def spoiled(which, tiles):
        def product(*arrays):
            out = DEFINITIONS[which](*arrays)
            if tiles.span == 4:
                return jax.tree.map(lambda a: a.at[-1].add(5), out)
            if tiles.span == 16:
                raise NotImplementedError("no span of 16:\nuse another")
            if tiles.span == 1:
                return jax.tree.map(lambda a: jnp.full_like(a, jnp.nan), out)
            return out

        return product

    monkeypatch.setattr(tune_kernels, "kernel", spoiled)
    (bucket,) = buckets(passes=["swiglu"])
    rule = tune_kernels.candidates(bucket)[0]
    case = tune_kernels.prepare(bucket, rule)
    batch = [dataclasses.replace(rule, span=span) for span in (rule.span, 4, 16, 1, 32)]
    found = list(tune_kernels.measure(case, batch).values())
    assert found[0] == pytest.approx(rule.span + rule.stages)
    assert found[4] == pytest.approx(32 + rule.stages)
    assert found[1].startswith("computes something else: error")
    assert found[2] == "no span of 16: use another"
    assert found[3] == "computes something else: error inf"


@pytest.mark.parametrize("which", [which for which in PASSES if which not in FP8])
def test_the_kernel_of_a_bucket_lowers(which):
    """The other tests have stand-ins for kernels."""
    (bucket,) = buckets("fine_grained", [which])
    dims = cases.operand_dims(which, *dataclasses.astuple(bucket.shape))
    arguments = [jax.ShapeDtypeStruct(own, bucket.dtype) for own in dims]
    arguments.append(jax.ShapeDtypeStruct((bucket.shape.groups,), jnp.int32))
    tiles = tune_kernels.candidates(bucket)[-1]
    with use_abstract_mesh(H200):
        traced = jax.jit(KERNEL(which, tiles)).trace(*arguments)
        traced.lower(lowering_platforms=("cuda",))


@pytest.mark.slow
def test_a_run_goes_on_where_the_file_ends(tmp_path):
    path = tmp_path / "some.json"
    summary = tune(path)
    assert (summary["num_left"], summary["failed"]) == (0, {})
    record = json.loads(path.read_text())
    keys = [bucket.key for bucket in buckets(passes=("forward", "dgrad"))]
    assert list(record["tiles"]) == list(record["measured"]) == keys
    assert record["device"] == KIND
    for row in record["measured"].values():
        assert row["msec"] < row["rule_msec"]
        assert row["is_whole"]
    assert {Tiles(**tiles).span for tiles in record["tiles"].values()} == {1}
    assert {Tiles(**tiles).stages for tiles in record["tiles"].values()} == {2}
    assert tune(path)["measured"] == []
    assert json.loads(path.read_text()) == record


def test_buckets_share_the_time(tmp_path, monkeypatch, capsys):
    """The clock advances by a second at each reading. The first bucket gets half of the
    time and is cut off; no time is left for the second."""
    seconds = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr(tune_kernels, "time", clock)
    path = tmp_path / "some.json"
    summary = tune(path, limit_sec=3)
    assert [row["is_whole"] for row in summary["measured"]] == [False]
    assert summary["num_left"] == 1
    assert "the time is up: 1 buckets are left" in capsys.readouterr().out
    assert len(device_file.load(path, KIND)["tiles"]) == 1


def test_wrong_default_tiles_fail_their_bucket_alone(tmp_path, monkeypatch, capsys):
    def kernel(which, tiles):
        factor = 2 if which == "forward" else 1
        return lambda *arrays: factor * DEFINITIONS[which](*arrays)

    monkeypatch.setattr(tune_kernels, "kernel", kernel)
    monkeypatch.setattr(tune_kernels, "hopper_here", lambda: KIND)
    out = tmp_path / "some.json"
    argv = f"--shapes tiny --passes forward,dgrad --out {out} --json".split()
    assert tune_kernels.main(argv) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    (why,) = summary["failed"].values()
    assert "has an error of" in why
    assert [row["bucket"].split()[0] for row in summary["measured"]] == ["dgrad"]


def test_a_layer_has_its_own_products():
    found = [(b.which, b.shape.d, b.shape.f) for b in buckets(is_layer=True)]
    assert found == [
        *(("swiglu", 64, 128), ("forward", 128, 64), ("swiglu_dgrad", 64, 128)),
        *(("dgrad", 64, 256), ("wgrad", 64, 256), ("wgrad", 128, 64)),
        *(("fp8_forward", 64, 256), ("fp8_forward", 128, 64)),
        *(("fp8_dgrad", 64, 256), ("fp8_dgrad", 128, 64)),
    ]


def test_a_configuration_has_the_products_of_its_layer(repo):
    path = repo / "configs" / "olmoe_1b_7b.gin"
    found = list(tune_kernels.layer_buckets([path], [], KIND))
    assert [b.which for b in found] == [
        *("swiglu", "forward", "swiglu_dgrad", "dgrad", "wgrad", "wgrad")
    ]
    for bucket in found:
        assert bucket.name == "olmoe_1b_7b"
        assert bucket.shape.groups == 8
        assert bucket.shape.rows % bucket.align_rows == 0
        assert bucket.num_rows <= bucket.shape.rows


@pytest.mark.parametrize(
    ("arguments", "code", "rule"),
    [
        ("", 3, "tiles are measured on a Hopper GPU, but this is cpu"),
        ("--shapes mixtral", 2, "did you mean 'mixtral_8x7b'?"),
        ("--passes backward", 2, "none of forward, dgrad, wgrad, swiglu, swiglu_dgrad"),
        ("--limit_sec 0", 2, "--limit_sec 0.0 must be above 0"),
    ],
)
def test_errors_are_one_line(capsys, arguments, code, rule):
    assert tune_kernels.main([*arguments.split(), "--json"]) == code
    out, err = capsys.readouterr()
    assert rule in err
    assert err.count("\n") == 1
    assert json.loads(out)["exit_code"] == code


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
