"""Rotary position embedding (RoPE): frequencies, their scaling, and the rotation.

A head's components are rotated in pairs, pair j by position * theta**(-2j/i) (Su et al.
2021, RoFormer, equation 34), where i is the number of rotated components. Scaling
(moejax.config.Rope) divides low frequencies, so that sequences longer than those of
pre-training turn no pair further than it has been turned before.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moejax.config import Rope


class Rotation(NamedTuple):
    """Cosine and sine of the angles by which RoPE rotates the i/2 pairs of a head's
    first i components, for each token."""

    cos_btj: Float[Array, "b t j"]
    sin_btj: Float[Array, "b t j"]


def rotation(
    position_bt: Int[Array, "b t"],
    rotary_dim: int,
    theta: float,
    scaling: Rope,
) -> Rotation:
    """Return the rotation of `rotary_dim` components by position times frequency, in
    float32."""
    if scaling.scaling == "none":
        half = rotary_dim // 2
        frequency_j = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    else:
        frequency_j = jnp.float32(scaled_frequencies(rotary_dim, theta, scaling))
    angle_btj = position_bt.astype(jnp.float32)[..., None] * frequency_j
    cos_btj, sin_btj = jnp.cos(angle_btj), jnp.sin(angle_btj)
    if (factor := scaling.attention_factor()) != 1:
        cos_btj, sin_btj = factor * cos_btj, factor * sin_btj
    return Rotation(cos_btj, sin_btj)


def scaled_frequencies(rotary_dim: int, theta: float, scaling: Rope) -> np.ndarray:
    """Return the frequency of each pair, in radians per token, in float64."""
    frequency_j = theta ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    return frequency_j * (
        1 - (1 - 1 / scaling.factor) * _share_j(frequency_j, theta, scaling)
    )


def _share_j(frequency_j: np.ndarray, theta: float, scaling: Rope) -> np.ndarray:
    """Return by how much each frequency is divided: from 0, it is kept, to 1, it is
    divided by the whole factor."""
    if scaling.scaling == "linear":
        return np.ones_like(frequency_j)
    length = scaling.original_max_position_embeddings
    if scaling.scaling == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        rotations_j = length * frequency_j / (2 * math.pi)
        return np.clip((high - rotations_j) / max(high - low, 1e-9), 0, 1)
    num_pairs = len(frequency_j)
    low, high = (  # pairs that turn beta times within the original length
        num_pairs * math.log(length / (2 * math.pi * beta)) / math.log(theta)
        for beta in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    return np.clip((np.arange(num_pairs) - low) / max(high - low, 1e-3), 0, 1)


def rope(x_bthi: Float[Array, "b t h i"], angles: Rotation) -> Float[Array, "b t h i"]:
    """Rotate the pairs of each head's first components; others stay as they are.

    Pair j is elements j and j + i/2 of the i rotated components (the half-split order
    of Llama).
    """
    cos, sin = angles.cos_btj[:, :, None], angles.sin_btj[:, :, None]
    width, rest_bthi = 2 * cos.shape[-1], None
    if width < x_bthi.shape[-1]:
        x_bthi, rest_bthi = jnp.split(x_bthi, [width], axis=-1)
    first, second = jnp.split(x_bthi.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    turned_bthi = jnp.concatenate(rotated, axis=-1).astype(x_bthi.dtype)
    if rest_bthi is None:
        return turned_bthi
    return jnp.concatenate([turned_bthi, rest_bthi], axis=-1)
