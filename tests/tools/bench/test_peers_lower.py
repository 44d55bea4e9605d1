"""The peers of the benchmark of grouped products lower for CUDA, for an H200 that need
not be present: their interfaces are those that the benchmark calls.

tokamax's kernels ask the device that is here for its kind and its number of
multiprocessors; they are told those of an H200.
"""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest
from jax.extend import backend
from jax.sharding import use_abstract_mesh

from moejax.kernels.cases import operand_dims
from moejax.kernels.shapes import ProductShape
from tests.support.hopper_traces import H200
from tools.bench import grouped_dot_peers as peers

SHAPE = ProductShape(rows=2048, d=512, f=1024, groups=4)
"""tokamax's kernels have an instruction or more for each group."""
PASSES = ("forward", "dgrad", "wgrad")
CALLS = {"tokamax_mosaic": "mosaic_gpu_v2", "tokamax_triton": "__gpu$xla.gpu.triton"}
"""Custom call of an implementation's kernels; the others are XLA's own operations."""


@dataclasses.dataclass(frozen=True)
class Here:
    """The device that libraries see."""

    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"
    compute_capability: str = "9.0"
    core_count: int = 132


@pytest.fixture(autouse=True)
def h200(monkeypatch):
    monkeypatch.setattr(backend, "get_default_device", Here)


def check(impl, which, choose=slice(None)):
    """Assert that the chosen variants of an implementation lower to its kernels."""
    groups = 1 if impl == "dense" else SHAPE.groups
    dims = operand_dims(which, SHAPE.rows, SHAPE.d, SHAPE.f, groups)
    arguments = [jax.ShapeDtypeStruct(own, "bfloat16") for own in dims]
    rows_g = jax.ShapeDtypeStruct((groups,), jnp.int32)
    for tiles, run in list(peers.variants(impl, which).items())[choose]:
        with use_abstract_mesh(H200):
            traced = run.trace(*arguments, rows_g)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert CALLS.get(impl, "dot") in text, tiles


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("impl", ["ragged_dot", "dense"])
def test_a_peer_lowers(impl, which):
    check(impl, which)


@pytest.mark.peers
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("impl", CALLS)
def test_tokamax_lowers(impl, which):
    check(impl, which, slice(1, 2))


def test_tokamax_that_is_nowhere_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(peers, "PEERS", tmp_path / ".peers")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="tokamax is not in"):
        peers.import_tokamax()
