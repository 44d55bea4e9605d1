"""Ahead-of-time compilation of a run's steps, from shapes alone, without arrays."""

import dataclasses
from concurrent import futures
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Lowered

from moejax.axes import everywhere, sharding
from moejax.moe.types import Placement, Windows
from moejax.plan.expert_plan import ExpertPlan
from moejax.plan.layout import Layout
from moejax.resolve.resolved import Resolved
from train.step.gpu_options import compiler_options
from train.step.optimizer import make_optimizer
from train.step.state import abstract_state
from train.step.step import (
    StepContext,
    make_eval_step,
    make_train_step,
    window_sharding,
)


@dataclasses.dataclass(frozen=True)
class Steps:
    """Train step and evaluation step, compiled for one layout. Both are exact."""

    train: Any
    evaluate: Any
    loop_free: Any = None
    """The train step without later rounds. None: a step is never run again."""

    def run(
        self, step: int, state, placement, windows, *, is_loop_free: bool = False
    ) -> tuple[Any, Any]:
        """Dispatch the train step number `step`, from 1; return state and metrics."""
        if self.loop_free is None:
            return self.train(state, placement, windows)
        program = self.loop_free if is_loop_free else self.train
        mesh = jax.tree.leaves(placement)[0].sharding.mesh
        with jax.transfer_guard("allow"):  # the guard takes it for an implicit transfer
            num_updates = everywhere(np.int32(step - 1), mesh)
        return program(state, placement, windows, num_updates)

    def require_room(self) -> None:
        """Raise ValueError if a train step needs more memory than a device here has."""
        for program in (self.train, self.loop_free):
            if program is not None:
                require_room(program)


def make_model(run: Resolved) -> StepContext:
    """Return the context of a run's steps, with the optimizer of its configuration."""
    cfg = run.cfg
    return StepContext(run, make_optimizer(cfg.optimizer, cfg.train.num_steps))


def on_devices(plan: ExpertPlan, layout: Layout, mesh: Mesh) -> Placement:
    """Return the placement of a plan, replicated on every device of the mesh.

    Raises ValueError if the plan breaks a rule of the layout.
    """
    return everywhere(Placement.from_plan(plan.validate(layout), layout), mesh)


def home_placement(run: Resolved) -> Placement:
    """Return the placement with every expert at its owner, replicated on every device,
    for layouts without copies."""
    return on_devices(run.home_plan(run.owning), run.owning, run.mesh)


def trace_train_step(context: StepContext):
    """Return the traced train step, which can be lowered for any platform."""
    return make_train_step(context).trace(*_abstract_args(context))


def compile_steps(context: StepContext) -> Steps:
    """Return the train step and the evaluation step, compiled for the mesh's devices;
    the loop-free train step too if the layout's overflow is 'redo'.

    The evaluation step takes windows of one micro-batch.
    """
    args = _abstract_args(context)
    state, placement, windows, *_ = args
    first = jax.tree.map(lambda leaf: leaf.update(shape=(1, *leaf.shape[1:])), windows)
    eval_args = (state.params, state.router_bias, placement, first)
    exact = context._replace(is_exact=True)
    options = compiler_options(context.mesh.devices.flat[0].platform)
    compile_lowered = partial(Lowered.compile, compiler_options=options)
    with futures.ThreadPoolExecutor(3) as threads:
        loop_free = None
        if context.layout.overflow == "redo":
            lowered = make_train_step(context).trace(*args).lower()
            loop_free = threads.submit(compile_lowered, lowered)
        lowered = make_train_step(exact).trace(*args).lower()
        train_step = threads.submit(compile_lowered, lowered)
        lowered = make_eval_step(context).lower(*eval_args)
        eval_step = threads.submit(compile_lowered, lowered)
        return Steps(
            train_step.result(), eval_step.result(), loop_free and loop_free.result()
        )


def require_room(step) -> None:
    """Raise ValueError if a compiled step needs more memory than a device here has.

    Devices that do not report their memory pass; GPUs report it.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    memory, limit = step.memory_analysis(), stats.get("bytes_limit")
    if memory is None or limit is None:
        return
    needed = device_bytes(memory)
    if needed > limit:
        raise ValueError(
            f"the step needs {needed / 2**30:.1f} GiB on a device, and JAX has "
            f"{limit / 2**30:.1f} GiB of it: {(needed - limit) / 2**30:.1f} GiB too "
            "much: use a larger Train.accumulate_steps, Model.remat = 'full', "
            "Optimizer.mu_dtype = 'bfloat16' or more devices"
        )


def device_bytes(memory) -> int:
    """Return the bytes of device memory that a compiled program needs while it runs,
    from its memory_analysis().

    Outputs that take the place of donated arguments count once. Memory of the host,
    which has fields of its own, is not in it.
    """
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    return needed + memory.output_size_in_bytes - memory.alias_size_in_bytes


def _abstract_args(context: StepContext):
    """Return the arguments of a train step as ShapeDtypeStructs: state, placement,
    windows and, if the layout's overflow is 'redo', the number of updates."""
    cfg, mesh = context.cfg, context.mesh
    rows = cfg.train.batch_size // cfg.train.accumulate_steps
    shape = (cfg.train.accumulate_steps, rows, cfg.data.seq_len + 1)
    whole = sharding(mesh)
    placement = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole),
        Placement.from_plan(context.run.home_plan(), context.layout),
    )
    leaf = jax.ShapeDtypeStruct(shape, np.int32, sharding=window_sharding(mesh))
    state = abstract_state(context.run, context.optimizer, context.layout.store)
    is_target = None
    if context.has_targets:
        is_target = jax.ShapeDtypeStruct(shape, bool, sharding=leaf.sharding)
    args = state, placement, Windows(leaf, leaf, is_target)
    if context.layout.overflow != "redo":
        return args
    return *args, jax.ShapeDtypeStruct((), np.int32, sharding=whole)
