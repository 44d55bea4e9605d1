"""The run: restore or begin, step, evaluate, save, stop; reads top to bottom.

The device is one step ahead: step i is dispatched before the metrics of step i - 1 are
read, so a step never waits for the host.
"""

import dataclasses
import sys
import time

import jax

from moejax.model.flops import flops_per_token
from train.balance.balancing import Balancing
from train.checkpoint import identity
from train.checkpoint.checkpoints import Checkpointer, CheckpointError
from train.data.feed import feed
from train.eval.held_out import Evaluation, evaluate
from train.job import Job
from train.launch.processes import (
    Stop,
    Watchdog,
    are_several,
    from_first_process,
    wait_for_all,
)
from train.launch.program import say_loudly
from train.logs.peak import peak_tflops
from train.logs.profile import Window
from train.logs.progress import Bar
from train.logs.records import Records, step_record
from train.logs.run_dir import RunDir, write_whole
from train.step.state import (
    TrainState,
    abstract_state,
    compresses_gradients,
    init_state,
    with_new_tracked,
    with_zero_residual,
)


class Diverged(ArithmeticError):
    """Too many non-finite updates in a row."""


@dataclasses.dataclass
class LoopContext:
    """Everything that stays the same while a run goes on."""

    job: Job
    checkpointer: Checkpointer
    records: Records
    peak_tflops: float | None
    balancing: Balancing
    stop: Stop
    watchdog: Watchdog
    profile: Window


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    state: TrainState
    evaluation: Evaluation | None
    """None when a signal stopped the run before its last step."""
    step_secs: list[float]
    """Wall time of each step of this process, without evaluations and saves."""
    compile_sec: float
    wall_sec: float
    signal: int | None


@dataclasses.dataclass(frozen=True)
class Extras:
    """Records that a run is asked for beside its metrics."""

    has_tensorboard: bool = False
    profile_steps: range = range(0)


def train(
    job: Job, run_dir: RunDir, config_text: str, extras: Extras, say=print
) -> Outcome:
    """Train to cfg.train.num_steps from the newest good checkpoint, or from the start.

    `config_text` becomes config.gin once the checkpoint is known to be of this run.
    Raises Diverged, CheckpointError (saves keep failing, or the last one failed) and
    ValueError (a checkpoint of another model or of other data).
    """
    start_sec, stop, cfg = time.monotonic(), Stop(), job.cfg
    checkpointer = Checkpointer(run_dir.path / "checkpoints", cfg.checkpoint, say=say)
    try:
        state, meta = restore(job, checkpointer, say)
        from_first_process(
            lambda: write_whole(run_dir.path / "config.gin", config_text)
        )
        first = 0 if state is None else int(state.step)
        board_text = config_text if extras.has_tensorboard else None
        with (
            Records(run_dir, cfg, first, board_text) as records,
            Watchdog(cfg.processes.watchdog_sec, say_loudly) as watchdog,
        ):
            balancing, compile_sec = _compile(job, meta, say)
            if state is None:
                store = job.model.layout.store
                state = init_state(job.model.run, job.model.optimizer, store)
            state = balancing.begin(state)
            balancing.records = records
            peak = peak_tflops(job.model.mesh.size, cfg.train.peak_tflops)
            folder = run_dir.path / "profile"
            hlo_text = balancing.hlo_text
            profile = Window(folder, extras.profile_steps, say, hlo_text=hlo_text)
            run = LoopContext(
                job, checkpointer, records, peak, balancing, stop, watchdog, profile
            )
            with profile, Bar(cfg.train.num_steps, first) as bar:
                balancing.say = bar.say
                state, evaluation, step_secs = _steps(run, state, bar)
            watchdog.at("the last save")
            is_saved = checkpointer.wait()
        if not is_saved:
            raise CheckpointError(
                f"the state of step {int(state.step)} could not be saved: make room, "
                "and run again to go on from the last good checkpoint"
            )
    finally:
        # Orbax would wait for the other processes, who know of no failure.
        if not (are_several() and sys.exception()):
            checkpointer.close()
    wall_sec = time.monotonic() - start_sec
    return Outcome(state, evaluation, step_secs, compile_sec, wall_sec, stop.signal)


def _compile(job: Job, meta: dict | None, say) -> tuple[Balancing, float]:
    """Balancing with its steps compiled, and the seconds that they took. All processes
    have theirs when it returns, for the watchdog knows of no compilation."""
    start_sec, mesh = time.monotonic(), job.model.mesh
    for line in job.model.run.lines():
        say(line)
    balancing = Balancing(job, say)
    balancing.restore(meta)
    balancing.compile()
    compile_sec = time.monotonic() - start_sec
    wait_for_all("compiled")
    where = f"{mesh.size} devices ({job.cfg.mesh})"
    say(f"compiled for {where} in {compile_sec:.1f} s")
    return balancing, compile_sec


def restore(job: Job, checkpointer: Checkpointer, say):
    """The state of the newest good checkpoint and its meta, or None twice; ValueError
    if it is of another run."""

    def check(meta):
        for line in identity.check(meta, job.cfg, job.meta["data"]):
            say(f"changed since the checkpoint: {line}")

    model = job.model
    abstract = abstract_state(model.run, model.optimizer, model.layout.store)
    cfg, kept = job.cfg, "gradient_residual"
    restored = checkpointer.restore(
        abstract,
        check=check,
        without=lambda meta: (
            () if identity.has_same_residual_layout(meta, cfg) else (kept,)
        ),
    )
    if restored is None:
        return None, None
    say(f"resumed at step {restored.step}")
    state = restored.state
    if state.tracked is not None and not identity.has_same_sharding(restored.meta, cfg):
        say("what domains hold of one another's experts begins anew: they changed")
        state = with_new_tracked(state, model.run)
    if compresses_gradients(model.layout) and state.gradient_residual is None:
        say("what devices keep of gradients begins at zero: no such in the checkpoint")
        state = with_zero_residual(state, model.run)
    return state, restored.meta


def _steps(run: LoopContext, state: TrainState, bar: Bar):
    """The loop; returns state, last evaluation and the time of each step."""
    job, cfg, reader = run.job, run.job.cfg, Reader(run, bar)
    first, last = int(state.step), cfg.train.num_steps
    evaluation = _evaluate(run, state, first, bar) if first >= last else None
    for done in range(first + 1, last + 1):
        run.watchdog.at(f"step {done}")
        state = _adopt_due(run, done, state)
        windows = feed(
            job.batches,
            done - 1,
            cfg.train.batch_size,
            cfg.train.accumulate_steps,
            job.window_sharding,
        )
        run.records.samples(done, job.batches, job.window_sharding)
        run.profile.before(done)
        with jax.transfer_guard("disallow"):  # nothing crosses but by device_get
            step = run.balancing.steps.train
            state, metrics = step(state, run.balancing.placement, windows)
            reader.put(done, metrics)
        _end_of_profiled(run, reader, done, metrics)
        is_stopping = run.stop.is_set()
        is_eval = done % cfg.train.eval_every_steps == 0 or done == last
        is_save = done % cfg.checkpoint.every_steps == 0 or done == last or is_stopping
        if is_eval or is_save:
            reader.flush()
        eval_loss = None
        if is_eval:
            run.watchdog.at(f"the evaluation at step {done}")
            evaluation = _evaluate(run, state, done, bar)
            eval_loss = evaluation.loss
        if is_save:
            run.watchdog.at(f"the save at step {done}")
            state = run.balancing.logical(state)
            meta = job.meta | run.balancing.meta()
            run.checkpointer.save(done, state, meta, eval_loss)
            state = run.balancing.physical(state)
        if is_eval or is_save:
            reader.restart_clock()
        if is_stopping and done < last:
            return run.balancing.logical(state), None, reader.step_secs
    return run.balancing.logical(state), evaluation, reader.step_secs


def _adopt_due(run: LoopContext, step: int, state: TrainState) -> TrainState:
    """Adopt what the balancer has decided for this step. A relayout may have to be
    waited for, which the watchdog does not count."""
    if not run.balancing.is_waiting(step):
        return run.balancing.before(step, state)
    run.watchdog.rest()
    state = run.balancing.before(step, state)
    run.watchdog.at(f"step {step}")
    return state


def _end_of_profiled(run: LoopContext, reader: "Reader", step: int, metrics) -> None:
    """Writing a trace takes seconds, which are no part of a step's time."""
    is_edge = run.profile.is_edge(step)
    if is_edge:
        run.watchdog.at(f"the profile at step {step}")
        reader.flush()
    run.profile.after(step, metrics)
    if is_edge:
        reader.restart_clock()


def _evaluate(run: LoopContext, state: TrainState, step: int, bar: Bar) -> Evaluation:
    job, now = run.job, run.balancing
    evaluation = evaluate(
        now.steps.evaluate, state, now.placement, job.held_out, job.window_sharding
    )
    run.records.evaluation(step, evaluation.loss)
    loss = evaluation.loss
    bar.say(f"step {step}  held-out loss {loss:.4f} nats per {job.unit}")
    return evaluation


class Reader:
    """Reads the metrics of a step when the next one has been dispatched."""

    def __init__(self, run: LoopContext, bar: Bar):
        self.run, self.bar = run, bar
        self.waiting = None
        self.step_secs: list[float] = []
        flops = flops_per_token(run.job.cfg.network).train
        self.flops_per_step = flops * run.job.tokens_per_step
        self.restart_clock()

    def restart_clock(self) -> None:
        self.last_read_sec = time.monotonic()

    def put(self, step: int, metrics) -> None:
        jax.tree.map(lambda leaf: leaf.copy_to_host_async(), metrics)
        self.flush()
        self.waiting = (step, metrics)

    def flush(self) -> None:
        """Read, log and show what waits; raises Diverged."""
        if self.waiting is None:
            return
        (step, metrics), self.waiting = self.waiting, None
        jax.block_until_ready(metrics)
        now_sec = time.monotonic()
        step_sec, self.last_read_sec = now_sec - self.last_read_sec, now_sec
        self.step_secs.append(step_sec)
        metrics = jax.device_get(metrics)
        record = step_record(step, metrics, step_sec, self.run.job.tokens_per_step)
        peak = self.run.peak_tflops
        record["mfu"] = self.flops_per_step / step_sec / 1e12 / peak if peak else None
        record |= self.run.balancing.step_record(step)
        self.run.records.step(record, metrics.routing.tokens_le)
        self.run.balancing.observe(step, metrics.routing)
        self.bar.update(record)
        if record["skipped"]:
            self.bar.say(f"step {step}: loss or gradient not finite, update skipped")
        num_skipped = record["skipped_in_a_row"]
        if num_skipped >= self.run.job.cfg.optimizer.max_skipped_in_a_row:
            raise Diverged(
                f"{num_skipped} updates in a row were not finite, up to step {step}: "
                f"the parameters are still those of step {step - num_skipped}; go on "
                "from a checkpoint with a lower Optimizer.learning_rate, or start "
                "afresh with --fresh"
            )
