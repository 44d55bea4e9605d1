"""Muon for stacks of matrices that lie split over devices.

    momentum        average of gradients, Nesterov's look ahead
    all_to_all      each device gets whole matrices, its share of the stack
    Newton-Schulz   optax's five steps, each matrix by itself
    all_to_all      back to where the parameters rest

Every matrix is made orthogonal on one device, and no device holds more of them than it
holds parameters. Experts are split by expert already: they travel only over the axes
that split their width. Along axes over which a parameter is whole, such as dc, each
device does the same work and sends nothing (decision 0040).

Source: Jordan 2024, https://kellerjordan.github.io/posts/muon; the scale is that of Liu
et al. 2025, "Muon is scalable for LLM training", arXiv 2502.16982, section 2.2.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float

from moejax.axes import AxisNames

RMS = 0.2
"""Root mean square of an update, over the learning rate: that of AdamW's, so that both
train at the same rates (arXiv 2502.16982, equation 4)."""
BLOCK = 2**25
"""Number of elements of the matrices that are made orthogonal at a time. It bounds the
memory of the products, which is a few times 4 bytes for each."""

_NEWTON_SCHULZ = optax.contrib.scale_by_muon(beta=0.0, nesterov=False)
"""Without momentum, optax's Muon is its Newton-Schulz iteration alone."""


class MuonState(NamedTuple):
    """State of `scale_by_muon`."""

    count: jax.Array
    """Number of updates."""
    mu: optax.Updates
    """Averages of gradients, like the parameters."""


def scale_by_muon(momentum: float) -> optax.GradientTransformationExtraArgs:
    """Return Muon's direction for parameters [.., m, n], each a stack of matrices.

    An update is the orthogonal factor of Nesterov's momentum, times
    RMS * sqrt(max(m, n)). `update` takes `shardings`, a tree of NamedShardings of the
    parameters; without it matrices are whole on the device.
    """

    def init(params):
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(grads, state, params=None, *, shardings=None):
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(grads, state.mu, momentum, 1)
        ahead = jax.tree.map(
            lambda mean, grad: momentum * mean + (1 - momentum) * grad,
            optax.tree.bias_correction(mu, momentum, count + 1),
            optax.tree.bias_correction(grads, momentum, count),
        )
        if shardings is None:
            shardings = jax.tree.map(lambda _: None, grads)
        updates = jax.tree.map(
            lambda x, sharding: x if _is_masked(x) else orthogonal_update(x, sharding),
            ahead,
            shardings,
            is_leaf=_is_masked,
        )
        return updates, MuonState(count, mu)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_masked(leaf) -> bool:
    return isinstance(leaf, optax.MaskedNode)


def orthogonal_update(
    x: Float[Array, "*b m n"], sharding: NamedSharding | None
) -> Float[Array, "*b m n"]:
    """Return the orthogonal factors of a stack of matrices, scaled, in its sharding."""
    scale = RMS * math.sqrt(max(x.shape[-2:]))
    if sharding is None:
        return scale * _orthogonalize(x)
    spec = (*sharding.spec, *(None,) * (x.ndim - len(sharding.spec)))
    rows, columns = (_several(sharding, names) for names in spec[-2:])
    body = partial(_orthogonalize_parts, rows=rows, columns=columns)
    run = jax.shard_map(
        body, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=sharding.spec
    )
    return scale * run(x)


def _several(sharding: NamedSharding, names: AxisNames | None) -> tuple[str, ...]:
    """Return those of a dim's mesh axes that have several devices."""
    names = () if names is None else (names,) if isinstance(names, str) else names
    return tuple(name for name in names if sharding.mesh.shape[name] > 1)


def _orthogonalize_parts(
    part: Float[Array, "*b r c"], rows: tuple[str, ...], columns: tuple[str, ...]
) -> Float[Array, "*b r c"]:
    """Return this device's part of the orthogonal factors of a stack of matrices, from
    its part of the stack. Rows and columns are split over these mesh axes."""
    if not (along := rows + columns):
        return _orthogonalize(part)
    num_rows, num_columns = (
        math.prod(map(jax.lax.axis_size, names)) for names in (rows, columns)
    )
    r, c = part.shape[-2:]
    part_src = part.reshape(-1, r, c)
    num, devices = len(part_src), num_rows * num_columns
    share = -(-num // devices)
    padded = jnp.pad(part_src, ((0, devices * share - num), (0, 0), (0, 0)))
    parts = jax.lax.all_to_all(padded, along, 0, 0, tiled=True)
    parts = parts.reshape(num_rows, num_columns, share, r, c)
    whole = parts.transpose(2, 0, 3, 1, 4).reshape(share, num_rows * r, num_columns * c)
    whole = _orthogonalize(whole)
    parts = whole.reshape(share, num_rows, r, num_columns, c).transpose(1, 3, 0, 2, 4)
    back = jax.lax.all_to_all(parts.reshape(padded.shape), along, 0, 0, tiled=True)
    return back[:num].reshape(part.shape)


def _orthogonalize(x: Float[Array, "*b m n"]) -> Float[Array, "*b m n"]:
    """Return the orthogonal factor of each matrix of a stack, by Newton-Schulz."""
    stack = x.reshape(-1, *x.shape[-2:])
    one = lambda matrix: _NEWTON_SCHULZ.update(matrix, _NEWTON_SCHULZ.init(matrix))[0]  # noqa: E731
    at_once = max(1, BLOCK // math.prod(x.shape[-2:]))
    if len(stack) <= at_once:
        return jax.vmap(one)(stack).reshape(x.shape)
    return jax.lax.map(one, stack, batch_size=at_once).reshape(x.shape)
