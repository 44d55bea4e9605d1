"""From a configuration to compiled steps, ahead of time: shapes alone, no arrays."""

import jax
import numpy as np
from jax.sharding import Mesh

from moejax.axes import everywhere, sharding
from moejax.moe.types import Placement, Windows
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.resolve.resolved import Resolved
from train.step.optimizer import make_optimizer
from train.step.state import abstract_state
from train.step.step import (
    StepContext,
    make_eval_step,
    make_train_step,
    window_sharding,
)


def make_model(run: Resolved) -> StepContext:
    cfg = run.cfg
    return StepContext(run, make_optimizer(cfg.optimizer, cfg.train.num_steps))


def on_devices(plan: ExpertPlan, layout: Layout, mesh: Mesh) -> Placement:
    """The plan's placement, whole on every device."""
    return everywhere(Placement.from_plan(plan.validate(layout), layout), mesh)


def home_placement(run: Resolved) -> Placement:
    """Return the placement with every expert at its owner, for layouts without
    copies."""
    return on_devices(run.home_plan(run.owning), run.owning, run.mesh)


def trace_train_step(model: StepContext):
    """The traced train step: lower it for any platform, or compile it for this one."""
    return make_train_step(model).trace(*_abstract_args(model))


def compile_steps(model: StepContext):
    """The train step and the evaluation step, compiled for the mesh's devices."""
    state, placement, windows = _abstract_args(model)
    one = jax.tree.map(lambda leaf: leaf.update(shape=(1, *leaf.shape[1:])), windows)
    eval_args = (state.params, state.router_bias, placement, one)
    train_step = trace_train_step(model).lower().compile()
    return train_step, make_eval_step(model).lower(*eval_args).compile()


def require_room(step) -> None:
    """MemoryError if a compiled step needs more than the devices here have, where they
    say how much that is (GPUs do)."""
    stats = jax.local_devices()[0].memory_stats() or {}
    memory, limit = step.memory_analysis(), stats.get("bytes_limit")
    if memory is None or limit is None:
        return
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    needed += memory.output_size_in_bytes - memory.alias_size_in_bytes
    if needed > limit:
        raise MemoryError(
            f"the step needs {needed / 2**30:.1f} GiB of {limit / 2**30:.1f} GiB"
        )


def _abstract_args(model: StepContext):
    cfg, mesh = model.cfg, model.mesh
    rows = cfg.train.batch_size // cfg.train.accumulate_steps
    shape = (cfg.train.accumulate_steps, rows, cfg.data.seq_len + 1)
    whole = sharding(mesh)
    placement = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
        Placement.from_plan(model.run.home_plan(), model.layout),
    )
    leaf = jax.ShapeDtypeStruct(shape, np.int32, sharding=window_sharding(mesh))
    state = abstract_state(model.run, model.optimizer, model.layout.store)
    return state, placement, Windows(token_bt=leaf, position_bt=leaf)
