"""Which keys each query reads.

Documents, causality and a window all give one thing: for each query a range of keys
[low, high), whose ends never fall from one query to the next. For example, with two
documents and causal attention over a window of 3 keys:

    query   0  1  2  3  4 | 5  6  7            key  0 1 2 3 4 5 6 7
    first   0  0  0  0  0 | 5  5  5        query 3    x x x          [1, 4)
    low     0  0  0  1  2 | 5  5  5        query 4      x x x        [2, 5)
    high    1  2  3  4  5 | 6  7  8        query 6            x x    [5, 7)
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Rule(NamedTuple):
    """Static part of an attention, equal for all tokens of a layer."""

    scale: float | None = None
    """Factor of the products of queries and keys; None: 1 / sqrt(width of a query)."""
    is_causal: bool = True
    """Whether queries read no key after their own position."""
    window: int | None = None
    """Largest number of keys that a query reads, its own included. None: no limit.
    Causal attention only."""
    soft_cap: float | None = None
    """Bound of the scores: a score s becomes soft_cap * tanh(s / soft_cap). None: no
    bound."""


CAUSAL = Rule()
"""The rule of most models: every key of the document so far."""


class Inputs(NamedTuple):
    """Arrays that attention reads, in the layout of the model.

    The heads of queries are in groups: query head h reads key head h // (heads / g).
    """

    q_bthi: Float[Array, "b t h i"]
    """Queries."""
    k_bugi: Float[Array, "b u g i"]
    """Keys."""
    v_bugj: Float[Array, "b u g j"]
    """Values."""
    first_bt: Int[Array, "b t"]
    """Key at which each query's document begins. It never falls along a row."""
    start: Int[Array, ""]
    """Key at whose place the first query stands; the others follow it. There is a key
    at the place of each, which only a caller can check: start + t <= u."""


class KeyRange(NamedTuple):
    """Range of keys [low, high) that each query reads. Neither end ever falls from one
    query of a row to the next."""

    low_bt: Int[Array, "b t"]
    """First key of the range."""
    high_bt: Int[Array, "b t"]
    """Key after the last one."""


def check(inputs: Inputs, rule: Rule, num_sinks: int | None) -> None:
    """Raise ValueError for shapes that do not fit each other, and for rules that say
    nothing."""
    q, k, v = (array.shape for array in inputs[:3])
    if k[:3] != v[:3] or q[0] != k[0] or q[3] != k[3]:
        raise ValueError(f"shapes of queries {q}, keys {k} and values {v} do not fit")
    if q[2] % k[2]:
        raise ValueError(f"{k[2]} key heads must divide {q[2]} query heads")
    if num_sinks not in (None, q[2]):
        raise ValueError(f"{num_sinks} sinks for {q[2]} query heads: give one to each")
    if inputs.first_bt.shape != q[:2]:
        found = inputs.first_bt.shape
        raise ValueError(f"first_bt has shape {found}, and queries have {q[:2]}")
    if rule.window is not None and not rule.is_causal:
        raise ValueError("window is for causal attention: set is_causal, or no window")
    if rule.window is not None and rule.window < 1:
        raise ValueError(f"window={rule.window} must be 1 or more keys")
    if q[1] > k[1]:
        raise ValueError(f"{q[1]} queries and {k[1]} keys: each query stands at a key")
    if not rule.is_causal and q[1] != k[1]:
        raise ValueError(
            f"{q[1]} queries and {k[1]} keys: without is_causal they must be the same "
            "tokens, because a query reads its document to the end"
        )


def scale(inputs: Inputs, rule: Rule) -> float:
    """Return the factor of the products of queries and keys."""
    width = inputs.q_bthi.shape[-1]
    return width**-0.5 if rule.scale is None else rule.scale


def sum_dtype(*arrays: Array) -> jnp.dtype:
    """Return the dtype in which scores and sums of these arrays are taken."""
    return jnp.result_type(jnp.float32, *arrays)


def mean_gradient(
    out_bthj: Float[Array, "b t h j"], dout_bthj: Float[Array, "b t h j"]
) -> Float[Array, "b h t"]:
    """Return the product of each output with its gradient, which is the mean of the
    gradients of a query's weights. FlashAttention calls it delta or D."""
    dtype = sum_dtype(out_bthj)
    return jnp.einsum("bthj,bthj->bht", out_bthj.astype(dtype), dout_bthj.astype(dtype))


def key_range(inputs: Inputs, rule: Rule) -> KeyRange:
    """Return the range of keys that each query reads."""
    first_bt = inputs.first_bt.astype(jnp.int32)
    place_t = inputs.start + jnp.arange(first_bt.shape[1], dtype=jnp.int32)
    if not rule.is_causal:
        return KeyRange(first_bt, _document_end(first_bt))
    low_bt = first_bt
    if rule.window is not None:
        low_bt = jnp.maximum(low_bt, place_t - rule.window + 1)
    return KeyRange(low_bt, jnp.broadcast_to(place_t + 1, first_bt.shape))


def _document_end(first_bt: Int[Array, "b t"]) -> Int[Array, "b t"]:
    """Return the token after each token's document, where the rows are whole."""
    num_tokens = first_bt.shape[1]
    place_t = jnp.arange(num_tokens, dtype=jnp.int32)
    edge_bt = jnp.where(first_bt == place_t, place_t, num_tokens)
    next_bt = jax.lax.cummin(edge_bt, axis=1, reverse=True)
    return jnp.pad(next_bt[:, 1:], ((0, 0), (0, 1)), constant_values=num_tokens)
