"""AdamW in optax: learning-rate schedule, masked weight decay, global-norm clipping."""

import jax
import optax

from moejax.config import Optimizer

UNDECAYED = ("scale_d", "embed_vd", "head_vd", "bias", "sinks_h")
"""Parts of the names of parameters without weight decay: norm scales, embeddings,
biases and sinks. Decay is for matrices that multiply activations."""


def learning_rate(cfg: Optimizer, num_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the step.

    It rises linearly to cfg.learning_rate in cfg.warmup_steps, and then follows
    cfg.decay down to cfg.final_lr_ratio times the peak.
    """
    peak, end = cfg.learning_rate, cfg.learning_rate * cfg.final_lr_ratio
    warmup = min(cfg.warmup_steps, num_steps)
    rest = max(num_steps - warmup, 1)
    decays = {
        "cosine": optax.cosine_decay_schedule(peak, rest, cfg.final_lr_ratio),
        "linear": optax.linear_schedule(peak, end, rest),
        "constant": optax.constant_schedule(peak),
    }
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, decays[cfg.decay]], [warmup])


def is_decayed(params):
    """Return a tree of booleans: whether weight decay acts on each parameter."""

    def has_decay(path, _):
        return not any(name in jax.tree_util.keystr(path) for name in UNDECAYED)

    return jax.tree_util.tree_map_with_path(has_decay, params)


def make_optimizer(cfg: Optimizer, num_steps: int) -> optax.GradientTransformation:
    """Return AdamW with the configured clipping, weight decay and schedule."""
    adam = optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps)
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity(),
        adam if cfg.mu_dtype == "float32" else _resting_in(cfg.mu_dtype, adam),
        optax.add_decayed_weights(cfg.weight_decay, mask=is_decayed),
        optax.scale_by_learning_rate(learning_rate(cfg, num_steps)),
    )


def _resting_in(dtype: str, adam: optax.GradientTransformation):
    """Return Adam with a first moment that is `dtype` between updates, and float32
    within them.

    optax's own `mu_dtype` multiplies the resting moment by b1 in that dtype, and 0.9 is
    0.8984 in bfloat16.
    """

    def init(params):
        state = adam.init(params)
        return state._replace(mu=optax.tree.cast(state.mu, dtype))

    def update(grads, state, params=None):
        state = state._replace(mu=optax.tree.cast(state.mu, "float32"))
        updates, state = adam.update(grads, state, params)
        return updates, state._replace(mu=optax.tree.cast(state.mu, dtype))

    return optax.GradientTransformation(init, update)
