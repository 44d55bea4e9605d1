"""Test how a process ends when it, or another one of its run, fails."""

import json
import threading

import pytest

from tests.support.waiting import wait_until
from train.launch import coordinator, failures
from train.launch.program import CRASHED, FAILED, guarded


class Ended(Exception):
    """Stands for the end of the process."""


class Store:
    """The coordinator's key-value store, as far as it is needed here."""

    def __init__(self):
        self.texts, self.faults = {}, []
        self.goes_on = threading.Event()
        """Not set while process 0 is stopped."""
        self.goes_on.set()

    def key_value_set(self, key: str, text: str) -> None:
        self.goes_on.wait(10)
        self.texts[key] = text

    def key_value_dir_get(self, begin: str) -> list[tuple[str, str]]:
        self.goes_on.wait(10)
        if self.faults:
            raise self.faults.pop()
        return [(k, x) for k, x in self.texts.items() if k.startswith(begin)]

    def note(self, index: int, code: int) -> None:
        note = json.dumps({"code": code, "line": "the disk is full"})
        self.texts[f"moejax/failure/{index}"] = note
        self.texts[f"moejax/ended/{index}"] = ""


@pytest.fixture
def codes(monkeypatch):
    """The exit codes with which process 1 of 2 would have ended."""
    codes = []

    def end(code):
        codes.append(code)
        raise Ended

    monkeypatch.setattr(failures, "exit_now", end)
    monkeypatch.setattr(failures, "_ending", threading.Lock())
    monkeypatch.setattr(failures, "_report", failures._report)
    return codes


@pytest.fixture
def store(monkeypatch):
    store = Store()
    monkeypatch.setattr(coordinator, "client", lambda: store)
    monkeypatch.setattr(coordinator, "own_index", lambda: 1)
    monkeypatch.setattr(coordinator, "count", lambda: 2)
    monkeypatch.setattr(failures, "CONFIRM_SEC", 0.1)
    monkeypatch.setattr(failures, "_heartbeat_sec", 0.6)
    yield store
    store.goes_on.set()


def test_a_failure_is_told_and_the_others_confirm(store, codes):
    store.texts["moejax/ended/0"] = ""
    with pytest.raises(Ended):
        failures.end_all(FAILED, "the disk is full")
    assert codes == [FAILED]
    note = json.loads(store.texts["moejax/failure/1"])
    assert note == {"code": FAILED, "line": "the disk is full"}
    assert "moejax/ended/1" in store.texts


def test_a_failure_is_told_without_a_place_to_print(store, codes):
    """Standard error may be a file on the disk that is full."""

    def refuse(*_):
        raise OSError("No space left on device")

    failures.report_by(refuse)
    with pytest.raises(Ended):
        failures.end_all(FAILED, "the disk is full")
    assert codes == [FAILED]
    assert "moejax/failure/1" in store.texts


def test_a_failure_ends_its_process_while_process_0_is_stopped(store, codes):
    """The coordinator takes the note only when process 0 goes on, if ever."""
    store.goes_on.clear()
    with pytest.raises(Ended):
        failures.end_all(FAILED, "the disk is full")
    assert codes == [FAILED]


def test_an_error_after_the_end_of_another_process_is_its_consequence(
    store, codes, capfd, monkeypatch
):
    """A collective fails where a process of it has ended: no traceback, no code 1."""
    monkeypatch.setattr("train.launch.program._has_joined", lambda: True)
    monkeypatch.setattr("train.launch.program._leave", lambda code: code)

    def work():
        raise RuntimeError("Connection closed by peer")

    store.note(0, FAILED)
    guarded(work, as_json=False)
    assert codes == [FAILED]
    expected = "error: process 0 has ended the run: the disk is full\n"
    assert capfd.readouterr().err.startswith(expected)
    assert "moejax/ended/1" in store.texts


def test_a_crash_of_its_own_has_a_traceback(store, codes, capfd, monkeypatch):
    monkeypatch.setattr("train.launch.program._has_joined", lambda: True)
    monkeypatch.setattr("train.launch.program._leave", lambda code: code)
    assert guarded(lambda: 1 // 0, as_json=False) == CRASHED
    assert codes == []
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_the_watch_outlives_an_error_of_the_coordinator(store, codes):
    store.faults = [RuntimeError("UNAVAILABLE")] * 2
    stop = threading.Event()
    thread = threading.Thread(target=failures._watch, args=(stop,), daemon=True)
    thread.start()
    wait_until(lambda: not store.faults)
    store.note(0, FAILED)
    wait_until(lambda: codes)
    stop.set()
    thread.join()
    assert codes == [FAILED]
