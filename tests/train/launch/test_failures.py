"""How a process ends when it, or another one of its run, fails."""

import json
import threading
from types import SimpleNamespace

import pytest

from train.launch import coordinator, failures
from train.launch.program import CRASHED, FAILED, guarded

LINE = "the disk is full"


class Ended(BaseException):
    """Stands for the end of the process."""


class Store:
    """The coordinator's store and its barrier, as far as they are needed here."""

    def __init__(self):
        self.texts, self.has_changed = {}, threading.Condition()
        self.num_met = 0
        self.goes_on = threading.Event()
        """Not set while process 0 is stopped."""
        self.goes_on.set()

    def put(self, key: str, text: str) -> None:
        self.goes_on.wait(60)
        with self.has_changed:
            assert key not in self.texts
            self.texts[key] = text
            self.has_changed.notify_all()

    def wait_for(self, key: str) -> str:
        with self.has_changed:
            self.has_changed.wait_for(lambda: key in self.texts, 60)
            return self.texts[key]

    def meet(self, name: str, limit_sec: float) -> None:
        self.num_met += 1


@pytest.fixture
def codes(monkeypatch):
    """The exit codes with which process 1 of 3 would have ended."""
    codes = []

    def end(code):
        codes.append(code)
        raise Ended

    monkeypatch.setattr(failures, "exit_now", end)
    monkeypatch.setattr(failures, "_ending", threading.Lock())
    monkeypatch.setattr(failures, "_report", failures._report)
    monkeypatch.setattr(failures, "MEET_SEC", 0.1)
    return codes


@pytest.fixture
def store(monkeypatch):
    store = Store()
    for name in ("put", "wait_for", "meet"):
        monkeypatch.setattr(coordinator, name, getattr(store, name))
    monkeypatch.setattr(coordinator, "is_here", lambda: True)
    monkeypatch.setattr(coordinator, "own_index", lambda: 1)
    monkeypatch.setattr(coordinator, "count", lambda: 3)
    yield store
    store.goes_on.set()


@pytest.mark.parametrize("can_print", [True, False])
def test_a_failure_is_told_to_each_process(store, codes, can_print):
    """Standard error may be a file on the disk that is full."""

    def refuse(*_):
        raise OSError("No space left on device")

    if not can_print:
        failures.report_by(refuse)
    with pytest.raises(Ended):
        failures.end_all(FAILED, LINE)
    assert (codes, store.num_met) == ([FAILED], 1)
    assert sorted(store.texts) == ["failure/0", "failure/2"]
    note = json.loads(store.texts["failure/2"])
    assert note == {"from": 1, "code": FAILED, "line": LINE}


def test_a_failure_ends_its_process_while_process_0_is_stopped(store, codes):
    """The coordinator takes the note only when process 0 goes on, if ever."""
    store.goes_on.clear()
    with pytest.raises(Ended):
        failures.end_all(FAILED, LINE)
    assert codes == [FAILED]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_note_ends_the_process_with_its_line_and_code(store, codes, capfd):
    """Whatever its main thread does, which ends quietly with a consequence of it."""
    others = set(threading.enumerate())
    failures.watch()
    (watcher,) = set(threading.enumerate()) - others
    store.put("failure/1", json.dumps({"from": 0, "code": FAILED, "line": LINE}))
    watcher.join(60)
    assert codes == [FAILED]
    assert store.num_met
    expected = f"error: process 0 has ended the run: {LINE}\n"
    assert capfd.readouterr().err.startswith(expected)
    assert failures._ending.locked(), "so that end_if_told() waits"


def test_a_crash_of_its_own_has_a_traceback(store, codes, capfd, monkeypatch):
    monkeypatch.setattr("train.launch.program._has_joined", lambda: True)
    monkeypatch.setattr("train.launch.program._leave", lambda code: code)
    with guarded(as_json=False) as ending:
        _ = 1 // 0
    assert ending.code == CRASHED
    assert codes == []
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_the_state_of_jax_is_found_while_import_is_replaced(monkeypatch):
    """etils replaces it while orbax is imported; the watch runs in another thread."""

    def broken(*_, **__):
        raise ImportError("in the thread of another import alone")

    assert coordinator.own_index() == 0  # jax's modules are imported
    monkeypatch.setattr("builtins.__import__", broken)
    assert (coordinator.own_index(), coordinator.count()) == (0, 1)


@pytest.mark.parametrize(
    ("fault", "num_cancelled"),
    [
        ("CANCELLED: CANCELLED", 3),
        ("UNAVAILABLE: ping timeout", 3),
        ("CANCELLED: CANCELLED", coordinator.MAX_CANCELLED + 1),
    ],
)
def test_a_request_whose_answer_was_lost_is_made_again(
    monkeypatch, fault, num_cancelled
):
    """A process that was stopped for a while (SIGSTOP) finds its request cancelled."""
    faults = [fault] * num_cancelled
    client = SimpleNamespace(blocking_key_value_get=lambda key, _: answer(key))
    monkeypatch.setattr(coordinator, "_state", lambda: SimpleNamespace(client=client))

    def answer(key: str) -> str:
        if faults:
            raise RuntimeError(faults.pop())
        return f"text of {key}"

    if num_cancelled > coordinator.MAX_CANCELLED:
        with pytest.raises(RuntimeError, match="CANCELLED"):
            coordinator.wait_for("plan")
        return
    assert coordinator.wait_for("plan") == "text of moejax/plan"
    faults.append("UNAVAILABLE: the coordinator is gone")
    with pytest.raises(RuntimeError, match="is gone"):
        coordinator.wait_for("plan")
