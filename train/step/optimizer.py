"""The optimizer in optax: AdamW or Muon, the learning rate, weight decay, clipping of
the global norm; and which parameters train."""

import jax
import jax.numpy as jnp
import optax

from moejax.config import Optimizer
from moejax.model.parameters import is_frozen, is_matrix, name_of
from train.step.muon import scale_by_muon

UNDECAYED = ("scale_d", "embed_vd", "head_vd", "bias", "sinks_h")
"""Parts of the names of parameters without weight decay: norm scales, embeddings,
biases and sinks. Decay is for matrices that multiply activations."""


def learning_rate(cfg: Optimizer, num_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the step.

    It rises linearly to cfg.learning_rate in cfg.warmup_steps, and then follows
    cfg.decay down to cfg.final_lr_ratio times the peak. 'wsd' falls as 1 - sqrt(t) does
    (Haegele et al. 2024, arXiv 2405.18392, section 3).
    """
    peak, end = cfg.learning_rate, cfg.learning_rate * cfg.final_lr_ratio
    warmup = min(cfg.warmup_steps, num_steps)
    rest = max(num_steps - warmup, 1)
    stable = max(decay_begin(cfg, num_steps) - warmup, 0)

    def wsd(step):
        done = jnp.clip((step - stable) / max(rest - stable, 1), 0, 1)
        return peak + (end - peak) * jnp.sqrt(done)

    decays = {
        "cosine": optax.cosine_decay_schedule(peak, rest, cfg.final_lr_ratio),
        "linear": optax.linear_schedule(peak, end, rest),
        "constant": optax.constant_schedule(peak),
        "wsd": wsd,
    }
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, decays[cfg.decay]], [warmup])


def decay_begin(cfg: Optimizer, num_steps: int) -> int:
    """Return the number of steps after which 'wsd' begins to decay."""
    return num_steps - round(cfg.decay_share * num_steps)


def trained(params, cfg: Optimizer):
    """Return a tree of parameters, or of what they have, with None for frozen ones."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: None if is_frozen(name_of(path), cfg.frozen) else leaf,
        params,
    )


def with_frozen(values, params):
    """Return the tree of all parameters: `values` of those that train, and of `params`
    the frozen ones."""
    return jax.tree.map(
        lambda value, param: param if value is None else value,
        values,
        params,
        is_leaf=lambda leaf: leaf is None,
    )


def is_decayed(params):
    """Return a tree of booleans: whether weight decay acts on each parameter."""

    def has_decay(path, _):
        return not any(name in jax.tree_util.keystr(path) for name in UNDECAYED)

    return jax.tree_util.tree_map_with_path(has_decay, params)


def make_optimizer(cfg: Optimizer, num_steps: int) -> optax.GradientTransformation:
    """Return the configured optimizer, for trees of the parameters that train.

    With Muon, `update` takes the parameters' `shardings` (train.step.muon).
    """
    direction = _resting_in(cfg.mu_dtype, optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps))
    if cfg.name == "muon":
        muon = _resting_in(cfg.mu_dtype, scale_by_muon(cfg.momentum))
        direction = optax.partition({"adam": direction, "muon": muon}, _labels)
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity(),
        direction,
        optax.add_decayed_weights(cfg.weight_decay, mask=is_decayed),
        optax.scale_by_learning_rate(learning_rate(cfg, num_steps)),
    )


def _labels(params):
    """Return a tree with the name of each parameter's optimizer."""

    def label(path, leaf):
        return "muon" if is_matrix(name_of(path), leaf.shape) else "adam"

    return jax.tree_util.tree_map_with_path(label, params)


def _resting_in(dtype: str, optimizer: optax.GradientTransformation):
    """Return an optimizer with an average `mu` that is `dtype` between updates, and
    float32 within them.

    optax's own `mu_dtype` multiplies the resting average by b1 in that dtype, and 0.9
    is 0.8984 in bfloat16.
    """
    if dtype == "float32":
        return optimizer

    def init(params):
        state = optimizer.init(params)
        return state._replace(mu=optax.tree.cast(state.mu, dtype))

    def update(grads, state, params=None, **others):
        state = state._replace(mu=optax.tree.cast(state.mu, "float32"))
        updates, state = optimizer.update(grads, state, params, **others)
        return updates, state._replace(mu=optax.tree.cast(state.mu, dtype))

    return optax.GradientTransformationExtraArgs(init, update)
