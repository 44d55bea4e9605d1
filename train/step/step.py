"""One training step and one evaluation step: pure functions of arrays, jitted once."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx, struct
from jax.sharding import Mesh

from moejax import axes
from moejax.config import Config
from moejax.model.routed import RoutingMode
from moejax.model.transformer import StepInputs
from moejax.moe import recorded
from moejax.moe import route as routing
from moejax.moe.types import Batch, Placement, RouterLosses, RoutingStats, Windows
from moejax.moe.weights.slots import Slots
from moejax.plan.layout import Layout
from moejax.resolve.resolved import Resolved
from train.step.gradient_target import gradient_target
from train.step.loss import cross_entropy
from train.step.optimizer import learning_rate, trained, with_frozen
from train.step.state import (
    TrainState,
    abstract_state,
    model_graph,
    param_shardings,
    with_tracked,
)


@struct.dataclass
class StepMetrics:
    """Report of one train step, which the host reads a step late."""

    loss: jax.Array
    """Cross-entropy in nats per token."""
    total_loss: jax.Array
    """Loss that was differentiated: cross-entropy and every auxiliary loss."""
    router: RouterLosses
    grad_norm: jax.Array
    learning_rate: jax.Array
    """Rate of this update. An update that is skipped does not advance the schedule."""
    is_skipped: jax.Array
    skipped_in_a_row: jax.Array
    routing: RoutingStats
    is_redo_needed: jax.Array | None = None
    """Whether the step left the state as it was, because rows were left after round 0
    or because a step before it did so. None: the layout's overflow is not 'redo'."""


class StepContext(NamedTuple):
    """Static context that a step is compiled for, beside the shapes of its arguments:
    the run, the optimizer and the end of documents."""

    run: Resolved
    optimizer: optax.GradientTransformation
    is_exact: bool = False
    """Whether later rounds carry what round 0 cannot, also where the layout's overflow
    is 'redo': the step in which a batch runs again."""
    has_targets: bool = False
    """Whether windows say which of their tokens are targets (Windows.is_target_bt)."""
    ends: tuple[int, int] | None = None
    """The separator of documents, and the token that their last one predicts; None: the
    separator (Batch.from_windows)."""

    @property
    def cfg(self) -> Config:
        """Configuration of the run."""
        return self.run.cfg

    @property
    def mesh(self) -> Mesh:
        """Mesh of the run's devices."""
        return self.run.mesh

    @property
    def layout(self) -> Layout:
        """Layout of the step."""
        return self.run.layout

    def relaid(self, layout: Layout) -> "StepContext":
        """Return the context of the same run for a step of another layout."""
        return self._replace(run=self.run.relaid(layout))


def window_sharding(mesh: Mesh) -> jax.sharding.NamedSharding:
    """Return the sharding of Windows [micro-batch, b, t + 1], which splits b over all
    batch axes."""
    return axes.sharding(mesh, None, axes.BATCH_AXES)


def make_train_step(context: StepContext):
    """Return the jitted step(state, placement, windows) -> state, StepMetrics.

    The step donates its state. If the layout's overflow is 'redo', the step has one
    more argument: the number of updates that the state should have, as an int32. The
    step leaves every leaf of the state as it was if the number is another one, for a
    step before it must run again, or, unless the context is exact, if an exchange of
    the step overflows.
    """
    # Metrics are whole on every device, so that every process can read them.
    state = abstract_state(context.run, context.optimizer, context.layout.store)
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    return jax.jit(
        partial(_train_step, context),
        donate_argnums=0,
        out_shardings=(state_shardings, axes.sharding(context.mesh)),
    )


def make_eval_step(context: StepContext):
    """Return the jitted step(params, router_bias, placement, windows) -> nats per
    token, RoutingStats.

    The step evaluates the first micro-batch of `windows` only. It is exact. Where
    windows have targets, the nats are their mean.
    """

    def eval_step(params, router_bias, placement, windows):
        first = jax.tree.map(lambda leaf: leaf[0], windows)
        inputs = LossInputs(placement, first, jax.random.key(0), jnp.int32(0), False)
        inputs = inputs._replace(target_share=_target_share(windows, 1))
        _, (nats, _, stats) = micro_batch_loss(exact, params, router_bias, inputs)
        return nats, stats

    exact = context._replace(is_exact=True)
    return jax.jit(eval_step, out_shardings=axes.sharding(context.mesh))


def _train_step(
    context: StepContext, state: TrainState, placement, windows, num_updates=None
):
    """Average gradients over micro-batches and update the state with them."""
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
    target = gradient_target(context.run, state, placement)
    count = windows.token_bt.shape[0]
    target_share = _target_share(windows, count)

    def add_micro_batch(sums, args):
        """Return the sum of gradients with one micro-batch more, and its report."""
        index, windows = args

        def loss_of(values):
            """Return the loss as a function of the target's values."""
            params, slots = target.split(values)
            inputs = LossInputs(
                placement,
                windows,
                jax.random.fold_in(key, index),
                state.step,
                is_training=True,
                micro_batch=index,
                slots=slots,
                tracked=state.tracked if slots is None else None,
                target_share=target_share,
            )
            return micro_batch_loss(context, params, state.router_bias, inputs)

        total, pull_back, aux = jax.vjp(loss_of, target.values, has_aux=True)
        # Each layer's gradients are added to their part of the sum: those of all layers
        # never exist beside it.
        refs = jax.tree.map(jax.new_ref, sums)
        pull_back.with_refs(refs)(jnp.ones_like(total))
        return jax.tree.map(jax.ref.freeze, refs), (total, aux)

    with jax.named_scope("gradients"):
        zeros = jax.tree.map(jnp.zeros_like, target.values)
    sums, reports = jax.lax.scan(add_micro_batch, zeros, (jnp.arange(count), windows))
    with jax.named_scope("gradients"):
        grads = jax.tree.map(lambda leaf: leaf / count, sums)
    after, metrics = _update(context, state, target.to_params(grads), *reports)
    if num_updates is None:
        return after, metrics
    is_redo_needed = state.step != num_updates
    if not context.is_exact:
        is_redo_needed |= jnp.any(metrics.routing.rounds_l > 1)
    after = jax.tree.map(partial(jnp.where, is_redo_needed), state, after)
    return after, metrics.replace(is_redo_needed=is_redo_needed)


def _target_share(windows: Windows, count: int) -> jax.Array | None:
    """Return the weight of a target in its micro-batch's loss, so that the mean over
    the first `count` micro-batches is the mean over all their targets; None where
    windows have no targets of their own. Without any target the loss is 0."""
    if windows.is_target_bt is None:
        return None
    number = jnp.sum(windows.is_target_bt[:count, :, 1:])
    return count / jnp.maximum(number, 1).astype(jnp.float32)


class LossInputs(NamedTuple):
    """Inputs of one micro-batch's loss beside parameters and router bias."""

    placement: Placement
    windows: Windows
    key: jax.Array
    """Random key of the micro-batch, for jitter and recorded choices."""
    step: jax.Array
    is_training: bool
    micro_batch: jax.Array | int = 0
    """Number of the micro-batch within its step, from 0."""
    slots: Slots | None = None
    """Slots of all layers, if they were made before the loss. None: each layer makes
    its slots from the parameters."""
    target_share: jax.Array | None = None
    """Weight of each target, where windows have targets of their own."""
    tracked: jax.Array | None = None
    """Copy of TrainState.tracked. None: a domain's experts travel whole, or the slots
    are given."""


def micro_batch_loss(
    context: StepContext, params, router_bias, inputs: LossInputs
) -> tuple[jax.Array, tuple[jax.Array, RouterLosses, RoutingStats]]:
    """Return the loss of one micro-batch with every auxiliary loss, and its
    cross-entropy in nats per token, router losses and routing statistics."""
    cfg, layout = context.cfg, context.layout
    layout = layout.with_rounds if context.is_exact else layout
    batch, weight_bt = Batch.from_windows(inputs.windows, context.ends), None
    if inputs.target_share is not None:
        weight_bt = inputs.windows.is_target_bt[:, 1:] * inputs.target_share
    chance_le = None
    if cfg.router.kind == "recorded":
        sizes = cfg.model.num_moe_layers, cfg.moe.num_experts, cfg.moe.top_k
        chance_tle = recorded.loads(cfg.recorded, *sizes)
        at = inputs.step, inputs.micro_batch, cfg.train.accumulate_steps
        sample = recorded.sample_index(cfg.recorded, len(chance_tle), *at)
        chance_le = jnp.asarray(chance_tle)[sample]
    jitter = cfg.router.jitter if inputs.is_training else 0.0
    is_dense = inputs.is_training and cfg.router.training == "dense"
    mode = RoutingMode(jitter, is_dense, cfg.recorded.points)
    step_inputs = StepInputs(inputs.key, chance_le, mode)

    network = nnx.merge(model_graph(context.run), params, router_bias)
    hidden_btd, sums = network(
        batch.tokens_bt,
        batch.position_bt,
        inputs.placement,
        layout,
        step_inputs,
        inputs.slots,
        inputs.tracked,
    )
    mean, nats = cross_entropy(
        hidden_btd,
        network.head(),
        batch.targets_bt,
        context.mesh,
        cfg.train.loss_chunk,
        cfg.train.logit_z_loss,
        weight_bt,
    )
    stats = RoutingStats.from_sums(sums)
    sizes = batch.tokens_bt.size, cfg.data.seq_len
    router = routing.router_losses(sums.over_devices(), *sizes)
    total = mean + routing.weighted_loss(router, cfg.router)
    return total, (nats, router, stats)


@jax.named_scope("optimizer")
def _update(context: StepContext, state: TrainState, grads, total_a, aux):
    """Return the state after one update, and the metrics of the step.

    Where the loss or a gradient is not finite, parameters, moments and biases stay as
    they are. The tracked weights of experts that travel compressed follow the
    parameters in either case.
    """
    cfg, nats_a, router_a, stats_a = context.cfg, *aux
    loss, grad_norm = jnp.mean(nats_a), optax.tree.norm(grads)
    stats = _merge_stats(stats_a)
    optimizer = optax.with_extra_args_support(context.optimizer)
    shardings = param_shardings(context.run, context.layout.store)
    params, shardings = (trained(x, cfg.optimizer) for x in (state.params, shardings))
    updates, opt_state = optimizer.update(
        grads, state.opt_state, params, shardings=shardings
    )
    params = with_frozen(optax.apply_updates(params, updates), state.params)
    router_bias = state.router_bias
    if rate := cfg.router.bias_rate:  # aux-loss-free balancing
        move = partial(routing.update_bias, tokens_le=stats.tokens_le, rate=rate)
        moved = jax.tree.map(move, trained(router_bias, cfg.optimizer))
        router_bias = with_frozen(moved, router_bias)
    new = params, opt_state, router_bias
    is_finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    old = (state.params, state.opt_state, state.router_bias)
    params, opt_state, router_bias = jax.tree.map(
        lambda after, before: jnp.where(is_finite, after, before), new, old
    )
    skipped_in_a_row = jnp.where(is_finite, 0, state.skipped_in_a_row + 1)
    metrics = StepMetrics(
        loss=loss,
        total_loss=jnp.mean(total_a),
        router=jax.tree.map(lambda leaf: jnp.mean(leaf, axis=0), router_a),
        grad_norm=grad_norm,
        learning_rate=learning_rate(cfg.optimizer, cfg.train.num_steps)(
            _num_updates(state)
        ),
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
    )
    return with_tracked(state, context.run), metrics


def _num_updates(state: TrainState) -> jax.Array:
    """Return the number of updates that were made, by which the optimizer's schedule
    goes; the number of steps where an optimizer keeps no count."""
    counts = optax.tree_utils.tree_get_all_with_path(state.opt_state, "count")
    return counts[-1][1] if counts else state.step


def _merge_stats(stats: RoutingStats) -> RoutingStats:
    """Return the statistics of a step from those of its micro-batches."""
    return RoutingStats(
        tokens_lwe=jnp.sum(stats.tokens_lwe, axis=0),
        rows_lw=jnp.sum(stats.rows_lw, axis=0),
        rounds_l=jnp.max(stats.rounds_l, axis=0),
        dropped_l=jnp.sum(stats.dropped_l, axis=0),
        fullest_pair_l=jnp.max(stats.fullest_pair_l, axis=0),
        fullest_device_l=jnp.sum(stats.fullest_device_l, axis=0),
        bound_l=jnp.sum(stats.bound_l, axis=0),
        together_lee=jax.tree.map(partial(jnp.sum, axis=0), stats.together_lee),
    )
