"""Test tools/gpu_report.py: what it keeps of parts that are cut, what a second call
runs, what it installs, and what it finds wrong. Parts are stand-ins, but for a whole
dry run."""

import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from moejax.kernels.cases import IMPLEMENTATIONS
from moejax.perf import target
from tests.support.waiting import wait_until
from tools import gpu_report
from tools.gpu import table
from tools.gpu_report import KERNELS, PARTS, ROOT, Part
from train.config import gin_reader
from train.dry_run import dry_run

STAND_IN = '''"""Stand in for a part: note the call, and write what it would find."""
import json, os, pathlib, sys, time
name, file, *rest = sys.argv[1:]
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as calls:
    print(name, *rest, file=calls)
(here / "pid").write_text(str(os.getpid()))
if name == "machine":
    versions = {"jax": os.environ.get("JAX", "1")}
    found = [{"kind": "a GPU", "num_devices": 1, "versions": versions,
              "commit": os.environ.get("COMMIT", "a"), "dense_tflops": 1.0,
              "copy_tb_per_sec": 1.0, "nvidia_smi": {}}]
elif name == "kernels":
    gone = {word.removeprefix("--deselect=") for word in rest}
    found = [{"id": kernel, "kernel": kernel, "implementation": "hopper", "case": "",
              "state": "right", "error": 0.0, "tolerance": 1.0, "compile_sec": 1.0,
              "why": ""} for kernel in ("wgrad", "take") if kernel not in gone]
else:
    found = [{"pass": which, "impl": "dense", "msec": 1.0, "tflops": 1.0}
             for which in rest[0].split(",")]
for record in found:
    with open(file, "a") as out:
        print(json.dumps(record), file=out)
    while (here / f"hang-{name}").exists():
        time.sleep(0.01)
sys.exit(1 if (here / f"fail-{name}").exists() else 0)
'''
RUNNER = """
import json, pathlib, sys
sys.path.insert(0, {root!r})
from tools import gpu_report
gpu_report.PARTS = [gpu_report.Part(*own) for own in json.loads({parts!r})]
gpu_report.WORK = pathlib.Path({work!r})
sys.exit(gpu_report.main({args!r}))
"""


class Lab:
    """A folder with stand-ins for three parts, which note their calls."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder, self.out = folder, folder / "out"
        program = folder / "stand_in.py"
        program.write_text(STAND_IN)
        last = {"olmoe": "{passes}", "qwen3": "{passes}"}
        words = {
            name: f"{program} {name} {{file}} {last.get(name, '')}".rstrip()
            for name in ("machine", "kernels", "olmoe", "qwen3")
        }
        self.parts = [Part(name, own, own, 60, 0) for name, own in words.items()]
        self.args = [f"--out={self.out}", f"--wheels={folder}", "--json"]

    def start(self) -> subprocess.Popen:
        """Start the program in a process of its own."""
        text = RUNNER.format(
            root=str(ROOT), parts=json.dumps(self.parts), args=self.args,
            work=str(self.folder / "work"),
        )  # fmt: skip
        return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.DEVNULL)

    def calls(self) -> list[str]:
        """Return the calls since the last time."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines()
        path.write_text("")
        return lines

    def report(self) -> dict:
        return json.loads((self.out / "report.json").read_text())

    def hang(self, name: str) -> contextlib.ExitStack:
        """Let a part hang after its first record in a `with` block."""
        (self.folder / f"hang-{name}").touch()
        stack = contextlib.ExitStack()
        stack.callback((self.folder / f"hang-{name}").unlink)
        return stack

    def wait_for_first(self, name: str) -> None:
        wait_until(lambda: gpu_report.results(self.out, name))


@pytest.fixture
def lab(tmp_path, monkeypatch) -> Lab:
    own = Lab(tmp_path)
    monkeypatch.setattr(gpu_report, "PARTS", own.parts)
    monkeypatch.setattr(gpu_report, "WORK", tmp_path / "work")
    monkeypatch.setattr(gpu_report, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    return own


ALL = ["machine", "kernels", "olmoe forward,dgrad,wgrad", "qwen3 forward,dgrad,wgrad"]


def test_a_second_call_runs_what_is_asked_for_or_was_measured_elsewhere(
    lab, monkeypatch
):
    assert gpu_report.main(lab.args) == 0
    assert lab.calls() == ALL
    assert gpu_report.main([*lab.args, "--again=qwen3,kernels"]) == 0
    assert lab.calls() == ["machine", "kernels", ALL[-1]]
    monkeypatch.setenv("COMMIT", "b")
    assert gpu_report.main(lab.args) == 0
    assert lab.calls() == ["machine"]
    assert lab.report()["parts"]["olmoe"]["why"] == "at commit a"
    assert len(lab.report()["found"]["olmoe"]) == 3
    monkeypatch.setenv("JAX", "2")
    assert gpu_report.main(lab.args) == 0
    assert lab.calls() == ALL


def test_a_hang_costs_its_part_alone(lab, monkeypatch):
    parts = [p._replace(limit_sec=0.2) if p.name == "olmoe" else p for p in lab.parts]
    monkeypatch.setattr(gpu_report, "PARTS", parts)
    with lab.hang("olmoe"):
        assert gpu_report.main(lab.args) == 75
    assert lab.report()["left"] == ["olmoe"]
    assert lab.report()["parts"]["qwen3"]["state"] == "ended"


def test_a_part_that_fails_comes_last_the_next_time(lab, monkeypatch):
    (lab.folder / "fail-olmoe").touch()
    parts = [p._replace(min_sec=1e9) if p.name == "qwen3" else p for p in lab.parts]
    with monkeypatch.context() as patch:
        patch.setattr(gpu_report, "PARTS", parts)
        assert gpu_report.main(lab.args) == 1
    assert lab.report()["wrong"] == ["olmoe:  (exit code 1)"]
    assert lab.report()["left"] == ["qwen3"]
    lab.calls()
    (lab.folder / "fail-olmoe").unlink()
    assert gpu_report.main(lab.args) == 0
    assert [call.split()[0] for call in lab.calls()] == ["machine", "qwen3", "olmoe"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_program_is_ended_in_the_middle(lab, number):
    """Results are kept, children end, what did not run is named, and a second
    call runs the rest: of the rows, those of the passes that have none."""
    with lab.hang("olmoe"), lab.start() as process:
        lab.wait_for_first("olmoe")
        process.send_signal(number)
        code = process.wait()
        child = pathlib.Path("/proc", (lab.folder / "pid").read_text())
        wait_until(lambda: not child.exists() or " Z " in (child / "stat").read_text())
    report = lab.report()
    assert code == (75 if number == signal.SIGTERM else -signal.SIGKILL)
    assert report["left"] == ["olmoe", "qwen3"]
    assert report["parts"]["kernels"]["state"] == "ended"
    assert "SIGTERM" in report["parts"]["qwen3"]["why"] or number == signal.SIGKILL
    assert "left" in (lab.out / "report.txt").read_text()
    lab.calls()
    lab.start().wait()
    assert lab.calls() == ["machine", ALL[-1], "olmoe dgrad,wgrad"]
    assert [row["pass"] for row in lab.report()["found"]["olmoe"]] == list(
        gpu_report.PASSES
    )
    assert lab.report()["left"] == []


def test_results_go_to_the_folder_of_the_environment_and_are_kept_for_the_next_call(
    lab, tmp_path, monkeypatch
):
    for folder in ("first", "second"):
        monkeypatch.setenv("OUT", str(tmp_path / folder))
        assert gpu_report.main(lab.args[1:]) == 0
        assert (tmp_path / folder / "report.txt").is_file()
    assert lab.calls() == [*ALL, "machine"]


def test_wheels_that_are_here_are_not_installed(tmp_path, monkeypatch):
    for name in ("pytest-0.1-py3-none-any.whl", "no_such_thing-1-py3-none-any.whl"):
        (tmp_path / name).touch()
    taken = []
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(gpu_report, "pip", lambda *words: taken.extend(words))
    gpu_report.install(tmp_path, tmp_path / "site")
    assert [word for word in taken if word.endswith(".whl")] == [
        str(tmp_path / "no_such_thing-1-py3-none-any.whl")
    ]


def test_the_pack_has_versions_and_the_wheels_of_make_peers(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr(gpu_report, "pip", lambda *words: taken.extend(words))
    assert gpu_report.main(["--pack", f"--wheels={tmp_path}"]) == 0
    pinned = (ROOT / "constraints.txt").read_text().replace("_", "-").lower()
    for name in gpu_report.WHEELS:
        assert name in taken
        assert f"\n{name.replace('_', '-')}==" in pinned
    makefile = (ROOT / "Makefile").read_text()
    (line,) = (x for x in makefile.splitlines() if x.startswith("PEER_WHEELS"))
    assert set(line.partition(":= ")[2].split()) <= set(gpu_report.WHEELS)


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--minutes=0"], "--minutes=0 must be above 0"),
        (["--again=train,gemm"], "--again: 'gemm' must be one of machine, kernels"),
        ([], "JAX sees no GPU here, only cpu"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, flags, match):
    monkeypatch.setattr(gpu_report, "WORK", tmp_path / "work")
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    args = [f"--out={tmp_path / 'out'}", f"--wheels={tmp_path}", *flags]
    assert gpu_report.main(args) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert match in error
    assert flags or "--dry" in error


def test_kernels_are_those_of_the_cases():
    assert set(KERNELS) == set(IMPLEMENTATIONS)


def kernel_line(kernel: str, state: str, implementation: str = "hopper") -> dict:
    return {
        "id": kernel, "kernel": kernel, "implementation": implementation,
        "case": "a case", "state": state, "error": None, "tolerance": 0.02,
        "compile_sec": None, "run_sec": None, "why": "",
    }  # fmt: skip


def test_kernels_that_are_not_right_are_left_out_of_later_parts(tmp_path):
    run = gpu_report.Run(tmp_path, False, False, 0.0, {})
    by_name = {part.name: part for part in PARTS}

    def words(name: str) -> str:
        return " ".join(gpu_report.words_of(run, by_name[name]))

    assert "--impls hopper,ragged_dot" in words("olmoe")
    assert "--gin_param" not in words("train")
    lines = [kernel_line("wgrad", "hang"), kernel_line("attention", "error", "cudnn")]
    (tmp_path / "kernels-1.json").write_text("\n".join(map(json.dumps, lines)))
    assert "--impls ragged_dot" in words("olmoe")
    assert "Dispatch.kernels = 'plain'" in words("train")
    assert "Model.attention = 'blocked'" in words("train")


@pytest.mark.parametrize(
    ("part", "code", "text", "state"),
    [
        ("olmoe", 1, '[{"failed": "w"}]', "ended"),
        ("olmoe", 1, '{"error": "bad"}', "failed"),
        ("olmoe", 1, "KeyError: 1", "failed"),
        ("olmoe", 0, "", "ended"),
        ("tuning", 0, '{"num_left": 2}', "cut"),
    ],
)
def test_how_a_part_ended(tmp_path, part, code, text, state):
    """A program that says what is wrong has ended; one that crashes, or says only an
    error, has failed; tuning that has buckets left was cut."""
    by_name, log = {own.name: own for own in PARTS}, tmp_path / "log"
    log.write_text(f"a table\n{text}\n")
    path = tmp_path / f"{part}-1.json"
    assert gpu_report.how_it_ended(by_name[part], code, log, path)["state"] == state


def trainer_run(name: str, steps: int, digest: str, failed: str = "") -> dict:
    about = {"attention": "auto", "run": name, "steps": steps, "sec": 9.0}
    return about | {"digest": digest, "failed": failed}


def test_all_that_is_wrong_is_listed():
    rows = [{"pass": "wgrad", "impl": "hopper", "failed": "wrong values"}]
    runs = [trainer_run("whole", 12, "aa"), trainer_run("resumed", 6, "", "code 1: D")]
    found = {
        "olmoe": rows,
        "tuning": [{"failed": {"wgrad": "wrong"}}],
        "train": [{"losses": [9.0, float("nan")]}],
        "trainer": [{"runs": runs}],
        "kernels": [kernel_line("take", "wrong"), kernel_line("wgrad", "right")],
    }
    assert table.wrong(found, {"layer": {"state": "failed", "why": "bad"}}) == [
        "layer: bad",
        "take hopper, wrong: a case: (at most 0.02)",
        "olmoe: wgrad hopper: wrong values",
        "tuning: wgrad: wrong",
        "trainer: auto, resumed: code 1: D",
        "train: a loss is not finite",
    ]


def test_runs_of_the_trainer_are_held_against_the_whole_run():
    whole, half = trainer_run("whole", 12, "aa"), trainer_run("resumed", 6, "bb")
    for digest, beside in (("aa", ", equal to the whole run"), ("cc", ", NOT the")):
        runs = [whole, half, trainer_run("resumed", 12, digest)]
        besides = [cells[2] for cells in table.trainer({"runs": runs})]
        assert besides[:2] == ["digest aa", "digest bb"]
        assert besides[2].startswith(f"digest {digest}{beside}")


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_stored_predictions_are_those_of_today(name):
    gpu = target.load(name)
    own = json.loads((ROOT / "tools/gpu/predictions.json").read_text())[gpu.name]
    layers = f"Model.num_layers = {own['num_layers']}"
    cfg = gin_reader.load([ROOT / "tools/gpu/olmoe.gin"], [layers])
    with contextlib.redirect_stdout(io.StringIO()):
        record = dry_run(cfg, gpu)
    assert record["fit"]["fits"]
    assert round(sum(record["memory"].values()) / 2**30, 2) == own["dry_run_gib"]


@pytest.mark.long
@pytest.mark.slow
def test_a_dry_run_with_a_wrong_kernel(tmp_path):
    words = [sys.executable, "tools/gpu_report.py", "--dry", "--json", "--minutes=30"]
    words += [f"--out={tmp_path}/out"]
    environ = os.environ | {"TMPDIR": str(tmp_path), "MOEJAX_PLANT": "wrong:wgrad"}
    environ.pop("XLA_FLAGS")
    done = subprocess.run(
        words, cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    states = {name: own["state"] for name, own in result["parts"].items()}
    assert states == dict.fromkeys(states, "ended")
    assert {line.split()[0] for line in result["wrong"]} == {"wgrad"}
    assert {own["kernel"] for own in result["found"]["kernels"]} == set(KERNELS)
