"""Build documents and arrays of attention, and run implementations with all gradients.

Documents are given by their edges, the keys at which one begins; key 0 always is one.
"""

import functools
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.kernels.attention import Rule, attention, portable


class Sizes(NamedTuple):
    """Sizes of an attention, by the letters of its arrays."""

    b: int = 2
    t: int = 83
    u: int = 83
    h: int = 4
    g: int = 4
    i: int = 8
    j: int = 8


class Arrays(NamedTuple):
    """Arrays that attention is differentiated by, and the gradient of its output."""

    q_bthi: jax.Array
    k_bugi: jax.Array
    v_bugj: jax.Array
    sinks_h: jax.Array | None
    dout_bthj: jax.Array


def arrays(sizes: Sizes, dtype=jnp.float32, has_sinks=False, seed=0) -> Arrays:
    """Return normal random arrays."""
    b, t, u, h, g, i, j = sizes
    rng = np.random.default_rng((seed, *sizes))
    shapes = (b, t, h, i), (b, u, g, i), (b, u, g, j), (h,), (b, t, h, j)
    q, k, v, sinks, dout = (
        jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes
    )
    return Arrays(q, k, v, sinks if has_sinks else None, dout)


def first_keys(edges: Iterable[int], num_keys: int) -> np.ndarray:
    """Return the key [u] at which the document of each key begins."""
    key_u = np.arange(num_keys, dtype=np.int32)
    return np.maximum.accumulate(np.where(np.isin(key_u, list(edges)), key_u, 0))


def edges_by_name(num_keys: int, block: int) -> dict[str, list[int]]:
    """Return named documents of a row: their edges at borders of blocks, beside them,
    everywhere and nowhere, and at random."""
    borders = list(range(block, num_keys, block))
    named = {
        "one document": [],
        "documents of one token": list(range(num_keys)),
        "edges at borders": borders,
        "edges before borders": [border - 1 for border in borders],
        "edges after borders": [border + 1 for border in borders],
        "edges around borders": [x + y for x in borders for y in (-1, 0, 1)],
        "one edge": borders[:1],
        "the last token alone": [num_keys - 1],
    }
    return named | {
        f"random edges {seed}": random_edges(num_keys, seed) for seed in range(4)
    }


def random_edges(num_keys: int, seed: int) -> list[int]:
    """Return up to 12 random edges."""
    rng = np.random.default_rng(seed)
    return sorted(rng.integers(1, num_keys, rng.integers(1, 13)).tolist())


def is_read(first_t: np.ndarray, num_keys: int, rule: Rule, start: int) -> np.ndarray:
    """Return whether each query reads each key [t, u], by comparison one by one."""
    is_read_tu = np.zeros((len(first_t), num_keys), bool)
    for query, first in enumerate(first_t):
        place = start + query
        for key in range(num_keys):
            if rule.is_causal:
                is_seen = first <= key <= place
                is_near = rule.window is None or key > place - rule.window
                is_read_tu[query, key] = is_seen and is_near
            else:
                is_read_tu[query, key] = first_t[key] == first
    return is_read_tu


def results(
    impl: str, rule: Rule, arrays: Arrays, first_bt, start: int = 0
) -> dict[str, jax.Array]:
    """Return the output of an implementation and all gradients, by name.

    One program is compiled for each implementation, rule and shape.
    """
    program = _program(impl, rule, (portable.QUERIES, portable.KEYS))
    return program(arrays, jnp.asarray(first_bt), jnp.int32(start))


@functools.cache
def _program(impl: str, rule: Rule, blocks: tuple[int, int]):
    """Return the compiled function of `results`. It depends on the sizes of blocks,
    which tests make small."""
    del blocks

    def run(arrays: Arrays, first_bt, start) -> dict[str, jax.Array]:
        def of_floats(q_bthi, k_bugi, v_bugj, sinks_h):
            inputs = q_bthi, k_bugi, v_bugj, first_bt
            options = {"rule": rule, "start": start, "implementation": impl}
            return attention(*inputs, sinks_h=sinks_h, **options)

        out_bthj, vjp = jax.vjp(of_floats, *arrays[:4])
        leaves = (out_bthj, *vjp(arrays.dout_bthj))
        named = zip(("out", "dq", "dk", "dv", "dsinks"), leaves, strict=True)
        return {name: leaf for name, leaf in named if leaf is not None}

    return jax.jit(run)
