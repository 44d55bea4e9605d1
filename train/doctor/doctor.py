"""Check the devices of a run before it trains, and replace what is wrong.

    heal     at the start of a run on GPUs, unless it is remembered that all was right;
             a wrong kernel or transport is replaced by its plain form
    check    for `train/main.py --check`: a table, and nothing is replaced

All processes check together and get the same outcomes, those of all devices, through
the coordinator. So they replace the same, and compile equal programs.
"""

import dataclasses
import threading
import time
from collections.abc import Callable

import jax

from moejax.config import Config
from moejax.kernels import quarantine
from moejax.resolve.resolved import Resolved
from train.doctor import memory
from train.doctor.collectives import (
    CollectiveCheck,
    collective_checks,
    run_collectives,
    transport_checks,
)
from train.doctor.kernel_check import KernelCheck, run_kernels
from train.doctor.other_kernels import (
    attention_checks,
    permute_check,
    water_fill_check,
)
from train.doctor.outcome import Outcome, from_text, merge, to_text
from train.doctor.products import product_checks
from train.launch import failures
from train.launch.agreement import merged
from train.launch.program import FAILED, RunFailed
from train.messages import one_line

PLAIN_OPTIONS = {
    "Dispatch.transport": "padded",
    "Dispatch.fused_split": False,
    "Model.gradient_reduce_dtype": "float32",
}
"""Values of options with which a collective or a kernel is not used."""

Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Checks:
    """Checks of a run's devices."""

    kernels: list[KernelCheck]
    transport: list[CollectiveCheck]
    others: list[CollectiveCheck]
    """Checks of the other collectives."""

    @classmethod
    def of(cls, run: Resolved) -> "Checks":
        """Return all checks of a run."""
        return cls(kernel_checks(run), transport_checks(run), collective_checks(run))

    @property
    def names(self) -> list[str]:
        """Names of the checks, in the order in which they run."""
        return [c.name for c in (*self.kernels, *self.transport, *self.others)]


@dataclasses.dataclass(frozen=True)
class Report:
    """Outcomes of the checks on all devices."""

    outcomes: list[Outcome]
    sec: float

    @property
    def wrong(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if not outcome.is_right]


def kernel_checks(run: Resolved) -> list[KernelCheck]:
    """Return a check for each kernel that the layers of a run use."""
    checks = attention_checks(run)
    if run.cfg.router.training != "dense":
        checks = [*product_checks(run), permute_check(run), *checks]
        if run.layout.split == "water_filling":
            checks.append(water_fill_check(run))
    return checks


def heal(
    run: Resolved, resolve_again: Callable[[Config], Resolved], say: Say
) -> Config | None:
    """Check the devices of a run on GPUs, and replace what is wrong by its plain form.

    Return the configuration to train with, and None where nothing was replaced. A wrong
    kernel is held in quarantine in this process; `resolve_again` resolves a run
    afterwards. Nothing runs if every process remembers that all was right; the ragged
    transport is checked all the same. `say` gets the warnings, on process 0 those about
    devices.

    Raises RunFailed if something without a plain form is wrong.
    """
    if not is_for(run):
        return None
    checks, is_first = Checks.of(run), jax.process_index() == 0
    digest = memory.fingerprint(run, checks.names)
    if is_known := _all_remember(digest, say):
        ragged = checks.transport if run.layout.transport == "ragged" else []
        checks = Checks([], ragged, [])
    report, healed = examine(run, checks), None
    while report.wrong:
        healed, lines = _replace(run, report.wrong)
        for line in lines if is_first else ():
            say(line)
        run = resolve_again(healed)
        checks = Checks.of(run)
        report = examine(run, checks)
    if report.outcomes and is_first:
        num = len(report.outcomes)
        print(f"doctor: {num} checks are right, in {report.sec:.1f} s", flush=True)
    if healed is not None:
        memory.remember(memory.fingerprint(run, checks.names), say)
    elif not is_known:
        memory.remember(digest, say)
    return healed


def is_for(run: Resolved) -> bool:
    """Return whether the devices of a run are checked without being asked to."""
    return run.mesh.devices.flat[0].platform == "gpu"


def check(run: Resolved, say: Say) -> Report:
    """Check the devices of a run, and return what was found; nothing is replaced. It is
    remembered if all is right."""
    checks = Checks.of(run)
    report = examine(run, checks)
    if not report.wrong:
        memory.remember(memory.fingerprint(run, checks.names), say)
    return report


def examine(run: Resolved, checks: Checks) -> Report:
    """Run checks on the devices of a run, and return what all processes have found.

    A program that takes longer than Processes.watchdog_sec ends all processes.
    """
    start_sec, outcomes = time.monotonic(), []
    devices = list(run.mesh.local_devices)
    with Limit(run.cfg.processes.watchdog_sec) as limit:
        if checks.kernels:
            limit.at(checks.kernels)
            found = run_kernels(checks.kernels, devices)
            outcomes += from_text(merged(_unused_name(), to_text(found), merge))
        for collectives in (checks.transport, checks.others):
            if collectives:
                limit.at(collectives)
                outcomes += _examine_collectives(run, collectives)
    return Report(outcomes, time.monotonic() - start_sec)


def _examine_collectives(run: Resolved, checks: list[CollectiveCheck]) -> list[Outcome]:
    """Return what all processes have found of collectives, which run as one program. If
    that fails, each runs by itself."""
    fault = None
    try:
        found = run_collectives(checks, run.mesh_layout.mesh)
    except Exception as error:
        fault = f"{type(error).__name__}: {one_line(error, 300)}"
        found = [_failed(check, run, fault) for check in checks]
    outcomes = from_text(merged(_unused_name(), to_text(found), merge))
    has_failed = any(outcome.error == float("inf") for outcome in outcomes)
    if has_failed and len(checks) > 1:
        return [x for check in checks for x in _examine_collectives(run, [check])]
    return outcomes


def _failed(check: CollectiveCheck, run: Resolved, fault: str) -> Outcome:
    """Return the outcome of a check whose program raised an error."""
    devices = tuple(device.id for device in run.mesh.local_devices)
    process = jax.process_index()
    infinite = float("inf")
    return Outcome(check.name, check.subject, infinite, 0.0, devices, process, fault)


def _all_remember(digest: str, say: Say) -> bool:
    """Return whether every process remembers that the checks of a digest were right."""
    own = "yes" if memory.is_remembered(digest, say) else "no"
    return merged(_unused_name(), own, min) == "yes"  # 'no' is below 'yes'


_names = iter(range(2**31))


def _unused_name() -> str:
    """Return a name for the coordinator that no one has used. All processes ask for one
    in the same order."""
    return f"doctor {next(_names)}"


def _replace(run: Resolved, wrong: list[Outcome]) -> tuple[Config, list[str]]:
    """Replace what is wrong by its plain form; return the new configuration, and a
    warning for each.

    Raises RunFailed for the first thing that has no plain form.
    """
    cfg, lines = run.cfg, []
    for outcome in sorted(wrong, key=lambda outcome: outcome.subject != ""):
        lines.append(f"WRONG ON THESE DEVICES: {outcome}: {remedy(outcome)}")
        if not outcome.subject:
            raise RunFailed(lines[-1])
        if outcome.subject in PLAIN_OPTIONS:
            cfg = _with_plain(cfg, outcome.subject)
            continue
        quarantine.hold(outcome.subject, "first", f"found wrong at start, {outcome}")
        if outcome.subject.startswith("attention"):  # its name would insist on it
            model = dataclasses.replace(cfg.model, attention="auto")
            cfg = dataclasses.replace(cfg, model=model)
    return cfg, lines


def _with_plain(cfg: Config, option: str) -> Config:
    """Return a configuration with the plain value of an option."""
    part, field = option.lower().split(".")
    value = PLAIN_OPTIONS[option]
    changed = dataclasses.replace(getattr(cfg, part), **{field: value})
    return dataclasses.replace(cfg, **{part: changed})


def remedy(outcome: Outcome) -> str:
    """Return what a run does about something wrong, or what the user can do."""
    if outcome.subject in PLAIN_OPTIONS:
        value = PLAIN_OPTIONS[outcome.subject]
        return f"the run goes on with {outcome.subject} = {value!r}"
    if outcome.subject:
        return "the run goes on with the next implementation"
    return (
        "it has no plain form that could replace it: the devices, their links or the "
        "libraries compute something wrong; leave out these devices, or change versions"
    )


class Limit:
    """A timer that ends all processes, with the name of what hangs, where checks take
    longer than `limit_sec`. 0 never ends them."""

    def __init__(self, limit_sec: int) -> None:
        self._limit_sec = limit_sec
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "Limit":
        return self

    def __exit__(self, *_) -> None:
        self._cancel()

    def at(self, checks: list) -> None:
        """Start the timer for checks that are one program."""
        self._cancel()
        if not self._limit_sec:
            return
        names = ", ".join(check.name for check in checks)
        self._timer = threading.Timer(self._limit_sec, self._end, [names])
        self._timer.daemon = True
        self._timer.start()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, names: str) -> None:
        failures.end_all(
            FAILED,
            f"DOCTOR HANGS: the checks of {names} have not ended after "
            f"{self._limit_sec} s (Processes.watchdog_sec): a device or a link does "
            "not answer, or a process is missing; NCCL_DEBUG=INFO says more of GPUs",
        )
