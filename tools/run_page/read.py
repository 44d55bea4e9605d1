"""Read the folders of runs into the data of their page, and again what they gain.

    RunReader(folder).poll()   takes the lines that are new
    page_data(readers, ..)     one JSON object: see docs/report.md

A run of any length is read line by line, and what is kept of it has a bound (thin.py).
"""

import json
import pathlib
import re
import time
from collections.abc import Callable

from tools.plots.run_arrays import require_log, require_run
from tools.run_page.follow import FollowedFile
from tools.run_page.plain import clean_text, left_out, plain
from tools.run_page.read_metrics import Limits, Metrics
from tools.run_page.read_plans import Plans
from tools.run_page.state import Progress, RunState, find_state
from tools.run_page.thin import Thinned
from train.files import path_named
from train.logs.accounts import Account, is_account, report
from train.logs.record_lines import parse_line

FORMAT = 1
OWN_FIELDS = {"Train.run_dir"}
"""Fields of the configuration in which every two runs may differ."""
SCHEMA = 1
"""Schema of a run that does not say which it has."""
LARGE_FIELDS = {"load_le"}
"""Fields of summary.json that the page does not show."""
MAX_FILE_BYTES = 2**26
MAX_ATTEMPTS = 500
_BINDING = re.compile(r"([A-Za-z]\w*\.\w+) = (.*)", re.ASCII)


class RunReader:
    """Reader of one run's folder. Each `poll` takes what the run has written since."""

    def __init__(self, folder: pathlib.Path, limits: Limits) -> None:
        """Raises ValueError where `folder` is not the folder of a run."""
        self.folder, self._limits = folder, limits
        require_run(folder, "metrics.jsonl", "config.gin")
        self._files = {
            name: FollowedFile(folder / f"{name}.jsonl")
            for name in ("attempts", "goodput", "plans", "metrics")
        }
        self._small: dict[str, tuple] = {
            "config.gin": ("unread", {}, ""),
            "summary.json": ("unread", None, ""),
        }
        self._fault, self._num_attempts_read, self._polled = "", 0, ()
        for name in self._files:
            self._restart(name)

    def poll(self) -> bool:
        """Take what is new, and return whether the data has changed since the last
        poll. A file that cannot be read becomes a note."""
        try:
            self.read()
            self._fault = ""
        except OSError as error:
            self._fault = f"{error.filename} cannot be read: {error.strerror}"
        before, self._polled = self._polled, self._key()
        return self._polled != before

    def read(self) -> None:
        """Take what is new. Raises OSError where a file cannot be read."""
        self._read_small("config.gin", _bindings)
        self._read_small("summary.json", _summary)
        for name in ("attempts", "goodput"):
            for line in self._files[name].poll(lambda name=name: self._restart(name)):
                self._take_attempt(name, line)
        num_attempts = max(len(self._starts), len(self._first_lines))
        if num_attempts > self._num_attempts_read > 0:
            # The lines after a checkpoint were cut off, and may have come again.
            for name in ("plans", "metrics"):
                self._files[name].forget()
                self._restart(name)
        self._num_attempts_read = num_attempts
        for name, log in (("plans", "_plans"), ("metrics", "_metrics")):
            for line in self._files[name].poll(lambda name=name: self._restart(name)):
                getattr(self, log).take(line)

    def require_log(self) -> None:
        """Raise ValueError where most of metrics.jsonl is no line of a run."""
        metrics, path = self._metrics, self.folder / "metrics.jsonl"
        require_log(path, metrics.num_bad, metrics.num_steps + len(metrics.evals))

    def data(self) -> dict:
        """Return the object of this run in the page's data; its name is that of the
        folder."""
        config, state = self._small["config.gin"][1], self._state()
        return {
            "name": clean_text(self.folder.resolve().name),
            "path": clean_text(str(self.folder)),
            "state": state.name,
            "state_text": state.text,
            "notes": self._notes(state),
            "num_steps": _num_steps(config),
            "step_at": self._step_at(),
            "config": [list(pair) for pair in config.items()],
            "attempts": self._attempts(),
            "goodput": self._goodput(),
            "summary": self._small["summary.json"][1],
            **self._metrics.data(),
            **self._plans.data(),
        }

    def _restart(self, name: str) -> None:
        """Forget what the lines of a file said."""
        if name == "metrics":
            self._metrics = Metrics(self._limits)
        elif name == "plans":
            self._plans = Plans(self._limits.plan_bytes)
        elif name == "attempts":
            self._starts: dict[int, dict] = {}
            self._ends: dict[int, dict] = {}
            self._num_bad_starts = 0
        else:
            self._first_lines: dict[int, dict] = {}
            self._accounts = Thinned(self._limits.num_goodput)
            self._num_bad_accounts = 0

    def _take_attempt(self, name: str, line: bytes) -> None:
        """Take a line of attempts.jsonl or of goodput.jsonl."""
        record = parse_line(line)
        is_record = isinstance(record, dict)
        if name == "attempts":
            if is_record and type(number := record.get("attempt")) is int:
                lines = self._ends if "end" in record else self._starts
                lines[number] = plain(record)
            else:
                self._num_bad_starts += 1
        elif is_record and is_account(record):
            self._first_lines.setdefault(int(record["attempt"]), record)
            self._accounts.take(lambda: record)
        else:
            self._num_bad_accounts += 1

    def _attempts(self) -> list[dict]:
        """Return the starts of the run, as attempts.jsonl has them, with how they
        ended; of older runs, the first line of each in goodput.jsonl."""
        first = {
            number: {"step": line["step"], "attempt": number, "at": round(line["at"])}
            for number, line in self._first_lines.items()
        }
        attempts = first | self._starts
        for number, line in self._ends.items():
            end = {name: line.get(name) for name in ("end", "why")}
            end |= {"end_step": line["step"], "end_at": line.get("at")}
            attempts[number] = attempts.get(number, {"attempt": number}) | end
        return [attempts[number] for number in sorted(attempts)][-MAX_ATTEMPTS:]

    def _goodput(self) -> dict | None:
        """Return where the time went, up to the last line and over time; None without a
        line."""
        lines = self._accounts.items()
        if not lines or not sum(lines[-1]["sec"].values()) > 0:
            return None
        last = lines[-1]
        account = Account(last["sec"], last["down_sec"], int(last["attempt"]))
        return plain(report(account)) | {
            "step": [line["step"] for line in lines],
            "sec": {
                clean_text(name): [plain(line["sec"].get(name)) for line in lines]
                for name in last["sec"]
            },
        }

    def _step_at(self) -> float | None:
        """Return when the last line of a step was written, in seconds since 1970; None
        before the first step."""
        if not self._metrics.num_steps:
            return None
        try:
            return round(self._files["metrics"].path.stat().st_mtime, 1)
        except OSError:
            return None

    def _state(self) -> RunState:
        summary = self._small["summary.json"][1] or {}
        step = summary.get("step")
        last = max(self._starts, default=0)
        end = self._ends.get(last, {})
        progress = Progress(
            step=self._metrics.last_step,
            num_steps=_num_steps(self._small["config.gin"][1]),
            finished_step=step if type(step) is int else None,
            failure=str(end.get("why", "")) if end.get("end") == "failed" else None,
        )
        return find_state(self.folder, progress)

    def _notes(self, state: RunState) -> list[str]:
        """Return a line about each thing that is missing, damaged or thinned."""
        notes = [self._fault] if self._fault else []
        for name, file in self._files.items():
            if file.num_torn_bytes and state.name != "running":
                notes.append(
                    f"{name}.jsonl: the last line is torn after {file.num_torn_bytes} "
                    "bytes, and is left out"
                )
        for name, num_bad in (
            ("attempts", self._num_bad_starts),
            ("goodput", self._num_bad_accounts),
        ):
            if num_bad:
                notes.append(f"{name}.jsonl: {left_out(num_bad, 'damaged line')}")
        notes += self._metrics.notes() + self._plans.notes()
        notes += [note for _, _, note in self._small.values() if note]
        notes += self._missing_files() if self._metrics.num_steps else []
        return [clean_text(note) for note in notes]

    def _missing_files(self) -> list[str]:
        """Return lines about what older versions have not written."""
        notes = []
        schemas = {str(start.get("schema", SCHEMA)) for start in self._starts.values()}
        schemas |= {str(SCHEMA) for n in self._first_lines if n not in self._starts}
        if len(schemas) > 1:
            notes.append(
                f"the starts of this run wrote schemas {', '.join(sorted(schemas))}: "
                "older lines lack the fields of newer ones"
            )
        files = [file.path for file in self._files.values()]
        missing = [path.name for path in files if not path.exists()]
        if missing:
            notes.append(f"without {', '.join(missing)}: what it holds is not shown")
        return notes

    def _read_small(self, name: str, parse: Callable) -> None:
        """Read a small file whole if it has changed. `parse` returns its content and a
        note."""
        path = self.folder / name
        try:
            stat = path.stat()
            key = stat.st_ino, stat.st_size, stat.st_mtime_ns
            if self._small[name][0] == key:
                return
            with path_named(path), path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES)
        except FileNotFoundError:
            key, data = None, None
        self._small[name] = key, *parse(data)

    def _key(self) -> tuple:
        """Return a value that changes with the data of the run."""
        files = tuple(file.key() for file in self._files.values())
        small = tuple(content[0] for content in self._small.values())
        return files, small, self._state(), self._fault


def page_data(readers: list[RunReader], *, is_live: bool) -> dict:
    """Return the data of a page about these runs."""
    runs = [reader.data() for reader in readers]
    for run, name in zip(runs, _distinct_names(runs), strict=True):
        run["name"] = name
    return {
        "format": FORMAT,
        "made_at": round(time.time()),
        "live": is_live,
        "differences": _differences([dict(run["config"]) for run in runs]),
        "runs": runs,
    }


def _distinct_names(runs: list[dict]) -> list[str]:
    """Return the names of the runs; their paths where two have one name, with a number
    where that does not help."""
    for key in ("name", "path"):
        names = [run[key] for run in runs]
        if len(set(names)) == len(names):
            return names
    return [f"{run['path']} ({number})" for number, run in enumerate(runs, 1)]


def _differences(configs: list[dict[str, str]]) -> list[list]:
    """Return the fields of the configurations that differ, with the value of each run;
    an empty text where a run has no such field."""
    names = sorted({name for config in configs for name in config} - OWN_FIELDS)
    rows = [[name, [config.get(name, "") for config in configs]] for name in names]
    return [row for row in rows if len(set(row[1])) > 1]


def _bindings(data: bytes | None) -> tuple[dict[str, str], str]:
    """Return the bindings of a config.gin as text, by name, and a note. A run of
    another version may have fields that this one does not know."""
    if data is None:
        return {}, "there is no config.gin"
    lines = data.decode("utf-8", "replace").splitlines()
    matches = [_BINDING.fullmatch(line) for line in lines]
    return {m[1]: clean_text(m[2]) for m in matches if m}, ""


def _summary(data: bytes | None) -> tuple[dict | None, str]:
    """Return the content of a summary.json without its large fields, and a note."""
    if data is None:
        return None, ""
    try:
        summary = json.loads(data)
    except (ValueError, RecursionError):
        summary = None
    if not isinstance(summary, dict):
        return None, "summary.json is damaged, and is left out"
    kept = {name: x for name, x in summary.items() if name not in LARGE_FIELDS}
    return plain(kept), ""


def _num_steps(config: dict[str, str]) -> int | None:
    """Return the number of steps that a configuration asks for, or None."""
    text = config.get("Train.num_steps", "")
    return int(text) if re.fullmatch(r"\d{1,15}", text, re.ASCII) else None
