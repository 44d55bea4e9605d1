"""Read damaged files as programs do, and say which of them are not handled well.

    python -m tests.support.mutation_run FOLDER FORMAT:FIRST:STOP [FORMAT:FIRST:STOP ..]

Case n of a format is the n-th damaged file, the same in every run. For each case that
fails, one JSON object is printed, and the damaged file is kept in FOLDER/failed. The
last line says how many cases were read.

A valid file must be read without an error, or all its damaged copies would be refused
for another reason. A case is handled well if its reader returns, or raises an error
that `guarded` of train.launch.program turns into exit code 2 or 3 and one short line
that names the file. Nothing may be printed that has control characters or a traceback.
The case ends within LIMIT_SEC, a generous limit for what hangs, and may map at most
ADDRESS_SPACE more than the process had mapped before. It writes within its own folder
alone, and runs no code of a file.
"""

import contextlib
import dataclasses
import io
import json
import math
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unicodedata
import warnings
from collections.abc import Iterator, Sequence

from tests.support.mutated_formats import FORMATS, Format
from tests.support.mutations import mutate

LIMIT_SEC = 120
MAX_LENGTHS = (len("error: ") + 1001, 20_000)
"""Characters that one line must stay below, and that one case may print."""
ADDRESS_SPACE = 3 * 2**30
"""Bytes that the process may map beside what it has mapped before."""
SILENCE_SEC = 600
"""Time after which a process that reads no further case hangs in native code."""
MAX_CRASHES = 10
ROOT = pathlib.Path(__file__).resolve().parents[2]
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = (
    "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink",
    "os.truncate", "os.chmod", "os.chown", "os.utime",
)  # fmt: skip
_RUNS = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen",
    "pickle.find_class", "socket.connect", "socket.bind", "ctypes.dlopen",
)  # fmt: skip


class Hang(BaseException):
    """Raised in a case that has taken too long."""


class Watch:
    """Record of forbidden actions of a case, by Python's audit events."""

    def __init__(self, folder: pathlib.Path) -> None:
        cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", "/dev")
        self.allowed = (f"{folder}/", f"{os.path.realpath(cache)}/", "/dev/", "/proc/")
        self.seen: list[str] = []
        self.is_on = False
        self._in_hook = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple) -> None:
        if not self.is_on or self._in_hook:
            return
        self._in_hook = True
        try:
            self._note(event, args)
        finally:
            self._in_hook = False

    def _note(self, event: str, args: tuple) -> None:
        if event in _RUNS:
            self.seen.append(f"{event} {args[:2]!r}"[:300])
        elif event == "exec":
            name = getattr(args[0], "co_filename", "?")
            if not os.path.exists(name) and not name.startswith("<"):
                self.seen.append(f"exec of code in {name!r}"[:300])
            elif name == "<string>":
                self.seen.append(f"exec of {args[0]!r}"[:300])
        elif event in _CHANGES or (event == "open" and args[2] & _WRITES):
            first = 1 if event == "os.symlink" else 0  # the text of a link comes first
            stop = 2 if event in ("os.rename", "os.link", "os.symlink") else 1
            has_folder = event in ("os.remove", "os.rmdir", "os.mkdir")
            for path in args[first:stop]:
                folder = args[-1] if has_folder else -1
                if not isinstance(path, int) and not self._is_inside(path, folder):
                    self.seen.append(f"{event} {path!r}"[:300])

    def _is_inside(self, path, open_folder: int) -> bool:
        """Return whether a path is in an allowed folder. A relative path may be one in
        an open folder."""
        is_open = open_folder != -1
        start = f"/proc/self/fd/{open_folder}" if is_open else os.getcwd()
        path = os.path.join(start, os.fsdecode(path))
        folder_of_path = os.path.realpath(os.path.dirname(path))
        where = os.path.join(folder_of_path, os.path.basename(path))
        return f"{where}/".startswith(self.allowed)


@dataclasses.dataclass(frozen=True)
class Room:
    """The folder in which cases are read, and what is watched."""

    folder: pathlib.Path
    watch: Watch


def main(words: Sequence[str]) -> None:
    """Read the cases that the command line names."""
    folder = pathlib.Path(words[0]).resolve()
    inside = folder / "inside"
    inside.mkdir(parents=True)
    for name in ("TMPDIR", "MOEJAX_CACHE_DIR"):
        os.environ[name] = str(inside / name)
        (inside / name).mkdir()
    tempfile.tempdir = None
    room = Room(folder, Watch(inside))
    num_cases = 0
    for word in words[1:]:
        name, first, stop = word.split(":")
        with _valid_files(FORMATS[name], inside) as valid:
            for _ in range(2):  # the first time imports modules, which runs code
                problem = _read(FORMATS[name], valid[0], room, None)
            if problem:
                print(json.dumps({"format": name, "case": "valid"} | problem))
            _limit_address_space()
            for case in range(int(first), int(stop)):
                num_cases += 1
                print(json.dumps({"begins": f"{name}:{case}"}), flush=True)
                found = _read_case(FORMATS[name], f"{name}:{case}", valid, room)
                if found:
                    print(json.dumps(found), flush=True)
    print(json.dumps({"num_cases": num_cases}), flush=True)


@contextlib.contextmanager
def _valid_files(form: Format, inside: pathlib.Path) -> Iterator[list[pathlib.Path]]:
    """Yield two folders, each with valid files of the format."""
    os.environ["MOEJAX_CACHE_DIR"] = str(inside / "building")
    folders = [inside / f"valid-{variant}" for variant in (0, 1)]
    with contextlib.redirect_stdout(io.StringIO()):
        for variant, folder in enumerate(folders):
            folder.mkdir()
            form.build(folder, variant)
    yield folders
    for folder in folders:
        shutil.rmtree(folder)


def _read_case(
    form: Format, label: str, valid: list[pathlib.Path], room: Room
) -> dict | None:
    """Damage a file and read it; return what went wrong, or None."""
    rng = random.Random(label)
    target = form.choose(valid[0], rng)
    second = valid[1] / target.relative_to(valid[0])
    if not second.is_file() or rng.random() < 0.5:
        second = form.choose(valid[0], rng)
    whole, other = target.read_bytes(), second.read_bytes()
    mutator, data = mutate(whole, other, form.mutators, rng)
    change = (target.relative_to(valid[0]), data)
    problem = _read(form, valid[0], room, change)
    if problem is None:
        return None
    name, case = label.split(":")
    kept = room.folder / "failed" / f"{name}-{case}{target.suffix}"
    kept.parent.mkdir(exist_ok=True)
    kept.write_bytes(data)
    found = {"format": name, "case": int(case), "mutator": mutator, "bytes": len(data)}
    return found | problem | {"input": str(kept)}


def _read(
    form: Format,
    valid: pathlib.Path,
    room: Room,
    change: tuple[pathlib.Path, bytes] | None,
) -> dict | None:
    """Read a copy of valid files after one of them was replaced; return what went wrong
    or None."""
    from train.launch.program import guarded

    watch, work = room.watch, room.folder / "inside" / "case"
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(valid, work)
    os.environ["MOEJAX_CACHE_DIR"] = str(work / "cache")
    if change is not None:
        (work / change[0]).write_bytes(change[1])
    printed = io.StringIO()
    watch.seen.clear()
    fault, code, escaped = "", None, None
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        warnings.catch_warnings(record=True),
    ):
        watch.is_on = True
        signal.alarm(LIMIT_SEC)
        _alarms.clear()
        try:
            with guarded(as_json=False) as ending:
                ending.code = form.read(work) or 0
            code = ending.code
        except Hang as hang:
            escaped, fault = hang, "it hangs"
        except BaseException as error:
            escaped, fault = error, "an error that is no Exception"
        finally:
            signal.alarm(0)
            watch.is_on = False
    text = printed.getvalue()
    if not fault and _alarms:
        fault = "it hangs, and it caught the alarm"
    if not fault:
        fault = _fault_of(text, code, form)
    if not fault and change is None and code != 0:
        fault = f"a valid file is refused with exit code {code}"
    if watch.seen:
        fault = f"{fault or 'not allowed'}: {'; '.join(watch.seen[:3])}"
    if not fault:
        return None
    if escaped is not None:
        text += "".join(traceback.format_exception(escaped))
    end = text if len(text) < 1500 else f"{text[:300]} ... {text[-1200:]}"
    record = {"fault": fault, "code": code, "end": end}
    del escaped
    return record


def _fault_of(text: str, code: int | None, form: Format) -> str:
    """Return what is wrong with an exit code and what was printed, or ''."""
    lines = text.removesuffix("\n").split("\n") if text else []
    errors = [line for line in lines if line.startswith("error:")]
    max_line, max_text = (math.inf, math.inf) if form.is_report else MAX_LENGTHS
    is_long = any(len(line) >= max_line for line in lines)
    checks = {
        f"a traceback, exit code {code}": "Traceback (most recent" in text
        or code not in (0, 2, 3),
        f"exit code {code} and {len(errors)} lines of errors": len(errors)
        != (code > 0),
        "a line that is too long": is_long,
        "control characters in a line": any(map(_has_controls, lines)),
        f"{len(text)} characters are printed": len(text) > max_text,
        f"the error names none of {', '.join(form.names)}": bool(errors)
        and not any(name in errors[0] for name in form.names),
    }
    return next((fault for fault, is_so in checks.items() if is_so), "")


def _has_controls(line: str) -> bool:
    """Return whether a line could colour a terminal, break or reverse text."""
    return any(unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Cs") for c in line)


def require_no_faults(folder: pathlib.Path, cases: dict[str, range]) -> None:
    """Read damaged files of each format. Raise AssertionError with the first faults and
    the paths of their inputs."""
    faults = read_in_child(folder, cases)
    lines = [json.dumps(fault, ensure_ascii=False) for fault in faults[:5]]
    assert not faults, f"{len(faults)} files: " + "\n".join(lines)


def read_in_child(folder: pathlib.Path, cases: dict[str, range]) -> list[dict]:
    """Read damaged files of each format in processes of their own; return what went
    wrong, as `main` prints it.

    A process that crashes, or that says nothing for SILENCE_SEC, is a failure of the
    case that it was reading. Another process reads the rest.
    """
    faults, todo = [], [f"{n}:{r.start}:{r.stop}" for n, r in cases.items() if len(r)]
    num_read = 0
    for attempt in range(MAX_CRASHES):
        work = folder / f"run-{attempt}"
        records, end = _run_child(work, todo)
        faults += [record for record in records if "fault" in record]
        begun = [record["begins"] for record in records if "begins" in record]
        num_read += len(begun)
        if records and "num_cases" in records[-1]:
            assert num_read == sum(map(len, cases.values())), "cases were left out"
            return faults
        assert begun, f"no case was read: {end}"
        name, case = begun[-1].split(":")
        faults.append({"format": name, "case": int(case), "fault": end})
        names = [word.split(":")[0] for word in todo]
        todo = todo[names.index(name) :]
        stop = todo[0].split(":")[2]
        todo[0] = f"{name}:{int(case) + 1}:{stop}"
    return faults


def _run_child(folder: pathlib.Path, words: list[str]) -> tuple[list[dict], str]:
    """Run `main` in a process; return what it printed, and how it ended."""
    folder.mkdir(parents=True)
    out, err = folder / "stdout", folder / "stderr"
    command = [
        sys.executable,
        "-m",
        "tests.support.mutation_run",
        str(folder / "files"),
        *words,
    ]
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stdout=stdout, stderr=stderr)
    try:
        size, since_sec = 0, time.monotonic()
        while process.poll() is None and time.monotonic() - since_sec < SILENCE_SEC:
            time.sleep(0.1)
            if out.stat().st_size != size:
                size, since_sec = out.stat().st_size, time.monotonic()
        end = f"exit code {process.poll()}; None: it hung: {err.read_text()[-1500:]}"
    finally:
        process.kill()
        process.wait()
    lines = out.read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    if "Traceback (most recent" in err.read_text():
        # A thread or a logger printed it, past the streams that a case redirects.
        records.insert(0, {"fault": "a traceback on standard error", "end": end})
    return records, end


def _limit_address_space() -> None:
    status = pathlib.Path("/proc/self/status").read_text()
    mapped_kib = int(status.split("VmSize:")[1].split()[0])
    limit = mapped_kib * 1024 + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


_alarms: list[int] = []
"""Signals of the alarms that the case which is being read has caused."""


def _stop(number: int, _frame: object) -> None:
    _alarms.append(number)
    raise Hang


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, _stop)
    main(sys.argv[1:])
