"""Test tools/launch/local.py with small programs that end, hang, stop or ignore
signals."""

import dataclasses
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.support.pids import LIMIT_SEC, is_alive, wait_until_gone
from tools.launch import local

LAUNCHER = pathlib.Path(local.__file__)
STACKS_SEC = 60.0
"""Longest wait for stacks. A process ends once it has printed its own."""
START = """
import faulthandler, os, pathlib, signal, subprocess, sys, time
faulthandler.register(signal.SIGUSR1, chain=True)
me, folder = int(os.environ["MOEJAX_PROCESS_ID"]), pathlib.Path(sys.argv[1])
def attempt():
    with open(folder / f"starts-{me}", "a") as f: f.write(os.environ["MOEJAX_ATTEMPT"])
    return (folder / f"starts-{me}").stat().st_size
def exit_on_term(code): signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
def ready(): (folder / f"ready-{me}").write_text(str(os.getpid()))
def wait_forever():
    ready()
    while True: time.sleep(0.05)
"""


@dataclasses.dataclass
class Launched:
    """A running launcher. It is killed when the `with` block ends."""

    folder: pathlib.Path
    process: subprocess.Popen

    def __enter__(self) -> "Launched":
        return self

    def __exit__(self, *_) -> None:
        self.process.kill()
        self.process.communicate()

    def wait_for_ready(self, count: int) -> list[int]:
        """Return the pids of the workers, once all have called ready()."""
        return [int(self.wait_for(f"ready-{i}")) for i in range(count)]

    def wait_for(self, name: str) -> str:
        end_sec = time.monotonic() + 60
        path = self.folder / name
        while not (path.exists() and path.read_text()):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < end_sec, f"never saw {name}"
            time.sleep(0.01)
        return path.read_text()

    def end(self) -> tuple[dict, str, str]:
        """Wait for the launcher to end, and return its JSON record, what it printed on
        stdout before that, and its stderr."""
        out, err = self.process.communicate(timeout=2 * LIMIT_SEC)
        *lines, last = out.splitlines()
        record = json.loads(last)
        assert record["exit_code"] == self.process.returncode
        return record, "\n".join(lines), err


def launch(
    folder: pathlib.Path,
    program: str,
    count: int = 3,
    err=subprocess.PIPE,
    hangup=signal.SIG_DFL,
    **options,
) -> Launched:
    """Start the launcher with this handler of SIGHUP. Otherwise it would inherit that
    of the tests, which ignore SIGHUP when they run under nohup."""
    waits = {"stacks_sec": 0.3, "backoff_sec": 0.01, "max_restarts": 0} | options
    flags = [f"--{name}={value}" for name, value in waits.items()]
    child = [sys.executable, "-S", "-c", START + program, str(folder)]
    words = [sys.executable, str(LAUNCHER), "-n", str(count), "--json", *flags, "--"]
    pipes = {"stdout": subprocess.PIPE, "stderr": err}
    before = signal.signal(signal.SIGHUP, hangup)
    try:
        return Launched(folder, subprocess.Popen(words + child, **pipes, text=True))
    finally:
        signal.signal(signal.SIGHUP, before)


def test_each_process_learns_its_role_and_lines_stay_whole(tmp_path):
    program = """
names = ("MOEJAX_COORDINATOR", "MOEJAX_NUM_PROCESSES", "PYTHONUNBUFFERED")
print(*[os.environ[name] for name in names], flush=True)
for i in range(200):
    os.write(1, b"abc"); os.write(1, b"def\\n")
os.write(1, b"[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of \\n")
os.write(1, b" 7 peer ranks. Expected number of connected peer ranks is : 7\\n")
"""
    with launch(tmp_path, program) as launched:
        record, out, err = launched.end()
    port = record["attempts"][0]["port"]
    for prefix in ("", "[1] ", "[2] "):
        assert f"{prefix}127.0.0.1:{port} 3 1" in out.splitlines()
        assert out.splitlines().count(prefix + "abcdef") == 200
    assert record["exit_code"] == 0
    assert "Gloo" not in out
    assert "peer ranks" not in out
    assert record["attempts"][0]["codes"] == [0, 0, 0]
    assert all(line.startswith("launch_local: ") for line in err.splitlines())


@pytest.mark.parametrize(
    ("number", "state", "num_stacks"),
    [
        (signal.SIGKILL, "was killed by SIGKILL", 2),
        pytest.param(signal.SIGSTOP, "stopped", 3, marks=pytest.mark.slow),
    ],
)
def test_one_death_ends_all_with_their_stacks(tmp_path, number, state, num_stacks):
    """A process that is stopped for --stopped_sec counts as dead."""
    waits = {"stacks_sec": STACKS_SEC, "stopped_sec": 0.2}
    with launch(tmp_path, "wait_forever()", **waits) as launched:
        pids = launched.wait_for_ready(3)
        os.kill(pids[1], number)
        wait_until_gone(pids)
        record, _, err = launched.end()
    code = 137 if number == signal.SIGKILL else None
    assert record["attempts"][0]["codes"] == [None, code, None]
    assert record["exit_code"] == 137
    assert f"process 1 (pid {pids[1]}): {state}" in err
    assert f"process 0 (pid {pids[0]}): running" in err
    assert err.count("in wait_forever") == num_stacks


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "2"], "no program is named"),
        (["-n", "0", "--", "true"], "--num_processes=0 must be 1 or more"),
        (["-n", "2", "--grace_sec=nan", "--", "true"], "--grace_sec=nan must be"),
        (["-n", "2", "--", "no/such.py"], "no/such.py is not a file"),
        (["-n", "2", "--", "no-such-program"], "no-such-program is not a program"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(words, message, capsys):
    assert local.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


FAIL = "attempt(); ready(); sys.exit({}) if me == 1 else wait_forever()"
SAVE = "sys.exit(75 if attempt() < 3 else 0)"
ENDINGS = {
    "bad input": (FAIL.format(2), {"max_restarts": 3}, 2, "0"),
    "a final failure": (FAIL.format(3), {"max_restarts": 3}, 3, "0"),
    "crashes": (FAIL.format(5), {"max_restarts": 2}, 5, "012"),
    "a crash, then all is well": (
        "attempt() == 1 == me and os.kill(os.getpid(), 9); time.sleep(.2)",
        {"max_restarts": 1}, 0, "01",
    ),
    "saved after long attempts": (SAVE, {"short_sec": 0}, 0, "012"),
    "saved after a short attempt": (SAVE, {"short_sec": 600}, 75, "0"),
    "one that outlasts another": (
        "attempt(); me and wait_forever()", {"grace_sec": 0.3}, 137, "0",
    ),
}  # fmt: skip
"""Programs of two processes that end by themselves, waits of the launcher, its exit
code, and the numbers of the attempts."""


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDINGS)
def test_how_the_workers_end_decides_whether_they_start_again(tmp_path, case):
    program, options, code, attempts = ENDINGS[case]
    with launch(tmp_path, program, 2, **options) as launched:
        record, _, err = launched.end()
    assert record["exit_code"] == code
    assert record["restarts"] == len(attempts) - 1
    assert (tmp_path / "starts-1").read_text() == attempts
    ports = [attempt["port"] for attempt in record["attempts"]]
    assert all(a != b for a, b in itertools.pairwise(ports))
    waits = [f"starting again in {0.01 * 2**i:g} s" in err for i in range(2)]
    assert waits == [case.startswith("a crash") or case == "crashes", case == "crashes"]
    if code in (2, 3):
        assert "in wait_forever" not in err
    if code == 137:
        assert record["attempts"][0]["codes"] == [0, None]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_as_sigterm_and_all_may_save(tmp_path, number):
    with launch(
        tmp_path, "exit_on_term(75); wait_forever()", max_restarts=3
    ) as launched:
        launched.wait_for_ready(3)
        launched.process.send_signal(number)
        record, _, _ = launched.end()
    assert record["exit_code"] == 75
    assert record["restarts"] == 0
    assert record["attempts"][0]["codes"] == [75, 75, 75]


@pytest.mark.slow
def test_a_launcher_under_nohup_outlives_a_hangup(tmp_path):
    program = "exit_on_term(75); wait_forever()"
    with launch(tmp_path, program, hangup=signal.SIG_IGN) as launched:
        pids = launched.wait_for_ready(3)
        launched.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)  # the launcher looks for requests to stop six times
        assert all(map(is_alive, pids))
        launched.process.terminate()
        record, _, _ = launched.end()
    assert record["attempts"][0]["codes"] == [75, 75, 75]


@pytest.mark.slow
def test_a_process_that_ignores_sigterm_is_killed_after_the_grace_period(tmp_path):
    program = "exit_on_term(75)\nif me: signal.signal(15, signal.SIG_IGN)\n"
    program += "wait_forever()"
    with launch(tmp_path, program, grace_sec=1) as launched:
        pids = launched.wait_for_ready(3)
        launched.process.terminate()
        record, _, err = launched.end()
        wait_until_gone(pids)
    assert record["exit_code"] == 137
    assert record["attempts"][0]["codes"][1:] == [None, None]
    assert "within --grace_sec=1 of SIGTERM" in err


@pytest.mark.slow
def test_a_second_interrupt_kills_at_once(tmp_path):
    program = "signal.signal(15, lambda *_: ready2())\ndef ready2(): \n"
    program += "  (folder / f'term-{me}').write_text('x')\nwait_forever()"
    with launch(tmp_path, program) as launched:
        pids = launched.wait_for_ready(3)
        launched.process.send_signal(signal.SIGINT)
        launched.wait_for("term-2")
        launched.process.send_signal(signal.SIGINT)
        wait_until_gone(pids)
        record, _, _ = launched.end()
    assert record["exit_code"] == 130


@pytest.mark.slow
def test_grandchildren_end_with_the_workers(tmp_path):
    program = """
child = subprocess.Popen(["sleep", "60"])
(folder / f"new-{me}").write_text(str(child.pid))
(folder / f"new-{me}").rename(folder / f"child-{me}")
while not all(os.path.exists(folder / f"child-{i}") for i in range(2)):
    time.sleep(0.01)
os._exit(0)
"""
    with launch(tmp_path, program, 2) as launched:
        record, _, _ = launched.end()
    assert record["exit_code"] == 0
    wait_until_gone([int((tmp_path / f"child-{i}").read_text()) for i in range(2)])


@pytest.mark.slow
def test_a_killed_launcher_takes_its_processes_along(tmp_path):
    with launch(tmp_path, "wait_forever()") as launched:
        pids = launched.wait_for_ready(3)
        launched.process.kill()
        wait_until_gone(pids)


@pytest.mark.slow
@pytest.mark.parametrize("names", [["stdout"], ["stdout", "stderr"]])
def test_a_reader_that_leaves_stops_the_workers_which_save(tmp_path, names):
    program = """
def save(*_): time.sleep(0.3); (folder / f"saved-{me}").touch(); os._exit(75)
signal.signal(signal.SIGTERM, save); ready()
while True: print(me, flush=True); print(me, file=sys.stderr); time.sleep(0.01)
"""
    with launch(tmp_path, program) as launched:
        pids = launched.wait_for_ready(3)
        for name in names:
            getattr(launched.process, name).close()
        wait_until_gone(pids)
    assert len(list(tmp_path.glob("saved-*"))) == 3


def test_a_full_disk_under_the_launcher_does_not_end_the_workers(tmp_path):
    program = "for _ in range(99): print(me, file=sys.stderr); time.sleep(0.002)"
    with (
        open("/dev/full", "w") as full,
        launch(tmp_path, program, err=full) as launched,
    ):
        assert launched.end()[0]["attempts"][0]["codes"] == [0, 0, 0]
