"""Ranges of keys and of blocks, against a comparison of each query with each key."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.kernels.attention import Rule, portable
from moejax.kernels.attention.reading import Inputs, key_range
from tests.support.attention_cases import edges_by_name, first_keys, is_read

NUM_KEYS = 48
EDGES = edges_by_name(NUM_KEYS, block=8)
CASES = {
    "causal": (Rule(), NUM_KEYS, 0, (16, 8)),
    "causal, few rows": (Rule(), NUM_KEYS, 0, (8, 16)),
    "a window of one key": (Rule(window=1), NUM_KEYS, 0, (8, 16)),
    "a window wider than a block": (Rule(window=11), NUM_KEYS, 0, (16, 8)),
    "not causal": (Rule(is_causal=False), NUM_KEYS, 0, (16, 8)),
    "not causal, one block of keys": (Rule(is_causal=False), NUM_KEYS, 0, (16, 48)),
    "a cache": (Rule(), 16, 21, (8, 16)),
    "a cache and a window": (Rule(window=9), 32, 16, (16, 8)),
}
"""Rules, the number of queries and the key of the first one, and the sizes of blocks of
queries and of keys."""


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_those_with_a_read_key_and_no_others(name, monkeypatch):
    rule, num_queries, start, rows_columns = CASES[name]
    rows, columns = rows_columns
    sizes = {"QUERIES": rows, "KEYS": columns, "FEW_BLOCKS": 0}  # each row by itself
    for size, value in sizes.items():
        monkeypatch.setattr(portable, size, value)
    first_bu = np.stack([first_keys(edges, NUM_KEYS) for edges in EDGES.values()])
    first_bt = first_bu[:, start : start + num_queries]
    keys, of_queries, of_keys = jax.device_get(
        ranges(rule, rows_columns, jnp.asarray(first_bt), start)
    )
    for row, first_t in enumerate(first_bt):
        is_read_tu = is_read(first_t, NUM_KEYS, rule, start)
        key_u = np.arange(NUM_KEYS)
        low_t1, high_t1 = keys.low_bt[row][:, None], keys.high_bt[row][:, None]
        np.testing.assert_array_equal((low_t1 <= key_u) & (key_u < high_t1), is_read_tu)
        cut = is_read_tu.reshape(-1, rows, NUM_KEYS // columns, columns)
        is_needed_nc = cut.any(axis=(1, 3))
        np.testing.assert_array_equal(
            visited(of_queries, row, is_needed_nc.shape[1]), is_needed_nc
        )
        np.testing.assert_array_equal(
            visited(of_keys, row, is_needed_nc.shape[0]), is_needed_nc.T
        )


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def ranges(rule, rows_columns, first_bt, start):
    """Return the keys of each query, the blocks of keys of each block of queries, and
    the blocks of queries of each block of keys. The sizes of blocks are part of the key
    under which JAX caches the trace."""
    del rows_columns
    b, t = first_bt.shape
    q, k = jnp.zeros((b, t, 1, 1)), jnp.zeros((b, NUM_KEYS, 1, 1))
    inputs = Inputs(q, k, k, first_bt, jnp.int32(start))
    blocks = portable.Blocks.of(inputs, rule)
    return key_range(inputs, rule), blocks.key_blocks(), blocks.query_blocks()


def visited(blocks, row: int, num_blocks: int) -> np.ndarray:
    """Return whether each block of one side visits each of the other."""
    begin_n1, end_n1 = blocks.begin_zn[row][:, None], blocks.end_zn[row][:, None]
    other = np.arange(num_blocks)
    return (begin_n1 <= other) & (other < end_n1)
