"""The stage 'sanitizer': NVIDIA's compute-sanitizer over each kernel, small cases."""

import os
import pathlib
import re
import shutil
import sys

from tools.stages import runner
from tools.stages.numerics import read_lines
from tools.stages.stage import NotHere, Result, Task

TOOLS = ("memcheck", "racecheck")
PLACES = ("/usr/local/cuda/bin/compute-sanitizer",)
KERNELS = "kns=mosaic_gpu"
"""Part of the name of each kernel that Pallas makes by Mosaic GPU, as ptxas prints it:
grouped_rows_mosaic_gpu_kernel. The sanitizer leaves XLA's own kernels alone."""
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
KERNEL_SEC = 60.0
"""Limit on one kernel under one tool."""


def work(task: Task) -> Result:
    """Check each kernel with each tool. A kernel with errors of memory is quarantined;
    hazards fail the stage alone, because racecheck does not follow all asynchronous
    copies."""
    from moejax.kernels import quarantine

    settings = task.settings
    path = shutil.which("compute-sanitizer")
    path = path or next((p for p in PLACES if os.access(p, os.X_OK)), None)
    if path is None:
        raise NotHere("compute-sanitizer is neither on PATH nor in /usr/local/cuda/bin")
    if settings.is_dry:
        raise NotHere("it checks kernels on a GPU, and interpreted ones run on none")
    own = [name for name in quarantine.KERNELS if name != "attention_cudnn"]
    held = quarantine.unusable(own, settings.device_kind)
    found: dict[str, str] = {}
    for tool in TOOLS:
        for kernel in own:
            if kernel in held:
                continue
            task.note(f"{tool} of {kernel}", checks=found)
            if task.left_sec < KERNEL_SEC / 2:
                found[f"{tool} {kernel}"] = "no time was left"
                continue
            found[f"{tool} {kernel}"] = check(task, path, tool, kernel)
    return judge(task, found)


def check(task: Task, path: str, tool: str, kernel: str) -> str:
    """Run one kernel's first form under a tool. Return what is wrong, or ''."""
    findings, log = (task.path.with_name(f"sanitizer.{x}") for x in ("jsonl", "log"))
    findings.write_text("")
    words = [path, "--tool", tool, "--kernel-name", KERNELS, "--log-file", str(log)]
    words += [sys.executable, "-m", "tools.stages.kernel_checks"]
    words += [str(task.path.with_name("small.json")), str(findings), f"{kernel}/first"]
    write_small_settings(task)
    log.unlink(missing_ok=True)
    end = runner.run_in_group(words, min(KERNEL_SEC, task.left_sec))
    text = log.read_text(errors="replace") if log.is_file() else ""
    print(text, flush=True)
    counts = [int(a or b) for a, b in SUMMARY.findall(text)]
    lines = [line for line in read_lines(findings) if line["is_over"]]
    if counts and sum(counts):
        first = next((x for x in text.split("\n") if "Invalid" in x or "Race" in x), "")
        return f"{sum(counts)} errors; {first.strip('= ')}".strip("; ")
    if not counts or not lines:
        return end.why or "the tool wrote no summary"
    return lines[0]["why"]


def write_small_settings(task: Task) -> None:
    """Write the settings by which a process checks one small case of a kernel."""
    import dataclasses

    small = dataclasses.replace(task.settings, is_small=True)
    small.save(pathlib.Path(task.path.with_name("small.json")))


def judge(task: Task, found: dict[str, str]) -> Result:
    """Quarantine kernels with errors of memory, and return the result of the stage."""
    from moejax.kernels import quarantine

    wrong = {check: why for check, why in found.items() if why}
    held = {}
    for check, why in wrong.items():
        tool, kernel = check.split()
        if tool == "memcheck" and " errors" in why:
            held[kernel] = f"memcheck: {why}"
    for kernel, why in held.items():
        quarantine.store(task.settings.device_kind, kernel, "first", why)
    figures = {"checks": found}
    if not wrong:
        text = f"{len(found)} checks of {' and '.join(TOOLS)} without an error"
        return Result("passed", text, figures)
    text = "; ".join(f"{check}: {why}" for check, why in wrong.items())
    state = "quarantined" if len(held) == len(wrong) else "failed"
    return Result(state, text, figures)
