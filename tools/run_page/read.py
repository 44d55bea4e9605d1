"""Read the folder of a run into the data of its page.

    page_data(RunReader(folder))   one JSON object: see docs/report.md

A run of any length is read line by line, and what is kept of it has a bound (thin.py).
"""

import json
import pathlib
import re
import time
from collections.abc import Callable, Iterator

from tools.run_page.plain import clean_text, left_out, plain
from tools.run_page.read_metrics import Limits, Metrics
from tools.run_page.read_plans import Plans
from tools.run_page.state import Progress, RunState, find_state
from tools.run_page.thin import Thinned
from train.files import path_named
from train.logs.accounts import Account, is_account, report
from train.logs.record_lines import MAX_LINE_BYTES, lines, parse_line

FORMAT = 1
SCHEMA = 1
"""Schema of a run that does not say which it has."""
LARGE_FIELDS = {"load_le"}
"""Fields of summary.json that the page does not show."""
MAX_FILE_BYTES = 2**26
MAX_ATTEMPTS = 500
_BINDING = re.compile(r"([A-Za-z]\w*\.\w+) = (.*)", re.ASCII)


class RunReader:
    """Reader of the files of one run's folder."""

    def __init__(self, folder: pathlib.Path, limits: Limits | None = None) -> None:
        """Read the folder. Raises ValueError where it is not that of a run, or where
        most of metrics.jsonl is no line of one, and OSError where a file cannot be
        read."""
        self.folder, self._limits = folder, limits or Limits()
        require_run(folder)
        self._config, config_note = _small(folder / "config.gin", _bindings)
        self._summary, summary_note = _small(folder / "summary.json", _summary)
        self._small_notes = [note for note in (config_note, summary_note) if note]
        self._starts: dict[int, dict] = {}
        self._ends: dict[int, dict] = {}
        self._first_lines: dict[int, dict] = {}
        self._accounts = Thinned(self._limits.num_goodput)
        self._plans = Plans(self._limits.plan_bytes)
        self._metrics = Metrics(self._limits)
        self._num_bad = {"attempts": 0, "goodput": 0}
        self._num_torn_bytes: dict[str, int] = {}
        for name in ("attempts", "goodput"):
            for line in self._lines(name):
                self._take_attempt(name, line)
        for line in self._lines("plans"):
            self._plans.take(line)
        for line in self._lines("metrics"):
            self._metrics.take(line)
        metrics, path = self._metrics, folder / "metrics.jsonl"
        num_good = metrics.num_steps + len(metrics.evals)
        if metrics.num_bad > num_good:
            raise ValueError(
                f"{path} has {metrics.num_bad} damaged lines and {num_good} good ones: "
                "it is not the log of a run, or was overwritten"
            )

    def _lines(self, name: str) -> Iterator[bytes]:
        """Yield the whole lines of a file, none where it is not there. A last line
        without an end is left out, and noted."""
        path = self.folder / f"{name}.jsonl"
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return
        with path_named(path), file:
            for line in lines(file):
                if not line.endswith(b"\n") and len(line) < MAX_LINE_BYTES:
                    self._num_torn_bytes[name] = len(line)
                    return
                yield line

    def data(self) -> dict:
        """Return the object of this run in the page's data; its name is that of the
        folder."""
        config, state = self._config, self._state()
        return {
            "name": clean_text(self.folder.resolve().name),
            "path": clean_text(str(self.folder)),
            "state": state.name,
            "state_text": state.text,
            "notes": self._notes(state),
            "num_steps": _num_steps(config),
            "config": [list(pair) for pair in config.items()],
            "attempts": self._attempts(),
            "goodput": self._goodput(),
            "summary": self._summary,
            **self._metrics.data(),
            **self._plans.data(),
        }

    def _take_attempt(self, name: str, line: bytes) -> None:
        """Take a line of attempts.jsonl or of goodput.jsonl."""
        record = parse_line(line)
        is_record = isinstance(record, dict)
        if name == "attempts":
            if is_record and type(number := record.get("attempt")) is int:
                lines = self._ends if "end" in record else self._starts
                lines[number] = plain(record)
            else:
                self._num_bad["attempts"] += 1
        elif is_record and is_account(record):
            self._first_lines.setdefault(int(record["attempt"]), record)
            self._accounts.take(lambda: record)
        else:
            self._num_bad["goodput"] += 1

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

    def _state(self) -> RunState:
        summary = self._summary or {}
        step = summary.get("step")
        last = max(self._starts, default=0)
        end = self._ends.get(last, {})
        progress = Progress(
            step=self._metrics.last_step,
            num_steps=_num_steps(self._config),
            finished_step=step if type(step) is int else None,
            failure=str(end.get("why", "")) if end.get("end") == "failed" else None,
        )
        return find_state(self.folder, progress)

    def _notes(self, state: RunState) -> list[str]:
        """Return a line about each thing that is missing, damaged or thinned."""
        notes = []
        for name, num_bytes in self._num_torn_bytes.items():
            if state.name != "running":
                notes.append(
                    f"{name}.jsonl: the last line is torn after {num_bytes} bytes, and "
                    "is left out"
                )
        for name, num_bad in self._num_bad.items():
            if num_bad:
                notes.append(f"{name}.jsonl: {left_out(num_bad, 'damaged line')}")
        notes += self._metrics.notes() + self._plans.notes()
        notes += self._small_notes
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
        names = ("attempts", "goodput", "plans", "metrics")
        files = [self.folder / f"{name}.jsonl" for name in names]
        missing = [path.name for path in files if not path.exists()]
        if missing:
            notes.append(f"without {', '.join(missing)}: what it holds is not shown")
        return notes


def page_data(reader: RunReader) -> dict:
    """Return the data of the page of a run."""
    return {"format": FORMAT, "made_at": round(time.time()), "runs": [reader.data()]}


def require_run(folder: pathlib.Path) -> None:
    """Raise ValueError unless a folder has a file of a run."""
    if not any((folder / name).is_file() for name in ("metrics.jsonl", "config.gin")):
        what = "has no metrics.jsonl" if folder.is_dir() else "is not a folder"
        raise ValueError(f"{folder} {what}: name the run directory of train/main.py")


def _small(path: pathlib.Path, parse: Callable) -> tuple:
    """Return what `parse` makes of a small file's content, None where it is not there:
    its content and a note."""
    try:
        with path_named(path), path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES)
    except FileNotFoundError:
        data = None
    return parse(data)


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
