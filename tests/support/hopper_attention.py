"""Run attention by the Hopper kernels in the interpreter, and by its definition.

Each row of a batch has documents of its own, because one call of the interpreter takes
seconds, whatever the number of its rows.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from moejax.kernels.attention import reference
from moejax.kernels.attention.hopper import kernels
from moejax.kernels.attention.reading import CAUSAL, Inputs, Rule

BORDERS = (63, 64, 65, 127, 128, 129, 191, 192, 193)
"""Tokens at and beside the borders of the rows of a warpgroup and of a tile."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """Sizes and rule of an attention."""

    t: int = 256
    """Number of queries."""
    u: int | None = None
    """Number of keys; None means as many as queries."""
    heads: tuple[int, int] = (2, 1)
    """Numbers of query heads and of key heads."""
    widths: tuple[int, int] = (64, 64)
    """Widths of queries and of values."""
    start: int = 0
    """Key at whose place the first query stands."""
    rule: Rule = CAUSAL
    dtype: str = "bfloat16"

    @property
    def num_keys(self) -> int:
        """Number of keys."""
        return self.t if self.u is None else self.u


def random_edges(num_tokens: int, num_documents: int, seed: int) -> list[int]:
    """Return the first tokens of documents, drawn at random."""
    drawn = np.random.default_rng(seed).choice(
        np.arange(1, num_tokens), num_documents - 1, replace=False
    )
    return [0, *sorted(drawn.tolist())]


def make_inputs(setup: Setup, rows: Sequence[Sequence[int]], seed: int = 0) -> Inputs:
    """Return random inputs. Each item of `rows` has the first keys of the documents of
    one row of the batch."""
    random = np.random.default_rng(seed)
    (h, g), (i, j) = setup.heads, setup.widths
    b, t, u = len(rows), setup.t, setup.num_keys
    floats = (
        jnp.asarray(random.standard_normal(dims), setup.dtype)
        for dims in ((b, t, h, i), (b, u, g, i), (b, u, g, j))
    )
    place_t = setup.start + np.arange(t)
    first_bt = [
        np.asarray(edges)[np.searchsorted(edges, place_t, "right") - 1]
        for edges in rows
    ]
    first_bt = jnp.asarray(np.stack(first_bt), jnp.int32)
    return Inputs(*floats, first_bt, jnp.int32(setup.start))


def make_dout(setup: Setup, num_rows: int) -> jax.Array:
    """Return random gradients of the output."""
    dims = num_rows, setup.t, setup.heads[0], setup.widths[1]
    drawn = np.random.default_rng(1).standard_normal(dims)
    return jnp.asarray(drawn, setup.dtype)


def interpreted(inputs: Inputs, rule: Rule, dout_bthj=None, monkeypatch=None):
    """Return the output, the logarithm of the sum and, with `dout_bthj`, the gradients.

    With `monkeypatch`, assert that no kernel had a race.
    """
    states = [] if monkeypatch is None else watch_races(monkeypatch)

    def both(inputs, dout_bthj):
        out_bthj, lse_bht = kernels.forward(inputs, rule, interpret=True)
        results = {"out": out_bthj, "lse": lse_bht}
        if dout_bthj is not None:
            gradients = kernels.backward(
                inputs, rule, out_bthj, lse_bht, dout_bthj, interpret=True
            )
            results |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        return results

    results = jax.tree.map(np.asarray, jax.jit(both)(inputs, dout_bthj))
    if monkeypatch is not None:
        assert len(states) == (1 if dout_bthj is None else 3)
        assert not any(state.races_found for state in states)
    return results


def watch_races(monkeypatch) -> list:
    """Return a list that gets the race detector of each kernel that is interpreted. The
    interpreter itself keeps that of the last one."""
    states, make = [], gpu_callbacks.GPURaceDetectionState

    def record(*args, **kwargs):
        states.append(make(*args, **kwargs))
        return states[-1]

    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", record)
    return states


def expected(inputs: Inputs, rule: Rule, dout_bthj):
    """Return the output and the gradients by the definition, in float32."""

    @jax.jit
    def run(floats, dout_bthj):
        def of_floats(*floats):
            return reference.attention(Inputs(*floats, *inputs[3:]), rule)

        out_bthj, back = jax.vjp(of_floats, *floats)
        gradients = zip(("dq", "dk", "dv"), back(dout_bthj), strict=True)
        return {"out": out_bthj, **dict(gradients)}

    return run(*jax.tree.map(lambda y: y.astype(jnp.float32), (inputs[:3], dout_bthj)))
