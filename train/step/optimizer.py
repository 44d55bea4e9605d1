"""AdamW by optax: schedule, masked weight decay, global-norm clipping."""

import jax
import optax

from moejax.config import Optimizer

UNDECAYED = ("scale_d", "embed_vd", "head_vd")
"""Norm scales and embeddings: decay is for matrices that multiply activations."""


def learning_rate(cfg: Optimizer, num_steps: int) -> optax.Schedule:
    """Linear warm-up to cfg.learning_rate, then cfg.decay to final_lr_ratio of it."""
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
    """Tree of booleans: which parameters weight decay acts on."""

    def decayed(path, _):
        return not any(name in jax.tree_util.keystr(path) for name in UNDECAYED)

    return jax.tree_util.tree_map_with_path(decayed, params)


def make_optimizer(cfg: Optimizer, num_steps: int) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity(),
        optax.scale_by_adam(cfg.b1, cfg.b2, cfg.eps),
        optax.add_decayed_weights(cfg.weight_decay, mask=is_decayed),
        optax.scale_by_learning_rate(learning_rate(cfg, num_steps)),
    )
