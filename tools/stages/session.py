"""A bring-up at work: which stages run, for how long, and what is kept of them.

tools/bringup.py is its program. Results go to the folder OUT, caches and runs to the
folder WORK.
"""

import argparse
import dataclasses
import getpass
import hashlib
import json
import os
import pathlib
import sys
import tempfile
import time
from concurrent import futures
from typing import Any

from tools.stages import machine, record, runner, screen
from tools.stages.machine import ROOT, Devices
from tools.stages.models import corpus
from tools.stages.stage import DRY_KIND, Settings, Stage
from tools.stages.table import (
    BY_NAME,
    DRY_LIMIT_SEC,
    PLANTED_LIMIT_SEC,
    STAGES,
)
from train.files import write_whole
from train.messages import one_line

MAX_CUT_OFF = 2
"""Number of times that a stage may be cut off before it is left out."""
MAX_LOG_BYTES = 2**20
"""Bytes of the end of each stage's output that are kept."""
LANES = 3
"""Number of stages that run at once in a dry run."""
LINES, LOG, SCREEN, RESULT = "stages.jsonl", "log.txt", "screen.txt", "result.json"
"""Names of files in OUT: a line as each stage begins and ends, output, the end."""
GIN_FILES = ("configs/olmoe_1b_7b.gin",)
"""Configurations that are tuned and trained where none is named."""


@dataclasses.dataclass
class BringUp:
    """A bring-up at work: its settings, its record, and what it has found."""

    settings: Settings
    key: dict[str, Any]
    driver: str | None
    is_again: bool
    lines: list[str]
    """Lines about this machine for the screen: what it lacks, and what still runs."""
    not_here: dict[str, str]
    """Reasons by stage, for stages that lack a module."""
    left: list[str] = dataclasses.field(default_factory=list)
    results: dict[str, dict] = dataclasses.field(default_factory=dict)

    @classmethod
    def begin(cls, args: argparse.Namespace) -> "BringUp":
        """Find out about this machine, and return a bring-up of it. Raises ValueError
        or OSError, one line, for a machine on which nothing of it can run."""
        out = make_folder(pathlib.Path(args.out).resolve(), "--out")
        work = args.work or pathlib.Path(
            tempfile.gettempdir(),
            f"bringup-{getpass.getuser()}-"
            + hashlib.sha256(str(out).encode()).hexdigest()[:8],
        )
        work = make_folder(pathlib.Path(work).resolve(), "--work")
        driver = None if args.dry else machine.find_driver()
        machine.require_driver(driver)
        devices = Devices("cpu", DRY_KIND, 1, "9.0", None)
        if not args.dry:
            devices = machine.find_devices()
            machine.require_gpu(devices)
        settings = Settings(
            out=str(out),
            work=str(work),
            is_dry=args.dry,
            device_kind=devices.kind,
            num_devices=devices.count,
            is_hopper=devices.capability == "9.0",
            gin_files=tuple(args.gin_file) or tuple(
                str(ROOT / file) for file in GIN_FILES
            ),
            memory_bytes=devices.memory_bytes,
            corpus=str(pathlib.Path(args.corpus).resolve()) if args.corpus else "",
            plants=tuple(args.plant),
        )  # fmt: skip
        versions = machine.versions()
        key = {
            "code": machine.code_hash(),
            "device": f"{devices.count} x {devices.kind}",
            "versions": versions | ({"driver": driver} if driver else {}),
            "plants": sorted(args.plant),
        }
        not_here, lines = lacking(settings)
        return cls(settings, key, driver, args.again, lines, not_here)

    @property
    def out(self) -> pathlib.Path:
        return pathlib.Path(self.settings.out)

    @property
    def work(self) -> pathlib.Path:
        return pathlib.Path(self.settings.work)

    def play(self, stages: list[Stage], limit_sec: float) -> None:
        """Run the stages that have not ended, those that failed before last. One runs
        at a time; in a dry run, where nothing is timed, LANES do."""
        end_sec = time.monotonic() + limit_sec
        self.settings.save(self.work / "settings.json")
        self.take_choices()
        corpus(self.settings)
        todo, running = self.find_todo(stages), {}
        lanes = LANES if self.settings.is_dry else 1
        try:
            with futures.ThreadPoolExecutor(lanes) as pool:
                try:
                    while todo or running:
                        busy = {stage.name for stage in (*todo, *running.values())}
                        ready = [s for s in todo if not busy.intersection(s.after)]
                        if ready and len(running) < lanes:
                            todo.remove(ready[0])
                            left_sec = end_sec - time.monotonic()
                            limit = self.share_sec(ready[0], todo, left_sec)
                            if limit is None:
                                self.left.append(ready[0].name)
                            elif not self.skip(ready[0]):
                                self.begin_stage(ready[0], limit)
                                end = pool.submit(self.ended, ready[0], limit)
                                running[end] = ready[0]
                            continue
                        over, _ = futures.wait(
                            running, return_when=futures.FIRST_COMPLETED
                        )
                        for end in over:
                            self.end_stage(running.pop(end), end.result())
                finally:
                    runner.kill_all()
        finally:
            runner.kill_all()

    def find_todo(self, stages: list[Stage]) -> list[Stage]:
        """Return the stages to run, and keep the results of those that have ended, or
        that were cut off too often."""
        past = record.read(self.out / LINES, self.key)
        todo = []
        for stage in stages:
            own = past.get(stage.name, record.Past())
            if own.is_over and not self.is_again:
                self.results[stage.name] = own.ended
            elif own.num_cut_off >= MAX_CUT_OFF and not self.is_again:
                why = f"cut off {own.num_cut_off} times, so left out: --again runs it"
                self.results[stage.name] = _result("failed", why)
            else:
                todo.append((own.ended is not None, stage))
        return [stage for _, stage in sorted(todo, key=lambda pair: pair[0])]

    def share_sec(
        self, stage: Stage, later: list[Stage], left_sec: float
    ) -> float | None:
        """Return the time limit of a stage: what it needs, and all that is left beside
        the needs of the later stages that fit. None if it does not fit itself."""
        if f"hang:{stage.name}" in self.settings.plants:
            return PLANTED_LIMIT_SEC
        if self.settings.is_dry:
            return min(DRY_LIMIT_SEC, left_sec) if left_sec > 0 else None
        if stage.name in self.not_here:
            return stage.need_sec
        if left_sec < stage.need_sec:
            return None
        slack = left_sec - stage.need_sec
        for other in later:
            if other.need_sec > slack or other.name in self.not_here:
                continue
            slack -= other.need_sec
        return min(stage.limit_sec, stage.need_sec + slack)

    def skip(self, stage: Stage) -> bool:
        """Return whether a stage cannot run on this machine, after storing that."""
        if stage.name not in self.not_here:
            return False
        self.end_stage(stage, _result("not_here", self.not_here[stage.name]))
        return True

    def begin_stage(self, stage: Stage, limit_sec: float) -> None:
        """Store and say that a stage begins."""
        line = {"stage": stage.name, "key": self.key, "state": record.BEGUN}
        record.append(self.out / LINES, line)
        print(f"{stage.name:10} {stage.what}, at most {limit_sec:.0f} s", flush=True)

    def end_stage(self, stage: Stage, ended: dict[str, Any]) -> None:
        """Store and say how a stage has ended."""
        self.results[stage.name] = ended
        record.append(self.out / LINES, {"stage": stage.name, "key": self.key} | ended)
        self.give_choices()
        print(f"{stage.name:10} {ended['state']}: {ended['why']}", flush=True)

    def ended(self, stage: Stage, limit_sec: float) -> dict[str, Any]:
        """Run the process of a stage, and return its result. One that gives none has
        failed."""
        log, result = (self.work / f"{stage.name}.{x}" for x in ("log", "json"))
        result.unlink(missing_ok=True)
        log.write_text(f"\n== {stage.name}\n")
        words = [sys.executable, "-m", "tools.stages.run", stage.name]
        words += [str(self.work / "settings.json"), str(result), f"{limit_sec:.1f}"]
        end = runner.run(words, limit_sec, log, environ=self.environ(), cwd=ROOT)
        with (self.out / LOG).open("ab") as file:
            file.write(log.read_bytes()[-MAX_LOG_BYTES:])
        found = json.loads(result.read_text()) if result.is_file() else {}
        sec = round(end.sec, 2)
        if "state" in found:
            return {"sec": sec, **found}
        why = end.why or "it ended without a result"
        if end.code is not None and (line := runner.last_line(log)):
            why = f"{why}: {one_line(line, 200)}"
        if found.get("doing"):
            why = f"{why}, at {found['doing']}"
        figures = found.get("figures", {})
        return {"state": "failed", "sec": sec, "why": why, "figures": figures}

    def environ(self) -> dict[str, str]:
        """Return the variables of all stages: their caches, and the file of choices."""
        from moejax.kernels import device_file

        own = {
            device_file.FOLDER_VARIABLE: str(self.out),
            "MOEJAX_CACHE_DIR": str(self.work / "data"),
            "PYTHONUNBUFFERED": "1",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        }
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
            own["JAX_COMPILATION_CACHE_DIR"] = str(self.work / "programs")
        if self.settings.is_dry:
            own |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
            own["GLIBC_TUNABLES"] = ""  # programs need not start again for huge pages
            flag = "--xla_cpu_parallel_codegen_split_count=1"  # programs are small
            own["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        return own

    def choices_file(self) -> pathlib.Path:
        """Return the file of choices in OUT."""
        from moejax.kernels import device_file

        return self.out / device_file.path_of(self.settings.device_kind).name

    def take_choices(self) -> None:
        """Begin with the choices that the repository has for this device."""
        from moejax.kernels import device_file

        known = device_file.path_of(self.settings.device_kind)
        own = self.choices_file()
        if known.is_file() and not own.is_file():
            write_whole(own, known.read_bytes())

    def give_choices(self) -> None:
        """Copy the file of choices to where runs read it. A dry run does not."""
        from moejax.kernels import device_file

        own, known = self.choices_file(), device_file.path_of(self.settings.device_kind)
        if self.settings.is_dry or not own.is_file() or own == known:
            return
        try:
            known.parent.mkdir(parents=True, exist_ok=True)
            write_whole(known, own.read_bytes())
        except OSError as error:
            line = (
                f"{known} cannot be written ({error.strerror}): runs use {own.name} "
                f"with {device_file.FOLDER_VARIABLE}={self.out}; every stage runs as "
                "usual"
            )
            if line not in self.lines:
                self.lines.append(line)

    def finish(self) -> dict[str, Any]:
        """Write the result and the screen to OUT, and return the result."""
        from tools.bench.program import commit

        order = [name for name in BY_NAME if name in self.results]
        fields = ("state", "sec", "why", "figures")
        stages = {n: {f: self.results[n][f] for f in fields} for n in order}
        choices = self.choices_file()
        known = json.loads(choices.read_text()) if choices.is_file() else {}
        figures = stages.get("steps", {}).get("figures", {})
        lines = list(self.lines)
        if self.left:
            lines.append(
                f"no time was left for {len(self.left)} stages: the same command goes "
                "on with them"
            )
        lines.append(f"files: {self.out}; log: {LOG}")
        result = {
            "device": self.settings.device_kind,
            "num_devices": self.settings.num_devices,
            "is_dry": self.settings.is_dry,
            "driver": self.driver,
            "commit": commit(),
            "versions": self.key["versions"],
            "stages": stages,
            "left": self.left,
            "quarantined": known.get("quarantined", {}),
            "kernels": figures.get("kernels", {}),
            "lines": lines,
        }
        write_whole(self.out / RESULT, json.dumps(result, indent=1) + "\n")
        write_whole(self.out / SCREEN, screen.draw(result))
        return result


def _result(state: str, why: str) -> dict[str, Any]:
    """Return the result of a stage that did not run."""
    return {"state": state, "sec": 0.0, "why": why, "figures": {}}


def make_folder(path: pathlib.Path, flag: str) -> pathlib.Path:
    """Return a folder, made if needed, in which files can be written.

    Raises ValueError, one line.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"{flag}={path} cannot be written ({error.strerror}): nothing runs "
            f"without it; name another folder, {flag} {tempfile.gettempdir()}/bringup"
        ) from None
    return path


def lacking(settings: Settings) -> tuple[dict[str, str], list[str]]:
    """Return why stages cannot run on this machine, by stage, and a line for each thing
    that it lacks, with the stages that still run."""
    why, lines = {}, []
    if not settings.is_hopper:
        text = f"our kernels are for Hopper, not {settings.device_kind}"
        why |= {stage.name: text for stage in STAGES if stage.needs_hopper}
        lines.append(f"{text}: {_still_running(why)}")
    missing = machine.missing(tuple(dict.fromkeys(m for s in STAGES for m in s.needs)))
    for stage in STAGES:
        if own := [name for name in stage.needs if name in missing]:
            why[stage.name] = f"it needs {', '.join(map(machine.wanted, own))}"
    if missing:
        names = ", ".join(map(machine.wanted, missing))
        lines.append(
            f"not installed here: {names}: {_still_running(why)}; on a machine with a "
            "network `python tools/bringup.py --pack DIR` writes what is missing"
        )
    return why, lines


def _still_running(why: dict[str, str]) -> str:
    names = [stage.name for stage in STAGES if stage.name not in why]
    return f"{', '.join(names) or 'no stage'} still run"
