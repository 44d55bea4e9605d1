"""Cross-entropy in chunks of positions, so that not all logits exist at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def cross_entropy(
    hidden_btd: Float[Array, "b t d"],
    head_vd: Float[Array, "v d"],
    targets_bt: Int[Array, "b t"],
    chunk: int,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the mean nats per token and the mean of logsumexp(logits)^2.

    The second is PaLM's z-loss. `chunk` positions at a time have logits.
    """
    nats_bt, square_bt = token_nats(hidden_btd, head_vd, targets_bt, chunk)
    return jnp.mean(nats_bt), jnp.mean(square_bt)


@jax.named_scope("loss")
def token_nats(
    hidden_btd: Float[Array, "b t d"],
    head_vd: Float[Array, "v d"],
    targets_bt: Int[Array, "b t"],
    chunk: int,
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """Return the nats of each target and logsumexp(logits)^2 at its position.

    Logits are float32; hidden_btd and head_vd share any dtype. `chunk` divides t, or
    exceeds it.
    """
    b, t, d = hidden_btd.shape
    count = t // min(chunk, t)
    hidden_cbtd = hidden_btd.reshape(b, count, -1, d).swapaxes(0, 1)
    targets_cbt = targets_bt.reshape(b, count, -1).swapaxes(0, 1)

    @jax.checkpoint
    def chunk_nats(args):
        hidden, target = args
        logits = jnp.einsum(
            "btd,vd->btv",
            hidden,
            head_vd,
            preferred_element_type=jnp.float32,
        )
        norm = jax.nn.logsumexp(logits, axis=-1)
        chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        return norm - chosen, norm * norm

    if count == 1:
        return chunk_nats((hidden_btd, targets_bt))
    chunks = jax.lax.map(chunk_nats, (hidden_cbtd, targets_cbt))
    return jax.tree.map(lambda leaf: leaf.swapaxes(0, 1).reshape(b, t), chunks)
