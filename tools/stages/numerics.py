"""The stage 'numerics': every kernel against its definition, and quarantine.

This process does not import jax. Another one checks kernel after kernel
(kernel_checks.py). Where it crashes or hangs, the kernel that it was at is quarantined,
and a new process goes on with the rest.
"""

import json
import pathlib
import sys
import time

from tools.stages import runner
from tools.stages.stage import Result, Task

KERNEL_SEC = {True: 60.0, False: 120.0}
"""Limit on one kernel in one form, compilation included, by Settings.is_dry."""
CHECKS = "tools.stages.kernel_checks"
"""Module that checks the kernels, in a process of its own."""
START_SEC = 60.0
"""Limit on the start of a process."""


def work(task: Task) -> Result:
    """Check all kernels, and quarantine those that are wrong."""
    from moejax.kernels.quarantine import FORMS, KERNELS

    todo = [f"{kernel}/{form}" for form in FORMS for kernel in KERNELS]
    found: dict[str, dict] = {}
    while todo:
        task.note(todo[0], kernels=found)
        lines, end = check(task, todo)
        over = {line["unit"]: line for line in lines if line["is_over"]}
        found |= {unit: _figures(line) for unit, line in over.items()}
        begun = [line["unit"] for line in lines if line["unit"] not in over]
        if begun:
            found[begun[-1]] = {"why": end.why or "it ended in the middle"}
        elif not over:
            raise RuntimeError(f"no kernel was checked: {end.why}")
        wrong = {unit: own["why"] for unit, own in found.items() if own["why"]}
        hold(task, {unit: why for unit, why in wrong.items() if unit in todo})
        left_out = {unit.split("/")[0] for unit in wrong}
        todo = [
            unit
            for unit in todo
            if unit not in found and unit.split("/")[0] not in left_out
        ]
    return judge(found)


def hold(task: Task, wrong: dict[str, str]) -> None:
    """Quarantine kernels, in the form that is wrong, with the reasons."""
    from moejax.kernels import quarantine
    from tools.bench.program import commit

    for unit, why in wrong.items():
        kernel, form = unit.split("/")
        kind = task.settings.device_kind
        quarantine.store(kind, kernel, form, why, commit=commit())


def check(task: Task, units: list[str]) -> tuple[list[dict], runner.Ended]:
    """Check kernels in a process of their own until one of them crashes or hangs.
    Return the lines that it wrote, and how it ended."""
    findings = task.path.with_name("findings.jsonl")
    findings.write_text("")
    words = [sys.executable, "-m", CHECKS]
    words += [str(task.path.with_name("settings.json")), str(findings), *units]
    process = runner.start(words)
    begin, at = time.monotonic(), 0
    limit = START_SEC + KERNEL_SEC[task.settings.is_dry]
    while (code := process.poll()) is None:
        if findings.stat().st_size != at:
            at, begin = findings.stat().st_size, time.monotonic()
            task.note(read_lines(findings)[-1]["unit"])
            limit = KERNEL_SEC[task.settings.is_dry]
        if time.monotonic() - begin > limit:
            process.kill()
            process.wait()
            code = None
            break
        time.sleep(0.02)
    return read_lines(findings), runner.Ended(code, time.monotonic() - begin)


def read_lines(findings: pathlib.Path) -> list[dict]:
    """Return the whole lines of a file of findings."""
    *lines, _ = findings.read_text().split("\n")
    return [json.loads(line) for line in lines]


def judge(found: dict[str, dict]) -> Result:
    """Return the result of the stage."""
    wrong = {unit: own["why"] for unit, own in found.items() if own["why"]}
    checked = {u: own for u, own in found.items() if own.get("num_cases")}
    num_cases = sum(own["num_cases"] for own in checked.values())
    figures = {"kernels": found}
    if wrong:
        text = "; ".join(f"{unit} ({why})" for unit, why in wrong.items())
        return Result("quarantined", text, figures)
    text = f"{len(checked)} kernels right in {num_cases} cases, the same bits twice"
    return Result("passed", text, figures)


def _figures(line: dict) -> dict:
    return {name: line[name] for name in ("why", "num_cases", "max_error", "sec")}
