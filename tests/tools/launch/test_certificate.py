"""Test the throw-away certificate of a launch, and that strangers are refused."""

import contextlib
import os
import pathlib
import signal
import socket
import ssl
import stat
import subprocess
import sys

import pytest

from tests.support.meeting import Meeting
from tests.support.workers import LiveWorkers
from tools.launch.certificate import throw_away_certificate
from train.launch.program import PREEMPTED
from train.launch.tls import AUTHORITY, CERT, KEY, uses_tls

STRANGER = """
import sys, jax
jax.distributed.initialize(
    sys.argv[1], 2, 1, cluster_detection_method="deactivate", initialization_timeout=1
)
print("joined")
"""


def test_a_certificate_is_made_for_the_workers_and_removed():
    with throw_away_certificate(2, {}) as variables:
        assert uses_tls(variables, "127.0.0.1")
        assert uses_tls(variables, "::1")
        assert uses_tls(variables, "localhost")
        with pytest.raises(ValueError, match="mismatch"):
            uses_tls(variables, "192.0.2.7")
        key = pathlib.Path(variables[KEY])
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert stat.S_IMODE(key.parent.stat().st_mode) == 0o700
        with throw_away_certificate(2, {}) as others:
            mixed = variables | {AUTHORITY: others[AUTHORITY]}
            with pytest.raises(ValueError, match="would be refused"):
                uses_tls(mixed, None)
    assert not key.parent.exists()


def test_no_certificate_is_made_where_none_is_needed():
    with throw_away_certificate(1, {}) as variables:
        assert variables == {}
    with throw_away_certificate(2, {CERT: "/of/the/user"}) as variables:
        assert variables == {}


def test_without_openssl_a_line_says_that_there_is_no_tls(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    with throw_away_certificate(2, {}) as variables:
        assert variables == {}
    said = "the processes meet WITHOUT TLS on loopback: there is no openssl on the PATH"
    assert said in capfd.readouterr().err
    program = tmp_path / "openssl"
    program.write_text("#!/bin/sh\necho no such curve >&2\nexit 3\n")
    program.chmod(0o755)
    with throw_away_certificate(2, {}) as variables:
        assert variables == {}
    assert "openssl ended with 3: no such curve" in capfd.readouterr().err
    program.write_bytes(b"\x7fELF of another machine")
    with throw_away_certificate(2, {}) as variables:
        assert variables == {}
    assert "openssl cannot be run (Exec format error)" in capfd.readouterr().err


def send_strangers(coordinator: str) -> None:
    """Let strangers try to reach a coordinator, and assert that each is refused.

    They are processes of jax without a certificate and with one of another authority, a
    client of TLS without a certificate, and one that sends bytes at random.
    """
    host, _, port = coordinator.rpartition(":")
    with throw_away_certificate(2, {}) as variables:
        jaxes = [start_stranger(coordinator, x) for x in ({}, variables)]
        for text in (bytes(range(256)) * 100, b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(text)
                with contextlib.suppress(ConnectionResetError):
                    connection.recv(100)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            # A server that accepts its client begins with its settings of HTTP/2.
            assert context.wrap_socket(connection).recv(100) == b""
        for process in jaxes:
            out, _ = process.communicate(timeout=60)
            assert process.returncode != 0
            assert "joined" not in out


def start_stranger(coordinator: str, variables: dict) -> subprocess.Popen:
    """Start a process that says that it is process 1."""
    words = [sys.executable, "-c", STRANGER, coordinator]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environ = os.environ | {"JAX_PLATFORMS": "cpu"} | variables
    return subprocess.Popen(words, env=environ, **pipes)


@pytest.mark.slow
def test_strangers_are_refused_and_the_processes_go_on(tmp_path):
    with Meeting(tmp_path) as meeting:
        send_strangers(meeting.coordinator)
        code, text, record = meeting.end()
    assert code == 0, text
    assert (record["restarts"], record["attempts"][0]["codes"]) == (0, [0, 0])


@pytest.mark.long
def test_strangers_are_refused_and_a_run_goes_on(tmp_path):
    with LiveWorkers(tmp_path / "run", 2, "Train.num_steps = 100000") as live:
        live.wait_for_steps(2)
        environ = pathlib.Path(f"/proc/{live.pids()[0]}/environ").read_text()
        variables = dict(x.split("=", 1) for x in environ.split("\0") if "=" in x)
        send_strangers(variables["MOEJAX_COORDINATOR"])
        live.wait_for_steps(5)
        ended = live.end(signal.SIGTERM)
    assert ended.code == PREEMPTED, ended.err
    assert ended.record["restarts"] == 0
