"""Find out in fifteen minutes what is right and how fast on a machine with one GPU.

    python tools/gpu_report.py [--minutes 9] [--out gpu]
    python tools/gpu_report.py --dry       the parts at toy size, on a CPU
    python tools/gpu_report.py --pack      the wheels that such a machine lacks

Parts run one after another, the most valuable first, each in processes of its own with
a time limit. What a part finds is in a file as soon as it is known. The report,
report.txt and report.json in the folder --out, is written again after each part, and
after SIGTERM or SIGINT. A second call runs what is missing, and the parts of --again;
on another device, or with other libraries, all of them.

docs/gpu.md explains the report. Exit codes: 0 every part has ended, 1 something is
wrong, 2 bad input or no GPU, 75 the time is up and parts are left.
"""

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

# These import the standard library alone, as this file does: others may have to be
# installed first.
from tools.gpu import table  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.files import write_whole  # noqa: E402

DONE, WRONG, BAD_INPUT, LEFT = 0, 1, 2, 75
MARGIN_SEC = 10.0
"""Time that is kept for the report at the end."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
KEPT = ROOT / "gpu"
"""Default folder of the results. Where the variable OUT names another folder, results
are in that, and a copy is here for the next call."""
WORK = pathlib.Path(tempfile.gettempdir(), f"moejax-gpu-{os.getuid()}")
"""Folder of caches and installed wheels, which stays on the machine."""
PASSES = ("forward", "dgrad", "wgrad")
PEERS = "ragged_dot,tokamax_mosaic,torch,dense"

KERNELS = (
    "forward", "dgrad", "wgrad", "swiglu", "swiglu_dgrad", "fp8_forward", "fp8_dgrad",
    "take", "weighted_sum", "combine_backward", "attention", "water_fill",
)  # fmt: skip
"""Kernels of moejax.kernels.cases, which may not be imported here."""
KERNEL_TESTS = "tests/kernels/test_cases.py"

WHEELS = (
    "gin-config", "grain", "array_record", "portpicker", "nest-asyncio2", "ptyprocess",
    "tokamax", "einshape", "immutabledict", "pydantic", "pydantic-core",
    "annotated-types", "typing-inspection", "qwix", "typeguard",
    "pytest", "pluggy", "iniconfig", "pytest-xdist", "execnet",
)  # fmt: skip
"""Distributions of a pack: what a machine may lack that has JAX with its CUDA plugin,
flax, optax, orbax and torch."""
PLATFORMS = [f"manylinux_2_{x}_x86_64" for x in (28, 27, 24, 17, 12, 5)]


class Part(NamedTuple):
    """One part of the report, a program that writes what it finds to {file}."""

    name: str
    gpu: str
    """Arguments of Python on a GPU. {passes} are the passes without rows, {ours} our
    implementation of them if it is right, {sec} the seconds that it has."""
    dry: str
    """The same in a dry run."""
    limit_sec: float
    min_sec: float
    """With fewer seconds left it does not start."""
    codes: tuple[int, ...] = (0,)
    """Exit codes with which it has ended."""


MEASURE, PRODUCTS = "-m tools.gpu.measure", "tools/bench/grouped_dot.py"
ROWS = "--skews uniform --passes {passes} --out {file} --json"
TOY_ROWS = f"{PRODUCTS} --shapes narrow --impls blocked,dense --repeats 1 {ROWS}"
PARTS = (
    Part(
        "machine",
        f"{MEASURE} machine --out {{file}}",
        f"{MEASURE} machine --dry --out {{file}}",
        60, 10,
    ),
    Part(
        "kernels",
        f"-m pytest --gpu {KERNEL_TESTS} --gpu-out {{file}}",
        f"-m pytest --gpu --interpret {KERNEL_TESTS} --gpu-out {{file}}",
        130, 40, (0, 1, 5),  # 1: a case is not right; 5: none is left
    ),
    Part(
        "olmoe",
        f"{PRODUCTS} --device gpu --shapes olmoe_1b_7b --impls {{ours}}{PEERS} "
        f"--repeats 5 {ROWS}",
        TOY_ROWS, 110, 40,
    ),
    Part(
        "train",
        f"{MEASURE} train --gin_file=tools/gpu/olmoe.gin --out {{file}}",
        f"{MEASURE} train --gin_file=tools/gpu/dry.gin --steps 2 --out {{file}}",
        150, 60,
    ),
    Part(
        "trainer",
        f"{MEASURE} trainer --gin_file=tools/gpu/trainer.gin --out {{file}}",
        f"{MEASURE} trainer --gin_file=tools/gpu/dry.gin --out {{file}}",
        240, 90,
    ),
    Part(
        "qwen3",
        f"{PRODUCTS} --device gpu --shapes qwen3_30b_a3b --impls {{ours}}{PEERS} "
        f"--repeats 5 {ROWS}",
        TOY_ROWS, 100, 40,
    ),
    Part(
        "layer",
        "tools/bench/moe_layer.py --gpu --tokens 8192 --experts 64 --top_k 8 --d 2048 "
        "--f 1024 --repeats 3 --out {file}",
        "tools/bench/moe_layer.py --devices 1 --tokens 256 --experts 8 --top_k 2 "
        "--d 64 --f 64 --repeats 1 --out {file}",
        140, 40,
    ),
    Part(
        "tuning",
        "tools/tune_kernels.py --layer --shapes olmoe_1b_7b --limit_sec {sec} "
        "--out {tuned} --json",
        "",
        400, 60,
    ),
)  # fmt: skip
"""All parts in their order. A dry run has no tuning, which needs a Hopper GPU."""


@dataclasses.dataclass
class Run:
    """One call: its folder, its end, and the state of all parts."""

    out: pathlib.Path
    is_kept: bool
    """Whether results are copied to KEPT."""
    is_dry: bool
    end_sec: float
    """Value of time.monotonic() at which the last part must have ended."""
    parts: dict[str, dict[str, Any]]
    """Device, commit, state, seconds and reason of each part that was begun, by its
    name. The state is 'ended', 'cut' or 'failed'."""
    again: tuple[str, ...] = ()
    """Names of the parts that run though they have ended."""
    why_left: str = "not reached"
    """Reason why other parts did not run."""

    def limit_sec(self, part: Part) -> float:
        """Return the seconds that a part has: at most its limit. In a dry run, whose
        times say nothing, it has all that are left."""
        left_sec = self.end_sec - time.monotonic()
        return left_sec if self.is_dry else min(part.limit_sec, left_sec)


class Stopped(BaseException):
    """Raised by the first of SIGNALS."""


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        if args.pack:
            return pack(args.wheels)
        run = begin(args)
    except (ValueError, OSError) as error:
        return refuse(str(error))
    for number in SIGNALS:
        signal.signal(number, stop)
    try:
        play(run)
    except Stopped as stopped:
        run.why_left = str(stopped)
    else:
        run.why_left = "no time was left"
        if not results(run.out, "machine"):
            return refuse(run.parts["machine"]["why"])
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    result = report(run)
    print((run.out / "report.txt").read_text(), end="", flush=True)
    if args.json:
        print(json.dumps(result), flush=True)
    return WRONG if result["wrong"] else LEFT if result["left"] else DONE


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=9.0, help="time of this call")
    add(
        "--out",
        type=pathlib.Path,
        help="folder of the results (default: that of the variable OUT, else gpu; of a"
        " dry run, one in the folder of temporary files)",
    )
    add("--dry", action="store_true", help="run every part at toy size on the CPU")
    add(
        "--wheels",
        type=pathlib.Path,
        default=ROOT / ".whl",
        metavar="FOLDER",
        help="folder of wheels, of which those are installed, for this program alone,"
        " that are not here (default: .whl)",
    )
    add(
        "--pack",
        action="store_true",
        help="fill the folder --wheels for a machine without a network, and run"
        " nothing",
    )
    add(
        "--again",
        default="",
        metavar="PARTS",
        help="parts that run again, with commas between, as after an edit of what they"
        " measure (default: none)",
    )
    return parser.parse_args(argv)


def refuse(line: str) -> int:
    """Print an error in one line, and return the exit code."""
    print(f"error: {' '.join(line.split())}", file=sys.stderr, flush=True)
    return BAD_INPUT


def stop(number: int, _frame: object) -> None:
    """Raise Stopped, and ignore later signals, so that the report gets written; a
    signal handler."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise Stopped(f"stopped by {signal.Signals(number).name}")


def begin(args: argparse.Namespace) -> Run:
    """Return a run whose folders are there and whose wheels are installed. Raises
    ValueError or OSError."""
    if not args.minutes > 0:
        raise ValueError(f"--minutes={args.minutes:g} must be above 0")
    again, known = tuple(filter(None, args.again.split(","))), [x.name for x in PARTS]
    for name in again:
        if name not in known:
            raise ValueError(f"--again: {name!r} must be one of {', '.join(known)}")
    end_sec = time.monotonic() + 60 * args.minutes - MARGIN_SEC
    usual = WORK / "dry" if args.dry else pathlib.Path(os.environ.get("OUT", KEPT))
    out = args.out or usual
    for folder in (out, WORK):
        folder.mkdir(parents=True, exist_ok=True)
    is_kept = not args.out and not args.dry and out != KEPT
    state = out / "state.json"
    if is_kept and KEPT.is_dir() and not state.exists():
        shutil.copytree(KEPT, out, dirs_exist_ok=True)
    install(args.wheels, WORK / "site")
    parts = json.loads(state.read_text()) if state.exists() else {}
    return Run(out.resolve(), is_kept, args.dry, end_sec, parts, again)


def install(wheels: pathlib.Path, site: pathlib.Path) -> None:
    """Install the wheels of a folder whose distributions are not here, in any version.
    Raises ValueError if pip fails."""
    sys.path.insert(1, str(site))
    lacking = []
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            importlib.metadata.distribution(wheel.name.partition("-")[0])
        except importlib.metadata.PackageNotFoundError:
            lacking.append(str(wheel))
    if lacking:
        print(f"installing {len(lacking)} wheels in {site}", flush=True)
        options = ["--no-index", "--no-deps", "--no-compile", f"--target={site}"]
        pip("install", *options, *lacking)


def pack(folder: pathlib.Path) -> int:
    """Download WHEELS at the versions of constraints.txt, for Python 3.12 on Linux, and
    return the exit code. Raises ValueError if pip fails."""
    options = ["--no-deps", "--only-binary=:all:", "--python-version=3.12"]
    options += [f"--platform={name}" for name in PLATFORMS]
    options += [f"--dest={folder}", f"--constraint={ROOT / 'constraints.txt'}"]
    pip("download", *options, *WHEELS)
    sizes = [wheel.stat().st_size for wheel in folder.glob("*.whl")]
    print(f"{folder}: {len(sizes)} wheels, {sum(sizes) / 2**20:.1f} MiB", flush=True)
    return DONE


def pip(*words: str) -> None:
    """Run pip. Raises ValueError with its last words if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"pip {words[0]} failed: {done.stderr.strip()[-500:]}")


def play(run: Run) -> None:
    """Run the parts that are missing as long as time is left; those that were cut or
    that failed come last. Without results of the first part, none runs."""
    machine, *others = PARTS
    forget(run.out, machine.name)
    run_part(run, machine, words_of(run, machine), run.limit_sec(machine))
    if not results(run.out, machine.name):
        return
    here = about(run)
    for part in others:
        if run.parts.get(part.name, here).get("device") != here["device"]:
            forget(run.out, part.name)
            del run.parts[part.name]
    states = {name: own["state"] for name, own in run.parts.items()}
    tried = {name for name, state in states.items() if state in ("cut", "failed")}
    tried.discard("kernels")  # the others do without kernels that are not right
    for part in sorted(others, key=lambda part: part.name in tried):
        words, limit_sec = words_of(run, part), run.limit_sec(part)
        is_due = part.name in run.again or states.get(part.name) != "ended"
        if words and is_due and limit_sec >= part.min_sec:
            if part.name in run.again:
                forget(run.out, part.name)
            run_part(run, part, words, limit_sec)


def about(run: Run) -> dict[str, Any]:
    """Return on what results depend: device and libraries, and the commit."""
    found = results(run.out, "machine") or [{}]
    device = [found[0].get("kind"), found[0].get("versions")]
    return {"device": device, "commit": found[0].get("commit")}


def words_of(run: Run, part: Part) -> list[str]:
    """Return the arguments of a part's program, with names in braces for what each call
    decides; [] if there is none. Kernels that are not right are left out."""
    broken = table.broken_kernels(results(run.out, "kernels"))
    ours = "" if broken & set(PASSES) else "hopper,"
    words = (part.dry if run.is_dry else part.gpu).replace("{ours}", ours).split()
    if part.name == "train" and "attention" in broken:
        words.append("--gin_param=Model.attention = 'blocked'")
    if part.name in ("train", "trainer") and broken - {"attention"}:
        words.append("--gin_param=Dispatch.kernels = 'plain'")
    return words


def files_of(out: pathlib.Path, name: str) -> list[pathlib.Path]:
    """Return the files with results of a part, one for each time that it ran."""
    return sorted(out.glob(f"{name}-*.json"), key=lambda path: (len(path.name), path))


def results(out: pathlib.Path, name: str) -> list[dict]:
    """Return what a part has found so far. A file holds a list, an object, or an object
    in each line; a program that was killed may have left the last line incomplete."""
    found = []
    for path in files_of(out, name):
        text = path.read_text()
        try:
            record = json.loads(text)
            found += record if isinstance(record, list) else [record]
        except ValueError:
            for line in text.split("\n"):
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict)]


def forget(out: pathlib.Path, name: str) -> None:
    """Delete the results of a part."""
    for path in files_of(out, name):
        path.unlink()


def run_part(run: Run, part: Part, words: list[str], limit_sec: float) -> None:
    """Run the program of a part, and kill it with all its children after `limit_sec`.
    Until it has ended its state is 'cut'."""
    print(f"{part.name:8} at most {limit_sec:.0f} s", flush=True)
    own = about(run) | {"state": "cut", "sec": 0.0, "why": "killed with its parent"}
    run.parts[part.name] = own
    report(run)
    known = results(run.out, part.name)
    passes = [p for p in PASSES if p not in {row.get("pass") for row in known}]
    path = run.out / f"{part.name}-{len(files_of(run.out, part.name)) + 1}.json"
    fields = {
        "file": path,
        "tuned": run.out / "tuned.json",
        "passes": ",".join(passes or PASSES),
        "sec": f"{limit_sec - MARGIN_SEC:.0f}",
    }
    command = [sys.executable, *(word.format(**fields) for word in words)]
    if part.name == "kernels":
        command += [f"--deselect={line['id']}" for line in known]
    log, begin_sec = run.out / f"{part.name}.log", time.monotonic()
    ended = {"why": f"no end after {limit_sec:.0f} s"}
    try:
        with group(command, environ(run), log) as process:
            code = process.wait(limit_sec)
        ended = how_it_ended(part, code, log, path)
    except subprocess.TimeoutExpired:
        pass
    except Stopped as stopped:
        ended = {"why": str(stopped)}
        raise
    finally:
        own |= ended | {"sec": round(time.monotonic() - begin_sec, 1)}
        report(run)
        line = f"{part.name:8} {own['state']}, {own['sec']:.0f} s; {own['why']}"
        print(line.rstrip("; "), flush=True)


def environ(run: Run) -> dict[str, str]:
    """Return the environment of the programs of all parts."""
    path = [str(WORK / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "MOEJAX_CACHE_DIR": str(WORK / "data"),
        "JAX_COMPILATION_CACHE_DIR": str(WORK / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }
    if run.is_dry:
        variables |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        variables["GLIBC_TUNABLES"] = ""  # no program starts again for huge pages
    return os.environ | variables


@contextlib.contextmanager
def group(
    command: list[str], environ: dict[str, str], log: pathlib.Path
) -> Iterator[subprocess.Popen]:
    """Start a command as a group of processes with its output in `log`, and kill what
    is left of the group at the end of a `with` block, or as soon as this process is
    gone: then a pipe ends, on which a shell waits."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    kill = f"read _; kill -s KILL -- -{process.pid}"
    guard = subprocess.Popen(
        ["/bin/sh", "-c", kill], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        guard.communicate()
        process.wait()


def how_it_ended(
    part: Part, code: int, log: pathlib.Path, path: pathlib.Path
) -> dict[str, str]:
    """Return state and reason of a part that has ended by itself. A program that finds
    something wrong has ended, if its last line is its record. The record is written to
    `path`, if the program has written nothing."""
    line = log.read_text(errors="replace").strip().rpartition("\n")[2]
    record = None
    with contextlib.suppress(ValueError):
        record = json.loads(line)
    has_record = isinstance(record, list | dict) and "error" not in record
    if code not in part.codes and not (code == WRONG and has_record):
        why = line.removeprefix("error: ")[:300]
        return {"state": "failed", "why": f"{why} (exit code {code})"}
    if has_record and not path.exists():
        path.write_text(line)
    if has_record and "num_left" in record and record["num_left"]:
        return {"state": "cut", "why": f"{record['num_left']} buckets are left"}
    return {"state": "ended", "why": ""}


def report(run: Run) -> dict[str, Any]:
    """Write state and report, and return the report."""
    found = {part.name: results(run.out, part.name) for part in PARTS}
    left = {"state": "left", "sec": 0.0, "why": run.why_left}
    here = [part.name for part in PARTS if part.dry or not run.is_dry]
    states = {name: run.parts.get(name, left) for name in here}
    for name, own in states.items():
        if name != "machine" and own.get("commit") not in (None, about(run)["commit"]):
            why = f"at commit {own['commit']}; {own['why']}".removesuffix("; ")
            states[name] = own | {"why": why}
    predictions = json.loads((ROOT / "tools/gpu/predictions.json").read_text())
    predicted = (
        predictions.get(found["machine"][0]["kind"], {}) if found["machine"] else {}
    )
    rows = table.rows(found, states, predicted, KERNELS)
    missing = [n for n in here if states[n]["state"] in ("left", "cut")]
    result = {
        "is_dry": run.is_dry,
        "parts": states,
        "left": missing,
        "wrong": table.wrong(found, states),
        "table": [row._asdict() for row in rows],
        "predicted": predicted,
        "found": found,
    }
    write_whole(run.out / "state.json", json.dumps(run.parts, indent=1))
    write_whole(run.out / "report.json", json.dumps(result, indent=1))
    write_whole(run.out / "report.txt", table.draw(rows))
    if run.is_kept:
        shutil.copytree(run.out, KEPT, dirs_exist_ok=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
