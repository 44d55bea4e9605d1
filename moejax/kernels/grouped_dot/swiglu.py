"""A SwiGLU's first half and its backward pass, on grouped products without any fusing.

    into_mh = x @ into_gdh, gate in columns [:f] and up in [f:]     h = 2 f
    h_mf    = silu(gate) * up                                       dh_mf = dy @ down.T

The activation is a pass over all rows after the product. In the loop over blocks, while
a block is in cache, it gained nothing on CPUs: docs/log.md.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Product = Callable[[Array, Array, Array], Array]
"""(rows, matrices, rows_g) -> rows"""


def swiglu(
    forward: Product,
    x_md: Float[Array, "m d"],
    into_gdh: Float[Array, "g d h"],
    rows_g: Int[Array, " g"],
) -> tuple[Float[Array, "m f"], Float[Array, "m h"]]:
    """(h_mf, into_mh); both zero in rows past sum(rows_g), and in the dtype of x_md.

    The activation is taken in float32 at least. into_mh is what swiglu_dgrad needs.
    """
    into_mh = forward(x_md, into_gdh, rows_g)
    gate_mf, up_mf = _gate_and_up(into_mh)
    return (jax.nn.silu(gate_mf) * up_mf).astype(x_md.dtype), into_mh


def swiglu_dgrad(
    dgrad: Product,
    dy_md: Float[Array, "m d"],
    down_gfd: Float[Array, "g f d"],
    into_mh: Float[Array, "m h"],
    rows_g: Int[Array, " g"],
) -> tuple[Float[Array, "m h"], Float[Array, "m f"]]:
    """(dinto_mh, h_mf) of y = h @ down under the cotangent dy_md, in its dtype.

    into_mh is that of swiglu, zero in rows past sum(rows_g), and so are both results.
    h_mf is swiglu's once more, for the gradient of down: it need not be kept.
    """
    dh_mf = _wide(dgrad(dy_md, down_gfd, rows_g))
    gate_mf, up_mf = _gate_and_up(into_mh)
    sigmoid_mf = jax.nn.sigmoid(gate_mf)
    silu_mf = gate_mf * sigmoid_mf
    # The derivative of silu is sigmoid + silu (1 - sigmoid).
    dgate_mf = dh_mf * up_mf * (sigmoid_mf + silu_mf * (1 - sigmoid_mf))
    dinto_mh = jnp.concatenate([dgate_mf, dh_mf * silu_mf], axis=1)
    return dinto_mh.astype(dy_md.dtype), (silu_mf * up_mf).astype(dy_md.dtype)


def _gate_and_up(into_mh: Array) -> list[Array]:
    return jnp.split(_wide(into_mh), 2, axis=1)


def _wide(value: Array) -> Array:
    return value.astype(jnp.promote_types(value.dtype, jnp.float32))
