"""What a step differentiates by: parameters, or in place of the experts' masters their
slots, whose gradients travel to the masters once a step.

    parameters             stores owned, transient, sharded
    slots and the others   store resident; compressed gradients of a domain
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.moe.weights import stores
from moejax.resolve.resolved import Resolved
from train.step import expert_params
from train.step.state import TrainState


class Trained(NamedTuple):
    values: Any
    """What each micro-batch differentiates by."""
    split: Callable
    """values -> parameters, slots of all layers or None"""
    home: Callable
    """Their gradients, summed over micro-batches -> those of parameters, and
    TrainState.gradient_residual."""


def trained(run: Resolved, state: TrainState, placement) -> Trained:
    """Slots are made once, from the masters as they are now, and stand for them."""
    is_compressed = state.gradient_residual is not None
    if run.layout.store != "resident" and not is_compressed:
        return Trained(state.params, lambda params: (params, None), _as_they_are)
    master_params, others = expert_params.take(state.params)
    dtype, mesh_layout = jnp.dtype(run.cfg.model.compute_dtype), run.mesh_layout

    def make(master_params, placement, tracked_sx=None):
        return stores.slots(master_params, placement, mesh_layout, dtype, tracked_sx)

    if is_compressed:
        of_layers = (master_params, placement, state.tracked)
        slots, pull = stores.slots_of_layers(make, *of_layers), None
    else:
        of_all = partial(stores.slots_of_layers, make)
        slots, pull = jax.vjp(
            lambda master_params: of_all(master_params, placement), master_params
        )

    def home(grads):
        others, of_slots = grads
        if pull is None:
            residual_lsx = state.gradient_residual
            own, residual_lsx = stores.scatter_gradients(
                of_slots, residual_lsx, mesh_layout, dtype
            )
            return expert_params.put(others, own), residual_lsx
        of_slots = jax.tree.map(lambda g, s: g.astype(s.dtype), of_slots, slots)
        return expert_params.put(others, pull(of_slots)[0]), None

    return Trained((others, slots), partial(_put, master_params), home)


def _as_they_are(grads):
    return grads, None


def _put(master_params, values):
    others, slots = values
    return expert_params.put(others, master_params), slots
