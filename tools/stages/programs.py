"""The stages that run one of our programs on this machine's device and keep its last
line of JSON: 'attention' and 'products'; and how such programs are run.
"""

import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from tools.stages.machine import ROOT
from tools.stages.stage import Result, Task
from train.launch.program import CRASHED

MARGIN_SEC = 5.0
"""Seconds that a stage keeps for itself at the end of its time."""
TABLE = "products.json"
"""File in OUT with the rows of all implementations of the grouped product."""
ATTENTION = {
    True: "--lengths 64 --documents 4 --heads 2 --key_heads 1 --width 16 --repeats 1",
    False: "--lengths 2048,4096 --documents 1,8 --heads 16 --key_heads 16 --width 128",
}
"""Flags of tools/bench/attention.py, by Settings.is_dry."""
PRODUCTS = {
    True: "--skews zipf --passes forward --repeats 1",
    False: "--skews zipf,uniform --passes forward,dgrad,wgrad --untuned",
}
"""Flags of tools/bench/grouped_dot.py, by Settings.is_dry."""
WRONG = re.compile(r"^(\w+)\b.*? (?:computes something else|differs from)")
"""Beginning of the error of a benchmark that has found a wrong implementation."""


class Done(NamedTuple):
    """How a program ended."""

    code: int | None
    """Exit code; None if its time was up."""
    record: Any
    """The JSON on its last line, or None."""
    error: str
    """Its last line of stderr, for another exit code than 0."""


def run(words: Sequence[str], limit_sec: float) -> Done:
    """Run one of our Python programs with --json. Its output goes to the log too."""
    command = [sys.executable, *words, "--json"]
    print("$", *command[1:], flush=True)
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=limit_sec,
        )
    except subprocess.TimeoutExpired as late:
        _print(late.stdout, late.stderr)
        return Done(None, None, f"no end after {limit_sec:.0f} s: killed")
    _print(done.stdout, done.stderr)
    lines = done.stdout.strip().split("\n")
    try:
        record = json.loads(lines[-1])
    except ValueError:
        record = None
    errors = [line for line in done.stderr.split("\n") if line.strip()]
    text = errors[-1].removeprefix("error: ") if errors else f"code {done.returncode}"
    return Done(done.returncode, record, "" if done.returncode == 0 else text)


def _print(*texts: str | bytes | None) -> None:
    for text in filter(None, texts):
        is_text = isinstance(text, str)
        print(text if is_text else text.decode(errors="replace"), flush=True)


def run_right(words: Sequence[str], impls: Sequence[str], task: Task) -> tuple:
    """Run a benchmark without the implementations that it finds wrong, and without
    those that crash it.

    The first of `impls` is the one that others are compared with. Returns how the
    benchmark ended, and the reasons by implementation that was left out.
    """
    left_out: dict[str, str] = {}

    def run_those(names: Sequence[str]) -> Done:
        limit_sec = max(1.0, task.left_sec - MARGIN_SEC)
        return run([*words, "--impls", ",".join(names)], limit_sec)

    while True:
        names = [name for name in impls if name not in left_out]
        done = run_those(names)
        if done.code in (0, None) or len(names) < 2:
            return done, left_out
        wrong = WRONG.match(done.error)
        if done.code == CRASHED and wrong and wrong[1] in names[1:]:
            left_out[wrong[1]] = done.error
            continue
        alone = {name: run_those([names[0], name]) for name in names[1:]}
        # One whose time was up may only have come late: it is not left out.
        crashed = {
            name: own.error for name, own in alone.items() if own.code not in (0, None)
        }
        if not crashed:
            return done, left_out
        left_out |= crashed


def attention(task: Task) -> Result:
    """Time the forms of attention, and compare them with each other."""
    from moejax.kernels import quarantine

    settings = task.settings
    words = ["tools/bench/attention.py", "--device", settings.platform]
    words += ["--memory_lengths", "none", *ATTENTION[settings.is_dry].split()]
    impls = ["masked", "blocked"]
    impls += [] if settings.is_dry else ["masked_cudnn", "hopper", "cudnn"]
    done, left_out = run_right(words, impls, task)
    kernels = {"hopper": "attention", "cudnn": "attention_cudnn"}
    held = {kernels[name]: why for name, why in left_out.items() if name in kernels}
    for kernel, why in held.items():
        quarantine.store(settings.device_kind, kernel, "first", why)
    if done.code:
        return Result("failed", done.error, {"left_out": left_out})
    if done.record is None:
        return Result("failed", done.error or "no table was printed", {})
    times = done.record["times"]
    longest = [
        row
        for row in times
        if (row["tokens"], row["documents"])
        == max((r["tokens"], r["documents"]) for r in times)
    ]
    text = ", ".join(f"{row['impl']} {row['msec']:.2f} ms" for row in longest)
    first = longest[0]
    why = f"{first['tokens']} tokens in {first['documents']} documents: {text}"
    why += "".join(f"; left out: {x}" for x in left_out.values())
    figures = {"times": times, "declined": done.record["declined"]}
    figures["left_out"] = left_out
    return Result("quarantined" if held else "passed", why, figures)


def products(task: Task) -> Result:
    """Make the table of grouped products against every peer, shape by shape."""
    from moejax.kernels.shapes import MODEL_SHAPES
    from tools.bench.grouped_dot_peers import IMPLEMENTATIONS

    settings = task.settings
    path = pathlib.Path(settings.out) / TABLE
    words = ["tools/bench/grouped_dot.py", "--device", settings.platform]
    words += ["--seed", "0", "--out", str(task.path.with_name("rows.json"))]
    names, impls = list(MODEL_SHAPES), list(IMPLEMENTATIONS)
    if settings.is_dry:
        names, impls = ["olmoe_1b_7b"], ["blocked", "ragged_dot", "dense"]
    words += PRODUCTS[settings.is_dry].split()
    rows, problems = [], {}
    for i, name in enumerate(names):
        if task.left_sec < 2 * MARGIN_SEC:
            problems |= dict.fromkeys(names[i:], "no time was left")
            break
        task.note(name, num_rows=len(rows), problems=problems)
        own = task.path.with_name("rows.json")
        own.unlink(missing_ok=True)
        done, left_out = run_right([*words, "--shapes", name], impls, task)
        problems |= {f"{name}, {impl}": why for impl, why in left_out.items()}
        if done.code != 0:
            problems[name] = done.error
        rows += json.loads(own.read_text()) if own.is_file() else []
        path.write_text(json.dumps(rows, indent=1) + "\n")
    timed = [row for row in rows if row["msec"] is not None]
    figures = {"num_rows": len(timed), "problems": problems, "best": best_peers(timed)}
    if not timed:
        return Result("failed", next(iter(problems.values()), "no rows"), figures)
    text = ", ".join(f"{which} {ratio:.2f}" for which, ratio in figures["best"].items())
    why = f"{len(timed)} rows in {TABLE}; our speed over the best peer, least: {text}"
    why += "".join(f"; {case}: {each}" for case, each in problems.items())
    return Result("failed" if problems else "passed", why, figures)


def best_peers(rows: list[dict]) -> dict[str, float]:
    """Return, for each pass, the least ratio over shapes and skews of our speed over
    that of the fastest peer."""
    from tools.bench import grouped_dot
    from tools.bench.grouped_dot_peers import OURS

    best = {}
    for which in dict.fromkeys(row["pass"] for row in rows):
        own = [row for row in rows if row["pass"] == which]
        name = grouped_dot.first_measured(own, OURS)
        over_peer, *_ = grouped_dot.ratios(own, name, OURS)
        if over_peer:
            best[which] = round(min(over_peer.values()), 3)
    return best
