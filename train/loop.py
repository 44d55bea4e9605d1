"""A training run, from top to bottom: restore or begin, compile, step, save, end.

The device is one step ahead: step i is dispatched before the metrics of step i - 1 are
read, so a step never waits for the host. Where a step may have to run again
(`Layout.overflow`), whatever needs a certain state settles the steps in flight first.
So does a step that a decision after the one before may change (Balance.lag_steps = 1).
"""

import contextlib
import dataclasses
import functools
import time

import jax

from moejax.resolve.inert import inert_parts
from train.balance.balancing import Balancing
from train.checkpoint import from_hf, identity
from train.checkpoint.checkpoints import Checkpointer, CheckpointError
from train.checkpoint.checksum import checksums
from train.config import gin_reader
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
from train.logs.peak import ideal_step_sec
from train.logs.profile import Window
from train.logs.progress import Display, shown
from train.logs.records import Records, memory_fields, step_record
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


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a run that ended without an error."""

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


def train(
    job: Job,
    run_dir: RunDir,
    *,
    track: tuple[str, ...] = (),
    profile_steps: range = range(0),
    begun_sec: float | None = None,
    is_plain: bool = False,
) -> Outcome:
    """Train to Train.num_steps from the newest good checkpoint, or from the start.

    `track` names trackers that get the records too. `begun_sec` is the value of
    time.monotonic() when the program began; None: it begins now. With `is_plain` a
    terminal gets lines and no bar.

    Raises Diverged, ReplicasDiffer, CheckpointError (saves keep failing, or the last
    one failed) and ValueError (a checkpoint of another model or of other data).
    """
    start_sec, stop = time.monotonic(), Stop()
    begun_sec = start_sec if begun_sec is None else begun_sec
    cfg, model, mesh = job.cfg, job.model, job.model.mesh
    config_text, log = gin_reader.render(cfg), run_dir.log and str(run_dir.log)
    with contextlib.ExitStack() as opened:
        # What the run tells its user, and where its states go.
        display = opened.enter_context(shown(cfg.train.num_steps, is_plain=is_plain))
        say, during = display.say, display.during
        checkpointer = opened.enter_context(
            Checkpointer(run_dir.path / "checkpoints", cfg.checkpoint, say=say)
        )

        # Restore the newest good checkpoint. Once it is known to be of this run, the
        # configuration is written.
        config_path = run_dir.path / "config.gin"
        has_begun = from_first_process(config_path.exists)
        with during("looking for a checkpoint"):
            state, meta = restore(job, checkpointer, say)
        if state is None:
            _require_folder(job, run_dir)
            if has_begun:
                say(
                    "this run has begun before, and has no whole checkpoint: it starts "
                    f"again at step 1, and saves every {cfg.checkpoint.every_steps} "
                    "steps"
                )
        from_first_process(lambda: write_whole(config_path, config_text))
        first = 0 if state is None else int(state.step)

        # Open the records, which are cut back to this step, and watch that work ends.
        goodput = opened.enter_context(Stopwatch(run_dir.path, first, begun_sec))
        attempt = goodput.attempt, goodput.begun_at
        records = opened.enter_context(
            Records(run_dir.path, cfg, first, *attempt, track, config_text)
        )
        watchdog = opened.enter_context(
            Watchdog(cfg.processes.watchdog_sec, say_loudly, log)
        )

        # Compile the steps, while the planner's process starts. The watchdog counts
        # from the first step on, because compilation has no time limit.
        with goodput.at("compile"):
            compile_begin_sec = time.monotonic()
            tokens = from_hf.notes_on_tokens(cfg, job.corpus.tokenizer)
            for line in (*model.run.lines(), *inert_parts(cfg), *tokens):
                say(line)
            if line := options_line(mesh.devices.flat[0].platform):
                say(line)
            balancing = Balancing(job, records, say, during)
            opened.callback(balancing.close)
            balancing.restore(meta)
            where = f"{mesh.size} devices ({cfg.mesh})"
            cache = jax.config.jax_compilation_cache_dir or "JAX's compilation cache"
            say(
                f"compiling for {where}: seconds if {cache} has the programs, else "
                "from half a minute to several; no step runs before"
            )
            with during("compiling the first steps"):
                balancing.compile()
            compile_sec = time.monotonic() - compile_begin_sec
            if are_several():
                say(
                    f"this process has compiled in {compile_sec:.1f} s, and waits for "
                    "the rest"
                )
                with during("waiting for the other processes to compile"):
                    wait_for_all("compiled")
            say(f"compiled for {where} in {compile_sec:.1f} s")

        # Make the first state, if none was restored, and lay it out by the plan.
        if state is None and cfg.model.from_hf is None:
            with during("making the first parameters"):
                state = init_state(model.run, model.optimizer, model.layout.store)
        elif state is None:
            from_first_process(lambda: from_hf.keep_companions(cfg, run_dir.path))
            with during("reading the first parameters"):
                state = from_hf.first_state(
                    model.run, model.optimizer, model.layout.store, say
                )
        with goodput.at("compile"), during("compiling the checksums of saves"):
            checksums(state)  # later a save would wait, while a relayout compiles
        state = balancing.begin(first + 1, state)

        profile = Window(
            run_dir.path / "profile", profile_steps, say, hlo_text=balancing.hlo_text
        )
        with goodput.at("compile"), during("compiling the comparison of replicas"):
            replicas = Replicas(job, balancing, checkpointer, watchdog, say)
        in_flight = InFlight(model.run, balancing, watchdog)
        in_flight.restore(meta)
        run = Run(
            job=job,
            display=display,
            goodput=goodput,
            records=records,
            watchdog=watchdog,
            checkpointer=checkpointer,
            balancing=balancing,
            in_flight=in_flight,
            replicas=replicas,
            profile=profile,
            stop=stop,
        )
        goodput.end_start()
        display.begin(first)

        with profile, goodput.at("useful"):
            state, evaluation = run_steps(run, state)

        watchdog.at("the last save", checkpointer.num_written_bytes)
        with goodput.at("saves"), during("waiting for the last save"):
            is_saved = checkpointer.wait()
        if not is_saved:
            raise CheckpointError(
                f"the state of step {int(state.step)} could not be saved: "
                f"{checkpointer.last_failure}: make room, and run again to go on from "
                "the last good checkpoint"
            )
    wall_sec = time.monotonic() - start_sec
    return Outcome(
        state, evaluation, run.step_secs, compile_sec, wall_sec, stop.signal, goodput
    )


@dataclasses.dataclass
class Run:
    """Objects that live from the first step of a run to its last."""

    job: Job
    display: Display
    goodput: Stopwatch
    records: Records
    watchdog: Watchdog
    checkpointer: Checkpointer
    balancing: Balancing
    in_flight: InFlight
    replicas: Replicas
    profile: Window
    stop: Stop
    step_secs: list[float] = dataclasses.field(default_factory=list)
    """Wall time of each step that was read."""
    num_skipped: int = 0
    """Updates in a row that were skipped, up to the last step that was read."""
    last_read_sec: float = 0.0
    """Value of time.monotonic() from which the next step's time counts."""

    @functools.cached_property
    def ideal_step_sec(self) -> float | None:
        """Copy of `ideal_step_sec` of the run's devices."""
        device = self.job.model.mesh.devices.flat[0]
        return ideal_step_sec(self.job.cfg, device.device_kind)

    def restart_clock(self) -> None:
        """Begin to time the next step now."""
        self.last_read_sec = time.monotonic()

    def settle(self, state: TrainState) -> TrainState:
        """Read all steps in flight, and return the state after them. No step before it
        is run again."""
        while len(self.in_flight):
            state = self.read(state)
        return state

    def read(self, state: TrainState) -> TrainState:
        """Read, log and show the metrics of the oldest step in flight, after it was run
        again if that was needed, and return the state after the newest.

        Raises Diverged after Optimizer.max_skipped_in_a_row skipped updates.
        """
        job, cfg, balancing = self.job, self.job.cfg, self.balancing
        state, kept = self.in_flight.settle(state)
        step, metrics = kept.step, kept.metrics
        jax.block_until_ready(metrics)
        now_sec = time.monotonic()
        step_sec, self.last_read_sec = now_sec - self.last_read_sec, now_sec
        self.step_secs.append(step_sec)

        metrics = jax.device_get(metrics)
        record = step_record(step, metrics, step_sec, job.tokens_per_step)
        ideal_sec = self.ideal_step_sec
        record["mfu"] = ideal_sec and ideal_sec / step_sec
        record |= kept.record | memory_fields(jax.local_devices())
        record |= balancing.step_record(step, metrics.routing)
        sources = functools.partial(balancing.loads, metrics.routing)
        self.records.step(record, metrics.routing.tokens_le, sources)
        balancing.observe(step, metrics.routing, step_sec)
        self.goodput.tick(step)
        self.display.update(record)

        self.num_skipped = record["skipped_in_a_row"]
        if record["skipped"]:
            self.display.say(
                f"step {step}: loss or gradient not finite, update skipped"
            )
        if self.num_skipped >= cfg.optimizer.max_skipped_in_a_row:
            raise self._diverged(step)
        return state

    def evaluate(self, step: int, state: TrainState) -> Evaluation:
        """Evaluate the model on the held-out text, log and print the loss, and return
        the evaluation."""
        job, balancing = self.job, self.balancing
        self.watchdog.at(f"the evaluation at step {step}")
        what = "evaluating held-out text"
        with self.goodput.at("evaluation"), self.display.during(what):
            evaluation = evaluate(
                balancing.steps.evaluate,
                state,
                balancing.placement,
                job.held_out,
                job.window_sharding,
            )
        self.records.evaluation(step, evaluation.loss)
        self.display.say(
            f"step {step}  held-out loss {evaluation.loss:.4f} nats per {job.unit}"
        )
        return evaluation

    def save(self, step: int, state: TrainState, eval_loss: float | None) -> TrainState:
        """Begin to save the state after a step, and return it as the next step takes
        it. Experts are saved in logical order."""
        balancing, checkpointer = self.balancing, self.checkpointer
        self.watchdog.at(f"the save at step {step}", checkpointer.num_written_bytes)
        with self.goodput.at("saves"), self.display.during(f"saving step {step}"):
            state = balancing.logical(state)
            meta = self.job.meta | balancing.meta() | self.in_flight.meta()
            checkpointer.save(step, state, meta, eval_loss, self.num_skipped)
            state = balancing.physical(state)
        self.goodput.write(step)
        return state

    def _diverged(self, step: int) -> Diverged:
        """Return the error of a streak of skipped updates up to `step`, which names the
        checkpoint to go back to. The save in flight may be that one."""
        updated_step = step - self.num_skipped
        written = self.checkpointer.num_written_bytes
        self.watchdog.at("the save before the skipped updates", written)
        with jax.transfer_guard("allow"):  # several processes meet after a save
            self.checkpointer.settle()
            before = self.checkpointer.step_before(updated_step)
        go_on = "" if before is None else f"go on with --from_step={before}, or "
        return Diverged(
            f"{self.num_skipped} updates in a row were not finite, up to step {step}: "
            f"the parameters are still those of step {updated_step}; {go_on}start "
            "afresh with --fresh, and with a lower Optimizer.learning_rate"
        )


def run_steps(run: Run, state: TrainState) -> tuple[TrainState, Evaluation | None]:
    """Run the steps after `state`; return the last state, with experts in logical
    order, and the last evaluation: None where a signal stopped the run before its last
    step."""
    job, cfg = run.job, run.job.cfg
    balancing, in_flight, watchdog = run.balancing, run.in_flight, run.watchdog
    at, during = run.goodput.at, run.display.during
    is_computing = in_flight.is_computing  # then devices do not wait for the host
    first, last = int(state.step), cfg.train.num_steps
    evaluation = run.evaluate(first, state) if first >= last else None
    with at("other"):
        run.replicas.require_equal(first, state)
    run.restart_clock()
    for step in range(first + 1, last + 1):
        # Adopt the plan or layout that the balancer has decided on for this step.
        watchdog.at(f"step {step}")
        if balancing.awaits(step - 1):
            state = run.settle(state)
        with at("swaps", unless=is_computing):
            balancing.collect(step)
        if balancing.is_due(step) and in_flight.may_redo:
            state = run.settle(state)
        is_waiting = balancing.is_waiting(step)
        if is_waiting:
            watchdog.rest()  # a relayout may still compile, for as long as it takes
        with at("swaps", unless=is_computing):
            state = balancing.before(step, state)
        if is_waiting:
            watchdog.at(f"step {step}")

        # Feed and dispatch it, and read the step before.
        with at("data", unless=is_computing), during("waiting for data"):
            windows = feed(
                job.batches,
                step - 1,
                cfg.train.batch_size,
                cfg.train.accumulate_steps,
                job.window_sharding,
            )
        run.records.samples(step, job.batches, job.window_sharding)
        with at("profile"):
            run.profile.before(step)
        with jax.transfer_guard("disallow"):  # only explicit transfers are allowed
            state = in_flight.dispatch(step, state, windows)
            if len(in_flight) > 1:
                state = run.read(state)

        # Compare replicas, and end a profile.
        if in_flight.may_redo and run.replicas.is_due(step):
            state = run.settle(state)
        run.replicas.put(step, state)
        is_edge = run.profile.is_edge(step)
        if is_edge:  # the profiler waits for the devices, and takes seconds
            watchdog.at(f"the profile at step {step}")
            state = run.settle(state)
        with at("profile"):
            run.profile.after(step, state)

        # Evaluate, save, stop.
        is_stopping, is_last = run.stop.is_set(), step == last
        is_eval = step % cfg.train.eval_every_steps == 0 or is_last
        is_save = step % cfg.checkpoint.every_steps == 0 or is_last or is_stopping
        if is_eval or is_save:
            state = run.settle(state)
        if is_save:
            with at("saves"):
                run.replicas.require_equal(step, state)
        if is_eval:
            evaluation = run.evaluate(step, state)
        if is_save:
            state = run.save(step, state, evaluation.loss if is_eval else None)
        if is_eval or is_save or is_edge:
            run.restart_clock()
        if is_stopping and not is_last:
            return balancing.logical(state), None
    return balancing.logical(state), evaluation


def restore(
    job: Job, checkpointer: Checkpointer, say
) -> tuple[TrainState | None, dict | None]:
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
    if line := identity.changed_rate(restored.meta, job.cfg, restored.step):
        say(line)
    state = restored.state
    is_other = not identity.has_same_sharding(restored.meta, job.cfg)
    if state.tracked is not None and is_other:
        say("the domains have changed: their copies of experts start afresh")
        state = with_new_tracked(state, model.run)
    return state, restored.meta


def _require_folder(job: Job, run_dir: RunDir) -> None:
    """Check the folder that a run starts from, unless that was done before its
    checkpoints turned out to be damaged. Raises ValueError."""
    from_first_process(lambda: from_hf.require_origin(job.cfg, run_dir.path))
    if job.cfg.model.from_hf is not None and job.headers_sha256 is None:
        headers = from_hf.check_folder(job.cfg)
        require_same("first parameters", {"tensors of Model.from_hf": headers})
