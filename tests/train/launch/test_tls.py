"""With certificates strangers are refused; certificates that jax cannot use are refused
in one line."""

import contextlib
import os
import pathlib
import socket
import ssl
import subprocess
import sys

import pytest

from tests.support.meeting import Meeting
from tests.support.workers import run_apart

CERT, KEY = "JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE"
AUTHORITY, URI_PREFIX = "JAX_MTLS_CA_FILE", "JAX_MTLS_PEER_URI_PREFIX"
NAMES = "subjectAltName=DNS:node1,URI:spiffe://moejax/run"
STRANGER = """
import sys, jax
jax.distributed.initialize(
    sys.argv[1], 2, 1, cluster_detection_method="deactivate", initialization_timeout=1
)
print("joined")
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The variables of a certificate for the host node1."""
    return new_certificate(tmp_path_factory.mktemp("tls") / "files")


@pytest.mark.slow
def test_files_that_cannot_be_used_are_refused_at_once(files, tmp_path):
    envs = [files | {CERT: "/no/file"}, {AUTHORITY: files[AUTHORITY]}]
    ended = run_apart(tmp_path / "run", [(), ()], envs=envs)
    assert [x.code for x in ended] == [2, 2]
    assert all("error: this process cannot join its run: " in x.err for x in ended)
    assert "/no/file" in ended[0].err
    assert "private key" in ended[1].err or "certificate" in ended[1].err


@pytest.mark.long
def test_strangers_are_refused_and_the_processes_go_on(files, tmp_path, monkeypatch):
    """Strangers are processes of jax without a certificate and with one of another
    authority, a client of TLS without a certificate, and one that sends bytes at
    random."""
    strange = new_certificate(tmp_path / "strange")
    for name, value in (files | {URI_PREFIX: "spiffe://moejax/"}).items():
        monkeypatch.setenv(name, value)
    with Meeting(tmp_path) as meeting:
        host, _, port = meeting.coordinator.rpartition(":")
        jaxes = [start_stranger(meeting.coordinator, x) for x in ({}, strange)]
        for text in (bytes(range(256)) * 100, b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=60) as connection:
                connection.sendall(text)
                with contextlib.suppress(ConnectionResetError):
                    connection.recv(100)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            # A server that accepts its client begins with its settings of HTTP/2.
            assert context.wrap_socket(connection).recv(100) == b""
        for process in jaxes:
            out, _ = process.communicate(timeout=120)
            assert process.returncode != 0
            assert "joined" not in out
        code, text, record = meeting.end()
    assert code == 0, text
    assert (record["restarts"], record["attempts"][0]["codes"]) == (0, [0, 0])


def start_stranger(coordinator: str, variables: dict) -> subprocess.Popen:
    """Start a process that says that it is process 1."""
    words = [sys.executable, "-c", STRANGER, coordinator]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    own = (CERT, KEY, AUTHORITY, URI_PREFIX)
    environ = {name: x for name, x in os.environ.items() if name not in own}
    environ |= {"JAX_PLATFORMS": "cpu"} | variables
    return subprocess.Popen(words, env=environ, **pipes)


def new_certificate(folder: pathlib.Path) -> dict[str, str]:
    """Make a certificate that is its own authority, and return its variables."""
    folder.mkdir()
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    words = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    words += ["-nodes", "-subj", "/CN=test", "-addext", NAMES]
    command = ["openssl", "req", *words, "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    return {CERT: cert, KEY: key, AUTHORITY: cert}
