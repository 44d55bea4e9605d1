"""The SwiGLU on blocked products against one on the definition, as JAX derives it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from close import assert_close
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moejax.kernels.grouped_dot import blocked, blocked_swiglu, reference
from moejax.kernels.shapes import SKEWS, rows_of

NUM_DEVICES, NUM_ROWS, NUM_OWNED, NUM_GROUPS, D, F = 8, 200, 170, 6, 16, 24
BLOCK_ROWS = 48


def operands(dtype=jnp.float32, seed=0):
    """x_md, into_gdh, down_gfd and a cotangent dy_md."""
    random = np.random.default_rng(seed)
    shapes = (NUM_ROWS, D), (NUM_GROUPS, D, 2 * F), (NUM_GROUPS, F, D), (NUM_ROWS, D)
    return [jnp.asarray(random.standard_normal(shape) / 4, dtype) for shape in shapes]


def on_blocks(x_md, into_gdh, down_gfd, dy_md, rows_g):
    """All that a SwiGLU's forward and backward pass make, from the fused halves."""
    h_mf, into_mh = blocked_swiglu.swiglu(x_md, into_gdh, rows_g, BLOCK_ROWS)
    dinto_mh, again_mf = blocked_swiglu.swiglu_dgrad(
        dy_md, down_gfd, into_mh, rows_g, BLOCK_ROWS
    )
    return {
        "y": blocked.forward(h_mf, down_gfd, rows_g, BLOCK_ROWS),
        "dx": blocked.dgrad(dinto_mh, into_gdh, rows_g, BLOCK_ROWS),
        "dinto": blocked.wgrad(x_md, dinto_mh, rows_g, BLOCK_ROWS),
        "ddown": blocked.wgrad(again_mf, dy_md, rows_g, BLOCK_ROWS),
    }


def defined(x_md, into_gdh, down_gfd, dy_md, rows_g):
    """The same from the definition, in float32 whatever the operands are."""
    wide = [a.astype(jnp.float32) for a in (x_md, into_gdh, down_gfd)]

    def ffn(x_md, into_gdh, down_gfd):
        into_mh = reference.grouped_dot(x_md, into_gdh, rows_g)
        h_mf = jax.nn.silu(into_mh[:, :F]) * into_mh[:, F:]
        return reference.grouped_dot(h_mf, down_gfd, rows_g)

    y_md, vjp = jax.vjp(ffn, *wide)
    dx_md, dinto_gdh, ddown_gfd = vjp(dy_md.astype(jnp.float32))
    return {"y": y_md, "dx": dx_md, "dinto": dinto_gdh, "ddown": ddown_gfd}


on_blocks_jit, defined_jit = jax.jit(on_blocks), jax.jit(defined)


@pytest.mark.parametrize("num_owned", [0, NUM_OWNED, NUM_ROWS])
@pytest.mark.parametrize("skew", SKEWS)
def test_equals_definition(skew, num_owned):
    arrays = operands()
    rows_g = rows_of(skew, num_owned, NUM_GROUPS, seed=1)
    assert_close(on_blocks_jit(*arrays, rows_g), defined_jit(*arrays, rows_g))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision(dtype):
    arrays = operands(dtype)
    rows_g = rows_of("zipf", NUM_OWNED, NUM_GROUPS, seed=2)
    actual = on_blocks_jit(*arrays, rows_g)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(actual))
    assert_close(actual, defined_jit(*arrays, rows_g))


def test_nan_in_padding_reaches_nothing():
    x_md, into_gdh, down_gfd, dy_md = operands()
    rows_g = rows_of("with_empty", NUM_OWNED, NUM_GROUPS, seed=3)
    clean = on_blocks_jit(x_md, into_gdh, down_gfd, dy_md, rows_g)
    x_md, dy_md = (a.at[NUM_OWNED:].set(jnp.nan) for a in (x_md, dy_md))
    dirty = on_blocks_jit(x_md, into_gdh, down_gfd, dy_md, rows_g)
    for name, leaf in clean.items():
        np.testing.assert_array_equal(dirty[name], leaf, err_msg=name)
    assert not np.any(dirty["y"][NUM_OWNED:]), "padding must be zero"


def test_h_again_is_h():
    x_md, into_gdh, down_gfd, dy_md = operands()
    rows_g = rows_of("uniform", NUM_OWNED, NUM_GROUPS, seed=4)
    h_mf, into_mh = blocked_swiglu.swiglu(x_md, into_gdh, rows_g, BLOCK_ROWS)
    _, again_mf = blocked_swiglu.swiglu_dgrad(
        dy_md, down_gfd, into_mh, rows_g, BLOCK_ROWS
    )
    assert_close(again_mf, h_mf)


def test_inside_shard_map():
    """Other rows_g on each of 8 devices, with check_vma."""
    mesh = jax.make_mesh((NUM_DEVICES,), ("expert",), axis_types=(AxisType.Auto,))
    pieces = [operands(seed=i) for i in range(NUM_DEVICES)]
    rows = [
        rows_of(SKEWS[i % 4], NUM_OWNED - 9 * i, NUM_GROUPS, i)
        for i in range(NUM_DEVICES)
    ]
    expected = [defined_jit(*a, r) for a, r in zip(pieces, rows, strict=True)]
    body = jax.shard_map(
        on_blocks, mesh=mesh, in_specs=P("expert"), out_specs=P("expert")
    )
    arrays = map(jnp.concatenate, zip(*pieces, strict=True))
    actual = jax.jit(body)(*arrays, jnp.concatenate(rows))
    joined = {name: jnp.concatenate([e[name] for e in expected]) for name in actual}
    assert_close(actual, joined)
