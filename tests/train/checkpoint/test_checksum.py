"""Checksums equal their definition on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.axes import sharding
from tests.support.checkpoint_state import build_mesh, make_state
from train.checkpoint import checksum
from train.checkpoint.checksum import checksums, digest


@pytest.fixture
def mesh():
    return build_mesh(8, 2)


def definition(x: np.ndarray) -> int:
    """Return the checksum by the formula in checksum.py, one element at a time."""
    x = x.astype(np.uint8) if x.dtype == bool else x
    word_n = x.reshape(-1).view(f"uint{8 * x.dtype.itemsize}").tolist()
    total = 0
    for i, bits in enumerate(word_n):
        h = (bits + i * checksum.GOLDEN) % 2**32
        h = (h ^ (h >> 16)) * 0x85EBCA6B % 2**32
        h = (h ^ (h >> 13)) * 0xC2B2AE35 % 2**32
        total += h ^ (h >> 16)
    return total % 2**32


def test_checksums_equal_the_definition_on_every_sharding(mesh):
    want = checksums(state := make_state(mesh, 1))
    for name, leaf in checksum.named_leaves(state).items():
        assert want[name] == definition(np.asarray(leaf)), name
    assert next(iter(want)) == "extra/step"
    assert "params/blocks/w_lef" in want
    assert "opt/0/mu/embed_vd" in want
    for other in (build_mesh(4, 1), build_mesh(1, 1)):
        assert checksums(make_state(other, 1)) == want
    host = jax.tree.map(np.asarray, state)
    assert checksums(jax.tree.map(jnp.asarray, host)) == want
    assert checksums({}) == {}


def test_positions_are_those_of_the_whole_array(mesh):
    x = np.random.default_rng(0).integers(2**32, size=(8, 40, 24), dtype=np.uint32)
    want = {"x": definition(x)}
    for dims in (("data",), (None, "expert"), (("data", "expert"), None, "tensor")):
        assert checksums({"x": jax.device_put(x, sharding(mesh, *dims))}) == want
    assert checksums({"x": jnp.zeros((0, 4))}) == {"x": 0}


def test_digest_names_the_whole():
    sums = {"b": 1, "a": 2}
    assert digest(sums) == digest({"a": 2, "b": 1})
    assert len({digest(s) for s in (sums, {"a": 1, "b": 2}, {"a": 2}, {})}) == 4
    assert len(digest(sums)) == 16
    assert int(digest(sums), 16) >= 0
