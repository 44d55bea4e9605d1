"""Test arrays that are filled from views: equal for every sharding, each byte read
once."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from moejax.axes import make_mesh
from moejax.interop import views
from moejax.interop.arrays import to_arrays
from moejax.interop.folder import TensorFolder
from moejax.plan.layout import Topology
from tests.support.tensor_folders import BF16, E4M3, SINGLE, write_arrays

L, E, D, F = 2, 4, 16, 8
SPECS = (
    P(),
    P(None, "expert"),
    P(None, "expert", "data", "tensor"),
    P("data", None, ("expert", "tensor")),
    P(None, None, None, ("data", "expert", "tensor")),
)


@pytest.fixture(scope="module")
def mesh():
    """A mesh of eight devices."""
    return make_mesh(Topology(data=2, expert=2, tensor=2))


@pytest.fixture
def folder(tmp_path):
    """An open folder with the experts of two layers."""
    rng = np.random.default_rng(0)
    arrays = {
        f"{layer}.{e}": rng.standard_normal((F, D)).astype(BF16)
        for layer in range(L)
        for e in range(E)
    }
    arrays |= {"norm": rng.standard_normal(D).astype("f"), "s": np.float32(3)}
    arrays |= {"none": np.zeros((0, 8), "f"), "n": np.arange(8), "q": np.zeros(4, E4M3)}
    write_arrays(tmp_path / SINGLE, arrays)
    opened = TensorFolder(tmp_path)
    return opened


def experts(folder) -> views.View:
    """Return the parameter [l, e, d, f] of experts that are [f, d] on disk."""
    layers = [
        views.stacked([folder.view(f"{layer}.{e}") for e in range(E)])
        for layer in range(L)
    ]
    return views.transposed(views.stacked(layers), (0, 1, 3, 2))


def to_array(view, sharding, *args):
    """Return one view as an array."""
    return to_arrays({"x": view}, {"x": sharding}, *args)["x"]


@pytest.mark.parametrize("spec", SPECS)
def test_shards_are_equal_and_read_once(folder, mesh, spec):
    want = experts(folder).read(dtype=np.float32)
    before = folder.bytes_read
    array = to_array(experts(folder), NamedSharding(mesh, spec))
    assert folder.bytes_read - before == L * E * D * F * 2
    assert array.dtype == jnp.float32
    assert array.sharding == NamedSharding(mesh, spec)
    for shard in array.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), want[shard.index])


def test_several_arrays_and_their_dtypes(folder, mesh):
    some = {"experts": experts(folder), "norm": folder.view("norm"),
            "s": folder.view("s"), "none": folder.view("none")}  # fmt: skip
    where = dict.fromkeys(some, NamedSharding(mesh, P()))
    where["s"] = SingleDeviceSharding(jax.devices()[3])
    for dtype in (jnp.float32, jnp.bfloat16):
        arrays = to_arrays(some, where, dtype)
        assert arrays.keys() == some.keys()
        for name, array in arrays.items():
            want = some[name].read().astype(dtype)
            assert array.dtype == dtype
            assert array.sharding == where[name]
            assert np.asarray(array).tobytes() == want.tobytes()


def test_rounding_is_to_nearest_even(mesh):
    x = np.float32([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-16, -0.0, np.inf, 1e-40])
    array = to_array(views.held(x), NamedSharding(mesh, P()), jnp.bfloat16)
    assert np.asarray(array).tobytes() == x.astype(ml_dtypes.bfloat16).tobytes()
    assert float(array[0]) == 1
    assert float(array[1]) == 1 + 2**-6


@pytest.mark.parametrize("name", ["n", "q"])
def test_codes_are_no_weights(folder, mesh, name):
    with pytest.raises(
        ValueError, match=f"'{name}' is .*, which is no dtype of weights"
    ):
        to_array(folder.view(name), NamedSharding(mesh, P()))
