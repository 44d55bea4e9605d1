"""grouped_swiglu and its gradients against the formula with the reference grouped
product, differentiated by JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moejax.kernels.grouped_dot import grouped_swiglu, reference
from moejax.kernels.grouped_dot.choose import products
from moejax.kernels.shapes import SKEWS, make_rows
from tests.support.close import assert_close

NUM_DEVICES, NUM_ROWS, NUM_OWNED, NUM_GROUPS, D, F = 8, 200, 170, 6, 16, 24
BLOCK_ROWS = 48
IMPLEMENTATIONS = ("reference", "xla", "blocked")
GRADIENTS = ("dx", "dinto", "ddown")


def operands(dtype=jnp.float32, seed=0):
    """Return x_md, into_gdh, down_gfd and a cotangent dy_md."""
    random = np.random.default_rng(seed)
    shapes = (NUM_ROWS, D), (NUM_GROUPS, D, 2 * F), (NUM_GROUPS, F, D), (NUM_ROWS, D)
    return [jnp.asarray(random.standard_normal(shape) / 4, dtype) for shape in shapes]


def value_and_grads(x_md, into_gdh, down_gfd, dy_md, rows_g, implementation="blocked"):
    """Return y_md, and the gradients of the three operands for the cotangent dy_md."""

    def ffn(*floats):
        return grouped_swiglu(*floats, rows_g, implementation=implementation)

    y_md, vjp = jax.vjp(ffn, x_md, into_gdh, down_gfd)
    return {"y": y_md, **dict(zip(GRADIENTS, vjp(dy_md), strict=True))}


def by_definition(x_md, into_gdh, down_gfd, dy_md, rows_g):
    """Return the same results from the definition, always in float32."""
    wide = [a.astype(jnp.float32) for a in (x_md, into_gdh, down_gfd)]

    def ffn(x_md, into_gdh, down_gfd):
        into_mh = reference.grouped_dot(x_md, into_gdh, rows_g)
        h_mf = jax.nn.silu(into_mh[:, :F]) * into_mh[:, F:]
        return reference.grouped_dot(h_mf, down_gfd, rows_g)

    y_md, vjp = jax.vjp(ffn, *wide)
    grads = vjp(dy_md.astype(jnp.float32))
    return {"y": y_md, **dict(zip(GRADIENTS, grads, strict=True))}


value_and_grads_jit = jax.jit(value_and_grads, static_argnames="implementation")
by_definition_jit = jax.jit(by_definition)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_definition(implementation):
    """NaN in padding reaches nothing."""
    x_md, *weights, dy_md = operands()
    for skew in SKEWS:
        for num_owned in (0, NUM_OWNED, NUM_ROWS):
            rows_g = make_rows(skew, num_owned, NUM_GROUPS, seed=1)
            dirty = [a.at[num_owned:].set(jnp.nan) for a in (x_md, dy_md)]
            args = dirty[0], *weights, dirty[1], rows_g
            actual = value_and_grads_jit(*args, implementation=implementation)
            assert_close(actual, by_definition_jit(x_md, *weights, dy_md, rows_g))


@jax.jit
def in_small_blocks(x_md, into_gdh, down_gfd, dy_md, rows_g):
    """Return the results and gradients, and h from both passes."""
    p = products("blocked", BLOCK_ROWS)
    h_mf, into_mh = p.swiglu(x_md, into_gdh, rows_g)
    dinto_mh, again_mf = p.swiglu_dgrad(dy_md, down_gfd, into_mh, rows_g)
    result = {
        "y": p.forward(h_mf, down_gfd, rows_g),
        "dx": p.dgrad(dinto_mh, into_gdh, rows_g),
        "dinto": p.wgrad(x_md, dinto_mh, rows_g),
        "ddown": p.wgrad(again_mf, dy_md, rows_g),
    }
    return result, h_mf, again_mf


def test_both_passes_in_small_blocks():
    """The blocks are so small that a group has several blocks and a tail."""
    for skew in SKEWS:
        args = *operands(), make_rows(skew, NUM_OWNED, NUM_GROUPS, seed=4)
        result, h_mf, again_mf = in_small_blocks(*args)
        assert_close(result, by_definition_jit(*args))
        assert_close(again_mf, h_mf)


@pytest.mark.slow
def test_half_precision():
    arrays = operands(jnp.bfloat16)
    rows_g = make_rows("zipf", NUM_OWNED, NUM_GROUPS, seed=2)
    actual = value_and_grads_jit(*arrays, rows_g, implementation="xla")
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(actual))
    assert_close(actual, by_definition_jit(*arrays, rows_g))


@pytest.mark.slow
def test_inside_shard_map():
    """Each of 8 devices has its own rows_g, with check_vma. The shared weight gets
    summed gradients, and the other weight gets its own."""
    mesh = jax.make_mesh((NUM_DEVICES,), ("expert",), axis_types=(AxisType.Auto,))
    pieces = [operands(seed=i) for i in range(NUM_DEVICES)]
    shared_gdh = pieces[0][1]
    pieces = [(x_md, shared_gdh, *others) for x_md, _, *others in pieces]
    rows = [
        make_rows(SKEWS[i % 4], NUM_OWNED - 9 * i, NUM_GROUPS, i)
        for i in range(NUM_DEVICES)
    ]
    expected = [by_definition_jit(*a, r) for a, r in zip(pieces, rows, strict=True)]
    split = P("expert")
    body = jax.shard_map(
        value_and_grads,
        mesh=mesh,
        in_specs=(split, P(), split, split, split),
        out_specs={"y": split, "dx": split, "dinto": P(), "ddown": split},
    )
    x_md, _, *others = map(jnp.concatenate, zip(*pieces, strict=True))
    actual = jax.jit(body)(x_md, shared_gdh, *others, jnp.concatenate(rows))
    joined = {name: jnp.concatenate([e[name] for e in expected]) for name in actual}
    assert_close(actual, joined | {"dinto": sum(e["dinto"] for e in expected)})


def test_bad_arguments():
    x_md, into_gdh, down_gfd, _ = operands()
    rows_g = make_rows("uniform", NUM_OWNED, NUM_GROUPS, seed=0)
    for name, wrong in (
        ("into_gdh", (into_gdh.astype(jnp.bfloat16), down_gfd)),
        ("down_gfd", (into_gdh, down_gfd.astype(jnp.bfloat16))),
    ):
        with pytest.raises(ValueError, match=f"float32 and {name} is bfloat16: cast"):
            grouped_swiglu(x_md, *wrong, rows_g)
    for name, wrong in (
        ("into_gdh", (into_gdh[:, 1:], down_gfd)),
        ("into_gdh", (into_gdh, down_gfd[:, 1:])),
        ("down_gfd", (into_gdh, down_gfd[:, :, 1:])),
    ):
        with pytest.raises(ValueError, match=f"{name} has shape .* and must have"):
            grouped_swiglu(x_md, *wrong, rows_g)
    with pytest.raises(ValueError, match=r"rows_g has shape .* has 6 groups"):
        grouped_swiglu(x_md, into_gdh, down_gfd, rows_g[1:])
    with pytest.raises(ValueError, match="'dense' is not one of auto, reference"):
        grouped_swiglu(x_md, into_gdh, down_gfd, rows_g, implementation="dense")
