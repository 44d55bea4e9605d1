"""One training step and one evaluation step: pure functions of arrays, jitted once."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from jax.sharding import Mesh

from moejax import axes
from moejax.config import Config
from moejax.model.transformer import StepInputs
from moejax.moe import recorded
from moejax.moe import route as routing
from moejax.moe.types import Batch, Placement, RouterLosses, RoutingStats, Windows
from moejax.plan.layout import Layout
from moejax.resolve.resolved import Resolved
from train.step.loss import cross_entropy
from train.step.optimizer import learning_rate
from train.step.state import TrainState, abstract_state, model_graph, with_tracked
from train.step.trained import trained


@struct.dataclass
class StepMetrics:
    """What one step reports; read on the host a step late."""

    loss: jax.Array
    """Cross-entropy, nats per token."""
    total_loss: jax.Array
    """What was differentiated: with every auxiliary loss."""
    router: RouterLosses
    grad_norm: jax.Array
    learning_rate: jax.Array
    is_skipped: jax.Array
    skipped_in_a_row: jax.Array
    routing: RoutingStats


class StepContext(NamedTuple):
    """What a step is compiled for, beside shapes."""

    run: Resolved
    optimizer: optax.GradientTransformation

    @property
    def cfg(self) -> Config:
        return self.run.cfg

    @property
    def mesh(self) -> Mesh:
        return self.run.mesh

    @property
    def layout(self) -> Layout:
        return self.run.layout

    def relaid(self, layout: Layout) -> "StepContext":
        """Return the same model for a step of another layout."""
        return self._replace(run=self.run.relaid(layout))


class LossInputs(NamedTuple):
    """What the loss of one micro-batch takes beside parameters and router bias."""

    placement: Placement
    windows: Windows
    key: jax.Array
    """Random key of the micro-batch: jitter, recorded choices."""
    step: jax.Array
    is_training: bool
    slots: Any = None
    """Weights of all slots, where they exist already; None: made of the parameters."""
    tracked: jax.Array | None = None
    """As TrainState.tracked; None: a domain's experts travel whole."""


def window_sharding(mesh: Mesh) -> jax.sharding.NamedSharding:
    """Of Windows [micro-batch, b, t + 1]: rows are split over all batch axes."""
    return axes.sharding(mesh, None, axes.BATCH_AXES)


def make_train_step(model: StepContext):
    """step(state, placement, windows) -> state, StepMetrics; donates its state."""
    # Metrics are whole on every device, so that every process can read them.
    state = abstract_state(model.run, model.optimizer, model.layout.store)
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(
        partial(_train_step, model, make_loss(model)),
        donate_argnums=0,
        out_shardings=(state_shardings, axes.sharding(model.mesh)),
    )


def make_eval_step(model: StepContext):
    """step(params, router_bias, placement, windows) -> nats per token, RoutingStats, of
    the first micro-batch."""
    whole = axes.sharding(model.mesh)
    return jax.jit(partial(_eval_step, make_loss(model)), out_shardings=whole)


def make_loss(model: StepContext):
    """Return loss_fn(params, router_bias, inputs: LossInputs) -> total loss,
    (cross-entropy, router losses, routing statistics) of one micro-batch."""
    cfg, layout = model.cfg, model.layout
    graph = model_graph(model.run)
    chance_tle = None
    if cfg.router.kind == "recorded":
        sizes = (cfg.model.num_moe_layers, cfg.moe.num_experts, cfg.moe.top_k)
        chance_tle = recorded.loads(cfg.recorded, *sizes)

    def loss_fn(params, router_bias, inputs: LossInputs):
        batch = Batch.from_windows(inputs.windows)
        chance_le = None
        if chance_tle is not None:
            sample = recorded.sample_index(cfg.recorded, len(chance_tle), inputs.step)
            chance_le = jnp.asarray(chance_tle)[sample]
        jitter = cfg.router.jitter if inputs.is_training else 0.0
        network = nnx.merge(graph, params, router_bias)
        is_dense = inputs.is_training and cfg.router.training == "dense"
        step_inputs = StepInputs(inputs.key, chance_le, jitter, is_dense)
        hidden_btd, sums = network(
            batch.tokens_bt,
            batch.position_bt,
            inputs.placement,
            layout,
            step_inputs,
            inputs.slots,
            inputs.tracked,
        )
        nats, square = cross_entropy(
            hidden_btd, network.head(), batch.targets_bt, cfg.train.loss_chunk
        )
        stats = RoutingStats.from_sums(sums)
        sizes = batch.tokens_bt.size, cfg.data.seq_len
        router = routing.router_losses(sums.over_devices(), *sizes)
        total = (
            nats
            + cfg.train.logit_z_loss * square
            + routing.weighted_loss(router, cfg.router)
        )
        return total, (nats, router, stats)

    return loss_fn


def _train_step(model: StepContext, loss_fn, state: TrainState, placement, windows):
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    by = trained(model.run, state, placement)

    def loss_of_part(values, index, part):
        params, slots = by.split(values)
        inputs = LossInputs(
            placement,
            part,
            jax.random.fold_in(key, index),
            state.step,
            is_training=True,
            slots=slots,
            tracked=state.tracked if slots is None else None,
        )
        return loss_fn(params, state.router_bias, inputs)

    grad_of = jax.value_and_grad(loss_of_part, has_aux=True)

    count = windows.token_bt.shape[0]

    def micro(grads, args):
        (total, aux), new = grad_of(by.values, *args)
        if count > 1:  # slots' gradients are in the compute dtype: too coarse to add up
            new = jax.tree.map(_wide, new)
        return new if grads is None else jax.tree.map(jnp.add, grads, new), (total, aux)

    first = jax.tree.map(lambda leaf: leaf[0], windows)
    rest = jax.tree.map(lambda leaf: leaf[1:], windows)
    grads, reports = micro(None, (jnp.int32(0), first))
    reports = jax.tree.map(lambda leaf: leaf[None], reports)
    if count > 1:
        grads, more = jax.lax.scan(micro, grads, (jnp.arange(1, count), rest))
        reports = jax.tree.map(lambda *pair: jnp.concatenate(pair), reports, more)
        grads = jax.tree.map(lambda leaf: leaf / count, grads)
    return _update(model, state, by.home(grads), *reports)


def _wide(leaf):
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


@jax.named_scope("optimizer")
def _update(model: StepContext, state: TrainState, gradients, total_a, aux):
    """AdamW, unless loss or gradient is not finite: then only counters change. What
    domains hold of experts that travel compressed follows the masters.

    `gradients`: of parameters, and what is kept of those that travel compressed.
    """
    cfg, nats_a, router_a, stats_a = model.cfg, *aux
    grads, kept = gradients
    loss, grad_norm = jnp.mean(nats_a), optax.tree.norm(grads)
    stats = _over_micro_batches(stats_a)
    updates, opt_state = model.optimizer.update(grads, state.opt_state, state.params)
    new = (
        optax.apply_updates(state.params, updates),
        opt_state,
        _move_bias(cfg, state.router_bias, stats.tokens_le),
        kept,
    )
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if kept is not None:  # what has not arrived is in no norm
        is_finite &= jnp.all(jnp.isfinite(kept))
    old = (state.params, state.opt_state, state.router_bias, state.gradient_residual)
    params, opt_state, router_bias, kept = jax.tree.map(
        lambda after, before: jnp.where(is_finite, after, before), new, old
    )
    skipped_in_a_row = jnp.where(is_finite, 0, state.skipped_in_a_row + 1)
    metrics = StepMetrics(
        loss=loss,
        total_loss=jnp.mean(total_a),
        router=jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), router_a),
        grad_norm=grad_norm,
        learning_rate=learning_rate(cfg.optimizer, cfg.train.num_steps)(state.step),
        is_skipped=~is_finite,
        skipped_in_a_row=skipped_in_a_row,
        routing=stats,
    )
    state = TrainState(
        step=state.step + 1,
        params=params,
        router_bias=router_bias,
        opt_state=opt_state,
        key=state.key,
        skipped_in_a_row=skipped_in_a_row,
        tracked=state.tracked,
        gradient_residual=kept,
    )
    return with_tracked(state, model.run), metrics


def _over_micro_batches(stats: RoutingStats) -> RoutingStats:
    return RoutingStats(
        tokens_lwe=jnp.sum(stats.tokens_lwe, axis=0),
        rows_lw=jnp.sum(stats.rows_lw, axis=0),
        rounds_l=jnp.max(stats.rounds_l, axis=0),
        dropped_l=jnp.sum(stats.dropped_l, axis=0),
        fullest_pair_l=jnp.max(stats.fullest_pair_l, axis=0),
        fullest_device_l=jnp.sum(stats.fullest_device_l, axis=0),
        bound_l=jnp.sum(stats.bound_l, axis=0),
    )


def _move_bias(cfg: Config, router_bias, tokens_le):
    """Aux-loss-free balancing moves each expert's bias once per step."""
    if not cfg.router.bias_rate:
        return router_bias
    rate = cfg.router.bias_rate
    return jax.tree.map(
        lambda bias_le: routing.update_bias(bias_le, tokens_le, rate), router_bias
    )


def _eval_step(loss_fn, params, router_bias, placement, windows):
    key, step = jax.random.key(0), jnp.int32(0)
    first = jax.tree.map(lambda leaf: leaf[0], windows)
    inputs = LossInputs(placement, first, key, step, is_training=False)
    _, (nats, _, stats) = loss_fn(params, router_bias, inputs)
    return nats, stats
