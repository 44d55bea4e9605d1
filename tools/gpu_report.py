"""Find out in fifteen minutes what is right and how fast on a machine with one GPU.

    python tools/gpu_report.py [--minutes 9] [--out gpu]
    python tools/gpu_report.py --dry       the parts at toy size, on a CPU
    python tools/gpu_report.py --pack      the wheels that such a machine lacks

Parts run one after another, the most valuable first, each in processes of its own with
a time limit. What a part finds is in a file as soon as it is known. The report,
report.txt and report.json in the folder --out, is written again after each part, and
after SIGTERM or SIGINT. A second call runs what is missing, and what depends on a
source file that has changed since.

docs/gpu.md explains the report. Exit codes: 0 every part has ended, 1 something is
wrong, 2 bad input or no GPU, 75 the time is up and parts are left.
"""

import argparse
import contextlib
import dataclasses
import hashlib
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
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)

# These import the standard library alone, as this file does: others may have to be
# installed first.
from tools.gpu import table  # noqa: E402
from tools.gpu.sources import longest_prefix, read_modules  # noqa: E402
from tools.launch.arguments import new_parser  # noqa: E402
from train.files import write_whole  # noqa: E402

DONE, WRONG, BAD_INPUT, LEFT = 0, 1, 2, 75
MARGIN_SEC = 10.0
"""Time that is kept for the report at the end."""
PLANTED_SEC = 5.0
"""Limit on a part whose hang is planted."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)
KEPT = ROOT / "gpu"
"""Default folder of the results. Where the variable OUT names another folder, results
are in that, and a copy is here for the next call."""
WORK = pathlib.Path(tempfile.gettempdir(), f"moejax-gpu-{os.getuid()}")
"""Folder of caches and installed wheels, which stays on the machine."""
PASSES = ("forward", "dgrad", "wgrad")
PEERS = "ragged_dot,tokamax_mosaic,torch,dense"

HOPPER = "moejax.kernels.grouped_dot.hopper"
MOVES = ("take", "weighted_sum", "combine_backward")
FP8 = ("fp8_forward", "fp8_dgrad")
OF_ROWS = ("forward", "dgrad", "swiglu", "swiglu_dgrad", *FP8)
OWNERS = {
    "moejax.kernels.grouped_dot": (*OF_ROWS, "wgrad"),
    f"{HOPPER}.rows_kernel": OF_ROWS,
    f"{HOPPER}.fp8_kernel": FP8,
    f"{HOPPER}.wgrad_kernel": ("wgrad",),
    "moejax.kernels.permute": MOVES,
    "moejax.kernels.attention": ("attention",),
    "moejax.kernels.water_fill": ("water_fill",),
}
"""Kernels that run the code of a module, or of a folder; those of the longest name
count. All kernels run the other modules that moejax.kernels.cases imports."""
KERNELS = tuple(dict.fromkeys(name for names in OWNERS.values() for name in names))
KERNEL_TESTS = (
    "tests/kernels/test_cases.py", "tests/support/on_gpu.py", "tests/conftest.py",
)  # fmt: skip

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
    roots: tuple[str, ...]
    """Modules whose code it runs, with all that they import."""
    files: tuple[str, ...] = ()
    """Other files that it reads."""
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
        60, 10, ("tools.gpu.measure",),
    ),
    Part(
        "kernels",
        f"-m pytest --gpu {KERNEL_TESTS[0]} --gpu-out {{file}}",
        f"-m pytest --gpu --interpret {KERNEL_TESTS[0]} --gpu-out {{file}}",
        130, 40, (), codes=(0, 1, 5),  # 1: a case is not right; 5: none is left
    ),
    Part(
        "olmoe",
        f"{PRODUCTS} --device gpu --shapes olmoe_1b_7b --impls {{ours}}{PEERS} "
        f"--repeats 5 {ROWS}",
        TOY_ROWS, 110, 40, ("tools.bench.grouped_dot",),
    ),
    Part(
        "train",
        f"{MEASURE} train --gin_file=tools/gpu/olmoe.gin --out {{file}}",
        f"{MEASURE} train --gin_file=tools/gpu/dry.gin --steps 2 --out {{file}}",
        150, 60, ("tools.gpu.measure",),
        ("tools/gpu/olmoe.gin", "configs/olmoe_1b_7b.gin", "tools/gpu/dry.gin"),
    ),
    Part(
        "trainer",
        f"{MEASURE} trainer --gin_file=tools/gpu/trainer.gin --out {{file}}",
        f"{MEASURE} trainer --gin_file=tools/gpu/dry.gin --out {{file}}",
        240, 90, ("train.main", "tools.gpu.measure"),
        ("tools/gpu/trainer.gin", "tools/gpu/olmoe.gin", "configs/olmoe_1b_7b.gin"),
    ),
    Part(
        "qwen3",
        f"{PRODUCTS} --device gpu --shapes qwen3_30b_a3b --impls {{ours}}{PEERS} "
        f"--repeats 5 {ROWS}",
        TOY_ROWS, 100, 40, ("tools.bench.grouped_dot",),
    ),
    Part(
        "layer",
        "tools/bench/moe_layer.py --gpu --tokens 8192 --experts 64 --top_k 8 --d 2048 "
        "--f 1024 --repeats 3 --out {file}",
        "tools/bench/moe_layer.py --devices 1 --tokens 256 --experts 8 --top_k 2 "
        "--d 64 --f 64 --repeats 1 --out {file}",
        140, 40, ("tools.bench.moe_layer",),
    ),
    Part(
        "tuning",
        "tools/tune_kernels.py --layer --shapes olmoe_1b_7b --limit_sec {sec} "
        "--out {tuned} --json",
        "",
        400, 60, ("tools.tune_kernels",),
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
    plants: tuple[str, ...]
    end_sec: float
    """Value of time.monotonic() at which the last part must have ended."""
    parts: dict[str, dict[str, Any]]
    """Digest, state, seconds and reason of each part that was begun, by its name. The
    state is 'ended', 'cut', 'failed', or 'old' if what it depends on has changed."""
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
        "--plant",
        action="append",
        default=[],
        help="a fault, to see what happens: wrong:KERNEL, sticky:KERNEL, hang:KERNEL or"
        " hang:PART; may be repeated",
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
    known = [f"{fault}:{k}" for fault in ("wrong", "sticky", "hang") for k in KERNELS]
    known += [f"hang:{part.name}" for part in PARTS]
    for plant in args.plant:
        if plant not in known:
            raise ValueError(f"--plant={plant} must be one of {', '.join(known)}")
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
    return Run(out.resolve(), is_kept, args.dry, tuple(args.plant), end_sec, parts)


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
    run_part(run, machine, words_of(run, machine), "", run.limit_sec(machine))
    if not results(run.out, machine.name):
        return
    modules = read_modules(ROOT)
    tried = {n for n, own in run.parts.items() if own["state"] in ("cut", "failed")}
    tried.discard("kernels")  # the others do without kernels that are not right
    for part in sorted(others, key=lambda part: part.name in tried):
        words, kernels = words_of(run, part), {}
        if not words:
            continue
        if part.name == "kernels":
            kernels = {k: digest(run, [], of_kernel(k, modules)) for k in KERNELS}
            key = digest(run, [*words, *kernels.values()], [])
        else:
            paths = [modules[name].path for name in imported(part.roots, modules)]
            key = digest(run, words, [*paths, *part.files])
        own = run.parts.get(part.name, {"state": "left", "digest": key})
        if own["digest"] != key:
            own |= {"state": "old", "why": "sources, device or libraries have changed"}
        limit_sec = run.limit_sec(part)
        if own["state"] == "ended" or limit_sec < part.min_sec:
            continue
        if f"hang:{part.name}" in run.plants:
            words, limit_sec = ["-c", "import time; time.sleep(1e6)"], PLANTED_SEC
        if own["state"] == "old":
            same = own.get("kernels", {}).items() & kernels.items()
            forget(run.out, part.name, {kernel for kernel, _ in same})
        run_part(run, part, words, key, limit_sec, kernels)


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


def of_kernel(kernel: str, modules: dict) -> list[pathlib.Path | str]:
    """Return the files on which the results of a kernel's cases depend."""
    names = imported(["moejax.kernels.cases"], modules)
    owners = {name: OWNERS.get(longest_prefix(name, OWNERS), KERNELS) for name in names}
    own = [modules[name].path for name in names if kernel in owners[name]]
    return [*own, *KERNEL_TESTS]


def imported(roots: Iterable[str], modules: dict) -> set[str]:
    """Return the names of these modules and of all that they import."""
    names, todo = set(), list(roots)
    while todo:
        name = todo.pop()
        if name in modules and name not in names:
            names.add(name)
            todo += [*modules[name].imports, name.rpartition(".")[0]]
    return names


def digest(run: Run, words: Iterable[str], paths: Iterable[pathlib.Path | str]) -> str:
    """Return a hash of what results depend on: a command, files, faults that are
    planted, the device and the libraries."""
    (machine,) = results(run.out, "machine")
    about = [machine["kind"], machine["versions"], run.is_dry, run.plants, list(words)]
    sha = hashlib.sha256(json.dumps(about).encode())
    for path in sorted({ROOT / path for path in paths}):
        sha.update(str(path).encode() + path.read_bytes())
    return sha.hexdigest()[:16]


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


def forget(out: pathlib.Path, name: str, kernels: Iterable[str] = ()) -> None:
    """Delete the results of a part, except those of some kernels."""
    lines = [own for own in results(out, name) if own.get("kernel") in kernels]
    for path in files_of(out, name):
        path.unlink()
    if lines:
        text = "\n".join(map(json.dumps, lines))
        (out / f"{name}-1.json").write_text(text)


def run_part(
    run: Run,
    part: Part,
    words: list[str],
    key: str,
    limit_sec: float,
    kernels: dict[str, str] | None = None,
) -> None:
    """Run the program of a part, and kill it with all its children after `limit_sec`.
    Until it has ended its state is 'cut'."""
    print(f"{part.name:8} at most {limit_sec:.0f} s", flush=True)
    own = {"digest": key, "state": "cut", "sec": 0.0, "why": "killed with its parent"}
    run.parts[part.name] = own | ({"kernels": kernels} if kernels else {})
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
        own = run.parts[part.name]
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
    for plant in run.plants:
        if plant.partition(":")[2] in KERNELS:
            variables["MOEJAX_PLANT"] = plant
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
    predictions = json.loads((ROOT / "tools/gpu/predictions.json").read_text())
    predicted = (
        predictions.get(found["machine"][0]["kind"], {}) if found["machine"] else {}
    )
    rows = table.rows(found, states, predicted, KERNELS)
    missing = [n for n in here if states[n]["state"] in ("left", "cut", "old")]
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
