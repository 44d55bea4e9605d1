"""Arrays that a train step differentiates the loss by, in place of the parameters.

Each layout has one of two gradient targets:

    parameters                  stores owned, transient, sharded
    slots and all parameters    store resident; slots gathered once a step
    but the experts'            (Layout.gather)

Frozen parameters are in none: no gradient of them is computed. With slots as the
target, experts' gradients travel to the experts' float32 master parameters once a step,
and not once a micro-batch. Slots have the compute dtype, which is too coarse for sums
over micro-batches: their gradients are summed in float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.moe.weights.slots import Slots, make_slots_of_layers
from moejax.resolve.resolved import Resolved
from train.step import expert_params
from train.step.optimizer import trained, with_frozen
from train.step.state import TrainState


class GradientTarget(NamedTuple):
    """Arrays to differentiate by, and functions that map them to parameters."""

    values: Any
    """Tree of the arrays by which each micro-batch differentiates its loss. In place of
    the weights of slots it has zeros, to which their gradients go."""
    split: Callable
    """split(values) -> parameters, Slots of all layers or None."""
    to_params: Callable
    """to_params(grads) -> gradients of the parameters that train, None in place of the
    others; `grads` are those of `values`, summed over micro-batches."""


def gradient_target(run: Resolved, state: TrainState, placement) -> GradientTarget:
    """Return the arrays by which one train step differentiates its loss: parameters, or
    for experts the slots made from them.

    Slots are made here once, from the state's master parameters, and all micro-batches
    use them.
    """
    optimizer = run.cfg.optimizer
    if not run.layout.keeps_slots:
        return GradientTarget(
            trained(state.params, optimizer),
            lambda values: (with_frozen(values, state.params), None),
            lambda grads: grads,
        )
    master_params, others = expert_params.take(state.params)
    trained_experts, trained_others = expert_params.take(
        trained(state.params, optimizer)
    )
    dtype, mesh_layout = jnp.dtype(run.cfg.model.compute_dtype), run.mesh_layout

    how = mesh_layout, dtype, run.cfg.model.gradient_reduce_dtype

    def make(experts):
        return make_slots_of_layers(experts, placement, run.mesh, *how).weights

    slots, pull_back = jax.vjp(make, master_params)

    def to_params(grads):
        other_grads, slot_grads = grads
        if not trained_experts:
            return other_grads
        slot_grads = jax.tree.map(lambda g, s: g.astype(s.dtype), slot_grads, slots)
        slot_grads, zeros = _zeros_after(slot_grads, master_params)
        refs = jax.tree.map(jax.new_ref, zeros)
        pull_back.with_refs(refs)(slot_grads)
        own_grads = jax.tree.map(jax.ref.freeze, refs)
        return trained(expert_params.put(other_grads, own_grads), optimizer)

    wide = jnp.promote_types(dtype, jnp.float32)
    zeros = jax.tree.map(lambda leaf: jnp.zeros_like(leaf, wide), slots)

    def split(values):
        some, gradients = values
        params = expert_params.put(with_frozen(some, others), master_params)
        return params, Slots(slots, zeros if gradients is None else gradients)

    values = trained_others, zeros if trained_experts else None
    return GradientTarget(values, split, to_params)


def _zeros_after(arrays, like):
    """Return the arrays, and zeros like a tree, which are made after the arrays.

    XLA schedules zeros that depend on nothing at the beginning of the step, where
    gradients of all master parameters would take memory until its end.
    """
    arrays, zero = jax.lax.optimization_barrier((arrays, jnp.float32(0)))
    return arrays, jax.tree.map(lambda leaf: jnp.full_like(leaf, zero), like)
