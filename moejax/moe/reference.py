"""Reference MoE layer that defines the result: every expert computes every token.

The cost is O(n * e) for n tokens and e experts.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moejax.moe.types import Routes
from moejax.moe.weights.compression import ExpertWeights


def moe(x_nd: Float[Array, "n d"], routes: Routes, weights: ExpertWeights):
    """Return the sum over a token's choices of gate times the chosen expert's SwiGLU.

    A choice of -1 adds nothing.
    """
    num_experts = weights["gate_edf"].shape[0]
    hidden_enf = jax.nn.silu(jnp.einsum("nd,edf->enf", x_nd, weights["gate_edf"]))
    hidden_enf = hidden_enf * jnp.einsum("nd,edf->enf", x_nd, weights["up_edf"])
    y_end = jnp.einsum("enf,efd->end", hidden_enf, weights["down_efd"])
    is_chosen_nke = routes.expert_nk[..., None] == jnp.arange(num_experts)
    gate_ne = jnp.sum(jnp.where(is_chosen_nke, routes.gate_nk[..., None], 0.0), axis=1)
    return jnp.einsum("ne,end->nd", gate_ne.astype(y_end.dtype), y_end)
