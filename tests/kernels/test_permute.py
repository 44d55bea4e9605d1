"""Moving rows to a buffer and back, against the definition differentiated by JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moejax.kernels.permute import combine_rows, gather_rows
from tests.support.close import assert_close
from tests.support.permutations import arrays, both_ways, both_ways_jit, tables

NUM_DEVICES = 8


@pytest.mark.parametrize("kept", [0.0, 0.6, 1.0])
def test_reference_is_the_definition(kept):
    """The expected values are sums over the choices that have a row, one by one."""
    positions_nk, *_ = tables(kept)
    x_nd, dout_nd, y_md, gate_nk = map(np.asarray, arrays())
    expected = {
        "gathered": np.zeros_like(y_md),
        "dx": np.zeros_like(x_nd),
        "combined": np.zeros_like(x_nd),
        "dy": np.zeros_like(y_md),
        "dgate": np.zeros_like(gate_nk),
    }
    for (n, k), j in np.ndenumerate(positions_nk):
        if j >= 0:
            expected["gathered"][j] = x_nd[n]
            expected["dx"][n] += y_md[j]
            expected["combined"][n] += gate_nk[n, k] * y_md[j]
            expected["dy"][j] = gate_nk[n, k] * dout_nd[n]
            expected["dgate"][n, k] = dout_nd[n] @ y_md[j]
    actual = both_ways_jit("reference", arrays(), tables(kept))
    assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("kept", [0.0, 0.6, 1.0])
def test_equals_reference(kept, dtype):
    args = arrays(dtype), tables(kept)
    actual = both_ways_jit("xla", *args)
    expected = both_ways_jit("reference", *args)
    assert_close(actual, expected)
    for name, leaf in expected.items():
        assert actual[name].dtype == leaf.dtype, name


@pytest.mark.parametrize("how", ["reference", "xla"])
def test_nan_in_unused_rows_reaches_nothing(how):
    x_nd, dout_nd, y_md, gate_nk = arrays()
    positions_nk, assignment_m, source_m = tables(0.6)
    integers = positions_nk, assignment_m, source_m
    clean = both_ways_jit(how, (x_nd, dout_nd, y_md, gate_nk), integers)
    y_nan_md = y_md.at[assignment_m < 0].set(jnp.nan)
    gate_nan_nk = jnp.where(positions_nk < 0, jnp.nan, gate_nk)
    dirty = both_ways_jit(how, (x_nd, dout_nd, y_nan_md, gate_nan_nk), integers)
    for name, leaf in clean.items():
        np.testing.assert_array_equal(dirty[name], leaf, err_msg=name)


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


def test_there_and_back_is_the_sum_of_gates():
    """Combining the gathered rows returns x times the gates of the kept choices."""
    x_nd, _, _, gate_nk = arrays()
    positions_nk, assignment_m, source_m = tables(0.6)
    rows_md = gather_rows(x_nd, source_m, positions_nk)
    actual = combine_rows(rows_md, gate_nk, positions_nk, assignment_m)
    kept_gate_n = jnp.sum(gate_nk * (positions_nk >= 0), axis=1)
    assert_close(actual, x_nd * kept_gate_n[:, None])


@pytest.mark.parametrize("x_is_shared", [False, True])
def test_inside_shard_map(x_is_shared):
    """Each of 8 devices has its own tables; a shared x gets summed gradients."""
    mesh = jax.make_mesh((NUM_DEVICES,), ("expert",), axis_types=(AxisType.Auto,))
    devices = range(NUM_DEVICES)
    floats = [arrays(seed=i) for i in devices]
    integers = [tables(i / 7, seed=i) for i in devices]
    if x_is_shared:
        floats = [(floats[0][0], *others) for _, *others in floats]
    expected = [
        both_ways_jit("reference", *args) for args in zip(floats, integers, strict=True)
    ]
    split = P("expert")
    x_spec = P() if x_is_shared else split
    body = jax.shard_map(
        partial(both_ways, "xla"),
        mesh=mesh,
        in_specs=((x_spec, split, split, split), split),
        out_specs=dict.fromkeys(expected[0], split) | {"dx": x_spec},
    )
    x_nd, *others = (jnp.concatenate(a) for a in zip(*floats, strict=True))
    x_nd = floats[0][0] if x_is_shared else x_nd
    tables_of_all = tuple(jnp.concatenate(a) for a in zip(*integers, strict=True))
    actual = jax.jit(body)((x_nd, *others), tables_of_all)
    joined = {name: jnp.concatenate([e[name] for e in expected]) for name in actual}
    if x_is_shared:
        joined["dx"] = sum(e["dx"] for e in expected)
    assert_close(actual, joined)
