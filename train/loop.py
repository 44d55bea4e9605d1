"""The training loop: restore or begin, step, evaluate, save, stop, from top to bottom.

The device is one step ahead: step i is dispatched before the metrics of step i - 1 are
read, so a step never waits for the host. Where a step may have to run again
(`Layout.overflow`), whatever needs a certain state settles the steps in flight first.
So does a step that a decision after the one before may change (Balance.lag_steps = 1).
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable

import jax

from moejax.model.flops import flops_per_token
from moejax.moe.types import Windows
from train.balance.balancing import Balancing
from train.checkpoint import from_hf, identity
from train.checkpoint.checkpoints import Checkpointer, CheckpointError
from train.data.feed import feed
from train.eval.held_out import Evaluation, evaluate
from train.files import write_whole
from train.in_flight import InFlight
from train.job import Job
from train.launch.agreement import require_same
from train.launch.processes import (
    Stop,
    Watchdog,
    are_several,
    from_first_process,
    wait_for_all,
)
from train.launch.program import RunFailed, say_loudly
from train.logs.goodput import Stopwatch
from train.logs.peak import peak_tflops
from train.logs.profile import Window
from train.logs.progress import Display, shown
from train.logs.records import Records, attempt_line, memory_fields, step_record
from train.logs.run_dir import RunDir
from train.replicas import Replicas
from train.step.gpu_options import options_line
from train.step.state import (
    TrainState,
    abstract_state,
    init_state,
    with_new_tracked,
)


class Diverged(RunFailed):
    """Raised after too many updates in a row that were not finite."""


@dataclasses.dataclass
class LoopContext:
    """The objects that stay the same from the first step of a run to its last."""

    job: Job
    checkpointer: Checkpointer
    records: Records
    peak_tflops: float | None
    balancing: Balancing
    in_flight: InFlight
    stop: Stop
    watchdog: Watchdog
    profile: Window
    replicas: Replicas
    goodput: Stopwatch


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    state: TrainState
    evaluation: Evaluation | None
    """None when a signal stopped the run before its last step."""
    step_secs: list[float]
    """Wall time of each step that this process has run, without evaluations and
    saves."""
    compile_sec: float
    wall_sec: float
    signal: int | None
    goodput: Stopwatch


@dataclasses.dataclass(frozen=True)
class Extras:
    """Optional records that a run writes beside its metrics."""

    track: tuple[str, ...] = ()
    """Trackers that get the records too."""
    profile_steps: range = range(0)
    begun_sec: float | None = None
    """Value of time.monotonic() when the program began; None: when training begins."""
    is_plain: bool = False
    """Whether lines show how the run goes on a terminal too, and not a bar."""


def train(
    job: Job, run_dir: RunDir, config_text: str, extras: Extras, say=print
) -> Outcome:
    """Train to cfg.train.num_steps from the newest good checkpoint, or from the start.

    `config_text` is written to config.gin once the checkpoint is known to be of this
    run. Raises Diverged, CheckpointError (saves keep failing, or the last one failed)
    and ValueError (a checkpoint of another model or of other data).
    """
    with shown(job.cfg.train.num_steps, is_plain=extras.is_plain) as display:
        return _train(job, run_dir, config_text, extras, Voice(say, display))


@dataclasses.dataclass(frozen=True)
class Voice:
    """How a run tells what it does."""

    say: Callable[[str], None]
    """Print a line before the first step."""
    display: Display


def _train(
    job: Job, run_dir: RunDir, config_text: str, extras: Extras, voice: Voice
) -> Outcome:
    """Do what `train` does, once it is clear what shows how the run goes."""
    say, display = voice.say, voice.display
    start_sec, stop, cfg = time.monotonic(), Stop(), job.cfg
    begun_sec = start_sec if extras.begun_sec is None else extras.begun_sec
    goodput = Stopwatch(run_dir.path, begun_sec)
    checkpointer = Checkpointer(run_dir.path / "checkpoints", cfg.checkpoint, say=say)
    try:
        with display.during("looking for a checkpoint"):
            state, meta = _restore_or_begin(
                job, run_dir, config_text, checkpointer, say
            )
        first = 0 if state is None else int(state.step)
        goodput.resume(first)
        with (
            goodput,
            Records(run_dir.path, cfg, first, extras.track, config_text) as records,
            _attempt(job, records, goodput),
            Watchdog(
                cfg.processes.watchdog_sec, say_loudly, run_dir.log and str(run_dir.log)
            ) as watchdog,
            contextlib.ExitStack() as ends,
        ):
            with goodput.at("compile"):
                balancing, compile_sec = _compile(job, meta, ends, voice)
            if state is None:
                state = _first_state(job, run_dir, voice)
            state = balancing.begin(state)
            balancing.records = records
            balancing.record_start(first + 1)
            folder, steps = run_dir.path / "profile", extras.profile_steps
            profile = Window(folder, steps, say, hlo_text=balancing.hlo_text)
            with display.during("compiling the comparison of replicas"):
                run = _context(
                    job, balancing, checkpointer, watchdog, profile, stop, goodput
                )
            run.in_flight.restore(meta)
            goodput.end_start()
            display.begin(first)
            balancing.say = display.say
            with profile, goodput.at("useful"):
                state, evaluation, step_secs = _steps(run, state, display)
            watchdog.at("the last save", checkpointer.num_written_bytes)
            with goodput.at("saves"), display.during("waiting for the last save"):
                if not checkpointer.wait():
                    raise _lost(checkpointer, state)
    finally:
        # Orbax would wait for the other processes, who know of no failure.
        if not (are_several() and sys.exception()):
            checkpointer.close()
    wall_sec = time.monotonic() - start_sec
    return Outcome(
        state, evaluation, step_secs, compile_sec, wall_sec, stop.signal, goodput
    )


def _attempt(job: Job, records: Records, goodput: Stopwatch):
    """Return a context that records where this attempt begins and how it ends."""
    mesh, num_steps = job.cfg.mesh, job.cfg.train.num_steps
    begin = attempt_line(goodput.step, goodput.attempt, goodput.begun_at, mesh)
    return records.attempt(begin, lambda: goodput.step, num_steps)


def _restore_or_begin(
    job: Job, run_dir: RunDir, config_text: str, checkpointer: Checkpointer, say
) -> tuple[TrainState | None, dict | None]:
    """Return what `restore` returns, and write the configuration of the run. A run that
    begins again, because it has no whole checkpoint, says so.

    Raises ValueError where the published model that it came from is not named, or its
    folder is not as `check_folder` demands.
    """
    config_path = run_dir.path / "config.gin"
    has_begun = from_first_process(config_path.exists)
    state, meta = restore(job, checkpointer, say)
    if state is None:
        _require_folder(job, run_dir)
    if state is None and has_begun:
        say(
            "this run has begun before, and has no whole checkpoint: it starts again "
            f"at step 1, and saves every {job.cfg.checkpoint.every_steps} steps"
        )
    from_first_process(lambda: write_whole(config_path, config_text))
    return state, meta


def _require_folder(job: Job, run_dir: RunDir) -> None:
    """Check the folder that a run starts from, unless that was done before its
    checkpoints turned out to be damaged. Raises ValueError."""
    from_first_process(lambda: from_hf.require_origin(job.cfg, run_dir.path))
    if job.cfg.model.from_hf is not None and job.headers_sha256 is None:
        headers = from_hf.check_folder(job.cfg)
        require_same("first parameters", {"tensors of Model.from_hf": headers})


def _first_state(job: Job, run_dir: RunDir, voice: Voice) -> TrainState:
    """Return the state of a new run: from the folder of Model.from_hf, of which the run
    keeps config.json and tokenizer, or else at random."""
    model, store, cfg = job.model, job.model.layout.store, job.cfg
    if cfg.model.from_hf is None:
        with voice.display.during("making the first parameters"):
            return init_state(model.run, model.optimizer, store)
    from_first_process(lambda: from_hf.keep_companions(cfg, run_dir.path))
    with voice.display.during("reading the first parameters"):
        return from_hf.first_state(model.run, model.optimizer, store, voice.say)


def _lost(checkpointer: Checkpointer, state: TrainState) -> CheckpointError:
    """Return the error of a run whose last state could not be saved."""
    return CheckpointError(
        f"the state of step {int(state.step)} could not be saved: "
        f"{checkpointer.last_failure}: make room, and run again to go on from the last "
        "good checkpoint"
    )


def _compile(
    job: Job, meta: dict | None, ends: contextlib.ExitStack, voice: Voice
) -> tuple[Balancing, float]:
    """Return the balancer with the compiled steps, and the seconds of compilation. The
    balancer is closed with `ends`.

    Returns when all processes have compiled, because the watchdog, which starts with
    the first step, allows no time for it.
    """
    start_sec, mesh = time.monotonic(), job.model.mesh
    say, during = voice.say, voice.display.during
    for line in job.model.run.lines():
        say(line)
    if line := options_line(mesh.devices.flat[0].platform):
        say(line)
    balancing = Balancing(job, say, during)
    ends.callback(balancing.close)
    balancing.restore(meta)
    where = f"{mesh.size} devices ({job.cfg.mesh})"
    cache = jax.config.jax_compilation_cache_dir or "JAX's compilation cache"
    say(
        f"compiling for {where}: seconds if {cache} has the programs, else from half a "
        "minute to several; no step runs before"
    )
    with during("compiling the first steps"):
        balancing.compile()
    compile_sec = time.monotonic() - start_sec
    if are_several():
        say(f"this process has compiled in {compile_sec:.1f} s, and waits for the rest")
        with during("waiting for the other processes to compile"):
            wait_for_all("compiled")
    say(f"compiled for {where} in {compile_sec:.1f} s")
    return balancing, compile_sec


def _context(
    job: Job,
    balancing: Balancing,
    checkpointer: Checkpointer,
    watchdog: Watchdog,
    profile: Window,
    stop: Stop,
    goodput: Stopwatch,
) -> LoopContext:
    """Return the context of the steps, which writes the records and prints the lines
    where the balancer does. The comparison of replicas is compiled."""
    say = balancing.say
    mesh = job.model.mesh
    peak = job.cfg.train.peak_tflops or peak_tflops(mesh.devices.flat[0].device_kind)
    with goodput.at("compile"):
        replicas = Replicas(job, balancing, checkpointer, watchdog, say)
    return LoopContext(
        job=job,
        checkpointer=checkpointer,
        records=balancing.records,
        peak_tflops=peak and peak * mesh.size,
        balancing=balancing,
        in_flight=InFlight(job.model.run, balancing, watchdog),
        stop=stop,
        watchdog=watchdog,
        profile=profile,
        replicas=replicas,
        goodput=goodput,
    )


def restore(job: Job, checkpointer: Checkpointer, say):
    """Return the state and the meta record of the newest good checkpoint, or None and
    None without one.

    Raises ValueError if the checkpoint is of another model or of other data.
    """

    def check(meta):
        """Print the fields of the configuration that differ from the checkpoint's.
        Raise ValueError if the model or the data differ."""
        for line in identity.check(meta, job.cfg, job.meta["data"]):
            say(f"changed since the checkpoint: {line}")

    model = job.model
    abstract = abstract_state(model.run, model.optimizer, model.layout.store)
    restored = checkpointer.restore(abstract, check=check)
    if restored is None:
        return None, None
    say(f"resumed at step {restored.step}")
    state = restored.state
    is_other = not identity.has_same_sharding(restored.meta, job.cfg)
    if state.tracked is not None and is_other:
        say("the domains have changed: their copies of experts start afresh")
        state = with_new_tracked(state, model.run)
    return state, restored.meta


def _steps(run: LoopContext, state: TrainState, display: Display):
    """Run the steps; return the state, the last evaluation and the time of each step.

    The evaluation is None where a signal stopped the run before its last step.
    """
    job, cfg, at, during = run.job, run.job.cfg, run.goodput.at, display.during
    reader = Reader(run, display)
    first, last = int(state.step), cfg.train.num_steps
    evaluation = _evaluate(run, state, first, display) if first >= last else None
    with at("other"):
        run.replicas.require_equal(first, state)
    for done in range(first + 1, last + 1):
        run.watchdog.at(f"step {done}")
        if run.balancing.awaits(done - 1):
            state = reader.settle(state)
        with at("swaps", unless=reader.is_behind):
            run.balancing.collect(done)
        if run.in_flight.may_redo and run.balancing.is_due(done):
            state = reader.settle(state)
        with at("swaps", unless=reader.is_behind):
            state = _adopt_due(run, done, state)
        with at("data", unless=reader.is_behind), during("waiting for data"):
            windows = feed(
                job.batches,
                done - 1,
                cfg.train.batch_size,
                cfg.train.accumulate_steps,
                job.window_sharding,
            )
        run.records.samples(done, job.batches, job.window_sharding)
        with at("profile"):
            run.profile.before(done)
        with jax.transfer_guard("disallow"):  # only explicit transfers are allowed
            state = reader.dispatch(done, state, windows)
        if run.in_flight.may_redo and run.replicas.is_due(done):
            state = reader.settle(state)
        run.replicas.put(done, state)
        state = _end_of_profiled(run, reader, done, state)
        is_stopping = run.stop.is_set()
        is_eval = done % cfg.train.eval_every_steps == 0 or done == last
        is_save = done % cfg.checkpoint.every_steps == 0 or done == last or is_stopping
        if is_eval or is_save:
            state = reader.settle(state)
        if is_save:
            with at("saves"):
                run.replicas.require_equal(done, state)
        eval_loss = None
        if is_eval:
            run.watchdog.at(f"the evaluation at step {done}")
            evaluation = _evaluate(run, state, done, display)
            eval_loss = evaluation.loss
        if is_save:
            with during(f"saving step {done}"):
                state = _save(run, reader, done, state, eval_loss)
        if is_eval or is_save:
            reader.restart_clock()
        if is_stopping and done < last:
            return run.balancing.logical(state), None, reader.step_secs
    return run.balancing.logical(state), evaluation, reader.step_secs


def _adopt_due(run: LoopContext, step: int, state: TrainState) -> TrainState:
    """Return the state under the plan and layout that the balancer has decided on for
    this step. The watchdog does not count the time that a relayout still compiles."""
    if not run.balancing.is_waiting(step):
        return run.balancing.before(step, state)
    run.watchdog.rest()
    state = run.balancing.before(step, state)
    run.watchdog.at(f"step {step}")
    return state


def _end_of_profiled(
    run: LoopContext, reader: "Reader", step: int, state: TrainState
) -> TrainState:
    """Let the profiler end its trace if this step is the last of its window, and return
    the state. That takes seconds, which are not counted as a step's time."""
    is_edge = run.profile.is_edge(step)
    if is_edge:
        run.watchdog.at(f"the profile at step {step}")
        state = reader.settle(state)
    with run.goodput.at("profile"):
        run.profile.after(step, state)
    if is_edge:
        reader.restart_clock()
    return state


def _save(
    run: LoopContext,
    reader: "Reader",
    step: int,
    state: TrainState,
    eval_loss: float | None,
) -> TrainState:
    """Begin to save the state after a step, and return it as the next step takes it."""
    run.watchdog.at(f"the save at step {step}", run.checkpointer.num_written_bytes)
    with run.goodput.at("saves"):
        state = run.balancing.logical(state)
        meta = run.job.meta | run.balancing.meta() | run.in_flight.meta()
        run.checkpointer.save(step, state, meta, eval_loss, reader.num_skipped)
        state = run.balancing.physical(state)
    run.goodput.write(step)
    return state


def _evaluate(
    run: LoopContext, state: TrainState, step: int, display: Display
) -> Evaluation:
    """Evaluate the model on the held-out text, log and print the loss, and return the
    evaluation."""
    job, now = run.job, run.balancing
    with run.goodput.at("evaluation"), display.during("evaluating held-out text"):
        evaluation = evaluate(
            now.steps.evaluate, state, now.placement, job.held_out, job.window_sharding
        )
    run.records.evaluation(step, evaluation.loss)
    loss = evaluation.loss
    display.say(f"step {step}  held-out loss {loss:.4f} nats per {job.unit}")
    return evaluation


class Reader:
    """Reader of a step's metrics, which it reads when the next step is dispatched."""

    def __init__(self, run: LoopContext, display: Display):
        self.run, self.display = run, display
        self.step_secs: list[float] = []
        self.num_skipped = 0
        """Updates in a row that were skipped, up to the last step that was read."""
        flops = flops_per_token(run.job.cfg.network).train
        self.flops_per_step = flops * run.job.tokens_per_step
        self.devices = jax.local_devices()
        self.restart_clock()

    def restart_clock(self) -> None:
        """Begin to time the next step now."""
        self.last_read_sec = time.monotonic()

    def is_behind(self) -> bool:
        """Return whether devices still compute the step that was dispatched last, so
        that they do not wait for the host."""
        return not self.run.in_flight.is_ready()

    def dispatch(self, step: int, state: TrainState, windows: Windows) -> TrainState:
        """Dispatch a step, read the metrics of the step before, and return the
        state."""
        state = self.run.in_flight.dispatch(step, state, windows)
        return self._read(state) if len(self.run.in_flight) > 1 else state

    def settle(self, state: TrainState) -> TrainState:
        """Read the metrics of all steps in flight, and return the state after them. No
        step before it is run again."""
        while len(self.run.in_flight):
            state = self._read(state)
        return state

    def _read(self, state: TrainState) -> TrainState:
        """Read, log and show the metrics of the oldest step in flight, after it was run
        again if that was needed, and return the state.

        Raises Diverged after Optimizer.max_skipped_in_a_row skipped updates.
        """
        state, kept = self.run.in_flight.settle(state)
        step, metrics = kept.step, kept.metrics
        jax.block_until_ready(metrics)
        now_sec = time.monotonic()
        step_sec, self.last_read_sec = now_sec - self.last_read_sec, now_sec
        self.step_secs.append(step_sec)
        metrics = jax.device_get(metrics)
        record = step_record(step, metrics, step_sec, self.run.job.tokens_per_step)
        peak = self.run.peak_tflops
        record["mfu"] = self.flops_per_step / step_sec / 1e12 / peak if peak else None
        record |= kept.record | memory_fields(self.devices)
        record |= self.run.balancing.step_record(step, metrics.routing)
        self.run.records.step(record, metrics.routing.tokens_le)
        self.run.balancing.observe(step, metrics.routing)
        self.run.goodput.tick(step)
        self.display.update(record)
        if record["skipped"]:
            self.display.say(
                f"step {step}: loss or gradient not finite, update skipped"
            )
        self.num_skipped = record["skipped_in_a_row"]
        if self.num_skipped >= self.run.job.cfg.optimizer.max_skipped_in_a_row:
            raise self._diverged(step)
        return state

    def _diverged(self, step: int) -> Diverged:
        """Return the error of a streak of skipped updates up to `step`, which names the
        checkpoint to go back to. The save in flight may be that one."""
        checkpointer, updated_step = self.run.checkpointer, step - self.num_skipped
        written = checkpointer.num_written_bytes
        self.run.watchdog.at("the save before the skipped updates", written)
        with jax.transfer_guard("allow"):  # several processes meet after a save
            checkpointer.settle()
            before = checkpointer.step_before(updated_step)
        go_on = "" if before is None else f"go on with --from_step={before}, or "
        return Diverged(
            f"{self.num_skipped} updates in a row were not finite, up to step {step}: "
            f"the parameters are still those of step {updated_step}; {go_on}start "
            "afresh with --fresh, and with a lower Optimizer.learning_rate"
        )
