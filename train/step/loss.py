"""Cross-entropy, split over the vocabulary, with gradients made in the forward pass.

Each device computes the logits of its slice of the vocabulary for the tokens of its
group (moejax.model.vocabulary), a chunk of tokens at a time:

    1. hidden states of the group's tokens are gathered, in the compute dtype;
    2. a chunk's logits are a product with the slice, in float32;
    3. their maxima, and then the sums of their exponentials and the targets' logits,
       are combined over the slices: three numbers a token;
    4. the gradient of the logits, softmax minus one-hot, is made while the logits are
       there, and a product with the slice makes the hidden states' gradient from it;
    5. the parts of the hidden states' gradient go home and are summed there; the
       gradient of the slice is added up over chunks, in float32.

A training step computes the logits once, as Liger Kernel does on one GPU (Hsu et al.
2024, arXiv:2410.10989): 6 FLOPs for each weight and token, where a backward pass that
makes logits again takes 8. The backward pass multiplies the gradients by the incoming
one, a number.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from moejax.axes import AXES, EXPERT, TENSOR
from moejax.model.vocabulary import BATCH, SLICE_AXES, TABLE, Slices, gather_group
from moejax.moe.weights.gather import sum_own


def cross_entropy(
    hidden_btd: Float[Array, "b t d"],
    head_vd: Float[Array, "v d"],
    targets_bt: Int[Array, "b t"],
    mesh: Mesh,
    chunk: int,
    z_loss: float = 0.0,
    weight_bt: Float[Array, "b t"] | None = None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the mean loss per token, and the nats per token in it.

    The loss is nats and `z_loss` times the mean of logsumexp(logits)^2, PaLM's z-loss.
    It has a gradient, and the nats have none. `weight_bt` are the weights of the tokens
    in the means, which become sums; None: all tokens have the same. The other arguments
    are those of `token_nats`.
    """
    args = hidden_btd, head_vd, targets_bt, weight_bt, mesh, chunk, z_loss
    loss, nats = _mean_loss(*args)
    return loss, jax.lax.stop_gradient(nats)


def token_nats(
    hidden_btd: Float[Array, "b t d"],
    head_vd: Float[Array, "v d"],
    targets_bt: Int[Array, "b t"],
    mesh: Mesh,
    chunk: int,
) -> Float[Array, "b t"]:
    """Return the nats of each target, which have no gradient.

    `head_vd` is the output embedding as it is stored. Products take it in the dtype of
    hidden_btd; logits are float32, or wider if that is. A device computes its tokens in
    t / chunk equal parts, one after the other; `chunk` divides t, or exceeds it.
    """
    arrays = jax.lax.stop_gradient((hidden_btd, head_vd))
    return _token_losses(*arrays, targets_bt, None, mesh, chunk)[0]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _mean_loss(hidden_btd, head_vd, targets_bt, weight_bt, mesh, chunk, z_loss):
    """Return the mean loss and the mean nats per token."""
    losses = _token_losses(hidden_btd, head_vd, targets_bt, weight_bt, mesh, chunk)
    return _means(*losses, weight_bt, z_loss)


def _mean_loss_forward(hidden_btd, head_vd, targets_bt, weight_bt, mesh, chunk, z_loss):
    """Return the means, and the gradients of the loss."""
    args = hidden_btd, head_vd, targets_bt, weight_bt, mesh, chunk
    *losses, d_hidden_btd, d_head_vd = _token_losses(*args, z_loss)
    d_head_vd = d_head_vd[: head_vd.shape[0]].astype(head_vd.dtype)
    return _means(*losses, weight_bt, z_loss), (d_hidden_btd, d_head_vd)


def _mean_loss_backward(mesh, chunk, z_loss, grads, d_means):
    d_loss, _ = d_means
    return *((grad * d_loss).astype(grad.dtype) for grad in grads), None, None


_mean_loss.defvjp(_mean_loss_forward, _mean_loss_backward)


def _means(nats_bt, square_bt, weight_bt, z_loss):
    mean = jnp.mean
    if weight_bt is not None:
        mean = lambda x_bt: jnp.sum(weight_bt * x_bt)  # noqa: E731
    nats = mean(nats_bt)
    return nats + z_loss * mean(square_bt), nats


@jax.named_scope("loss")
def _token_losses(hidden_btd, head_vd, targets_bt, weight_bt, mesh, chunk, z_loss=None):
    """Return nats and logsumexp(logits)^2 of each token [b, t].

    If `z_loss` is not None, return also the gradients of the mean loss by hidden_btd
    and by the padded head, in which each token has its weight.
    """
    slices = Slices(mesh, head_vd.shape[0])
    b, t, d = hidden_btd.shape
    num_chunks = t // min(chunk, t)

    def body(block_vd, hidden_btd, targets_bt, *weights):
        slice_vd = slices.gather(block_vd, hidden_btd.dtype)
        of_chunk = partial(_chunk, slice_vd, slices.is_real(), z_loss, b * t)
        row_cm = slices.row_of(gather_group(targets_bt.reshape(num_chunks, -1), 1))
        weights = [gather_group(x_bt.reshape(num_chunks, -1), 1) for x_bt in weights]
        hidden_cnd = hidden_btd.reshape(num_chunks, -1, d)

        def next_chunk(carry, args):
            # While a chunk is computed, the next one's hidden states travel, and the
            # gradient of those of the one before.
            (hidden_md, *grads), (next_nd, *of_rows) = carry, args
            losses, new_grads = of_chunk(hidden_md, *of_rows)
            home = ()
            if z_loss is not None:
                (sum_vd, last_md), (d_slice_vd, d_hidden_md) = grads, new_grads
                grads = sum_vd + d_slice_vd, d_hidden_md
                home = (_sum_at_home(last_md),)
            return (gather_group(next_nd), *grads), (losses, home)

        hidden_md = gather_group(hidden_cnd[0])
        zeros = ()
        if z_loss is not None:
            wide = jnp.promote_types(block_vd.dtype, jnp.float32)
            shapes = (slice_vd.shape, wide), (hidden_md.shape, hidden_md.dtype)
            zeros = tuple(jnp.zeros(*shape) for shape in shapes)
        (_, *grads), (losses, home) = jax.lax.scan(
            next_chunk,
            (hidden_md, *jax.lax.pcast(zeros, AXES, to="varying")),
            (jnp.roll(hidden_cnd, -1, axis=0), row_cm, *weights),
            unroll=num_chunks == 1,
        )
        losses = [x_cn.reshape(targets_bt.shape) for x_cn in losses]
        if z_loss is None:
            return tuple(losses)
        d_slice_vd, last_md = grads
        d_hidden_cnd = jnp.concatenate([home[0][1:], _sum_at_home(last_md)[None]])
        d_hidden_btd = d_hidden_cnd.reshape(hidden_btd.shape)
        return *losses, d_hidden_btd, slices.sum_gradient(d_slice_vd)

    weights = () if weight_bt is None else (weight_bt,)
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(TABLE, BATCH, BATCH, *(BATCH for _ in weights)),
        out_specs=(BATCH,) * 2 + (() if z_loss is None else (BATCH, TABLE)),
    )(slices.pad(head_vd), hidden_btd, targets_bt, *weights)


def _chunk(slice_vd, is_real_v, z_loss, num_tokens, hidden_md, row_m, weight_m=None):
    """Return nats and logsumexp(logits)^2 of this device's tokens [n] in a chunk, and
    gradients of the mean loss of `num_tokens`, or of the sum with these weights.

    They are those by this slice [v, d], and this slice's part of those by hidden_md
    [m, d]; none if `z_loss` is None.
    """
    dtype = hidden_md.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    product = partial(jnp.einsum, preferred_element_type=wide)
    logits_mv = product("md,vd->mv", hidden_md, slice_vd)
    logits_mv = jnp.where(is_real_v, logits_mv, -jnp.inf)
    is_target_mv = jnp.arange(len(slice_vd)) == row_m[:, None]
    max_m = jax.lax.pmax(jnp.max(logits_mv, axis=1), SLICE_AXES)
    exp_m = jnp.sum(jnp.exp(logits_mv - max_m[:, None]), axis=1)
    chosen_m = jnp.sum(jnp.where(is_target_mv, logits_mv, 0), axis=1)
    exp_m, chosen_m = jax.lax.psum((exp_m, chosen_m), SLICE_AXES)
    norm_m = max_m + jnp.log(exp_m)
    losses = _own(norm_m - chosen_m), _own(norm_m * norm_m)
    if z_loss is None:
        return losses, ()
    share_mv = jnp.exp(logits_mv - norm_m[:, None])
    d_logits_mv = share_mv * (1 + 2 * z_loss * norm_m[:, None]) - is_target_mv
    if weight_m is None:
        d_logits_mv = (d_logits_mv / num_tokens).astype(dtype)
    else:
        d_logits_mv = (d_logits_mv * weight_m[:, None]).astype(dtype)
    d_hidden_md = jnp.einsum("mv,vd->md", d_logits_mv, slice_vd)
    d_slice_vd = product("mv,md->vd", d_logits_mv, hidden_md)
    return losses, (d_slice_vd, d_hidden_md)


def _own(x_m):
    """Return the values of this device's tokens among those of its group."""
    return x_m.reshape(jax.lax.axis_size(EXPERT), -1)[jax.lax.axis_index(EXPERT)]


def _sum_at_home(part_md: Float[Array, "m d"]) -> Float[Array, "n d"]:
    """Return the sum over slices of the parts for this device's own tokens.

    `part_md` are this device's parts for all tokens of its group. They travel along
    expert in their own dtype, and are summed in float32, or wider if that is. The sum
    over tensor is of these, and is rounded once, at its end.
    """
    part_wx = part_md.reshape(jax.lax.axis_size(EXPERT), -1)
    sum_x = jax.lax.psum(sum_own(part_wx, (EXPERT,), part_md.dtype), TENSOR)
    return sum_x.reshape(-1, part_md.shape[1]).astype(part_md.dtype)
