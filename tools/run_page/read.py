"""Read the folder of a run into the data of its page, one JSON object.

A run of any length is read line by line, and what is kept has bounds: curves are put
into bins, which keep the smallest, the mean and the largest number, and tables and
records are thinned evenly, never the first and the last. Damaged and missing lines are
left out, and noted. Arrays are base64, little-endian. Fields of the object:

    name, path, made_at       the folder, and the time in seconds since 1970
    state, state_text, notes  how the run ended (state.py), and what is left out
    step, num_steps           last step, and the number that the configuration asks for
    every_steps               steps in a bin of the curves
    config, summary           config.gin as names and values; summary.json without loads
    attempts                  starts of the run, with how they ended where that is known
    curves, evals             by name: `step`, and `mean` (`min`, `max` in bins); losses
    layer_curves              by name: float16 by point and layer
    parts_msec                parts of the modelled step
    goodput                   as in summary.json, with the seconds of buckets by step
    load, rows                loads of experts, rows of devices: a byte by table, layer
                              and column, 128 + 32 log2 of the load over the mean
    plans                     slots of each plan, int16 by layer and slot; -1 is empty
    decisions                 fields of a decision, with what came of it
    bytes                     bytes by collective from a step on
"""

import json
import pathlib
import re
import time
from collections.abc import Iterator

from tools.run_page.metrics import Limits, Metrics
from tools.run_page.plain import clean_text, evenly, left_out, plain
from tools.run_page.plans import plans_data
from tools.run_page.state import find_state
from train.files import path_named
from train.logs.goodput import Account, is_account, report
from train.logs.record_lines import parse_line

MAX_FILE_BYTES = 2**26
MAX_ATTEMPTS = 500
FILES = ("attempts", "goodput", "plans", "metrics")
_BINDING = re.compile(r"([A-Za-z]\w*\.\w+) = (.*)", re.ASCII)
_LIMITS = Limits()


def read_run(folder: pathlib.Path, limits: Limits = _LIMITS) -> dict:
    """Return the data of the page of a run.

    Raises ValueError where the folder is not that of a run, or where most of
    metrics.jsonl is no line of one, and OSError where a file cannot be read.
    """
    if not any((folder / name).is_file() for name in ("metrics.jsonl", "config.gin")):
        what = "has no metrics.jsonl" if folder.is_dir() else "is not a folder"
        raise ValueError(f"{folder} {what}: name the run directory of train/main.py")
    config = _config(folder / "config.gin")
    summary, notes = _summary(folder / "summary.json")
    torn: dict[str, int] = {}
    attempts, last_end, attempt_notes = _attempts(_lines(folder, "attempts", torn))
    goodput, goodput_notes = _goodput(
        _lines(folder, "goodput", torn), limits.num_goodput
    )
    plans, plan_notes = plans_data(_lines(folder, "plans", torn), limits.plan_bytes)
    metrics = Metrics(_lines(folder, "metrics", torn))
    num_good = len(metrics.steps) + len(metrics.evals)
    if metrics.num_bad > num_good:
        raise ValueError(
            f"{folder / 'metrics.jsonl'} has {metrics.num_bad} damaged lines and "
            f"{num_good} good ones: it is not the log of a run, or was overwritten"
        )
    figures, metric_notes = metrics.data(limits)
    num_steps = _num_steps(config)
    finished = (summary or {}).get("step")
    finished = finished if type(finished) is int else None
    state = find_state(folder, metrics.last_step, num_steps, finished, last_end)
    notes += attempt_notes + goodput_notes + metric_notes + plan_notes
    if state.name != "running":
        notes += [
            f"{name}.jsonl: the last line is torn after {num_bytes} bytes, and is left "
            "out"
            for name, num_bytes in torn.items()
        ]
    missing = [f"{n}.jsonl" for n in FILES if not (folder / f"{n}.jsonl").exists()]
    if missing and metrics.steps:
        notes.append(f"without {', '.join(missing)}: what it holds is not shown")
    return {
        "name": clean_text(folder.resolve().name),
        "path": clean_text(str(folder)),
        "made_at": round(time.time()),
        "state": state.name,
        "state_text": clean_text(state.text),
        "notes": [clean_text(note) for note in notes],
        "num_steps": num_steps,
        "config": [list(pair) for pair in config.items()],
        "attempts": attempts,
        "goodput": goodput,
        "summary": summary,
        **figures,
        **plans,
    }


def _lines(folder: pathlib.Path, name: str, torn: dict[str, int]) -> Iterator[bytes]:
    """Yield the whole lines of a file, none where it is not there. The length of a last
    line without an end, which is left out, is put into `torn`."""
    path = folder / f"{name}.jsonl"
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with path_named(path), file:
        for line in file:
            if not line.endswith(b"\n"):
                torn[name] = len(line)
                return
            yield line


def _attempts(lines: Iterator[bytes]) -> tuple[list[dict], dict, list[str]]:
    """Return the starts of the run with how they ended, the line about the end of the
    last one ({} without one), and notes."""
    starts, ends, num_bad = {}, {}, 0
    for line in lines:
        record = parse_line(line)
        if record and type(number := record.get("attempt")) is int:
            (ends if "end" in record else starts)[number] = plain(record)
        else:
            num_bad += 1
    attempts = []
    for number in sorted(starts.keys() | ends.keys())[-MAX_ATTEMPTS:]:
        attempt = starts.get(number, {"attempt": number})
        if end := ends.get(number):
            attempt |= {"end": end["end"], "why": end.get("why")}
            attempt |= {"end_step": end["step"], "end_at": end.get("at")}
        attempts.append(attempt)
    notes = [f"attempts.jsonl: {left_out(num_bad, 'damaged line')}"] if num_bad else []
    return attempts, ends.get(max(starts, default=0), {}), notes


def _goodput(lines: Iterator[bytes], max_lines: int) -> tuple[dict | None, list[str]]:
    """Return where the time went, up to the last line and over time (None without a
    line), and notes."""
    accounts, num_bad = [], 0
    for line in lines:
        record = parse_line(line)
        if record and is_account(record):
            accounts.append(record)
        else:
            num_bad += 1
    notes = [f"goodput.jsonl: {left_out(num_bad, 'damaged line')}"] if num_bad else []
    if not accounts or not sum(accounts[-1]["sec"].values()) > 0:
        return None, notes
    last = accounts[-1]
    shown = evenly(accounts, max_lines)
    total = report(Account(last["sec"], last["down_sec"], int(last["attempt"])))
    return plain(total) | {
        "step": [account["step"] for account in shown],
        "sec": {
            clean_text(name): [plain(account["sec"].get(name)) for account in shown]
            for name in last["sec"]
        },
    }, notes


def _config(path: pathlib.Path) -> dict[str, str]:
    """Return the bindings of a config.gin as text, by name; none where it is not there.
    A run of another version may have fields that this one does not know."""
    lines = (_content(path) or b"").decode("utf-8", "replace").splitlines()
    matches = [_BINDING.fullmatch(line) for line in lines]
    return {m[1]: clean_text(m[2]) for m in matches if m}


def _summary(path: pathlib.Path) -> tuple[dict | None, list[str]]:
    """Return the content of a summary.json without its loads, and notes."""
    if (content := _content(path)) is None:
        return None, []
    try:
        summary = json.loads(content)
    except (ValueError, RecursionError):
        summary = None
    if not isinstance(summary, dict):
        return None, ["summary.json is damaged, and is left out"]
    return plain({n: x for n, x in summary.items() if n != "load_le"}), []


def _content(path: pathlib.Path) -> bytes | None:
    """Return the first bytes of a small file; None where it is not there."""
    try:
        with path_named(path), path.open("rb") as file:
            return file.read(MAX_FILE_BYTES)
    except FileNotFoundError:
        return None


def _num_steps(config: dict[str, str]) -> int | None:
    """Return the number of steps that a configuration asks for, or None."""
    text = config.get("Train.num_steps", "")
    return int(text) if re.fullmatch(r"\d{1,15}", text, re.ASCII) else None
