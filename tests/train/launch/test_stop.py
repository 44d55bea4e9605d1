"""Test that a signal is answered at once, also where Python runs no handler."""

import ctypes
import os
import signal
import threading

import pytest

from train.launch.processes import Stop

LIMIT_SEC = 60.0


@pytest.fixture
def stop():
    """A request to stop, which handles the signals of this process."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    yield Stop()
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_answered_while_the_main_thread_is_in_c(stop, number):
    """The main thread reads a pipe in C, as it would compile, until the answer."""
    said, (reader, writer) = [], os.pipe()

    def say(line):
        said.append(line)
        os.write(writer, b"a")

    def send():
        signal.pthread_kill(threading.get_ident(), number)

    late = threading.Timer(LIMIT_SEC, os.write, (writer, b"l"))
    late.start()
    byte = ctypes.create_string_buffer(1)
    with stop.answered(say):
        threading.Thread(target=send).start()
        while ctypes.CDLL(None).read(reader, byte, 1) != 1:
            pass
    late.cancel()
    os.close(reader)
    os.close(writer)
    assert (byte.raw, stop.signal) == (b"a", number)
    assert said == [
        f"signal {int(number)}: the run stops after the next step, with everything "
        "saved; a compilation ends first"
    ]


def test_without_a_signal_nothing_is_said(stop):
    said = []
    with stop.answered(said.append):
        pass
    assert (said, stop.signal) == ([], None)
    assert signal.set_wakeup_fd(-1) == -1
