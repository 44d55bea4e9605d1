"""Moving rows to a buffer and back, against the definition differentiated by JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moejax.kernels.permute import gather_rows
from tests.support.close import assert_close
from tests.support.permutations import arrays, both_ways, both_ways_jit, tables

NUM_DEVICES = 8


@pytest.mark.parametrize("how", ["reference", "xla"])
def test_equals_the_definition(how):
    """The expected values are sums over the choices that have a row, one by one. NaN in
    unused rows and gates reaches nothing."""
    x_nd, dout_nd, y_md, gate_nk = map(np.asarray, arrays())
    for kept in (0.0, 0.6, 1.0):
        positions_nk, assignment_m, source_m = tables(kept)
        expected = {
            "gathered": np.zeros_like(y_md),
            "dx": np.zeros_like(x_nd),
            "combined": np.zeros_like(x_nd),
            "dy": np.zeros_like(y_md),
            "dgate": np.zeros_like(gate_nk),
            "summed": np.zeros_like(x_nd),
            "dsummed": np.zeros_like(y_md),
        }
        for (n, k), j in np.ndenumerate(positions_nk):
            if j >= 0:
                expected["gathered"][j] = x_nd[n]
                expected["dx"][n] += y_md[j]
                expected["combined"][n] += gate_nk[n, k] * y_md[j]
                expected["dy"][j] = gate_nk[n, k] * dout_nd[n]
                expected["dgate"][n, k] = dout_nd[n] @ y_md[j]
                expected["summed"][n] += y_md[j]
                expected["dsummed"][j] = dout_nd[n]
        y_nan_md = np.where((assignment_m < 0)[:, None], np.nan, y_md)
        gate_nan_nk = np.where(positions_nk < 0, np.nan, gate_nk)
        floats = tuple(map(np.float32, (x_nd, dout_nd, y_nan_md, gate_nan_nk)))
        actual = both_ways_jit(how, floats, (positions_nk, assignment_m, source_m))
        assert_close(actual, expected)


def test_results_have_the_dtypes_of_their_operands():
    """Rows are bfloat16 and so are gates, which are float32 in the layer."""
    (*rows, gate_nk), integers = arrays(jnp.bfloat16), tables(0.6)
    args = (*rows, gate_nk.astype(jnp.bfloat16)), integers
    actual, expected = (both_ways_jit(how, *args) for how in ("xla", "reference"))
    assert_close(actual, expected)
    assert {leaf.dtype for leaf in actual.values()} == {jnp.dtype(jnp.bfloat16)}


def test_no_scatter_in_either_direction():
    args = arrays(), tables(0.6)
    jaxpr = jax.make_jaxpr(both_ways, static_argnums=0)
    assert "scatter" in str(jaxpr("reference", *args))
    assert "scatter" not in str(jaxpr("xla", *args))


def test_an_unknown_implementation():
    x_nd, *_ = arrays()
    positions_nk, _, source_m = tables(0.6)
    with pytest.raises(
        ValueError, match="'xls' is not one of auto, reference, xla, hopper"
    ):
        gather_rows(x_nd, source_m, positions_nk, implementation="xls")


def test_inside_shard_map():
    """Each of 8 devices has its own tables; the shared x gets summed gradients."""
    mesh = jax.make_mesh((NUM_DEVICES,), ("expert",), axis_types=(AxisType.Auto,))
    devices = range(NUM_DEVICES)
    floats = [arrays(seed=i) for i in devices]
    integers = [tables(i / 7, seed=i) for i in devices]
    floats = [(floats[0][0], *others) for _, *others in floats]
    expected = [
        both_ways_jit("reference", *args) for args in zip(floats, integers, strict=True)
    ]
    split = P("expert")
    body = jax.shard_map(
        partial(both_ways, "xla"),
        mesh=mesh,
        in_specs=((P(), split, split, split), split),
        out_specs=dict.fromkeys(expected[0], split) | {"dx": P()},
    )
    _, *others = (jnp.concatenate(a) for a in zip(*floats, strict=True))
    tables_of_all = tuple(jnp.concatenate(a) for a in zip(*integers, strict=True))
    actual = jax.jit(body)((floats[0][0], *others), tables_of_all)
    joined = {name: jnp.concatenate([e[name] for e in expected]) for name in actual}
    joined["dx"] = sum(e["dx"] for e in expected)
    assert_close(actual, joined)
