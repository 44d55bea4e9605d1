"""The definition of attention, against a loop in NumPy. JAX derives its gradients."""

import numpy as np
import pytest

from moejax.kernels.attention import Rule
from tests.support.attention_cases import (
    Arrays,
    Sizes,
    arrays,
    first_keys,
    is_read,
    random_edges,
    results,
)
from tests.support.close import assert_close

CASES = {
    "a cache, a window, sinks": (
        Sizes(t=9, u=24, h=8, g=2, j=5),
        Rule(window=4, scale=0.7),
        10,
    ),
    "not causal, soft cap, sinks": (
        Sizes(t=24, u=24, h=2, g=1),
        Rule(is_causal=False, soft_cap=1.2),
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_is_a_loop_over_queries(name):
    sizes, rule, start = CASES[name]
    operands = arrays(sizes, has_sinks=True)
    first_bt = documents(sizes)[:, start : start + sizes.t]
    actual = results("reference", rule, operands, first_bt, start)["out"]
    assert_close(actual, loop(rule, operands, first_bt, start), dtype=np.float32)


def documents(sizes: Sizes) -> np.ndarray:
    """Return the first keys [b, u] of rows of random documents."""
    edges = (random_edges(sizes.u, row) for row in range(sizes.b))
    return np.stack([first_keys(row, sizes.u) for row in edges])


def loop(rule: Rule, operands: Arrays, first_bt: np.ndarray, start: int) -> np.ndarray:
    """Return the output of each row, query and head, one by one, in float64."""
    q_bthi, k_bugi, v_bugj, sinks_h, _ = (np.asarray(y, np.float64) for y in operands)
    (b, t, h, i), (_, u, g, j) = q_bthi.shape, v_bugj.shape
    scale = i**-0.5 if rule.scale is None else rule.scale
    out_bthj = np.zeros((b, t, h, j))
    for row in range(b):
        is_read_tu = is_read(first_bt[row], u, rule, start)
        for query, head in np.ndindex(t, h):
            key_head = head // (h // g)
            read_x = np.flatnonzero(is_read_tu[query])
            score_x = scale * k_bugi[row, read_x, key_head] @ q_bthi[row, query, head]
            if rule.soft_cap is not None:
                score_x = rule.soft_cap * np.tanh(score_x / rule.soft_cap)
            weight_x = np.exp(score_x)
            weight_x /= weight_x.sum() + np.exp(sinks_h[head])
            out_bthj[row, query, head] = weight_x @ v_bugj[row, read_x, key_head]
    return out_bthj
