"""Test where the wall time of a run is booked, with a clock that the tests set."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from functools import partial

from tests.support.close import assert_close
from train.logs.goodput import (
    BUCKETS,
    FILE,
    Stopwatch,
    next_attempt,
    read_lines,
    report,
)

BEGUN_AT = 1e9
"""Time of the fake clock's zero, in seconds since 1970."""


class Clock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.sec = 0.0

    def watch(self, folder, step: int = 0, start_sec: float = 0) -> Stopwatch:
        """Return a stopwatch of an attempt that goes on after `step`. It began
        `start_sec` ago, and reads this clock."""
        return Stopwatch(
            folder,
            step,
            self.sec - start_sec,
            monotonic=lambda: self.sec,
            now=lambda: BEGUN_AT + self.sec,
        )


def spent(watch: Stopwatch) -> dict[str, float]:
    """Return the buckets that are not empty."""
    return {name: sec for name, sec in watch.account().sec.items() if sec}


def make_line(step: int, at: float, attempt: int = 1, down_sec=0.0, **sec) -> dict:
    """Return a line of the file."""
    line = {"step": step, "attempt": attempt, "at": at, "down_sec": down_sec}
    return line | {"sec": dict.fromkeys(BUCKETS, 0.0) | sec}


def test_each_moment_belongs_to_the_innermost_block(tmp_path):
    clock = Clock()
    clock.sec += 1
    with clock.watch(tmp_path, start_sec=1) as watch:
        with watch.at("compile"):
            clock.sec += 20
        watch.end_start()
        clock.sec += 0.5
        with watch.at("useful"):
            clock.sec += 100
            with watch.at("saves"):
                clock.sec += 3
                with watch.at("evaluation"):
                    clock.sec += 7
                clock.sec += 1
            clock.sec += 10
        clock.sec += 2
        expected = {
            "useful": 110, "compile": 20, "evaluation": 7, "saves": 4, "other": 3.5,
        }  # fmt: skip
        assert spent(watch) == expected
        record = report(watch.account())
    clock.sec += 9
    assert report(watch.account()) == record, "no time counts after the attempt"
    assert_close(sum(record["share"].values()), 1.0)
    assert record["share"]["useful"] == 110 / 144.5
    assert (record["wall_sec"], record["down_sec"]) == (144.5, 0)
    assert record["num_attempts"] == 1


def test_waits_while_the_device_is_busy_and_blocks_that_raise(tmp_path):
    """The host waits for data only while the device has nothing to do."""
    clock = Clock()
    with clock.watch(tmp_path) as watch:
        with watch.at("useful"):
            for is_busy in (True, False, True):
                with watch.at("data", unless=partial(bool, is_busy)):
                    clock.sec += 1
        with contextlib.suppress(OSError), watch.at("saves"):
            clock.sec += 2
            raise OSError("full")
        clock.sec += 1
        assert spent(watch) == {"useful": 2, "data": 1, "saves": 2, "other": 1}


def test_a_killed_attempt_loses_what_it_did_after_its_checkpoint(tmp_path):
    """The first attempt saves step 10 and is killed after step 14, which the second
    does again."""
    clock = Clock()
    clock.sec += 5
    killed = clock.watch(tmp_path, start_sec=5)
    killed.end_start()
    with killed.at("useful"):
        for step in range(1, 15):
            clock.sec += 2
            killed.tick(step)
            if step == 10:
                with killed.at("saves"):
                    clock.sec += 3
                killed.write(step)
    killed._log.close()
    clock.sec += 1000  # no process
    clock.sec += 4
    with clock.watch(tmp_path, step=10, start_sec=4) as watch:
        with watch.at("compile"):
            clock.sec += 1
        watch.end_start()
        with watch.at("useful"):
            clock.sec += 10 * 2
        expected = {
            "useful": 40, "compile": 1, "saves": 3, "restarts": 8 + 4, "other": 5,
        }  # fmt: skip
        assert spent(watch) == expected
        record = report(watch.account())
    assert (record["down_sec"], record["num_attempts"]) == (1000, 2)
    with clock.watch(tmp_path, step=20) as watch:  # goes on after its end
        assert spent(watch) == expected


def test_next_attempt_goes_on_from_the_last_line_of_the_checkpoint():
    first = make_line(7, 50.0, useful=30.0, other=5.0)
    lines = [
        make_line(0, 10.0, other=5.0),
        make_line(7, 45.0, useful=30.0, saves=0.0, other=5.0),
        first | {"sec": first["sec"] | {"saves": 2.0}},
        make_line(9, 60.0, useful=40.0, saves=2.0, other=5.0),
    ]
    account = next_attempt(lines, 7, 100.0)
    assert account.sec == dict.fromkeys(BUCKETS, 0.0) | {
        "useful": 30.0, "saves": 2.0, "restarts": 10.0, "other": 5.0,
    }  # fmt: skip
    assert (account.down_sec, account.num_attempts) == (40.0, 2)
    lines.append(make_line(7, 110.0, 2, 40.0, **account.sec))
    again = next_attempt(lines, 7, 130.0)  # killed before its first step
    assert again.sec == account.sec
    assert (again.down_sec, again.num_attempts) == (60.0, 3)
    afresh = next_attempt(lines, 0, 130.0)  # no checkpoint is good
    assert afresh.sec["restarts"] == sum(account.sec.values()) - 5.0
    assert afresh.sec["useful"] == 0
    assert next_attempt(lines[:1], 3, 5.0).down_sec == 0, "the clock went back"


def test_lines_are_few(tmp_path):
    """Every second at first, then every hundredth of the attempt, at most a minute
    apart."""
    clock = Clock()
    with clock.watch(tmp_path) as watch:
        for step in range(1, 30_001):
            clock.sec += 0.25
            watch.tick(step)
    lines = read_lines(tmp_path / FILE)
    at = [line["at"] - BEGUN_AT for line in lines]
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert gaps[0] == 1.0
    assert max(gaps) == 60.0
    assert len(lines) < 600
    assert lines[-1]["step"] == 30_000


def test_damaged_lines_are_left_out(tmp_path):
    path = tmp_path / FILE
    good = make_line(3, 5.0, useful=2.0)
    bad = [
        b"", b"\0\0", b"null", b"[]", b"{}", b'{"step": 1', b"\xff",
        json.dumps(good | {"sec": {"useful": "2"}}).encode(),
        json.dumps(good | {"at": None}).encode(),
        json.dumps(good | {"at": 10**400}).encode(),
        json.dumps(good | {"down_sec": float("nan")}).encode(),
    ]  # fmt: skip
    path.write_bytes(b"\n".join([*bad, json.dumps(good).encode(), *bad]))
    assert read_lines(path) == [good]


def test_a_process_knows_when_it_began(repo):
    """Also after it has replaced itself, as a run of simulated devices does."""
    code = (
        "import os, sys, time\n"
        "if len(sys.argv) == 1:\n"
        "    words = [*sys.orig_argv[1:], str(time.monotonic())]\n"
        "    os.execv(sys.executable, [sys.executable, *words])\n"
        "from train.launch.program import start_of_process\n"
        "print(start_of_process(), sys.argv[1])\n"
    )
    begin_sec = time.monotonic()
    words = [sys.executable, "-c", code]
    text = subprocess.check_output(words, cwd=repo, env=os.environ, text=True)
    begun_sec, first_line_sec = map(float, text.split())
    assert begin_sec - 1 < begun_sec < first_line_sec
