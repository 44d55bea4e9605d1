"""Implementations of attention against the definition, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moejax.kernels.attention import Rule, attention, portable
from moejax.kernels.attention.reading import CAUSAL
from tests.support.attention_cases import (
    Arrays,
    Sizes,
    arrays,
    edges_by_name,
    first_keys,
    random_edges,
    results,
)
from tests.support.close import assert_close

T = 83
"""Tokens of a row. It divides no block."""
QUERIES, KEYS = 16, 8
"""Small blocks, so that many borders fit in a short row."""
B = len(edges_by_name(T, QUERIES))
"""Rows, one for each name of documents."""


@pytest.fixture
def small_blocks(monkeypatch) -> None:
    monkeypatch.setattr(portable, "QUERIES", QUERIES)
    monkeypatch.setattr(portable, "KEYS", KEYS)


def documents(num_keys: int = T) -> np.ndarray:
    """Return the first keys [b, u] of rows of documents, one row for each name."""
    rows = edges_by_name(num_keys, QUERIES).values()
    return np.stack([first_keys(edges, num_keys) for edges in rows])


def check(rule: Rule, operands, first_bt, start: int = 0, impl: str = "blocked"):
    """Compare an implementation with the definition."""
    actual = results(impl, rule, operands, first_bt, start)
    expected = results("reference", rule, operands, first_bt, start)
    assert_close(actual, expected)
    for name, leaf in expected.items():
        assert actual[name].dtype == leaf.dtype, name


FEATURES = {
    "4 query heads a key head, sinks": (Sizes(B, h=8, g=2), CAUSAL, jnp.float32),
    "8 query heads a key head, narrow values, long window, soft cap, sinks": (
        Sizes(B, h=16, g=2, j=4),
        Rule(window=40, soft_cap=1.5),
        jnp.bfloat16,
    ),
    "not causal": (Sizes(B, h=2, g=2), Rule(is_causal=False, scale=0.5), jnp.float32),
}


@pytest.mark.parametrize("name", FEATURES)
def test_documents(name, small_blocks):
    sizes, rule, dtype = FEATURES[name]
    operands = arrays(sizes, dtype, has_sinks="sinks" in name)
    check(rule, operands, documents())


def test_a_cache_in_float64(small_blocks):
    """The keys are more than the queries, which stand at their end, or amid keys that
    none of them reads. Values are wide, the window is shorter than a block, and each
    query head has its own key head."""
    t, u = 21, T
    with jax.enable_x64(True):
        rule = Rule(window=5, soft_cap=3.0)
        operands = arrays(Sizes(B, t, u, j=12), jnp.float64, has_sinks=True)
        for start in (0, 5, KEYS, 4 * KEYS + 1, u - t):
            check(rule, operands, documents()[:, start : start + t], start)


WINDOWS = (None, 1, 8, 17, 1000)


@pytest.mark.long
@pytest.mark.parametrize("blocks", [(8, 32), (24, 40), (256, 256)])
@pytest.mark.parametrize("t", [1, 7, 31, 64, 65])
def test_lengths_blocks_and_windows(t, blocks, monkeypatch):
    monkeypatch.setattr(portable, "QUERIES", blocks[0])
    monkeypatch.setattr(portable, "KEYS", blocks[1])
    # Without sinks the gradients of a lone query and its key are 0 but for rounding.
    operands = arrays(Sizes(t=t, u=t, h=4, g=2), has_sinks=True)
    rule = Rule(window=WINDOWS[(t + blocks[0]) % len(WINDOWS)])
    for seed in range(8):
        edges = [e for e in random_edges(max(t, 2), seed) if e < t]
        check(rule, operands, np.stack([first_keys(edges, t), first_keys([], t)]))


def test_inside_shard_map_scan_and_checkpoint(small_blocks):
    """Two layers, of which each adds its output to the queries of the next. Rows are
    split over one axis and heads over another."""
    b, mesh = 4, jax.make_mesh((4, 2), ("row", "head"), axis_types=(AxisType.Auto,) * 2)
    layers = [arrays(Sizes(b, h=8, g=2), has_sinks=True, seed=seed) for seed in (0, 1)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    first_bt = np.stack([first_keys(random_edges(T, row), T) for row in range(b)])
    by_head, by_row = P(None, "head"), P(None, "row", None, "head")
    split = Arrays(by_row, by_row, by_row, by_head, by_row)

    def gradients(implementation, stacked, first_bt):
        @jax.checkpoint
        def layer(x_bthi, own):
            q_bthi, k_bugi, v_bugj, sinks_h, _ = own
            inputs = x_bthi + q_bthi, k_bugi, v_bugj, first_bt
            how = {"sinks_h": sinks_h, "implementation": implementation}
            return x_bthi + attention(*inputs, **how), None

        def out(stacked):
            return jax.lax.scan(layer, stacked.dout_bthj[0], stacked)[0]

        x_bthi, vjp = jax.vjp(out, stacked)
        return x_bthi, *vjp(stacked.dout_bthj[1])

    actual = jax.shard_map(
        functools.partial(gradients, "blocked"),
        mesh=mesh,
        in_specs=(split, P("row")),
        out_specs=(P("row", None, "head"), split),
    )
    expected = functools.partial(gradients, "reference")
    assert_close(*(jax.jit(each)(stacked, first_bt) for each in (actual, expected)))


def test_other_documents_change_no_bit(small_blocks):
    """The tokens from 21 to 50 are one document, whose borders lie within blocks."""
    first_bt = np.stack([first_keys([5, 21, 51, 53], T)] * B)
    is_other_t = first_bt[0] == 21
    same, changed = with_and_without(lambda y: 100 * y + 1, is_other_t, first_bt)
    for name in PER_TOKEN:
        np.testing.assert_array_equal(
            changed[name][:, ~is_other_t], same[name][:, ~is_other_t], err_msg=name
        )
        is_same = changed[name][:, is_other_t] == same[name][:, is_other_t]
        assert not np.all(is_same), name


def test_nan_of_a_document_in_other_blocks_reaches_nothing(small_blocks):
    first_bt = np.stack([first_keys([QUERIES, 3 * QUERIES, 60], T)] * B)
    is_other_t = first_bt[0] == QUERIES
    clean, dirty = with_and_without(lambda y: y * jnp.nan, is_other_t, first_bt)
    for name in PER_TOKEN:
        np.testing.assert_array_equal(
            dirty[name][:, ~is_other_t], clean[name][:, ~is_other_t], err_msg=name
        )
        assert np.all(np.isnan(dirty[name][:, is_other_t])), name


PER_TOKEN = "out", "dq", "dk", "dv"


def with_and_without(change, is_changed_t, first_bt):
    """Return the results of random arrays, and of the same with some tokens changed."""
    sizes, rule, dtype = FEATURES["4 query heads a key head, sinks"]
    operands = arrays(sizes, dtype, has_sinks=True)
    where_t11 = jnp.asarray(is_changed_t)[:, None, None]
    changed = Arrays(
        *(
            y if y is operands.sinks_h else jnp.where(where_t11, change(y), y)
            for y in operands
        )
    )
    return (results("blocked", rule, each, first_bt) for each in (operands, changed))


def test_a_window_of_one_key_is_a_window():
    shapes = (1, 6, 4, 8), (1, 6, 2, 8), (1, 6, 2, 8)
    floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    first_bt = jax.ShapeDtypeStruct((1, 6), jnp.int32)
    run = functools.partial(attention, rule=Rule(window=1))
    assert jax.eval_shape(run, *floats, first_bt).shape == (1, 6, 4, 8)


WRONG = {
    "shapes of queries .* and values .* do not fit": {"k_bugi": (1, 5, 2, 8)},
    r"shapes of queries \(1, 6, 4, 9\)": {"q_bthi": (1, 6, 4, 9)},
    "3 key heads must divide 4 query heads": {
        "k_bugi": (1, 6, 3, 8), "v_bugj": (1, 6, 3, 8),
    },
    "3 sinks for 4 query heads": {"sinks_h": (3,)},
    r"first_bt has shape \(1, 5\), and queries have \(1, 6\)": {"first_bt": (1, 5)},
    "window is for causal attention": {"rule": Rule(is_causal=False, window=3)},
    "window=0 must be 1 or more keys": {"rule": Rule(window=0)},
    "6 queries and 5 keys: each query stands at a key": {
        "k_bugi": (1, 5, 2, 8), "v_bugj": (1, 5, 2, 8),
    },
    "6 queries and 7 keys: without is_causal they must be the same": {
        "k_bugi": (1, 7, 2, 8), "v_bugj": (1, 7, 2, 8), "rule": Rule(is_causal=False),
    },
    "implementation='block' is not one of auto, reference, blocked, cudnn": {
        "implementation": "block"
    },
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_arguments_that_do_not_fit_are_refused_with_numbers(message):
    shapes = {
        "q_bthi": (1, 6, 4, 8), "k_bugi": (1, 6, 2, 8), "v_bugj": (1, 6, 2, 8),
        "first_bt": (1, 6), "sinks_h": (4,),
    }  # fmt: skip
    given = shapes | WRONG[message]
    zeros = {
        name: np.zeros(given[name], np.int32 if name == "first_bt" else np.float32)
        for name in shapes
    }
    with pytest.raises(ValueError, match=message):
        attention(**given | zeros)
